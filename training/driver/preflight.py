"""How near the ranks of a run are to what they read: the plan's first epoch against where HDFS blocks lie."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.storage.files.interface import Blocks
from lockstep.storage.urls import join, split_url
from training.config import TrainConfig
from training.launch.placement import MOST_SHARDS, Near, bytes_near
from training.plan.datasets import open_parts
from training.plan.epoch_plan import EpochPlan
from training.plan.planning import lane_groups, plan_for


def near_ranks(config: TrainConfig, num_ranks: int, blocks_of: Callable[[str], Blocks]) -> Near | None:
    """Of each rank, how many bytes of its first epoch lie on which host.

    None where that cannot be told: the data lie on no HDFS, are a mixture, or have more than MOST_SHARDS shards.
    """
    if config.mix is not None or any(split_url(url)[0] not in ("hdfs", "webhdfs") for url in config.datasets):
        return None
    parts, manifest = open_parts(config.datasets, config.split)
    plan = plan_for(manifest, config)
    shards = manifest.splits[config.split].shards
    if not isinstance(plan, EpochPlan) or len(shards) > MOST_SHARDS:
        return None
    urls = [join(part.url, shard.path) for part in parts for shard in part.manifest.splits[part.split].shards]
    return bytes_near(plan, urls, [shard.bytes for shard in shards], num_ranks, lane_groups(config), blocks_of)
