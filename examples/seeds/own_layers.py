"""Federated averaging with layers of one's own: three workers share a 784-128-10 network's hidden layer, and each keeps
its last one (FedPer: Arivazhagan et al., 2019). Their classes have other numbers: one last layer for all cannot fit.
NumPy alone: `lockstep launch` starts it, and the communicator averages arrays.
"""

from __future__ import annotations

import argparse
import gzip
import os

import numpy as np

from lockstep import on_ranks

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--all", action="store_true", help="share the last layer too, for comparison")
args = parser.parse_args()

comm = on_ranks.communicator()
with gzip.open(os.path.join(args.data, "train-images-idx3-ubyte.gz")) as file:
    images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784) / np.float32(255)
with gzip.open(os.path.join(args.data, "train-labels-idx1-ubyte.gz")) as file:
    labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
mine = slice(comm.rank, 6000, comm.num_ranks)
held = slice(6000 + comm.rank, None, comm.num_ranks)
labels = np.random.default_rng(comm.rank).permutation(10)[labels]  # this worker's numbers of the classes

draws = np.random.default_rng(0)  # the same first weights on each worker
shared = [draws.normal(0, np.sqrt(2 / 784), (784, 128)).astype(np.float32), np.zeros(128, np.float32)]
own = [draws.normal(0, np.sqrt(1 / 128), (128, 10)).astype(np.float32), np.zeros(10, np.float32)]


def forward(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden layer (n, 128) of the rows (n, 784), and the probabilities (n, 10)."""
    hidden = np.maximum(x @ shared[0] + shared[1], 0)
    shares = np.exp(hidden @ own[0] + own[1])
    return hidden, shares / shares.sum(1, keepdims=True)


def local_epoch(x: np.ndarray, y: np.ndarray) -> None:
    """One pass of SGD over this worker's rows, in batches of 50."""
    for start in range(0, len(x), 50):
        rows, kinds = x[start : start + 50], y[start : start + 50]
        hidden, error = forward(rows)
        error[np.arange(len(rows)), kinds] -= 1
        error /= len(rows)
        back = (error @ own[0].T) * (hidden > 0)
        gradients = [rows.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
        for weight, gradient in zip([*shared, *own], gradients, strict=True):
            weight -= args.rate * gradient


for _ in range(args.rounds):
    local_epoch(images[mine], labels[mine])
    for weight in (*shared, *own) if args.all else shared:
        comm.all_reduce(weight.reshape(-1), "mean")  # workers have equally many rows: the mean is FedAvg's

accuracy = float((forward(images[held])[1].argmax(1) == labels[held]).mean())
print(f"accuracy {accuracy:.3f} with a last layer that {'all share' if args.all else 'is its own'}")
np.savez(os.path.join(args.out, f"own-{comm.rank}.npz"), *shared, *own, accuracy=accuracy)
