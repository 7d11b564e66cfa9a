"""What ranks on several hosts are asked to do; the name that a task gives is `tests.network.entries:...`."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import psutil

from lockstep.training.comm.base import Communicator, LinkUse
from lockstep.training.control.context import RankContext
from lockstep.training.rank.metrics import StepClock

MARK = b"a gradient in the clear. "


def values(rank: int, size: int) -> np.ndarray:
    """What a rank brings: float32 of many magnitudes, so that another order of sums gives other bits."""
    rng = np.random.default_rng(100 + rank)
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6, size)).astype(np.float32)


def exchange(context: RankContext) -> dict[str, Any]:
    """Reduces values and tells their digest, between which addresses it talks, how long large buffers take and how many
    bytes leave this host for all of them.
    """
    comm, rank = context.communicator(), context.world.rank
    buf = values(rank, context.payload["size"])
    comm.all_reduce(buf)
    marks = np.frombuffer(MARK * 4000, np.uint8).copy()
    gathered = comm.all_gather(marks)
    seconds = []
    large = comm.allocate(context.payload.get("large_bytes", 0), np.dtype(np.uint8)).view(np.float32)
    comm.barrier()
    sent = psutil.net_io_counters(pernic=True)["eth0"].bytes_sent
    for _ in range(context.payload.get("rounds", 0)):
        large[:] = rank + 1
        comm.barrier()
        began = time.perf_counter()
        comm.all_reduce(large)
        seconds.append(time.perf_counter() - began)
        assert np.all(large == sum(range(comm.num_ranks + 1)))
    comm.barrier()  # what this host has still to send is with the others
    sent = psutil.net_io_counters(pernic=True)["eth0"].bytes_sent - sent
    talks = [link for link in psutil.Process().net_connections("inet") if link.raddr]
    listens = [link for link in psutil.Process().net_connections("inet") if link.status == psutil.CONN_LISTEN]
    comm.barrier()
    return {
        "host": context.host,
        "digest": hashlib.sha256(buf.tobytes()).hexdigest(),
        "marks": bool(np.all(gathered == marks)),
        "seconds": seconds,
        "sent_bytes": sent,
        "ends": sorted({end for link in talks for end in (link.laddr.ip, link.raddr.ip)}),
        "listens": sorted({link.laddr.ip for link in listens}),
    }


def reduce_for_long(context: RankContext) -> dict[str, Any]:
    """Reduces 4 MiB over and over; tells the driver once when all are in the middle of it."""
    comm = context.communicator()
    buf = np.ones(1 << 20, np.float32)
    end = time.monotonic() + context.payload["seconds"]
    step = 0
    while time.monotonic() < end:
        comm.all_reduce(buf, "max")
        step += 1
        context.control.beat(step, "train")
        if step == 3:
            context.control.notify("going")
    return {}


class Summed:
    """What a StepClock asks of an exchange, of one buffer a step."""

    def __init__(self, comm: Communicator, size: int) -> None:
        self.comm, self.buf, self.waited_s = comm, np.ones(size, np.float32), 0.0

    @property
    def sent_bytes(self) -> int:
        return self.comm.sent_bytes

    def links(self) -> dict[int, LinkUse]:
        return self.comm.links()

    def sum(self) -> None:
        began = time.perf_counter()
        self.comm.all_reduce(self.buf, "max")
        self.waited_s = time.perf_counter() - began


def short_steps(context: RankContext) -> dict[str, Any]:
    """Steps that compute for `own_ms`, on one rank longer from some step on, and then reduce `size` floats, with the
    clock of a training.
    """
    world, payload, slow = context.world, context.payload, context.payload["slow"]
    exchange = Summed(context.communicator(), payload["size"])
    clock = StepClock(context.control, world.rank, exchange, num_ranks=world.num_ranks)
    for step in range(1, payload["steps"] + 1):
        is_slow = world.rank == slow["rank"] and step >= slow["from"]
        clock.begins()
        time.sleep((slow["own_ms"] if is_slow else payload["own_ms"]) / 1e3)
        exchange.sum()
        clock.ends(step)
        context.control.beat(step, "train")
    return {}
