"""Federated averaging by Flower's own simulation, on the clients and model of benchmarks.federated.

    PYTHON_WITH_FLOWER -m benchmarks.peers.flower_peer FOLDER ROUNDS FRACTION SEED

FOLDER has train-x.npy and test-x.npy, float32 (n, 784), train-y.npy and test-y.npy, int64 (n,), and clients.npy, the
client of each row of train. Prints the test accuracy after each round as JSON.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.federated import CLIENTS, first_weights, forward, local_pass

FOLDER, ROUNDS, FRACTION, SEED = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
client_app, server_app = ClientApp(), ServerApp()
accuracies: list[float] = []


def rows(name: str) -> tuple[np.ndarray, np.ndarray]:
    """x and y."""
    return np.load(f"{FOLDER}/{name}-x.npy", mmap_mode="r"), np.load(f"{FOLDER}/{name}-y.npy")


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One local epoch of one client."""
    (x, y), client = rows("train"), int(context.node_config["partition-id"])
    weights = message.content["arrays"].to_numpy_ndarrays()
    draws = np.random.default_rng([SEED, int(message.content["config"]["server-round"]), client])
    own = draws.permutation(np.flatnonzero(np.load(f"{FOLDER}/clients.npy") == client))
    found = local_pass(weights, x[own], y[own])
    content = {"arrays": ArrayRecord(found), "metrics": MetricRecord({"num-examples": len(own)})}
    return Message(content=RecordDict(content), reply_to=message)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on the test pictures, by the server."""
    x, y = rows("test")
    accuracy = float((forward(arrays.to_numpy_ndarrays(), x)[1].argmax(1) == y).mean())
    if server_round:
        if [accuracy] == accuracies[-1:] == accuracies[-2:-1]:
            raise SystemExit("three rounds gave equal weights: the clients fail, see Ray's log")
        accuracies.append(accuracy)
    return MetricRecord({"accuracy": accuracy})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Average by the number of examples."""
    strategy = FedAvg(fraction_train=FRACTION, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    initial = ArrayRecord(first_weights(np.random.default_rng(SEED)))
    strategy.start(grid, initial, num_rounds=ROUNDS, evaluate_fn=evaluate)


if __name__ == "__main__":
    run_simulation(server_app, client_app, CLIENTS, backend_config={"client_resources": {"num_cpus": 1}})
    print(json.dumps(accuracies), flush=True)
