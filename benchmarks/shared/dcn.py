"""A deep and cross network of some 229,000 weights over 13 numbers and 26 ids, and rows for it."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

NUMBERS = tuple(f"number_{n:02d}" for n in range(13))
IDS = tuple(f"id_{n:02d}" for n in range(26))
BUCKETS, WIDTH, CROSSES = 830, 8, 1
SCHEMA = f"""
[[fields]]
names = {[*NUMBERS]}
dtype = "float32"

[[fields]]
names = {[*IDS]}
dtype = "int64"
encoding = {{ kind = "hash", buckets = {BUCKETS - 1}, output = "index" }}

[[fields]]
name = "clicked"
dtype = "bool"
kind = "label"
"""


def rows(count: int) -> dict[str, np.ndarray]:
    """Columns by name, (count,) each: `row`, numbers, ids of a Zipf distribution, and a label that both decide."""
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {"row": np.arange(count)}
    found |= {name: rng.standard_normal(count, dtype=np.float32) for name in NUMBERS}
    found |= {name: rng.zipf(1.2, count) % 100_000 for name in IDS}
    score = found[NUMBERS[0]] + (found[IDS[0]] % 3) + rng.standard_normal(count)
    return found | {"clicked": score > 1}


def dcn() -> Any:
    """Build and compile DCN V2 of Wang and others (2021): crosses next to dense layers."""
    import keras
    from keras import layers

    inputs = {name: keras.Input((1,), name=name) for name in NUMBERS}
    inputs |= {name: keras.Input((1,), dtype="int64", name=name) for name in IDS}
    vectors = [layers.Flatten()(layers.Embedding(BUCKETS, WIDTH)(inputs[name])) for name in IDS]
    first = crossed = layers.Concatenate()([*(inputs[name] for name in NUMBERS), *vectors])
    for _ in range(CROSSES):
        crossed = first * layers.Dense(first.shape[-1])(crossed) + crossed
    deep = first
    for units in (32, 16):
        deep = layers.Dense(units, activation="relu")(deep)
    output = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([crossed, deep]))
    model = keras.Model(inputs, output)
    model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=["AUC"], jit_compile=False)
    return model


def timed(signature: Any, options: Any) -> tuple[Any, list[Any]]:
    """`dcn`, and a callback that writes wall and CPU seconds at the end of each epoch to a file of each rank's process
    in the folder options.extra["clocks"].
    """
    import keras

    class Clock(keras.callbacks.Callback):
        """Has no hooks for batches, which would cost time in each step."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with open(f"{options.extra['clocks']}/{os.getpid()}", "a", encoding="utf-8") as file:
                print(time.perf_counter(), time.process_time(), file=file)

    return dcn(), [Clock()]
