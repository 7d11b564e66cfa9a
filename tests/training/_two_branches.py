"""Entries for ranks with TensorFlow, whose graphs let the executor choose: two branches, and two optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.training.control.context import RankContext

STEPS = 6


def train(context: RankContext) -> dict[str, Any]:
    """`fit` with many tiny buckets and collectives within the step, then steps of two optimizers in one graph.

    Returns the final weights' digest.
    """
    import hashlib

    from lockstep.training.rank.runtime import import_tensorflow

    import_tensorflow()  # the settings below would be refused if it made a tensor
    import keras
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(context.payload["inter_op"][context.world.rank])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    from lockstep.training.steps.distribute import distribute, exchange_of
    from lockstep.training.steps.own_fit import rank_step

    comm = context.communicator()
    inputs = keras.Input((6,))
    left, right = inputs, inputs
    for width in (5, 7, 5):
        left = keras.layers.BatchNormalization()(keras.layers.Dense(width, "tanh")(left))
        right = keras.layers.BatchNormalization()(keras.layers.Dense(width + 1, "relu")(right))
    model = keras.Model(inputs, [keras.layers.Dense(1)(left), keras.layers.Dense(2)(right)])
    optimizer = distribute(keras.optimizers.Adam(0.01), comm, bucket_bytes=64)
    # Its denominators are reduced in the middle of the step, as are the batch statistics.
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(optimizer, [loss, loss], jit_compile=False)
    rank_step(model, comm, batchnorm="sync")
    rng = np.random.default_rng(comm.rank)
    x = rng.standard_normal((8 * STEPS, 6)).astype(np.float32)
    weights = [np.abs(x[:, 0]), np.abs(x[:, 1])]

    def beat(batch: int, logs: Any) -> None:
        context.control.beat(batch + 1, "fit")  # or the stall limit would be that of the whole run: of a slow machine

    beats = keras.callbacks.LambdaCallback(on_train_batch_end=beat)
    targets = [x[:, :1], x[:, 1:3]]
    model.fit(x, targets, sample_weight=weights, batch_size=8, epochs=1, verbose=0, callbacks=[beats])
    steps = exchange_of(model.optimizer).step

    first, second = (keras.Variable(np.ones((40, 3), np.float32)) for _ in range(2))
    one, two = (distribute(keras.optimizers.SGD(0.01), comm, bucket_bytes=64) for _ in range(2))
    two.build([second])
    one.build([first])

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as tape, tf.GradientTape() as other:
            loss, apart = tf.reduce_sum(x * first.value), tf.reduce_sum(x * x * second.value)
        # Nothing in the data orders these two: an executor may start with either.
        one.apply(tape.gradient(loss, [first.value]), [first])
        two.apply(other.gradient(apart, [second.value]), [second])

    for number in range(STEPS):
        step(tf.constant(rng.standard_normal((40, 3)), tf.float32))
        context.control.beat(number + 1, "two optimizers")
    arrays = [*model.get_weights(), first.numpy(), second.numpy()]
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in arrays)).hexdigest()
    return {"digest": digest, "steps": steps, "buckets": len(exchange_of(model.optimizer)._pools)}
