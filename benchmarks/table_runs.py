"""Runs with tables in shards: the stall of a checkpoint of 2 GB at other numbers of ranks, and AUC by size of table.

    python -m benchmarks.table_runs checkpoints [--gb 2] | auc --adult FILE

`checkpoints`: real runs by `lockstep.training.driver.train.train`, ranks as processes of this host: 400 steps on 2
ranks, then 20 each on 1 and 2, resumed from the checkpoint of the run before. Printed is for how long the step waits
while rows are copied, for whole checkpoints and for differences.

`auc`: Adult (UCI, the file adult.data.gz): 14 columns and 6 pairs of them as hashed ids, `wide-deep`, two ranks, 4
epochs; tables of 100,000 buckets a column against 100, and tables that grow. AUC on a fifth, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import itertools
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.shared.shapes import machine
from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.urls import join
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.results.evaluate import EvaluateRequest, evaluate
from lockstep.training.run.metrics import read_history
from tests.training._tiny import write_rows

WIDTH, COLUMNS, EVERY = 16, 8, 50


def large(signature: Any, options: Any) -> Any:
    """One table in shards of options.extra["gb"] GB with its accumulators, whose ids are those of all columns."""
    import keras
    from keras import ops

    from lockstep.training.embeddings import sharded_embedding

    sharded_embedding.COPIES = 1 << 40  # no export at the end: it is not measured
    rows = int(options.extra["gb"] * 1e9 / (WIDTH + 1) / 4)
    inputs = {n: keras.Input(s.shape, dtype=s.dtype, name=n) for n, s in signature.features.items()}
    ids = ops.mod(ops.concatenate(list(inputs.values()), axis=1), rows)
    x = keras.layers.Flatten()(sharded_embedding.ShardedEmbedding(rows, WIDTH, name="table")(ids))
    made = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    made.compile("sgd", "binary_crossentropy", jit_compile=False)
    return made


def dataset(root: str, columns: dict[str, np.ndarray], label: np.ndarray, encoding: dict[str, Any]) -> str:
    """A dataset of columns of ids (n,) int64 and a yes-or-no label; the last fifth is `test`."""
    ids = [sample_id([str(row).encode()], 0) for row in range(len(label))]
    fields = [Field(name=name, dtype="int64", encoding=encoding) for name in columns]
    schema = Schema(
        (Field(name="sample_id", dtype="int64", kind="id"), *fields, Field(name="y", dtype="bool", kind="label"))
    )
    arrays = [pa.array(ids), *(pa.array(column) for column in columns.values()), pa.array(label)]
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema.arrow_schema())
    test = len(label) // 5
    write_rows(root, schema, rows, {"train": len(label) - test, "test": test}, "tfrecord", 2, 64, 0)
    return root


def checkpoints(root: str, gb: float) -> None:
    """Print the stall of each kind of checkpoint."""
    rng = np.random.default_rng(0)
    columns = {f"c{i}": rng.zipf(1.2, 40_000) % 2**40 for i in range(COLUMNS)}
    data = dataset(join(root, "data"), columns, rng.random(40_000) < 0.3, {"kind": "number", "dtype": "int64"})
    before = 0
    for num_ranks, until in ((2, 400), (1, 420), (2, 440)):
        config = TrainConfig(
            datasets=(data,), run=join(root, "run"), model="benchmarks.table_runs:large", num_ranks=num_ranks, lanes=60,
            global_batch=240, epochs=20, max_steps=until, checkpoint_every=EVERY, launcher="local", batchnorm="local",
            extra={"gb": gb},
        )  # fmt: skip
        began = time.monotonic()
        train(config, run_local, hooks=Hooks(lease_watch_s=0.1))
        rows = [row for row in read_history(config.run).checkpoints if before < row["step"] <= until]
        before = until
        largest = max(row["bytes"] for row in rows)
        print(f"{num_ranks} ranks, to step {until}, {time.monotonic() - began:.0f} s in all:")
        for name, chosen in (
            ("whole", [row for row in rows if 2 * row["bytes"] > largest]),
            ("difference", [row for row in rows if 2 * row["bytes"] <= largest]),
        ):
            stalls = [1000 * row["blocked_s"] for row in chosen]
            if stalls:
                sizes, written = [row["bytes"] / 1e6 for row in chosen], [row["written_s"] for row in chosen]
                print(
                    f"  {len(stalls)} {name}: the step waits {np.median(stalls):.0f} ms ({min(stalls):.0f} to "
                    f"{max(stalls):.0f}), {max(sizes):.0f} MB a rank, written in {np.median(written):.1f} s"
                )


def hashed(name: str, values: list[str]) -> np.ndarray:
    """int64 ids of texts."""
    digests = (hashlib.sha256(f"{name}={value}".encode()).digest()[:8] for value in values)
    return np.array([int.from_bytes(digest, "little", signed=True) for digest in digests])


def auc(root: str, file: str) -> None:
    """Print the AUC by size of the tables."""
    with gzip.open(file, "rt") as text:
        rows = [[cell.strip() for cell in row] for row in csv.reader(text) if len(row) == 15]
    cells = list(map(list, zip(*rows, strict=True)))
    label = np.array([cell.startswith(">50K") for cell in cells[14]])
    columns = {f"c{i:02}": hashed(f"c{i}", cells[i]) for i in range(14)}
    for a, b in itertools.combinations((0, 3, 6, 12), 2):  # age, education, occupation, hours
        pairs = [f"{one}|{other}" for one, other in zip(cells[a], cells[b], strict=True)]
        columns[f"x{a}_{b}"] = hashed(f"x{a}_{b}", pairs)
    growing: dict[str, int | float | str] = {"any_ids": ",".join(columns)}
    for name, encoding, extra in (
        ("100,000 buckets", {"kind": "hash", "buckets": 100_000, "seed": 0, "output": "index"}, {}),
        ("100 buckets", {"kind": "hash", "buckets": 100, "seed": 0, "output": "index"}, {}),
        ("any ids", {"kind": "number", "dtype": "int64"}, growing),
        ("any ids, admitted after 5", {"kind": "number", "dtype": "int64"}, {**growing, "admit_after": 5}),
    ):
        data = dataset(join(root, f"data {name}"), columns, label, encoding)
        config = TrainConfig(
            datasets=(data,), run=join(root, f"run {name}"), model="wide-deep", num_ranks=2, global_batch=512, epochs=4,
            launcher="local", shard_embeddings=0, extra={"embedding": 8, "width": 32, **extra},
        )  # fmt: skip
        train(config, run_local, hooks=Hooks(lease_watch_s=0.1))
        found = evaluate(EvaluateRequest((config.run,), data, "test"), run_local)
        metric = next(one for one in found["metrics"] if "auc" in one.lower())
        low, high = found["intervals"][metric][:2]
        tables = read_history(config.run).epochs[-1].get("tables", {})
        rows_of = f", {sum(table['rows'] for table in tables.values())} rows" if tables else ""
        print(f"{name}: {metric} {found['metrics'][metric]:.4f} ({low:.4f} to {high:.4f}){rows_of}")


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("checkpoints", "auc"))
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--adult")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as root:
        if args.what == "checkpoints":
            checkpoints(root, args.gb)
        else:
            auc(root, args.adult)


if __name__ == "__main__":
    main()
