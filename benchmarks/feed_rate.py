"""The feed's share of the speed of plain sequential reading: shuffled batches of 64 lanes against blocks in file order.

    python -m benchmarks.feed_rate [--records N] [--repeats N]

Both use the same reader, decoder and encoder on one core, over a table like that of the web log (two vocabulary fields,
one of them a list, an hour, two numbers, a label). Interleaved, first round dropped; compare the ratio.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Vocabulary
from lockstep.features.schema.schema import Schema
from lockstep.training.batches.feed import RankFeed, eval_batches
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.world import World
from tests.training._tiny import write_rows

PAGES, TOKENS = 300, 200
BLOCK_RECORDS = 4096
CHUNK_ROWS = 4096  # what the feed encodes at once, so that plain reading has no other batch size


def vocabulary_field(name: str, shape: tuple[int | None, ...], size: int) -> Field:
    """A string field with a vocabulary of `size` tokens and one bucket for others."""
    encoding = {"kind": "vocabulary", "file": f"{name}.json", "max_size": size, "min_count": 1, "oov_buckets": 1}
    return Field(name=name, dtype="string", shape=shape, nullable=not shape, encoding=encoding)


SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        vocabulary_field("page", (), PAGES),
        vocabulary_field("tokens", (None,), TOKENS),
        Field(name="hour", dtype="int64", encoding={"kind": "bucketise", "boundaries": list(range(1, 24))}),
        Field(name="requests", dtype="float32"),
        Field(name="pace", dtype="float32"),
        Field(name="label", dtype="bool", kind="label"),
    )
)


def write(root: str, records: int, fmt: str) -> None:
    """A dataset of `records` rows of random content, the same each time."""
    rng = np.random.default_rng(0)
    pages = [f"/shuttle/missions/sts-{number}/mission-sts-{number}.html" for number in range(PAGES)]
    tokens = [f"token{number}" for number in range(TOKENS)]
    lists = [[tokens[t] for t in rng.integers(0, TOKENS, rng.integers(0, 4))] for _ in range(records)]
    columns = [
        pa.array([sample_id([str(row).encode()], 0) for row in range(records)], type=pa.int64()),
        pa.array([pages[int(page)] for page in rng.zipf(1.5, records) % PAGES]),
        pa.array(lists, type=pa.list_(pa.string())),
        pa.array(rng.integers(0, 24, records)),
        pa.array(rng.random(records, dtype=np.float32)),
        pa.array(rng.random(records, dtype=np.float32)),
        pa.array(rng.random(records) < 0.775),
    ]
    fitted = tuple(
        Vocabulary(name=name, tokens=tuple(sorted(words)), counts=(1,) * len(words), fitted_on=("train",))
        for name, words in (("page", pages), ("tokens", tokens))
    )
    rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    write_rows(root, SCHEMA, rows, {"train": records}, fmt, 3, BLOCK_RECORDS, 0, fitted)


def seconds(work: Callable[[], int]) -> tuple[float, int]:
    """Wall seconds of `work` and the samples that it returns."""
    start = time.perf_counter()
    samples = work()
    return time.perf_counter() - start, samples


def main(argv: list[str]) -> int:
    """Print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=30_000)
    parser.add_argument("--repeats", type=int, default=7, help="counted rounds, after a dropped one")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    print(f"python {platform.python_version()}, numpy {np.__version__}, pyarrow {pa.__version__}, one core")
    print(f"{args.records} records, {args.repeats} interleaved rounds after a dropped one; median (min - max)")
    for fmt in ("tfrecord", "parquet"):
        with tempfile.TemporaryDirectory() as folder:
            root = f"{folder}/dataset"
            write(root, args.records, fmt)
            compare(fmt, root, args.repeats)
    return 0


def compare(fmt: str, root: str, repeats: int) -> None:
    """Time plain reading and feeds of two global batches in turn, print samples/s and ratios to plain reading."""
    opened = OpenSplit.at(root, "train")

    def plain() -> int:
        return sum(len(part) for part in eval_batches(opened.reader, opened.encoder, 0, 1, CHUNK_ROWS))

    def fed(global_batch: int) -> Callable[[], int]:
        plan = EpochPlan.for_dataset(opened.manifest, "train", seed=0, global_batch=global_batch)

        def work() -> int:
            feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1))
            return sum(len(batch.sample_ids) for batch in feed.batches(0, plan.steps(1)))

        return work

    works = {"plain": plain, "feed, batch 64": fed(64), "feed, batch 512": fed(512)}
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            spent, samples = seconds(work)
            rates[name].append(samples / spent)
    base = rates["plain"][1:]
    for name, values in rates.items():
        ratios = sorted(value / plain_rate for value, plain_rate in zip(values[1:], base, strict=True))
        median = statistics.median(values[1:])
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
        print(f"{fmt:9} {name:16} {median:10,.0f} samples/s   ratio {spread}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
