"""Keras' `fit` under a strategy of TensorFlow, or none; prints the losses of its epochs."""

from __future__ import annotations

import contextlib
import json
import sys

import numpy as np
import tensorflow as tf

how = sys.argv[1]
scope: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
if how == "mirrored":
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
elif how == "multi":
    scope = tf.distribute.MultiWorkerMirroredStrategy().scope()

import keras  # noqa: E402 - after the strategy, which must be first to see the devices

x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int64)
with scope:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=loss, jit_compile=False)
history = model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(64), epochs=2, verbose=0)
print("losses", json.dumps(history.history["loss"]), flush=True)
