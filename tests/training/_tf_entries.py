"""Entries for ranks that join TensorFlow's servers; see `_ranks`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.storage.errors import CommunicationError
from lockstep.training.control.context import RankContext
from lockstep.training.rank.runtime import ENVIRONMENT


def killed_in_a_call(context: RankContext) -> dict[str, Any]:
    """Rank 1 is killed while rank 0 is in TensorFlow's sum; that one ignores SIGTERM and writes what it is told."""
    os.environ |= ENVIRONMENT
    comm: Any = context.communicator()
    buf = np.ones(1_000_000, np.float32)
    comm.barrier()
    meet, met = comm._meeting.all, Path(context.payload["folder"], "rank 0 has met rank 1")

    def then_go_on(*call: Any) -> None:
        meet(*call)
        met.touch()

    def then_die(*call: Any) -> None:
        meet(*call)
        while not met.exists():
            time.sleep(0.01)
        time.sleep(0.3)  # it calls TensorFlow next
        os.kill(os.getpid(), signal.SIGKILL)

    comm._meeting.all = then_die if comm.rank == 1 else then_go_on
    if comm.rank == 1:
        comm.all_reduce(buf)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told: list[str] = []
    while len(told) < 2:
        try:
            comm.all_reduce(buf)
        except CommunicationError as error:
            told.append(str(error))
    Path(context.payload["folder"], "rank-0").write_text("\n---\n".join(told))
    time.sleep(60)
    return {}
