"""V-trace equals the sums of the paper, written as loops over NumPy numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.training.actors.vtrace import vtrace

Array = NDArray[Any]


def by_the_paper(
    ratios: Array, rewards: Array, values: Array, discounts: Array, rho_bar: float, c_bar: float
) -> tuple[Array, Array]:
    """Espeholt et al. 2018, equation 1: targets and advantages of one environment's steps."""
    steps = len(rewards)
    targets = np.zeros(steps + 1)
    for s in range(steps):
        total = values[s]
        for t in range(s, steps):
            weight = 1.0
            for i in range(s, t):
                weight *= discounts[i] * min(c_bar, ratios[i])
            total += weight * min(rho_bar, ratios[t]) * (rewards[t] + discounts[t] * values[t + 1] - values[t])
        targets[s] = total
    targets[steps] = values[steps]
    advantages = np.array(
        [min(rho_bar, ratios[s]) * (rewards[s] + discounts[s] * targets[s + 1] - values[s]) for s in range(steps)]
    )
    return targets[:-1], advantages


def drawn(seed: int, steps: int, envs: int) -> tuple[Array, Array, Array, Array]:
    random = np.random.default_rng(seed)
    ratios = np.exp(random.normal(size=(steps, envs)))
    discounts = 0.9 * (random.random((steps, envs)) > 0.2)
    return ratios, random.normal(size=(steps, envs)), random.normal(size=(steps + 1, envs)), discounts


def found(*arrays: Any, **bars: float) -> tuple[Array, Array]:
    targets = vtrace(*arrays, **bars)
    return np.asarray(targets.values), np.asarray(targets.advantages)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 3), st.floats(0.1, 3.0), st.floats(0.1, 3.0))
def test_it_equals_the_sums_of_the_paper(seed: int, steps: int, envs: int, rho_bar: float, c_bar: float) -> None:
    arrays = drawn(seed, steps, envs)
    values, advantages = found(*arrays, rho_bar=rho_bar, c_bar=c_bar)
    ratios, rewards, known, discounts = arrays
    each = [
        by_the_paper(ratios[:, env], rewards[:, env], known[:, env], discounts[:, env], rho_bar, c_bar)
        for env in range(envs)
    ]
    np.testing.assert_allclose(values, np.stack([one for one, _ in each], 1), rtol=0, atol=1e-6)
    np.testing.assert_allclose(advantages, np.stack([one for _, one in each], 1), rtol=0, atol=1e-6)


def test_on_policy_it_is_the_return_of_n_steps() -> None:
    _, rewards, values, discounts = drawn(3, 7, 2)
    expected = values[-1]
    for step in reversed(range(7)):
        expected = rewards[step] + discounts[step] * expected
    targets, _ = found(np.ones((7, 2)), rewards, values, discounts)
    np.testing.assert_allclose(targets[0], expected, rtol=0, atol=1e-6)


def test_a_reset_passes_nothing_on() -> None:
    ratios, rewards, values, discounts = drawn(4, 6, 1)
    ratios[3] = 0.0
    changed = rewards.copy()
    changed[3:] += 100.0
    before, after = (found(ratios, one, values, discounts)[0] for one in (rewards, changed))
    np.testing.assert_array_equal(before[:3], after[:3])


def test_the_value_of_a_reset_is_kept() -> None:
    ratios, rewards, values, discounts = drawn(5, 6, 1)
    ratios[3] = 0.0
    assert found(ratios, rewards, values, discounts)[0][3] == pytest.approx(values[3])
