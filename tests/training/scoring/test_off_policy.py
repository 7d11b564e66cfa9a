"""Values of a policy from logged decisions, beside obp 0.4.1 and beside many simulated logs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.training.scoring.off_policy import Decisions, policy_value

# What obp 0.4.1 computes of `the_log(7)`: values by estimate_policy_value, and its bootstrap's 95 % intervals of 20,000
# draws (estimate_interval, random_state=1); of SNIPS it draws terms that the whole sum has divided, not ratios.
OBP = {"ips": 1.4402013854880527, "snips": 1.5379534496342981, "dr": 1.4565082805804526}
BOOTSTRAP = {"ips": (1.22208, 1.67722), "dr": (1.28090, 1.63386)}


def the_log(seed: int) -> Decisions:
    rng = np.random.default_rng(seed)
    rows, actions = 500, 5
    logged, policy = rng.dirichlet(np.ones(actions), rows), rng.dirichlet(np.ones(actions), rows)
    taken = np.array([rng.choice(actions, p=row) for row in logged])
    rewards = rng.random(rows) * (taken + 1)
    judged = rng.random((rows, actions)) * 3
    of_taken = np.arange(rows), taken
    return Decisions(rewards, logged[of_taken], policy[of_taken], (policy * judged).sum(axis=1), judged[of_taken])


def test_values_are_those_of_obp() -> None:
    found = policy_value(the_log(7))
    for name, value in OBP.items():
        assert found["values"][name]["value"] == pytest.approx(value, rel=1e-12)
    for name, (low, high) in BOOTSTRAP.items():
        assert found["values"][name]["interval"] == pytest.approx((low, high), abs=0.05 * (high - low))
    assert found["values"]["logged"]["value"] == pytest.approx(the_log(7).rewards.mean())
    weights = the_log(7).weights
    assert found["effective_samples"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum())


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """The policy's true value of a log is known: each action's mean reward is its number, over two."""
    rng = np.random.default_rng(1)
    logged, policy = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    truth, judged = float(policy @ [0.5, 1.0, 1.5]), np.array([0.4, 1.2, 1.4])
    inside = dict.fromkeys(OBP, 0)
    for _ in range(400):
        taken = rng.choice(3, 400, p=logged)
        rewards = rng.exponential((taken + 1) / 2)
        expected = np.full(400, policy @ judged)
        found = policy_value(Decisions(rewards, logged[taken], policy[taken], expected, judged[taken]))
        for name in inside:
            low, high = found["values"][name]["interval"]
            inside[name] += low <= truth <= high
        assert not found["doubts"]
    assert all(0.92 <= count / 400 <= 0.98 for count in inside.values()), inside


def test_decisions_of_one_visitor_count_as_one() -> None:
    once = the_log(3)
    fields = ("rewards", "propensities", "chosen", "expected", "judged")
    thrice = Decisions(*(np.repeat(getattr(once, name), 3) for name in fields))
    visitors = np.repeat(np.arange(500), 3)
    alone, together = policy_value(once), policy_value(thrice, visitors)
    for name in OBP:
        assert together["values"][name]["value"] == pytest.approx(alone["values"][name]["value"])
        assert together["values"][name]["interval"] == pytest.approx(alone["values"][name]["interval"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"propensities": (1, 0.01)}, "decisions count as"),
        ({"chosen": (500, 0.5)}, "the mean"),
    ],
)
def test_a_log_that_hardly_supports_a_policy_says_so(changed: dict[str, Any], words: str) -> None:
    taken = np.random.default_rng(5).choice(2, 500, p=[0.5, 0.5])
    chosen = np.array([0.4, 0.6])[taken]
    columns = {"rewards": taken * 1.0, "propensities": np.full(500, 0.5), "chosen": chosen}
    columns |= {"expected": np.full(500, 0.6), "judged": taken * 1.0}
    assert policy_value(Decisions(**columns))["doubts"] == []
    for name, (rows, times) in changed.items():
        columns[name][:rows] *= times
    doubts = policy_value(Decisions(**columns))["doubts"]
    assert len(doubts) == 1 and words in doubts[0] and "next: " in doubts[0]
