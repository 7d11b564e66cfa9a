"""What the driver asks the ranks of one generation to do, and by which deadlines it watches them."""

from __future__ import annotations

from dataclasses import replace

from lockstep.storage.files.interface import FileSystem
from lockstep.storage.settings import hadoop_settings
from training.comm.options import CommOptions
from training.config import TrainConfig
from training.control.task import Limits, RankTask
from training.plan.mixture import Plan
from training.run.comm_plans import read_plans
from training.run.lineage import Claim
from training.run.paths import RunPaths

PRELOAD = "training.rank.runtime:preload"


def task_of(
    config: TrainConfig, plan: Plan, fs: FileSystem, paths: RunPaths, claim: Claim, entry: str, preload: str
) -> RankTask:
    """The task of the generation that `claim` names; the communication plans that are frozen by now go with it."""
    options = CommOptions(
        backend=config.backend,
        algorithm=config.algorithm,
        trust_network=config.trust_network,
        plans=read_plans(fs, paths, config.num_ranks),
    )
    payload = {
        "config": config.to_json(),
        "plan": plan.identity(),
        "comm": {"options": options.to_json(), "freeze": True},
    }
    return RankTask(
        entry,
        payload,
        hadoop=hadoop_settings(),
        logs=paths.logs(claim.generation),
        tls=config.tls == "on",
        preload=preload if config.spare else None,
    )


def limits_of(config: TrainConfig, base: Limits) -> Limits:
    """`base` with the deadlines that the configuration names."""
    silent = config.heartbeat_limit_s
    return replace(
        base,
        start_s=config.start_limit_s,
        stall_s=config.stall_limit_s,
        silent_s=base.silent_s if silent is None else silent,
    )
