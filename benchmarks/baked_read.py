"""Reading a baked dataset against encoding the raw one when it is read: CPU of one core, and sizes on disk.

    python -m benchmarks.baked_read RAW BAKED [--split train] [--repeats N]

RAW and BAKED are two datasets of the same input, the second made with --bake. Their inputs are first compared bit for
bit. `read` decodes the records of a split into columns; `encode` makes a model's inputs from columns in memory, in
batches of 4,096 rows; `both` does one after the other. `as a model is fed` are the bytes of the inputs in memory: the
size of shards that also stored one-hot columns and padding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa

from benchmarks.shared.arrays import in_order
from benchmarks.shared.shapes import cpu_seconds, interleaved, machine, print_rates
from lockstep.training.reading.open import OpenSplit

BATCH_ROWS = 4096


def read(opened: OpenSplit) -> list[pa.RecordBatch]:
    """All records of a split as columns."""
    return list(in_order(opened.reader))


def encode(opened: OpenSplit, batches: list[pa.RecordBatch]) -> None:
    """Make inputs of columns."""
    for batch in batches:
        opened.encoder.encode(batch)


def both(opened: OpenSplit) -> None:
    """What training does with each record."""
    for batch in in_order(opened.reader):
        opened.encoder.encode(batch)


def rebatched(opened: OpenSplit) -> list[pa.RecordBatch]:
    """All records in batches of 4,096."""
    return pa.Table.from_batches(read(opened)).combine_chunks().to_batches(max_chunksize=BATCH_ROWS)


def fed_bytes(raw: OpenSplit, baked: OpenSplit) -> int:
    """The bytes of the inputs of all rows; ends where those of one dataset differ from the other's."""
    size = 0
    for one, other in zip(rebatched(raw), rebatched(baked), strict=True):
        want, got = raw.encoder.encode(one), baked.encoder.encode(other)
        same = np.array_equal(want.sample_id, got.sample_id) and list(want.x) == list(got.x)
        if not same or any(want.x[name].tobytes() != got.x[name].tobytes() for name in want.x):
            raise SystemExit("the two datasets give a model other inputs")
        size += sum(array.nbytes for array in got.x.values())
    return size


def main(argv: list[str]) -> int:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("raw")
    parser.add_argument("baked")
    parser.add_argument("--split", default="train")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    opened = {name: OpenSplit.at(getattr(args, name), args.split) for name in ("raw", "baked")}
    rows = opened["raw"].manifest.splits[args.split].records
    fed = fed_bytes(opened["raw"], opened["baked"])
    print(machine("pyarrow", "numba", "numpy"))
    for name, split in opened.items():
        size = sum(shard.bytes for shard in split.manifest.splits[args.split].shards)
        print(f"{name}: {size / rows:.1f} bytes a row on disk ({split.manifest.format})")
    print(f"as a model is fed: {fed / rows:.1f} bytes a row")
    held = {name: rebatched(split) for name, split in opened.items()}
    kinds: dict[str, Callable[[str], Callable[[], object]]] = {
        "read": lambda name: partial(read, opened[name]),
        "encode": lambda name: partial(encode, opened[name], held[name]),
        "both": lambda name: partial(both, opened[name]),
    }
    works: dict[str, Callable[[], float]] = {
        f"{kind} {name}": partial(cpu_seconds, of(name)) for kind, of in kinds.items() for name in opened
    }
    found = interleaved(works, args.repeats)
    for kind in kinds:
        print_rates(kind, rows, {name: found[f"{kind} {name}"] for name in opened}, "raw")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
