"""Encodings of one text column on one core against alternatives, and exact sums against rounded ones.

    python -m benchmarks.encodings [--rows N] [--tokens N] [--repeats N]

hash: XXH64 in a kernel (lockstep/features/encode/hashing.py), TensorFlow's to_hash_bucket_fast over the same bytes
(including making the tensor), Python's zlib.crc32 called for each value. vocabulary: this project's table of tokens,
pyarrow's index_in, TensorFlow's StaticVocabularyTable; half of the values are unknown. sums: mean and variance without
rounding (etl/fit/exact_sums.py), math.fsum, and NumPy's. Batches of 4,096 rows, as training encodes them. Times are CPU
seconds of the process.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.shared.shapes import cpu_seconds, interleaved, machine, print_rates
from lockstep.etl.fit.exact_sums import FLOAT_UNIT, ExactSums
from lockstep.features.encode.hashing import TokenTable, buckets_of

BATCH_ROWS, BUCKETS = 4096, 1000

Work = Callable[[pa.Array], object]


def hashes() -> dict[str, Work]:
    """Bucket of each text."""
    import tensorflow as tf

    return {
        "kernel, XXH64": lambda column: buckets_of(column, BUCKETS, 42),
        "tf.strings.to_hash_bucket_fast": lambda column: tf.strings.to_hash_bucket_fast(
            tf.constant(column.to_numpy(zero_copy_only=False)), BUCKETS
        ),
        "zlib.crc32 for each value": lambda column: [
            zlib.crc32(text.encode()) % BUCKETS for text in column.to_pylist()
        ],
    }


def vocabularies(tokens: list[str]) -> dict[str, Work]:
    """Place of each text among the tokens."""
    import tensorflow as tf

    known, table = pa.array(tokens), TokenTable(tokens)
    keys = tf.lookup.KeyValueTensorInitializer(tokens, list(range(len(tokens))), value_dtype=tf.int64)
    lookup = tf.lookup.StaticVocabularyTable(keys, 1)
    return {
        "table of tokens": table.find,
        "pyarrow index_in": lambda column: pc.index_in(column, value_set=known),
        "tf StaticVocabularyTable": lambda column: lookup.lookup(tf.constant(column.to_numpy(zero_copy_only=False))),
    }


def sums() -> dict[str, Callable[[np.ndarray], object]]:
    """Mean and variance of numbers."""

    def exact(values: np.ndarray) -> object:
        found = ExactSums(FLOAT_UNIT)
        found.add(values)
        return found.moments("x", ("train",))

    def fsum(values: np.ndarray) -> float:
        mean = math.fsum(values.tolist()) / len(values)
        return math.fsum(((values - mean) ** 2).tolist()) / len(values)

    return {"exact": exact, "math.fsum, twice": fsum, "numpy var, rounded": lambda values: values.var()}


def main(argv: list[str]) -> int:
    """Measure and print; the first of each table is ours, the second is what it is compared with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1 << 18)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    print(machine("pyarrow", "numpy", "numba", "tensorflow"))
    rng = np.random.default_rng(0)
    tokens = [f"{number:08x}" for number in range(args.tokens)]
    texts = pa.array([f"{number:08x}" for number in rng.integers(0, 2 * args.tokens, args.rows)])
    batches = [texts.slice(start, BATCH_ROWS) for start in range(0, args.rows, BATCH_ROWS)]

    def over(work: Work) -> Callable[[], float]:
        return lambda: cpu_seconds(lambda: [work(batch) for batch in batches])

    for title, works in (("hash", hashes()), (f"vocabulary of {args.tokens}", vocabularies(tokens))):
        print_rates(
            title, args.rows, interleaved({name: over(work) for name, work in works.items()}, args.repeats), [*works][1]
        )
    values = rng.standard_normal(args.rows)

    def once(work: Callable[[np.ndarray], object]) -> Callable[[], float]:
        return lambda: cpu_seconds(lambda: work(values))

    timed = {name: once(work) for name, work in sums().items()}
    print_rates("mean and variance", args.rows, interleaved(timed, args.repeats), [*timed][1])
    return 0


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.exit(main(sys.argv[1:]))
