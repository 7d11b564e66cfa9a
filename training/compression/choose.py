"""Which kind of sum a method is, and which method `auto` is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lockstep.training.comm.base import Communicator
from lockstep.training.compression.bucket_sum import Array, BucketSum, CodedSum, Placed
from lockstep.training.compression.codecs import Codec, codec_of
from lockstep.training.compression.low_rank_sum import LowRankSum
from lockstep.training.compression.method import Compression
from lockstep.training.compression.sparse_sum import SparseSum

CANDIDATES = ("bf16", "int8")  # those that keep no errors: they suit every optimizer, precision and number of ranks
PAYS = 1.1  # times faster, or whole gradients stay: the measurement is not more precise
ROUNDS = 3


def bucket_sum(
    communicator: Communicator, method: Compression, number: int, size: int, tensors: Sequence[Placed]
) -> BucketSum:
    """The sum of a bucket by `method`; `tensors` are (start, shape) of the gradients in it."""
    if method.name in ("topk", "dgc"):
        return SparseSum(communicator, method, number, size, tensors)
    if method.name == "powersgd":
        return LowRankSum(communicator, method, number, size, tensors)
    return CodedSum(communicator, method, number, size, tensors)


@dataclass(frozen=True, slots=True)
class Measured:
    """What `auto` chose, by the medians of a few sums of one bucket, of the slowest rank; the same on all ranks."""

    name: str
    text: str
    """Each candidate's time, and the rate of the network below which it is faster."""


def measure(communicator: Communicator, size: int) -> Measured:
    """Sum a bucket of `size` float32 whole and by each candidate, and choose the fastest. A collective."""
    whole = communicator.allocate(size, np.float32)
    taken = {"none": _median_s(communicator, lambda: communicator.all_reduce(whole))}
    lines = [f"whole {taken['none'] * 1e3:.1f} ms"]
    x = np.random.Generator(np.random.Philox(1)).standard_normal(size, dtype=np.float32)
    for name in CANDIDATES:
        method = Compression(name)
        one, flat = CodedSum(communicator, method, 0, size, ((0, (size,)),)), x.copy()
        taken[name] = _median_s(communicator, partial(one.reduce, flat, 1))
        coding = np.array([_seconds(partial(_there_and_back, codec_of(method), x))])
        communicator.all_reduce(coding, "max")
        # Each rank codes its part of the bucket twice over, and sends so many bytes less.
        saved = 2 * (communicator.num_ranks - 1) / communicator.num_ranks * (4 * size - codec_of(method).size(size))
        lines.append(f"{name} {taken[name] * 1e3:.1f} ms (pays below {saved * 8 / (2 * coding[0]) / 1e9:.2g} Gbit/s)")
    best = min(taken, key=lambda name: taken[name])
    chosen = best if taken["none"] > PAYS * taken[best] else "none"
    return Measured(chosen, f"{4 * size / 2**20:.1f} MiB: {', '.join(lines)}: {chosen}")


def _median_s(communicator: Communicator, work: Callable[[], None]) -> float:
    """The median of a few times of `work`, which ranks do together, after one that is not counted."""
    work()
    times = []
    for _ in range(ROUNDS):
        communicator.barrier()
        times.append(_seconds(work))
    found = np.array([np.median(times)])
    communicator.all_reduce(found, "max")
    return float(found[0])


def _there_and_back(codec: Codec, x: Array) -> None:
    codec.decode(codec.encode(x, 0), np.empty_like(x))


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
