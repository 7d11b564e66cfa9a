"""How fast blocks arrive in the plan's order, from a local disk and from HDFS, against reading each file sequentially.

    python -m benchmarks.read_ahead [--mb N] [--repeats N] [--lanes L]

Only bytes, no decoding: `sequential` reads each shard in pieces of 4 MiB; `by range` reads the blocks in an epoch's
order, each by a separate call, as without `prefetch`; `ahead` through BlockFetcher, with hints for as many blocks as
the budget holds; `ahead, windows` the lanes' windows in turn, most of them a part of a block; `cached`: the same from a
node's cache, filled in the dropped round. Each way also computes a checksum of all bytes, as the decoder does.
Interleaved rounds; compare the ratio. 1 MB is 10^6 bytes.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa

from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.order import Run
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import ReadOptions
from tests.cluster.daemons import Cluster
from tests.training._tiny import write_rows

RECORD_BYTES, BLOCK_RECORDS, SHARD_MB = 3000, 512, 64
PIECE_BYTES = 4 << 20
SCHEMA = Schema((sample_id_field(), Field(name="data", dtype="uint8", shape=(RECORD_BYTES,))))


def write(root: str, mb: int) -> int:
    """A dataset of about so many MB in blocks of 1.5 MB; returns its records."""
    records = mb * 1_000_000 // RECORD_BYTES
    data = np.random.default_rng(0).integers(0, 256, (records, RECORD_BYTES), dtype=np.uint8)
    columns = [pa.array(range(records), type=pa.int64()), pa.array([row.tobytes() for row in data], type=pa.binary())]
    rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    write_rows(root, SCHEMA, rows, {"train": records}, "tfrecord", -(-mb // SHARD_MB), BLOCK_RECORDS, 0)
    return records


def windows(plan: EpochPlan) -> Iterator[Run]:
    """The runs of an epoch as lanes need them: a window of each lane in turn."""
    spans = [plan.lane_span(0, lane) for lane in range(plan.lanes)]
    longest = max(stop - start for start, stop in spans)
    for offset in range(0, longest, plan.window_records):
        for start, stop in spans:
            yield from plan.runs(0, start + offset, min(stop, start + offset + plan.window_records))


def ways(root: str, lanes: int, cache: str) -> dict[str, Callable[[], int]]:
    """Each way to read all bytes of the split, returning how many there were."""
    opened = OpenSplit.at(root, "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=0, global_batch=lanes * 4, lanes=lanes)
    shards, fs = opened.manifest.splits["train"].shards, filesystem(root)
    blocks = plan.runs(0, 0, plan.total)

    def sequential() -> int:
        total = 0
        for shard in shards:
            with fs.open_read(join(root, shard.path)) as file:
                while data := file.read(PIECE_BYTES):
                    google_crc32c.value(data)
                    total += len(data)
        return total

    def by_range(runs: Iterable[Run]) -> int:
        reader, total = opened.reader, 0
        for run in runs:
            start, stop = reader._shards[run.shard].extent(run.first_record, run.count)
            google_crc32c.value(fs.read_range(join(root, shards[run.shard].path), start, stop - start))
            total += stop - start
        return total

    def ahead(runs: Iterable[Run], streams: int, depth: int, cache: str | None = None) -> int:
        options = ReadOptions(cache=cache, cache_bytes=8 << 30) if cache else None
        reader = OpenSplit.at(root, "train", options=options).reader
        reader.read_in_turn(streams)
        waiting: deque[Run] = deque()
        total = 0

        def next_one() -> int:
            run = waiting.popleft()
            data, _ = reader._fetcher.take(run.shard, run.first_record, run.count)
            google_crc32c.value(bytes(data))
            return len(data)

        for run in runs:
            reader.prefetch([run])
            waiting.append(run)
            total += next_one() if len(waiting) > depth else 0
        total += sum(next_one() for _ in range(len(waiting)))
        counts = reader.counts.fetched
        assert counts.direct < counts.ahead / 20, counts
        reader.close()
        return total

    return {
        "sequential": sequential,
        "by range": lambda: by_range(blocks),
        "by range, windows": lambda: by_range(windows(plan)),
        "ahead": lambda: ahead(blocks, 2, 32),
        "ahead, windows": lambda: ahead(windows(plan), lanes, 4 * lanes),
        "ahead, cached": lambda: ahead(blocks, 2, 32, cache),
        "cached, windows": lambda: ahead(windows(plan), lanes, 4 * lanes, cache),
    }


def compare(name: str, root: str, lanes: int, repeats: int, cache: str) -> None:
    """Print MB/s of each way and its ratio to sequential reading, round by round."""
    rates: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for way, work in ways(root, lanes, cache).items():
            began = time.perf_counter()
            total = work()
            rates.setdefault(way, []).append(total / 1e6 / (time.perf_counter() - began))
    base = rates["sequential"][1:]
    for way, values in rates.items():
        ratios = sorted(value / other for value, other in zip(values[1:], base, strict=True))
        median = statistics.median(values[1:])
        spread_text = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
        print(f"{name:12} {way:18} {median:8.0f} MB/s   ratio {spread_text}", flush=True)


def main(argv: list[str]) -> int:
    """Print the table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after a dropped one")
    args = parser.parse_args(argv)
    print(f"python {platform.python_version()}, hdfs-native {version('hdfs-native')}, {os.cpu_count()} cores,")
    print(f"load {os.getloadavg()[0]:.1f}, {args.repeats} rounds after a dropped one; median (min - max)")
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder) / "hadoop").start_hdfs()
        try:
            web = f"webhdfs://127.0.0.1:{cluster.ports['namenode-http']}"
            write(join(cluster.hdfs_url, "d"), args.mb)
            write(f"{folder}/d", args.mb)
            roots = {"local disk": f"{folder}/d", "hdfs-native": join(cluster.hdfs_url, "d"), "WebHDFS": f"{web}/d"}
            for name, root in roots.items():
                compare(name, root, args.lanes, args.repeats, f"{folder}/cache")
        finally:
            cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
