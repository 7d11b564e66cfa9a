"""Starting the process of a rank, and handing it its order."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

from training.launch.leftovers import MARK
from training.launch.order import Order

RankProcess = subprocess.Popen[bytes]


def start_process(mark: str, ranks_per_node: int) -> RankProcess:
    """Start `training.rank.__main__` with this process' import path; it waits for its order on standard input."""
    paths = [os.path.abspath(path or os.getcwd()) for path in sys.path]
    # The worker's secrets of Spark are of no use to a rank, and none of its business.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON_WORKER_FACTORY")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", MARK: mark}
    # Without a word from the user, the ranks of one host share its cores instead of each taking all of them.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks_per_node)))
    # TensorFlow starts threads anew each epoch, and glibc gives each a heap of its own, up to eight a core, which are
    # never given back: memory grew by 150 MB over the first 12 epochs. With two heaps it stays within 1 %.
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "training.rank.__main__"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        process_group=0,
    )


def hand_over(process: RankProcess, order: Order) -> None:
    """Write the order to the process.

    Key and certificate go through the pipe alone: arguments and environment are readable by others on the host.
    """
    document = {
        "parent": os.getpid(),
        "task": order.task.to_json(),
        "world": order.world.to_json(),
        "host": order.host,
        "control": list(order.control),
        "key": order.key.hex(),
        "tls": order.tls.to_json() if order.tls else None,
        "beat_s": order.limits.beat_s,
        "stall_s": order.limits.stall_s,
        "lost_s": order.limits.lost_s,
        "devices": list(order.devices),
    }
    write_line(process, document)


def write_line(process: RankProcess, document: dict[str, Any]) -> None:
    """Write a line of JSON to the process' standard input."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at its start: its exit code and log say why
        process.stdin.write(json.dumps(document).encode() + b"\n")
        process.stdin.flush()


def start_rank(order: Order) -> RankProcess:
    """Start a process and hand it its order."""
    process = start_process(order.mark, order.world.ranks_per_node)
    hand_over(process, order)
    return process
