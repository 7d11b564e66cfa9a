"""Which numbers make an epoch plan: the refusal of those that cannot be together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.storage.errors import ConfigError, DataError
from training.plan.cache_groups import check_cache_groups
from training.plan.lane_count import check_lanes, largest_divisor

if TYPE_CHECKING:
    from training.plan.epoch_plan import EpochPlan

PLAN_VERSION = 1
MOST = 1 << 63  # numbers below it are read again out of run.json and checkpoints


def check_plan(plan: EpochPlan) -> None:
    """Raise ConfigError where the plan's numbers cannot be right, DataError for a split without records."""
    _check(plan, "version", plan.version == PLAN_VERSION, f"{PLAN_VERSION}, the only plan of this version")
    for name in ("block_records", "global_batch", "lanes", "window_records"):
        _check(plan, name, 1 <= getattr(plan, name) < MOST, "an integer from 1 to 2^63 - 1")
    if plan.total == 0:
        raise DataError(
            f"split `{plan.split}` holds no records",
            got="0 records",
            allowed="at least one",
            next_step="Train on another split, or build the dataset with other --split shares.",
        )
    check_lanes(plan.global_batch, plan.lanes)
    if plan.total < plan.lanes:
        raise ConfigError(
            f"{plan.lanes} lanes are more than the samples of split `{plan.split}`",
            got=f"{plan.total} samples",
            allowed="at least one sample a lane",
            next_step=f"Use --lanes {largest_divisor(plan.global_batch, plan.total)} or more data.",
        )
    right = plan.interleave is None or 2 <= plan.interleave < MOST
    _check(plan, "interleave", right, "an integer from 2 up, below 2^63, or none")
    check_cache_groups(plan.global_batch, plan.lanes, plan.cache_groups, plan.cache_rotation)


def _check(plan: EpochPlan, name: str, right: bool, allowed: str) -> None:
    if not right:
        raise ConfigError(
            f"the epoch plan's {name} cannot be right",
            got=f"{name} = {getattr(plan, name)!r}",
            allowed=allowed,
            next_step=f"Correct {name}.",
        )
