"""examples/agent: what its page's commands train, beside the best policy of that desk."""

from __future__ import annotations

from itertools import product
from math import comb
from pathlib import Path

import keras
import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.training.actors.environment import Environments
from tests.examples.test_gallery import EXAMPLES, ran

pytestmark = pytest.mark.slow

SEATS, MINUTES, LEAVES = 4, 60, 0.1
WORTHS = ((1.0, 0.2), (0.2, 0.8))
"""A visitor's worth, and how likely it is."""
Answers = NDArray[np.float64]


def left() -> Answers:
    """The chance that of so many (row) who sit so many (column) still sit a minute later."""
    found = np.zeros((SEATS + 1, SEATS + 1))
    for taken in range(SEATS + 1):
        for gone in range(taken + 1):
            found[taken, taken - gone] = comb(taken, gone) * LEAVES**gone * (1 - LEAVES) ** (taken - gone)
    return found


def value(yes: Answers) -> float:
    """The mean return of an episode, by dynamic programming, of a policy whose chance of a yes to a worth (row) at so
    many taken seats (column) is `yes` (2, 4)."""
    stay, ahead = left(), np.zeros(SEATS + 1)
    for _ in range(MINUTES):
        now = np.zeros(SEATS + 1)
        for row, (worth, share) in enumerate(WORTHS):
            for taken in range(SEATS + 1):
                no = stay[taken] @ ahead
                chance = yes[row, taken] if taken < SEATS else 0.0
                accepted = worth + stay[taken + 1] @ ahead if taken < SEATS else 0.0
                now[taken] += share * (chance * accepted + (1 - chance) * no)
        ahead = now
    return float(ahead[0])


def test_the_desk_earns_what_its_chain_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that says yes to all, simulated and computed."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "agent"))
    desks = Environments("desk:desk", 400, seed=0)
    earned = sum(desks.step(np.ones(400, np.int32))[0] for _ in range(MINUTES))
    error = np.std(earned) / np.sqrt(400)
    assert abs(np.mean(earned) - value(np.ones((2, SEATS)))) < 4 * error


@pytest.mark.timeout(600)
def test_the_pages_commands_train_nearly_the_best_policy(tmp_path: Path) -> None:
    ran("agent", tmp_path)
    (model,) = tmp_path.glob(".demo/agents/desk/models/*/model.keras")
    trained = keras.saving.load_model(model)
    seen = np.array([[taken / SEATS, worth] for worth, _ in WORTHS for taken in range(SEATS)], np.float32)
    yes = np.asarray(keras.ops.softmax(trained(seen)["logits"]))[:, 1].reshape(2, SEATS)
    answers = [np.reshape(table, (2, SEATS)) for table in product((0.0, 1.0), repeat=2 * SEATS)]
    best, all_of_them = max(map(value, answers)), value(np.ones((2, SEATS)))
    assert value((yes > 0.5).astype(np.float64)) > best - 0.05 * (best - all_of_them), yes
    assert value(yes.astype(np.float64)) > best - 0.1 * (best - all_of_them), yes  # as it is played, by chance
