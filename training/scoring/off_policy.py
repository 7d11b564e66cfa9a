"""What a policy would have earned, from decisions that another one made and logged: IPS, SNIPS and DR. NumPy only.

Horvitz and Thompson, JASA 47 (1952); Swaminathan and Joachims, "The Self-Normalized Estimator for Counterfactual
Learning" (NeurIPS 2015); Dudík, Langford and Li, "Doubly Robust Policy Evaluation and Learning" (ICML 2011). Intervals
are those of lockstep.training.scoring.estimates: of SNIPS, a ratio, by its influences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.training.scoring.estimates import Estimates, Floats, means

FEW = 100.0  # effective rows
LARGE = 0.05  # share of all weights that one row has
FAR_ERRORS = 4.0  # standard errors by which the mean weight differs from 1


@dataclass(frozen=True, slots=True)
class Decisions:
    """Logged decisions (n,) and what a policy says of them."""

    rewards: Floats
    propensities: Floats
    """The probability with which the logged action was taken, in (0, 1]."""
    chosen: Floats
    """The policy's probability of the logged action."""
    expected: Floats
    """The mean reward by the reward model, over the policy's actions."""
    judged: Floats
    """The reward model's reward of the logged action."""

    @property
    def weights(self) -> Floats:
        """How many rows of the policy each row stands for."""
        weights: Floats = self.chosen / self.propensities
        return weights


def policy_value(decisions: Decisions, clusters: NDArray[Any] | None = None) -> dict[str, Any]:
    """Return {samples, values: {logged, ips, snips, dr: {value, interval}}, mean_weight: {value, interval},
    effective_samples, largest_share, least_propensity, doubts}.

    `logged` is the mean reward of the decisions as they were made, `doubts` are sentences on values that the log hardly
    supports. Rows of one of the `clusters` (n,) depend on each other.
    """
    rewards, weights = decisions.rewards, decisions.weights
    once = np.ones(len(rewards))
    robust = decisions.expected + weights * (rewards - decisions.judged)
    of_rows = means(np.stack([rewards, weights * rewards, robust, weights]), once, clusters)
    values = {name: _shown(of_rows, number) for number, name in enumerate(("logged", "ips", "dr"))}
    values["snips"] = _shown(means(rewards[None], weights, clusters), 0)
    total, squares = float(weights.sum()), float((weights * weights).sum())
    found = {
        "samples": len(rewards),
        "values": {name: values[name] for name in ("logged", "ips", "snips", "dr")},
        "mean_weight": _shown(of_rows, 3),
        "effective_samples": total * total / squares if squares else 0.0,
        "largest_share": float(weights.max()) / total if total else 0.0,
        "least_propensity": float(decisions.propensities.min()),
    }
    return found | {"doubts": _doubts(found, of_rows)}


def _shown(found: Estimates, number: int) -> dict[str, Any]:
    one = found.one(number)
    return {"value": one.value, "interval": one.interval}


def _doubts(found: dict[str, Any], of_rows: Estimates) -> list[str]:
    """What makes the values doubtful, with what to do next."""
    doubts, least = [], f"the least propensity is {found['least_propensity']:.3g}"
    if found["effective_samples"] < FEW or found["largest_share"] > LARGE:
        doubts.append(
            f"{found['samples']} decisions count as {found['effective_samples']:.0f}, and one of them as "
            f"{found['largest_share']:.1%} of all ({least}): intervals may not hold; next: log more decisions, or "
            "judge a policy that is nearer to the logged one"
        )
    weight, error = found["mean_weight"]["value"], math.sqrt(float(of_rows.covariance[3, 3]))
    if error and abs(weight - 1) > FAR_ERRORS * error:
        doubts.append(
            f"the weights have the mean {weight:.3g} and not 1: the propensities are not those of the logged actions, "
            "or actions that the policy takes were never logged; next: check the column of propensities"
        )
    return doubts
