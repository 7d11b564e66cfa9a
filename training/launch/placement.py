"""Which rank runs on which host: the lanes of a rank near the HDFS blocks that they read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.storage.errors import LockstepError
from lockstep.storage.files.deadlines import call_with_deadline
from lockstep.storage.files.interface import Blocks, HdfsBlock

if TYPE_CHECKING:
    from pyspark import SparkContext

    from training.plan.epoch_plan import EpochPlan

MOST_SHARDS = 2048  # a question to the NameNode each, some milliseconds through Spark's Java process
Near = Sequence[Mapping[str, int]]  # of each rank: bytes of its lanes that lie on a host, by the host's names


def bytes_near(
    plan: EpochPlan, urls: Sequence[str], sizes: Sequence[int], num_ranks: int, groups: int | None,
    blocks_of: Callable[[str], Blocks],
) -> list[dict[str, int]]:  # fmt: skip
    """For each rank, how many bytes of what its lanes read in the first epoch lie on each host.

    `urls` and `sizes` (bytes) are those of the plan's shards; records count as the mean of their shard. With cache
    groups these are the blocks of every epoch, without them the next epoch deals them anew.
    """
    places = [[(block.offset, block.offset + block.length, block.hosts) for block in blocks_of(url)] for url in urls]
    found: list[dict[str, int]] = []
    plan = replace(plan, interleave=None)  # the same records of each lane, in fewer runs
    for rank in range(num_ranks):
        lanes = plan.rank_lanes(rank, num_ranks, groups)
        start, stop = plan.lane_span(0, lanes.start)[0], plan.lane_span(0, lanes.stop - 1)[1]
        near: dict[str, int] = {}
        for run in plan.runs(0, start, stop):
            mean = sizes[run.shard] / plan.shard_records[run.shard]
            first, last = int(run.first_record * mean), int((run.first_record + run.count) * mean)
            for begin, end, hosts in places[run.shard]:
                for host in hosts if begin < last and first < end else ():
                    near[host] = near.get(host, 0) + min(end, last) - max(begin, first)
        found.append(near)
    return found


def ranks_of_tasks(hosts: Sequence[str], near: Near | None) -> list[int]:
    """The rank of each task, given the tasks' hosts: what swaps of two tasks can bring near their lanes' bytes is.

    The same in every task, which work it out by themselves. Without `near`, or where nothing is gained, task i is
    rank i.
    """
    count = len(hosts)
    task_of = np.arange(count)
    if near is not None and len(near) == count:
        # (ranks, tasks) int64: the bytes that a rank would find on a task's host
        gains = np.array([[of_rank.get(host, 0) for host in hosts] for of_rank in near], dtype=np.int64)
        for _ in range(4 * count):
            now = gains[:, task_of]
            own = np.diag(now)
            better = now + now.T - own[:, None] - own[None, :]
            one, other = np.unravel_index(int(np.argmax(better)), better.shape)
            if better[one, other] <= 0:
                break
            task_of[[one, other]] = task_of[[other, one]]
    return np.argsort(task_of).tolist()


log = logging.getLogger(__name__)
_LIMIT_S = 60.0  # the start of a run waits no longer for something that only makes it faster
# From a number of ranks, and a function that gives the blocks of a URL, to bytes near each rank.
NearOf = Callable[[int, Callable[[str], Blocks]], Near | None]


def blocks_by_spark(context: SparkContext, url: str) -> Blocks:
    """The HDFS blocks of a file; `hosts` holds names and addresses of the DataNodes, whichever Spark's tasks go by."""
    java: Any = context._jvm
    path = java.org.apache.hadoop.fs.Path(url)
    fs = path.getFileSystem(context._jsc.hadoopConfiguration())
    found = []
    for block in fs.getFileBlockLocations(path, 0, fs.getFileStatus(path).getLen()):
        addresses = (name.rpartition(":")[0] for name in block.getNames())
        hosts = tuple(dict.fromkeys((*block.getHosts(), *addresses)))
        found.append(HdfsBlock(int(block.getOffset()), int(block.getLength()), hosts))
    return found


def near_or_none(near: NearOf, context: SparkContext, num_ranks: int) -> Near | None:
    """What `near` says; None, with a line in the log, where it fails: placement makes nothing but speed."""
    from py4j.protocol import Py4JError

    def ask() -> Near | None:
        return near(num_ranks, lambda url: blocks_by_spark(context, url))

    try:
        return call_with_deadline(ask, _LIMIT_S, what="cannot tell where blocks lie", whom="the NameNode")
    except (LockstepError, Py4JError, OSError) as error:
        log.warning("ranks are not placed near their blocks: %s", (str(error) or repr(error)).splitlines()[0])
        return None
