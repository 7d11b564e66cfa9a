"""One dense network divided over two ranks, by the parts of its layers or by its layers: the run of one rank."""

from __future__ import annotations

import argparse
import os
from typing import Any

import keras
import numpy as np

import lockstep

WAYS: dict[str, Any] = {"parts": {"tensor_parallel": 2}, "stages": {"pipeline_stages": 2, "micro_batches": 2},
        "blocks": {"strategy": "layers"}}  # fmt: skip


def network(signature: lockstep.Signature, options: lockstep.ModelOptions) -> keras.Model:
    """A 784-128-64-10 network; with `--tensor-parallel` each rank has half of the units of `wide`, and the rows of
    `narrow` that take them."""
    (name, image), *_ = signature.features.items()
    inputs = keras.Input(image.shape, name=name)
    x = keras.layers.Rescaling(1 / 255)(keras.layers.Flatten()(inputs))
    x = keras.layers.Dense(128, "relu", name="wide")(x)
    x = keras.layers.Dense(64, "relu", name="narrow")(x)
    model = keras.Model({name: inputs}, keras.layers.Dense(signature.num_classes, "softmax")(x))
    model.parallel_layers = {"wide": "columns", "narrow": "rows"}
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    """Train by one rank and by two that divide the model, and print how far their weights are apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    weights, accuracy = [], []
    for name, ranks, way in (("alone", 1, {}), (args.way, 2, WAYS[args.way])):
        result = lockstep.train(
            args.dataset,
            os.path.join(args.out, name),
            network,
            num_ranks=ranks,
            global_batch=64,
            epochs=args.epochs,
            **way,
        )
        model = keras.saving.load_model(os.path.join(str(result.model), "model.keras"))
        weights.append(np.concatenate([value.ravel() for value in model.get_weights()]))
        accuracy.append(result.metrics["accuracy"])
    apart = float(np.abs(weights[0] - weights[1]).max())
    print(f"{args.way}: accuracy {accuracy[1]:.3f}, alone {accuracy[0]:.3f}; weights at most {apart:.1e} apart")


if __name__ == "__main__":
    main()
