"""A Parquet split read into fixed batches of arrays: this project's reader against Petastorm's.

    python -m benchmarks.petastorm_read [--tab N] [--images N] [--repeats N]

One core, one process, the same files (zstd level 1, page checksums, row groups of 2 MiB) in the page cache. This
project makes arrays of the images and checks footers and page checksums; Petastorm returns images as bytes and checks
nothing. Each contestant is timed to its last batch; tf.data's autotuner, which would delay the end, is off. Large row
groups are copies of the files with one row group each, which spare Petastorm its cost for each row group; all readers
read both. Two tables show the same rounds: wall time, in which Petastorm's pools also sleep, and CPU time of the
process, which is more reliable on a shared machine. Of two runs in a row the second counts: after another reader has
run, the first gets its memory from the system page by page.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.shared.arrays import split_arrays
from benchmarks.shared.arrow_peer import arrow_batches, fixed_batches, split_files
from benchmarks.shared.shapes import (
    image_rows,
    image_schema,
    interleaved,
    machine,
    print_rates,
    seconds,
    tab_rows,
    tab_schema,
)
from lockstep.etl.write.shards import BLOCK_BYTES, parquet_options
from lockstep.features.schema.schema import Schema
from lockstep.petastorm import enable
from lockstep.storage.dataset.layout import shard_path
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import Counts, ShardInfo, SplitInfo
from lockstep.storage.documents import sha256_hex
from lockstep.storage.formats.parquet_footer import read_footer
from tests.builders.records import crc32c_hex

BATCH = 1024
SHARDS = 4
OURS = "ours"


def write(root: Path, schema: Schema, rows: pa.RecordBatch, block_records: int) -> None:
    """A dataset of one split as the ETL jobs write it, in SHARDS shards."""
    shards = []
    for number in range(SHARDS):
        start, stop = (len(rows) * part // SHARDS for part in (number, number + 1))
        table = pa.Table.from_batches([rows.slice(start, stop - start)])
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=block_records, **parquet_options(schema))
        data = sink.getvalue().to_pybytes()
        path = shard_path("train", number, "parquet")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
        footer = read_footer(partial(_range, data), len(data), path)
        offsets = tuple(range(0, len(table), block_records))
        shards.append(
            ShardInfo(path, len(table), len(data), sha256_hex(data), crc32c_hex(data), sha256_hex(footer), offsets)
        )
    manifest = DatasetManifest.build(
        format="parquet",
        created_by={"version": "benchmark", "config": {}, "seed": 0},
        schema=schema.to_json(),
        splits={"train": SplitInfo(block_records, tuple(shards))},
        files={},
        counts=Counts(len(rows), len(rows), 0, {}),
        source=(),
    )
    (root / "_manifest.json").write_bytes(manifest.to_bytes())


def _range(data: bytes, offset: int, length: int) -> bytes:
    return data[offset : offset + length]


def ours(root: Path) -> int:
    """Fixed batches of arrays, images as (n, 32, 32, 3); each call opens and checks the dataset again."""
    return sum(len(batch["label"]) for batch in split_arrays(str(root), "train", BATCH))


def batch_reader(root: Path, pool: str) -> int:
    """make_batch_reader: arrays of a row group each."""
    from petastorm import make_batch_reader

    with make_batch_reader(f"file://{root}/split=train", reader_pool_type=pool, workers_count=2) as reader:
        return sum(len(batch.label) for batch in reader)


def rebatched(root: Path, pool: str) -> int:
    """make_petastorm_dataset cut into the same batches, by tf.data."""
    import tensorflow as tf
    from petastorm import make_batch_reader
    from petastorm.tf_utils import make_petastorm_dataset

    options = tf.data.Options()
    options.autotune.enabled = False
    with make_batch_reader(f"file://{root}/split=train", reader_pool_type=pool, workers_count=2) as reader:
        dataset = make_petastorm_dataset(reader).unbatch().batch(BATCH).with_options(options)
        return sum(len(batch.label) for batch in dataset)


def readers(root: Path, schema: Schema) -> dict[str, Callable[[], int]]:
    """All that read one dataset; each returns the rows that it saw."""
    files = split_files(root)
    return {
        OURS: lambda: ours(root),
        "iter_batches": lambda: sum(map(len, arrow_batches(files, BATCH))),
        "iter_batches as fixed batches of arrays": lambda: sum(
            len(batch["label"]) for batch in fixed_batches(files, schema, BATCH)
        ),
        "make_batch_reader, dummy": lambda: batch_reader(root, "dummy"),
        "make_batch_reader, 2 threads": lambda: batch_reader(root, "thread"),
        "make_petastorm_dataset rebatched, dummy": lambda: rebatched(root, "dummy"),
        "make_petastorm_dataset rebatched, 2 threads": lambda: rebatched(root, "thread"),
    }


def compare(name: str, schema: Schema, rows: pa.RecordBatch, repeats: int, folder: Path) -> None:
    """Time all readers in turn over one shape, and print tables of ratios to ours on the same files."""
    small, large = folder / name, folder / f"{name}-large"
    write(small, schema, rows, max(1, BLOCK_BYTES * len(rows) // rows.nbytes))
    write(large, schema, rows, len(rows))
    both = {"small": readers(small, schema), "large": readers(large, schema)}
    works = {f"{groups}/{title}": work for groups, found in both.items() for title, work in found.items()}
    cpu: dict[str, list[float]] = {key: [] for key in works}

    def timed(key: str) -> float:
        found = 0

        def work() -> None:
            nonlocal found
            found = works[key]()

        work()
        started = time.process_time()
        wall = seconds(work)
        cpu[key].append(time.process_time() - started)
        assert found == len(rows), key
        return wall

    wall = interleaved({key: partial(timed, key) for key in works}, repeats)
    counted = {key: values[1:] for key, values in cpu.items()}
    for groups, found in both.items():
        for clock, spent in (("wall", wall), ("CPU", counted)):
            part = {title: spent[f"{groups}/{title}"] for title in found}
            print_rates(f"{name}, {groups} row groups, {clock} time", len(rows), part, OURS)


def main(argv: list[str]) -> int:
    """Print a table for each shape; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tab", type=int, default=400_000, help="rows of 40 columns")
    parser.add_argument("--images", type=int, default=60_000, help="rows with an image of 3,072 bytes")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after a dropped one")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.simplefilter("ignore")
    enable()
    print(machine("pyarrow", "numpy", "petastorm", "tensorflow"))
    with tempfile.TemporaryDirectory() as folder:
        if args.tab:
            compare("tab", tab_schema(nullable=False), tab_rows(args.tab, 0.0), args.repeats, Path(folder))
        if args.images:
            compare("images", image_schema(), image_rows(args.images), args.repeats, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
