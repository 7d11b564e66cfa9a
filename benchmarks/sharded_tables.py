"""A table of embeddings in shards: bytes, seconds and memory of a rank, and how fast rows are gathered.

    python -m benchmarks.sharded_tables [--ranks 1 2] [--rows 4000000] [--memory-gib 4] [--steps 20] [--torch PYTHON]

The step is that of a recommender: each rank has 4,096 samples of 26 features, whose ids follow Zipf's law, in one table
16 wide. It looks the rows up, sends a gradient for each, and the owners apply row-wise Adagrad. Compared, in turns and
in the same processes: whole tables on every rank, whose gradients are gathered by rows as lockstep train does without
--shard-embeddings; and with --torch an nn.EmbeddingBag(sparse=True) over gloo, whose gradients are gathered too.
`arithmetic` is what must be sent: distinct ids of other ranks' rows, the rows, their gradients. Memory is what the
process grows by while it holds the table, its accumulators and a step's buffers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lockstep.training.comm import CommOptions, Communicator, connect
from lockstep.training.embeddings.sharded_table import EPSILON, ShardedTable, TableOptions
from lockstep.training.embeddings.table_kernels import adagrad, add_by_place, gather
from lockstep.training.exchange.sparse import Table, sum_rows
from lockstep.training.world import World

HERE = Path(__file__).parent
SAMPLES, FEATURES, WIDTH, ZIPF = 4096, 26, 16, 1.05
KEY = b"k" * 32
JOIN_S = 120.0


def ids_of(rank: int, step: int, rows: int) -> np.ndarray:
    """(SAMPLES, FEATURES) int64: each feature has its own part of the table; rank k's frequency falls as k ** -ZIPF."""
    rng, each = np.random.default_rng(1000 * step + rank), rows // FEATURES
    # The inverse of the distribution's integral, for an exponent near 1 as for any other.
    power = 1 - ZIPF
    drawn = (1 + rng.random((SAMPLES, FEATURES)) * (each**power - 1)) ** (1 / power)
    return np.minimum(drawn.astype(np.int64), each - 1) + np.arange(FEATURES) * each


class Counted:
    """Counts the bytes that a rank hands over for other ranks."""

    def __init__(self, comm: Communicator) -> None:
        self.sent = 0
        plain, gathered = comm.all_to_all_ragged, comm.all_gather_ragged

        def exchange(parts: Any) -> Any:
            self.sent += sum(part.nbytes for rank, part in enumerate(parts) if rank != comm.rank)
            self.sent += 8 * (comm.num_ranks + 1) * (comm.num_ranks - 1)  # the table of sizes
            return plain(parts)

        def gather_all(buf: Any) -> Any:
            self.sent += (buf.nbytes + 8) * (comm.num_ranks - 1)
            return gathered(buf)

        object.__setattr__(comm, "all_to_all_ragged", exchange)
        object.__setattr__(comm, "all_gather_ragged", gather_all)


class Control:
    """The rendezvous of `connect`, over a pipe to the parent."""

    host = "127.0.0.1"

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def rendezvous(self, host: str, port: int) -> list[tuple[str, int]]:
        """Send this rank's address, get all."""
        self._pipe.send((host, port))
        found: list[tuple[str, int]] = self._pipe.recv()
        return found


def sharded(table: ShardedTable, ids: np.ndarray, gradient: np.ndarray) -> None:
    """A step with the table in shards."""
    _, number = table.look_up(ids, keep=True)
    table.take_gradient(number, gradient)
    table.commit(skipped=False)


def replicated(comm: Communicator, whole: list[np.ndarray], ids: np.ndarray, gradient: np.ndarray) -> None:
    """A step with the whole table on every rank, and the same update."""
    rows, squares = whole
    flat, values = ids.reshape(-1), gradient.reshape(-1, WIDTH)
    gather(rows, flat, 0, np.empty((flat.size, WIDTH), np.float32))
    distinct, places = np.unique(flat, return_inverse=True)
    sums = np.zeros((distinct.size, WIDTH), np.float32)
    add_by_place(values, places, np.float32(1), sums)
    found = sum_rows(comm, Table("table", rows.shape, rows.dtype), distinct, sums)
    adagrad(rows, squares, found.indices, 0, found.values, np.float32(0.05), np.float32(EPSILON))


def rank_process(
    pipe: Connection, rank: int, num_ranks: int, backend: str, rows: int, steps: int, memory: bool
) -> None:
    """One rank: sends a dict of its figures."""
    os.environ["NUMBA_NUM_THREADS"] = "1"
    comm = connect(
        World.local(rank, num_ranks, 1), Control(pipe), KEY, JOIN_S, options=CommOptions(backend=backend)  # type: ignore[arg-type] # an argument of the command
    )  # fmt: skip
    options = TableOptions("table", rows, WIDTH)
    warm = ShardedTable(TableOptions("warm", 10_000, WIDTH), comm)
    sharded(warm, np.zeros((2, 2), np.int64), np.zeros((2, 2, WIDTH), np.float32))
    before = psutil.Process().memory_info().rss
    counted, table = Counted(comm), ShardedTable(options, comm)
    gradient = np.random.default_rng(rank).standard_normal((SAMPLES, FEATURES, WIDTH)).astype(np.float32)
    batches = [ids_of(rank, step, rows) for step in range(steps)]
    edges = [start for start, _ in options.bounds(num_ranks)] + [options.padded]
    asked = [np.histogram(options.positions(np.unique(batch)), edges)[0] for batch in batches]
    seconds: dict[str, list[float]] = {"sharded": [], "replicated": []}
    sent: dict[str, list[int]] = {"sharded": [], "replicated": []}
    whole = [] if memory else [np.zeros((rows, WIDTH), np.float32), np.zeros(rows, np.float32)]
    for batch in batches:
        for name in ("sharded",) if memory else ("sharded", "replicated"):
            comm.barrier()
            counted.sent, began = 0, time.perf_counter()
            if name == "sharded":
                sharded(table, batch, gradient)
            else:
                replicated(comm, whole, batch, gradient)
            comm.barrier()
            seconds[name].append(time.perf_counter() - began)
            sent[name].append(counted.sent)
    figures = {"grown": psutil.Process().memory_info().rss - before, "seconds": seconds, "sent": sent}
    pipe.send(figures | {"asked": [counts.tolist() for counts in asked]})
    comm.close()


def run_ranks(num_ranks: int, backend: str, rows: int, steps: int, *, memory: bool = False) -> list[dict[str, Any]]:
    """The figures of each rank."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(num_ranks)]
    ranks = [
        spawn.Process(target=rank_process, args=(theirs, rank, num_ranks, backend, rows, steps, memory), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    if num_ranks > 1:
        addresses = [mine.recv() for mine, _ in pipes]
        for mine, _ in pipes:
            mine.send(addresses)
    found = [mine.recv() for mine, _ in pipes]
    for process in ranks:
        process.join(JOIN_S)
    return found


def gather_speed(rows: int) -> None:
    """Rows in several orders against one copy of as many bytes, in turns; bytes read and written are counted."""
    table, shuffled = np.ones((rows, WIDTH), np.float32), np.random.default_rng(0).permutation(rows)
    orders = {
        "all, rising": np.arange(rows),
        "half of them, rising": np.sort(shuffled[: rows // 2]),
        "all, in random order": shuffled,
    }
    for name, order in orders.items():
        out, ratios, speeds = np.empty((len(order), WIDTH), np.float32), [], []
        for turn in range(9):
            began = time.perf_counter()
            gather(table, order, 0, out)
            gathered, began = time.perf_counter() - began, time.perf_counter()
            np.copyto(out, table[: len(order)])
            copied = time.perf_counter() - began
            if turn:
                ratios.append(copied / gathered)
                speeds.append((2 * out.nbytes + order.nbytes) / gathered)
        speed = statistics.median(speeds) / 1e9
        print(f"gather of {rows} rows, {name}: {speed:.1f} GB/s, {spread(ratios)} of a copy's speed")


def spread(values: list[float], form: str = "{:.2f}") -> str:
    """median (lowest to highest)"""
    middle, least, most = (form.format(one) for one in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})"


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--memory-gib", type=float, default=4.0)
    parser.add_argument("--torch", help="an interpreter with PyTorch")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    for num_ranks in args.ranks:
        for backend in ("tcp", "shm") if num_ranks > 1 else ("auto",):
            found = run_ranks(num_ranks, backend, args.rows, args.steps)
            seconds = {
                name: [max(r["seconds"][name][i] for r in found) for i in range(3, args.steps)]
                for name in found[0]["seconds"]
            }
            ratios = [a / b for a, b in zip(seconds["replicated"], seconds["sharded"], strict=True)]
            ms = {name: spread([1000 * one for one in times], "{:.1f}") for name, times in seconds.items()}
            print(
                f"{num_ranks} ranks, {backend}: {ms['sharded']} ms a step, "
                f"whole tables {ms['replicated']} ms, ratio {spread(ratios)}"
            )
            if num_ranks > 1:
                print_bytes(found)
    rows = int(args.memory_gib * 2**30 / (4 * (WIDTH + 1)))
    for num_ranks in args.ranks:
        grown = [one["grown"] for one in run_ranks(num_ranks, "auto", rows, 3, memory=True)]
        print(f"{num_ranks} ranks, {args.memory_gib:g} GiB in all: a rank grows by {max(grown) / 2**30:.2f} GiB")
    gather_speed(args.rows)
    if args.torch:
        print_torch(args.torch, max(args.ranks), args.rows, args.steps)


def print_bytes(found: list[dict[str, Any]]) -> None:
    """What rank 0 sends a step, against what must be sent."""
    asked = np.array([one["asked"] for one in found])  # (ranks, steps, ranks): distinct ids of s in the rows of r
    to, by = asked[0, :, 1:].sum(1), asked[1:, :, 0].sum(0)
    must = 8 * to + 4 * WIDTH * by + 4 * WIDTH * to
    sent, gathered = (np.array(found[0]["sent"][name]) for name in ("sharded", "replicated"))
    print(
        f"  bytes of rank 0 a step: {sent.mean() / 1e6:.2f} MB, arithmetic {must.mean() / 1e6:.2f} MB "
        f"({sent.mean() / must.mean():.3f}); whole tables {gathered.mean() / 1e6:.2f} MB"
    )


def print_torch(python: str, num_ranks: int, rows: int, steps: int) -> None:
    """Time the same step by PyTorch over gloo, and print it."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_ranks):
            for step in range(steps):
                np.save(Path(folder, f"ids-{rank}-{step}.npy"), ids_of(rank, step, rows))
        script = str(HERE / "peers" / "tables_torch.py")
        commands = [
            [python, script, folder, str(rank), str(num_ranks), str(rows), str(steps)] for rank in range(num_ranks)
        ]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
        found = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in processes]
    times = [1000 * max(one[i] for one in found) for i in range(3, steps)]
    print(f"{num_ranks} ranks, PyTorch over gloo: {spread(times, '{:.1f}')} ms a step")


if __name__ == "__main__":
    main()
