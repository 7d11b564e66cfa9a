"""Where the HDFS blocks of a file lie, as Spark's Java process is told: hdfs-native does not tell."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.storage.errors import LockstepError
from lockstep.storage.files.deadlines import call_with_deadline
from lockstep.storage.files.interface import Blocks, HdfsBlock
from training.launch.placement import Near

if TYPE_CHECKING:
    from pyspark import SparkContext

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
