"""Measures the ranks' all_reduce by size, backend and algorithm, and checks its results, in the terms of nccl-tests.

The ordinary launchers start the ranks, which report row by row, so that a caller sees the progress.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lockstep.storage.errors import CommunicationError, require
from lockstep.training.comm.comm_plan import HIERARCHICAL
from lockstep.training.comm.cost import COUNTS
from lockstep.training.comm.options import ALGORITHMS_OF, CommOptions
from lockstep.training.control.protocol import Message
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask

if TYPE_CHECKING:
    from lockstep.training.comm.base import Communicator
    from lockstep.training.control.context import RankContext
    from lockstep.training.launch.session import Launch

ENTRY = "lockstep.training.profiling.bench_comm:main"
DTYPE = np.dtype(np.float32)
MAX_BYTES = 1 << 31
MAX_CALLS = 2000  # of one round, for tiny buffers


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Message):
    """What to measure."""

    num_ranks: int
    """The number of processes."""
    sizes: tuple[int, ...]
    """Bytes of the buffers, float32."""
    backends: tuple[str, ...] = ("auto",)
    """Backends to measure, each a value of CommOptions.backend."""
    algorithms: tuple[str, ...] = ()
    """Algorithms to measure, each a value of CommOptions.algorithm; empty: `auto` and all algorithms of the backend in
    use."""
    trust_network: str | None = None
    """The value of CommOptions.trust_network."""
    tls: Literal["on", "off"] = "off"
    """Whether ranks on different hosts encrypt; has no effect within a host."""
    rounds: int = 5
    """Each round measures all backends and algorithms, so that a disturbance affects all."""
    round_s: float = 0.05
    """A round repeats a call for about this long."""

    def __post_init__(self) -> None:
        for name in ("sizes", "backends", "algorithms"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check("num_ranks", self.num_ranks >= 2, "an integer from 2 up")
        right = all(0 < size <= MAX_BYTES and size % DTYPE.itemsize == 0 for size in self.sizes)
        self._check("sizes", bool(self.sizes) and right, f"multiples of {DTYPE.itemsize} up to {MAX_BYTES} bytes")
        self._check("rounds", self.rounds >= 1, "an integer from 1 up")
        self._check("round_s", self.round_s > 0, "seconds above 0")
        for backend in self.backends:
            for algorithm in self.algorithms or ("auto",):
                self.options(backend, algorithm)

    def options(self, backend: str, algorithm: str) -> CommOptions:
        """How ranks join for one case."""
        return CommOptions(
            backend=backend,  # type: ignore[arg-type] # what it checks
            algorithm=algorithm,  # type: ignore[arg-type] # likewise
            trust_network=self.trust_network,
        )

    def _check(self, name: str, right: bool, allowed: str) -> None:
        flag, got = "--" + name.removesuffix("_s").replace("_", "-"), f"{name} = {getattr(self, name)!r}"
        require(right, f"the measurement's `{name}`", got, allowed, f"Correct {flag}.")


@dataclass(frozen=True, kw_only=True)
class Row(Message):
    """The result for one size, backend and algorithm."""

    nbytes: int
    backend: str
    """The backend in use."""
    algorithm: str
    """The algorithm in use at this size."""
    asked: str
    """`auto` or the algorithm's name."""
    median_s: float
    """The median over the rounds, each of which counts its slowest rank."""
    fastest_s: float
    slowest_s: float
    wrong: int
    """Wrong elements, over all ranks and rounds."""

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Bytes of the buffer a second."""
        return self.nbytes / self.median_s

    def bus_bytes_per_s(self, num_ranks: int) -> float:
        """Bytes a second on each rank's link: 2(N-1)/N of the buffer, for any algorithm (as in nccl-tests)."""
        return self.algorithm_bytes_per_s * 2 * (num_ranks - 1) / num_ranks


@dataclass(frozen=True, kw_only=True)
class RowDone(Message):
    """Rank 0's report of a row, and the number of all rows."""

    row: Row
    total: int


def bench(
    config: BenchConfig, launch: Launch, on_row: Callable[[Row, int], None] = lambda row, total: None
) -> list[Row]:
    """Start the ranks and measure; calls `on_row(row, number of all rows)` for each row.

    Raises ConfigError for a backend or algorithm that the hosts do not support, CommunicationError for a lost rank.
    """
    rows: list[Row] = []

    def handle(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        if kind != "row":
            raise CommunicationError(
                f"rank {rank} asked for `{kind}`", got=kind, allowed="row", next_step="Ship one version."
            )
        done = RowDone.from_json(fields)
        rows.append(done.row)
        on_row(done.row, done.total)
        return {}

    task = RankTask(ENTRY, config.to_json(), tls=config.tls == "on")
    launch(task, config.num_ranks, limits=Limits(), handler=Handler(handle))
    return rows


def check(rows: Sequence[Row]) -> None:
    """Raise CommunicationError if any sum was wrong."""
    if wrong := sum(row.wrong for row in rows):
        raise CommunicationError(
            "all_reduce returned wrong sums",
            got=f"{wrong} elements, see the column `wrong`",
            allowed="none",
            next_step="Check the hosts' memory and network cards, and report it with the table.",
        )


def main(context: RankContext) -> dict[str, Any]:
    """A rank's part of a BenchConfig."""
    config = BenchConfig.from_json(context.payload)
    cases = _cases(context, config)
    leader = context.world.is_leader
    for number, nbytes in enumerate(config.sizes):
        context.control.beat(number, f"all_reduce of {nbytes} bytes")
        times: list[list[float]] = [[] for _ in cases]
        wrong = [0 for _ in cases]
        buffers = [case.comm.allocate(nbytes // DTYPE.itemsize, DTYPE) for case in cases]
        calls = [_calls(case.comm, buf, config.round_s) for case, buf in zip(cases, buffers, strict=True)]
        for _ in range(config.rounds):
            for index, (case, buf) in enumerate(zip(cases, buffers, strict=True)):
                times[index].append(timed(case.comm, buf, calls[index]))
                wrong[index] += _wrong(case.comm, buf)
        if leader:
            for index, case in enumerate(cases):
                row = Row(
                    nbytes=nbytes,
                    backend=case.backend,
                    algorithm=case.choose(nbytes),
                    asked=case.asked,
                    median_s=statistics.median(times[index]),
                    fastest_s=min(times[index]),
                    slowest_s=max(times[index]),
                    wrong=wrong[index],
                )
                done = RowDone(row=row, total=len(cases) * len(config.sizes))
                context.control.request("row", 60.0, **done.to_json())
    for case in cases:
        case.comm.close()
    return {}


@dataclass(frozen=True, slots=True)
class _Case:
    comm: Communicator
    backend: str
    asked: str
    choose: Callable[[int], str]


def _cases(context: RankContext, config: BenchConfig) -> list[_Case]:
    cases: list[_Case] = []
    for backend in config.backends:
        names = list(config.algorithms)
        if not names:
            first = _case(context, config, backend, "auto")
            cases.append(first)
            mine: Mapping[str, tuple[str, ...]] = {"tcp": tuple(COUNTS), "hierarchical": (HIERARCHICAL,)}
            names = [name for name in mine.get(first.backend, ()) if name in ALGORITHMS_OF.get(backend, ())]
        cases += [_case(context, config, backend, name) for name in names]
    return cases


def _case(context: RankContext, config: BenchConfig, backend: str, algorithm: str) -> _Case:
    joined = context.join(config.options(backend, algorithm))
    plan = joined.plan
    if plan is None:  # a backend that has no plan
        return _Case(joined.communicator, backend, algorithm, lambda nbytes: backend)
    return _Case(joined.communicator, plan.backend, algorithm, plan.choose)


def _calls(comm: Communicator, buf: np.ndarray, round_s: float) -> int:
    """Calls in a round, the same on every rank."""
    comm.all_reduce(buf)
    return max(1, min(MAX_CALLS, int(round_s / timed(comm, buf, 2))))


def timed(comm: Communicator, buf: np.ndarray, calls: int) -> float:
    """Seconds a call of the slowest rank, on zeros. A collective."""
    buf[:] = 0
    comm.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(buf)
    seconds = np.array([(time.perf_counter() - began) / calls])
    comm.all_reduce(seconds, "max")
    return float(seconds[0])


def _wrong(comm: Communicator, buf: np.ndarray) -> int:
    """Wrong elements over all ranks; the inputs are integers that float32 holds exactly."""
    ramp = np.arange(buf.size, dtype=np.int64) % 997
    buf[:] = ramp + comm.rank
    comm.all_reduce(buf)
    expected = ramp * comm.num_ranks + comm.num_ranks * (comm.num_ranks - 1) // 2
    wrong = np.array([np.count_nonzero(buf != expected)], np.int64)
    comm.all_reduce(wrong)
    return int(wrong[0])


def table(rows: Sequence[Row], num_ranks: int) -> str:
    """The columns of nccl-tests; bandwidths in GB/s (10^9 bytes)."""
    head = f"{'bytes':>12} {'backend':<13}{'algorithm':<24}{'time us':>12}{'from':>12}{'to':>12}"
    head += f"{'algbw GB/s':>12}{'busbw GB/s':>12}{'wrong':>7}"
    lines = [f"all_reduce (sum, float32) between {num_ranks} ranks; median of the rounds; {machine()}", head]
    for row in rows:
        algorithm = row.algorithm if row.asked != "auto" else f"auto: {row.algorithm}"
        line = f"{row.nbytes:>12} {row.backend:<13}{algorithm:<24}"
        line += "".join(f"{seconds * 1e6:>12.1f}" for seconds in (row.median_s, row.fastest_s, row.slowest_s))
        line += f"{row.algorithm_bytes_per_s / 1e9:>12.3f}{row.bus_bytes_per_s(num_ranks) / 1e9:>12.3f}{row.wrong:>7}"
        lines.append(line)
    return "\n".join(lines)


def machine() -> str:
    """The driver's machine and versions."""
    return f"driver: {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}"


def document(rows: Sequence[Row], config: BenchConfig) -> bytes:
    """The rows as JSON."""
    found = {
        "kind": "bench_comm",
        "machine": machine(),
        "num_ranks": config.num_ranks,
        "rounds": config.rounds,
        "rows": [
            {
                **row.to_json(),
                "algorithm_bytes_per_s": row.algorithm_bytes_per_s,
                "bus_bytes_per_s": row.bus_bytes_per_s(config.num_ranks),
            }
            for row in rows
        ],
    }
    return json.dumps(found, indent=1).encode() + b"\n"
