"""The epoch plan of a run: the same call in the driver and in every rank."""

from __future__ import annotations

from storage.manifest import DatasetManifest
from training.config import TrainConfig
from training.lane_count import check_lanes
from training.plan import EpochPlan

LANE_GROUPS = 8  # of ghost BatchNorm: its statistics are over G / 8 samples, whatever the number of ranks


def lane_groups(config: TrainConfig) -> int | None:
    """The number of lane groups that ranks own whole; None where ranks may own any lanes."""
    return LANE_GROUPS if config.batchnorm == "ghost" else None


def plan_for(manifest: DatasetManifest, config: TrainConfig) -> EpochPlan:
    """The plan of `config` over the dataset; raises ConfigError where lanes, groups and ranks do not fit together."""
    groups = lane_groups(config)
    plan = EpochPlan.for_dataset(
        manifest,
        config.split,
        seed=config.seed,
        global_batch=config.global_batch,
        lanes=config.lanes,
        groups=groups,
        window_bytes=config.window_bytes,
    )
    check_lanes(plan.global_batch, plan.lanes, groups, config.num_ranks)
    return plan
