"""The epoch plan of a run: the same call in the driver and in every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError
from training.batches.augmenting import check_mixup
from training.config import TrainConfig
from training.models import scales_learning_rate
from training.plan.canonical import check_canonical
from training.plan.datasets import MixedManifest
from training.plan.epoch_plan import EpochPlan
from training.plan.lane_count import check_lanes, largest_divisor
from training.plan.mixture import MixedPlan, Plan

LANE_GROUPS = 8  # of ghost BatchNorm: its statistics are over G / 8 samples, whatever the number of ranks


def lane_groups(config: TrainConfig) -> int | None:
    """The number of lane groups that ranks own whole; None where ranks may own any lanes."""
    return LANE_GROUPS if config.batchnorm == "ghost" else None


def plan_for(manifest: DatasetManifest, config: TrainConfig) -> Plan:
    """The plan of `config` over the dataset; raises ConfigError where lanes, groups and ranks do not fit together."""
    _check_learning_rate(config)
    groups = lane_groups(config)
    plan = make_plan(
        manifest,
        config.split,
        config.mix,
        seed=config.seed,
        global_batch=config.global_batch,
        lanes=config.lanes,
        groups=groups,
        window_bytes=config.window_bytes,
        cache_groups=config.cache_groups,
        cache_rotation=config.cache_rotation,
        interleave=config.interleave,
    )
    check_lanes(plan.global_batch, plan.lanes, groups, config.num_ranks)
    _check_micro_batches(plan, config, groups)
    check_canonical(config, plan.lanes, groups)
    check_mixup(config.augment, plan.global_batch // plan.lanes)
    return plan


def make_plan(
    manifest: DatasetManifest, split: str, mix: Sequence[int] | None, *, interleave: int = 1, **numbers: Any
) -> Plan:
    """The plan over what TrainingSet.at opened with the same `mix`; `numbers` are those of EpochPlan.for_dataset."""
    numbers["interleave"] = interleave if interleave != 1 else None  # one place is no interleaving, and 0 is refused
    if mix is None:
        return EpochPlan.for_dataset(manifest, split, **numbers)
    assert isinstance(manifest, MixedManifest)
    return MixedPlan.for_datasets(manifest.mixed, manifest.digest, split, mix, **numbers)


def _check_learning_rate(config: TrainConfig) -> None:
    if not scales_learning_rate(config.model):
        return
    scaled = config.learning_rate_scaling != "none" and config.learning_rate is None
    if scaled or config.warm_up_epochs:
        raise ConfigError(
            f"the model {config.model} scales its learning rate and warms up by itself",
            got="--warm-up-epochs" if config.warm_up_epochs else "--learning-rate-scaling without --learning-rate",
            allowed="its own, or --learning-rate with a rule of scaling",
            next_step="Leave these flags out, or say --learning-rate.",
        )


def _check_micro_batches(plan: Plan, config: TrainConfig, groups: int | None) -> None:
    """Raise ConfigError where a rank's rows are not equal micro-batches: a mean of unequal means would be wrong."""
    rows = [plan.rows(rank, config.num_ranks, groups) for rank in range(config.num_ranks)]
    if any(count % config.micro_batches for count in rows):
        common = math.gcd(*rows)
        raise ConfigError(
            f"a rank's rows are no {config.micro_batches} equal micro-batches",
            got=f"--micro-batches {config.micro_batches}, ranks of {min(rows)} to {max(rows)} rows",
            allowed=f"divisors of {common}",
            next_step=f"Use --micro-batches {largest_divisor(common, config.micro_batches)} or another --global-batch.",
        )
