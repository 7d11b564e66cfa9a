"""Federated averaging of a 784-128-10 network over three workers, by --strategy federated (McMahan et al., 2017)."""

from __future__ import annotations

import argparse
import gzip
import os

import numpy as np
import pandas as pd

import lockstep

SCHEMA = """
[[fields]]
name = "image"
dtype = "uint8"
shape = [28, 28, 1]

[[fields]]
name = "worker"
dtype = "int64"
encoding = {kind = "ignore"}

[[fields]]
name = "label"
dtype = "int64"
kind = "label"
num_classes = 10
"""
WORKERS = 3


def pictures(data: str, rows: int) -> pd.DataFrame:
    """Rows of image (784 bytes), label, number, and the worker that holds them: each has a third of every class."""
    with gzip.open(os.path.join(data, "train-images-idx3-ubyte.gz")) as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)[:rows]
    with gzip.open(os.path.join(data, "train-labels-idx1-ubyte.gz")) as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[:rows].astype(np.int64)
    number = np.arange(rows)
    return pd.DataFrame(
        {"image": [one.tobytes() for one in images], "label": labels, "number": number, "worker": number % WORKERS}
    )


def main() -> None:
    """Write the dataset, train its rounds and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    dataset, run = os.path.join(args.out, "dataset"), os.path.join(args.out, "run")
    with lockstep.spark_session("federated", "local[2]"):
        schema = lockstep.load_schema(SCHEMA)
        lockstep.write_dataset(pictures(args.data, args.rows), dataset, schema=schema, id_columns="number")
    result = lockstep.train(
        dataset,
        run,
        "mlp",
        extra={"width": 128, "layers": 1, "dropout": 0.0},
        num_ranks=WORKERS,
        strategy="federated",
        clients="worker",
        client_fraction=1.0,
        local_epochs=1,
        global_batch=32,
        epochs=args.rounds,
        audit=True,
    )
    found = lockstep.evaluate(run, dataset, "test")
    print(f"{result.steps} rounds of {WORKERS} workers: accuracy {found['metrics']['accuracy']:.3f}")


if __name__ == "__main__":
    main()
