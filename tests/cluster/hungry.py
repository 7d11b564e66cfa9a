"""What ranks of memory_on_yarn.py run: a model too large for their container, and a rank that takes more and more."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

GREEDY_MIB = 1200


def wide(signature: Any, options: Any) -> Any:
    """80 MiB of weights: with Adam a run of one rank takes 10 times as much."""
    import keras

    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in signature.features.items()}
    hidden = keras.layers.Concatenate()([keras.layers.Flatten()(value) for value in inputs.values()])
    for _ in range(6):
        hidden = keras.layers.Dense(2048, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(optimizer=keras.optimizers.Adam(1e-4), loss="binary_crossentropy")
    return model


def greedy(context: Any) -> dict[str, Any]:
    """A training in miniature, which takes 1.2 GiB once it has made a checkpoint, in every generation."""
    import _ranks  # type: ignore[import-not-found]  # found by its own name on the ranks' path

    held: list[Any] = []
    start = int(context.control.request("restore", 600.0)["step"])

    def hurdle(step: int) -> None:
        if step == start + 6:
            held.append(np.ones(GREEDY_MIB << 20, np.uint8))
        time.sleep(0.1 if step <= start + 6 else 2.0)

    return _ranks._train(context, hurdle)
