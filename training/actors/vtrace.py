"""V-trace, the correction for actors whose weights are older than the learner's.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures" (ICML
2018), section 4.1. With rho = min(rho_bar, pi / mu) and c = min(c_bar, pi / mu), the target of a state's value is

    v_s = V(x_s) + sum over t >= s of discount^(t - s) (c_s ... c_(t-1)) rho_t (r_t + discount V(x_(t+1)) - V(x_t))

and a step's advantage is rho_s (r_s + discount v_(s+1) - V(x_s)).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from keras import ops


class Targets(NamedTuple):
    """What `vtrace` returns, both (steps, envs)."""

    values: Any
    """The targets v_s of the values."""
    advantages: Any
    """By which the gradient of log pi is multiplied."""


def vtrace(
    ratios: Any, rewards: Any, values: Any, discounts: Any, *, rho_bar: float = 1.0, c_bar: float = 1.0
) -> Targets:
    """The targets of trajectories of any length, by the paper's recursion from the last step back (remark 1).

    `ratios` are pi / mu of the actions, `rewards` and `discounts` those of each step, all (steps, envs); `values` are
    V(x), (steps + 1, envs), with that after the last step. A step of ratio 0, such as a reset, keeps its value and
    passes nothing on. `discounts` are 0 where an episode ends. Arrays or tensors of one floating dtype.
    """
    rho, c = ops.minimum(ratios, rho_bar), ops.minimum(ratios, c_bar)
    deltas = rho * (rewards + discounts * values[1:] - values[:-1])
    carried = ops.zeros_like(values[0])
    above = []  # v - V of each step
    for step in reversed(range(deltas.shape[0])):
        carried = deltas[step] + discounts[step] * c[step] * carried
        above.append(carried)
    targets = values[:-1] + ops.stack(above[::-1])
    following = ops.concatenate([targets[1:], values[-1:]])
    return Targets(targets, rho * (rewards + discounts * following - values[:-1]))
