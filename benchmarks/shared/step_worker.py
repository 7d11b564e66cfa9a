"""One process of benchmarks.train_step: it trains on the same batch for as many steps as it is asked for.

    python -m benchmarks.shared.step_worker CONTESTANT MODEL RANK RANKS    (started by benchmarks.train_step)

Contestants: `plain` (Keras' `fit` without exchange), `ours` (`fit` with `distribute`), `mwms` (tf_keras under
MultiWorkerMirroredStrategy). Protocol, one line of JSON in each direction: the worker sends its address, receives the
addresses of all ranks, reports that it is ready, and answers each {"steps": n} with the seconds for a step from the end
of the first to that of the last, of wall time and of all its threads' CPU time, {"forward": n} with those of an
evaluation, {"gradients": n} with those of a step that updates nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import numpy as np

from benchmarks.shared import step_models

KEY = b"t" * 32
# As lockstep.training.rank.runtime sets a rank's: one thread computes, and one more lets the exchange be fed while it
# does. With a single one TensorFlow 2.21 runs all of the backward pass before it hands over the first gradient.
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
for setting, value in THREADS.items():
    os.environ.setdefault(setting, value)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def say(document: Any) -> None:
    """One line to the parent."""
    print(json.dumps(document), file=sys.__stdout__, flush=True)


def hear() -> Any:
    """One line from the parent; the process ends with it."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return json.loads(line)


class Control:
    """The part of the control client that `connect` uses: the parent gives out all places."""

    def __init__(self, host: str) -> None:
        self.host = host

    def rendezvous(self, host: str, port: int) -> list[tuple[str, int]]:
        """All ranks' places."""
        say([host, port])
        return [(host, port) for host, port in hear()]


def dataset(model: str, rank: int) -> Any:
    """The batch without end; the autotuner would hold up the end of each `fit`."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    data = tf.data.Dataset.from_tensors(step_models.batch(model, rank)).repeat().with_options(options)
    return data


def clock(keras: Any) -> Any:
    """A callback that keeps wall and CPU time of the first and of the last step's end."""

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.last = (time.perf_counter(), time.process_time())
            if batch == 0:
                self.first = self.last

        on_test_batch_end = on_train_batch_end

    return Clock()


def plain(name: str, rank: int, ranks: int) -> Any:
    """Keras alone."""
    import keras

    return keras, step_models.build(keras, name), dataset(name, rank)


def ours(name: str, rank: int, ranks: int) -> Any:
    """Keras with the exchange."""
    import keras

    from lockstep.training.comm import connect
    from lockstep.training.steps.batchnorm import statistics_of
    from lockstep.training.steps.distribute import distribute
    from lockstep.training.steps.rank_step import RankStep
    from lockstep.training.world import World

    keras.utils.set_random_seed(0)
    model = step_models.build(keras, name)
    # One address a rank where each is on a host of its own.
    hosts = os.environ.get("BENCHMARK_HOSTS", "").split(",") if "BENCHMARK_HOSTS" in os.environ else []
    control = Control(hosts[rank] if hosts else "127.0.0.1")
    world = World(rank, ranks, 0, 1, 1) if hosts else World.local(rank, ranks)
    comm = connect(world, control, KEY, 60.0, 120.0)
    model.optimizer.build(model.trainable_variables)
    distribute(model.optimizer, comm, scale=1.0 / ranks, statistics=statistics_of(model))
    RankStep(1.0 / ranks).install(model, comm.group(range(ranks)))
    return keras, model, dataset(name, rank)


def mwms(name: str, rank: int, ranks: int) -> Any:
    """tf_keras under MultiWorkerMirroredStrategy over TensorFlow's own ring."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    workers = [f"127.0.0.1:{port}" for _, port in Control("127.0.0.1").rendezvous("127.0.0.1", port)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    import tensorflow as tf
    import tf_keras

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model = step_models.build(tf_keras, name)
    return tf_keras, model, strategy.distribute_datasets_from_function(lambda _: dataset(name, rank))


def without_update(keras: Any, model: Any) -> Any:
    """Return a model of the same layers whose optimizer takes the gradients and leaves the weights alone."""
    import tensorflow as tf

    class Idle(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            # TensorFlow skips unused results.
            tf.numpy_function(lambda *found: np.int32(0), list(grads), tf.int32)

    twin = keras.Model(model.inputs, model.outputs)
    twin.compile(Idle(), model.loss, jit_compile=False)
    return twin


def main() -> None:
    """Build, warm up, then answer until stdin ends."""
    contestant, name, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    keras, model, data = {"plain": plain, "ours": ours, "mwms": mwms}[contestant](name, rank, ranks)
    model.fit(data, steps_per_epoch=3, verbose=0)
    say({"ready": contestant, "parameters": int(model.count_params())})
    idle = None
    while True:
        ((what, steps),) = hear().items()
        watch = clock(keras)
        if what == "forward":
            model.evaluate(data, steps=steps, verbose=0, callbacks=[watch])
        elif what == "gradients":
            idle = idle or without_update(keras, model)
            idle.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[watch])
        else:
            model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[watch])
        wall, cpu = ((last - first) / (steps - 1) for first, last in zip(watch.first, watch.last, strict=True))
        say({"seconds_a_step": wall, "cpu_s_a_step": cpu})


if __name__ == "__main__":
    main()
