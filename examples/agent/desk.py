"""A desk with four seats: each minute a visitor asks for one, and the policy says yes or no.

One visitor in five is worth 1, the others 0.2. Each stays ten minutes on average, so a policy that never says
no has no seat when a dear visitor comes.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

SEATS = 4
DEAR = 0.2
"""The share of visitors that are worth 1."""
CHEAP = 0.2
"""What another visitor is worth."""
LEAVES = 0.1
"""The chance that one who sits leaves within a minute."""
MINUTES = 60
"""The length of an episode."""
Seen = NDArray[np.float32]


class Desk(gymnasium.Env[Seen, np.int64]):
    """Sees the share of seats that are taken, and the worth of who asks; action 1 says yes, 0 says no."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        """Empty the seats; returns what is seen: (2,) float32."""
        super().reset(seed=seed)
        self.taken = 0
        return self._next(), {}

    def step(self, action: np.int64) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """Answer who asks; the reward is that visitor's worth, if there was a yes and a seat."""
        reward = 0.0
        if action == 1 and self.taken < SEATS:
            reward = self.worth
            self.taken += 1
        self.taken -= int(self.np_random.binomial(self.taken, LEAVES))
        return self._next(), reward, False, False, {}

    def _next(self) -> Seen:
        self.worth = 1.0 if self.np_random.random() < DEAR else CHEAP
        return np.array([self.taken / SEATS, self.worth], np.float32)


def desk() -> gymnasium.Env[Seen, np.int64]:
    """A desk whose episodes are cut after MINUTES."""
    return gymnasium.wrappers.TimeLimit(Desk(), MINUTES)
