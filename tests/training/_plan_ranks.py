"""Entries for ranks that say they are on hosts of their own, so that they talk by TCP and calibrate."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import numpy as np

from lockstep.training.control.context import RankContext


def sums_killed_once(context: RankContext) -> dict[str, Any]:
    """Sums of several sizes, as the driver's metrics; rank 1 of generation 1 is killed after them."""
    with mock.patch("lockstep.training.comm.backend.host_identity", lambda: f"host {context.world.rank}"):
        comm = context.communicator()
    found = []
    for size in (1, 3000, 40_000):
        buf = np.random.default_rng(comm.rank).standard_normal(size).astype(np.float32)
        comm.all_reduce(buf)
        found.append(float(buf.astype(np.float64).sum()))
    row = {"step": context.world.generation, "epoch": 0, "kind": "step", "loss": 0.0, "sums": found}
    if context.world.is_leader:
        context.control.notify("metrics", rows=[row])
    comm.barrier()
    if context.world.generation == 1 and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    return {"steps": 1, "metrics": {}, "samples": 0, "seconds": 1.0}
