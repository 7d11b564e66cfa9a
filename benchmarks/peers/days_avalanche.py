"""The days of benchmarks.days by avalanche-lib: reads DAYS.npz and a JSON order, prints a JSON list of matrices.

    PYTHON -m benchmarks.peers.days_avalanche DAYS.npz '{"method": "ewc", "seeds": [0], ...}'

It imports no Lockstep. Its EWC is the online one, whose loss gains lambda * F (w - w_old)^2 (without the 1/2) with
squares of the gradients of batches of `batch` rows; its replay keeps `memory` rows, as many of each day.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import AvalancheDataset, DataAttribute
from avalanche.training import EWC, Naive
from avalanche.training.plugins import ReplayPlugin
from torch.utils.data import TensorDataset

torch.set_num_threads(1)


def dataset_of(x: np.ndarray, y: np.ndarray) -> Any:
    """A day's rows as avalanche wants them: pixels in 0..1 and labels 0 or 1."""
    rows = TensorDataset(torch.from_numpy(x.reshape(len(x), -1).astype(np.float32) / 255), torch.from_numpy(y))
    targets, tasks = DataAttribute(y.tolist(), "targets"), DataAttribute([0] * len(y), "targets_task_labels", True)
    return AvalancheDataset([rows], data_attributes=[targets, tasks])


def model_of(width: int) -> torch.nn.Module:
    """Build the layers of benchmarks.days, with Keras' first weights: uniform by Glorot, biases zero."""
    model = torch.nn.Sequential(torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
    for layer in (model[0], model[2]):
        torch.nn.init.xavier_uniform_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return model


def accuracies(model: torch.nn.Module, tests: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """The accuracy on each day."""
    with torch.no_grad():
        outputs = [model(torch.from_numpy(x.reshape(len(x), -1).astype(np.float32) / 255)) for x, _ in tests]
    return [float((out.argmax(1).numpy() == y).mean()) for out, (_, y) in zip(outputs, tests, strict=True)]


def matrix(data: Any, order: dict[str, Any], seed: int) -> list[list[float]]:
    """Accuracies: a row after each day, a column for each day."""
    torch.manual_seed(seed)
    days = range(order["days"])
    tests = [(data[f"x_test_{day}"], data[f"y_test_{day}"]) for day in days]
    train = [dataset_of(data[f"x_train_{day}"], data[f"y_train_{day}"]) for day in days]
    model, batch = model_of(order["width"]), order["batch"]
    settings: dict[str, Any] = {
        "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=order["rate"]),
        "criterion": torch.nn.CrossEntropyLoss(), "train_mb_size": batch, "train_epochs": order["epochs"],
        "evaluator": None,
    }  # fmt: skip
    if order["method"] == "ewc":
        strategy = EWC(ewc_lambda=order["strength"], mode="online", decay_factor=order["decay"], **settings)
    elif order["method"] == "replay":
        again = round(order["share"] * batch)
        plugin = ReplayPlugin(mem_size=order["memory"], batch_size=batch - again, batch_size_mem=again)
        strategy = Naive(plugins=[plugin], **settings)
    else:
        strategy = Naive(**settings)
    found = []
    for experience in benchmark_from_datasets(train=train).train_stream:
        strategy.train(experience)
        found.append(accuracies(model, tests))
    return found


def main() -> None:
    """Read the order, train for each seed, print the matrices."""
    order = json.loads(sys.argv[2])
    with np.load(sys.argv[1]) as data:
        print(json.dumps([matrix(data, order, seed) for seed in order["seeds"]]))


if __name__ == "__main__":
    main()
