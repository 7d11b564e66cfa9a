"""Keras' `fit`, `evaluate` and `predict` under a strategy of TensorFlow, or none; prints the losses.

Arguments: none, mirrored, multi or server, then the faults of Keras that it mends itself: build, reduce.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback

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
elif how == "server":
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    names = [f"127.0.0.1:{one.getsockname()[1]}" for one in found]
    for one in found:
        one.close()
    cluster = tf.train.ClusterSpec({"worker": names[:1], "ps": names[1:]})
    servers = [tf.distribute.Server(cluster, job_name=job, protocol="grpc") for job in cluster.jobs]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    scope = tf.distribute.ParameterServerStrategy(resolver).scope()

import keras  # noqa: E402 - after the strategy, which must be first to see the devices

x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int64)
with scope:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=loss)
    if "build" in sys.argv:
        model.build((None, 8))
if "build" in sys.argv:  # it makes one example of a whole batch, part by part of its structure
    model._maybe_symbolic_build = lambda **_: None
if "reduce" in sys.argv:  # it adds up what replicas return, along axis 0, which numbers do not have
    from keras.src.backend.tensorflow import trainer

    def reduce_per_replica(values: object, strategy: tf.distribute.Strategy, reduction: str) -> object:
        """The sums over replicas."""
        return keras.tree.map_structure(lambda value: strategy.reduce("SUM", value, axis=None), values)

    trainer.reduce_per_replica = reduce_per_replica
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).repeat(2)
try:
    history = model.fit(batches, epochs=2, steps_per_epoch=4, verbose=0, validation_data=(x[:128], y[:128]))
    printed = [*history.history["loss"], *history.history["val_loss"]]
    if how != "server":
        printed += [float(model.evaluate(x, y, verbose=0)), float(np.abs(model.predict(x[:128], verbose=0)).sum())]
    print("losses", json.dumps(printed), flush=True)
except Exception:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # servers of TensorFlow do not end
if how == "server":
    os._exit(0)
