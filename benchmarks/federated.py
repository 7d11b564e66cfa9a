"""How many rounds federated averaging takes to 0.85 accuracy on Fashion-MNIST, next to Flower's simulation.

    python -m benchmarks.federated FASHION [--flower PYTHON] [--rounds 80 --split iid two-classes --ranks 2]

FASHION is the folder of the four files; PYTHON an interpreter with `flwr[simulation]`. 100 clients of 600 pictures:
drawn at random (iid), or two pieces each of the pictures sorted by class (two-classes; McMahan et al., 2017). Both
sides train the same clients and model: 784 - 64 - 10 with ReLU, SGD, a tenth of the clients a round, one local epoch,
batches of 10. Flower's clients train by the NumPy of this file, and draw first weights, clients and orders of their
own; so rounds agree about, not exactly.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CLIENTS, FRACTION, BATCH, RATE, TARGETS = 100, 0.1, 10, 0.1, (0.8, 0.85)
SCHEMA = """
[[fields]]
name = "image"
dtype = "uint8"
shape = [28, 28, 1]

[[fields]]
name = "client"
dtype = "int64"
encoding = {kind = "ignore"}

[[fields]]
name = "label"
dtype = "int64"
kind = "label"
num_classes = 10
"""
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fashion", type=Path)
    parser.add_argument("--flower", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--split", nargs="+", default=["iid", "two-classes"], choices=("iid", "two-classes"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}", flush=True)
    data = read(args.fashion)
    for split in args.split:
        clients = clients_of(data["train"][1], split, args.seed)
        for name, contestant in (("flower", by_flower), ("lockstep", by_lockstep)):
            if contestant is by_flower and not args.flower:
                print("flower: no --flower", flush=True)
                continue
            began = time.perf_counter()
            found = contestant(data, clients, args)
            took = time.perf_counter() - began
            reached = ", ".join(f"{one}: {rounds_to(one, found)}" for one in TARGETS)
            print(f"{split:<12} {name:<9} rounds to {reached}; last accuracy {found[-1]:.4f}, "
                  f"mean of the last 5 {np.mean(found[-5:]):.4f}  {took:.0f} s", flush=True)  # fmt: skip


def rounds_to(target: float, accuracies: list[float]) -> str:
    """The first round that reached `target`."""
    return next((str(i + 1) for i, one in enumerate(accuracies) if one >= target), f"not in {len(accuracies)}")


def read(folder: Path) -> Arrays:
    """Pictures (n, 784) uint8 and labels (n,) of train and test."""

    def numbers(name: str, head: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((folder / name).read_bytes())[head:], np.uint8)

    files = {"train": "train", "test": "t10k"}
    return {
        split: (
            numbers(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 784),
            numbers(f"{name}-labels-idx1-ubyte.gz", 8),
        )
        for split, name in files.items()
    }


def clients_of(labels: np.ndarray, split: str, seed: int) -> np.ndarray:
    """The client of each picture."""
    draws, pieces = np.random.default_rng(seed), 2 * CLIENTS
    order = draws.permutation(len(labels)) if split == "iid" else np.argsort(labels, kind="stable")
    owner = np.repeat(draws.permutation(pieces) // 2, len(labels) // pieces)
    found = np.empty(len(labels), np.int64)
    found[order] = owner
    return found


def by_flower(data: Arrays, clients: np.ndarray, args: argparse.Namespace) -> list[float]:
    """Test accuracy after each round of Flower's FedAvg, in a process of its own interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (x, y) in data.items():
            np.save(f"{folder}/{name}-x.npy", x.astype(np.float32) / 255)
            np.save(f"{folder}/{name}-y.npy", y.astype(np.int64))
        np.save(f"{folder}/clients.npy", clients)
        command = [args.flower, "-m", "benchmarks.peers.flower_peer", folder, str(args.rounds), str(FRACTION)]
        root = str(Path(__file__).resolve().parent.parent)
        env = {**os.environ, "PYTHONPATH": root, "RAY_DISABLE_DASHBOARD": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, str(args.seed)], capture_output=True, text=True, env=env, cwd=root)
        if done.returncode:
            raise SystemExit(f"Flower failed:\n{done.stderr[-3000:]}")
        found: list[float] = json.loads(done.stdout.splitlines()[-1])
        return found


def first_weights(draws: np.random.Generator) -> list[np.ndarray]:
    """(784, 64), (64,), (64, 10), (10,) float32, uniform as by Glorot and Bengio (2010)."""
    limits = [np.sqrt(6 / (784 + 64)), np.sqrt(6 / (64 + 10))]
    found = [draws.uniform(-limits[0], limits[0], (784, 64)), np.zeros(64),
             draws.uniform(-limits[1], limits[1], (64, 10)), np.zeros(10)]  # fmt: skip
    return [one.astype(np.float32) for one in found]


def local_pass(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """The weights after one pass of SGD over the rows in their order, in batches of 10."""
    mine = [one.copy() for one in weights]
    for start in range(0, len(x), BATCH):
        rows, labels = x[start : start + BATCH], y[start : start + BATCH]
        hidden, shares = forward(mine, rows)
        shares[np.arange(len(rows)), labels] -= 1  # the gradient of cross entropy by the logits
        shares /= len(rows)
        back = (shares @ mine[2].T) * (hidden > 0)
        gradients = [rows.T @ back, back.sum(0), hidden.T @ shares, shares.sum(0)]
        for one, gradient in zip(mine, gradients, strict=True):
            one -= RATE * gradient
    return mine


def forward(weights: list[np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden layer, and the classes' probabilities."""
    hidden = np.maximum(x @ weights[0] + weights[1], 0)
    logits = hidden @ weights[2] + weights[3]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return hidden, shares / shares.sum(1, keepdims=True)


def model(signature: Any, options: Any) -> Any:
    """Build Flower's network in Keras."""
    import keras

    inputs = keras.Input((28, 28, 1), dtype="uint8", name="image")
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))
    x = keras.layers.Dense(10, activation="softmax")(keras.layers.Dense(64, activation="relu")(x))
    found = keras.Model({"image": inputs}, x)
    found.compile(keras.optimizers.SGD(RATE), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return found


def by_lockstep(data: Arrays, clients: np.ndarray, args: argparse.Namespace) -> list[float]:
    """Test accuracy after each round of a run whose dataset is made for it."""
    import lockstep

    with tempfile.TemporaryDirectory() as folder:
        write(data, clients, f"{folder}/data")
        lockstep.train(
            f"{folder}/data", f"{folder}/run", "benchmarks.federated:model", num_ranks=args.ranks, epochs=args.rounds,
            global_batch=BATCH, strategy="federated", clients="client", client_fraction=FRACTION, validate="test",
            checkpoint_every=10**6, seed=args.seed, audit=True,
        )  # fmt: skip
        assert not lockstep.verify(f"{folder}/run")
        return [row["metrics"]["val_accuracy"] for row in lockstep.read_history(f"{folder}/run").epochs]


def write(data: Arrays, clients: np.ndarray, url: str) -> None:
    """The dataset, with the field `client`; test pictures have client -1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import lockstep

    parts = []
    for split, (pictures, labels) in data.items():
        whose = clients if split == "train" else np.full(len(labels), -1)
        columns = {"image": [one.tobytes() for one in pictures], "client": whose, "label": labels.astype(np.int64)}
        parts.append(pa.table({**columns, "_split": [split] * len(labels), "picture": np.arange(len(labels))}))
    pq.write_table(pa.concat_tables(parts), f"{url}.parquet")
    with lockstep.spark_session("clients", "local[2]") as spark:
        rows, schema = spark.read.parquet(f"{url}.parquet"), lockstep.load_schema(SCHEMA)
        lockstep.write_dataset(rows, url, schema=schema, id_columns=("_split", "picture"), split="given")


if __name__ == "__main__":
    main()
