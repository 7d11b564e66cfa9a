"""Two ranks that make two different calls at a time, for all pairs of calls, and then train with unequal batches.

Each pair must end on both ranks, with both calls named; the last lines of the script end it with an error.
"""

from itertools import permutations

import keras
import numpy as np
import tensorflow as tf

import lockstep.horovod as hvd
from lockstep.storage.errors import TrainingFailedError

hvd.init()
keras.utils.set_random_seed(1)
three = tf.zeros(3)


def two_optimizers() -> None:
    """Make an optimizer that has made a step, and a new one."""
    global weight, used, new
    weight = keras.Variable([0.0], name="w")
    used, new = (hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2))
    used.apply([tf.constant([1.0])], [weight])


weight: keras.Variable
used: keras.optimizers.Optimizer
new: keras.optimizers.Optimizer


CALLS = {
    "allreduce": lambda: hvd.allreduce(three),
    "allgather": lambda: hvd.allgather(three),
    "broadcast": lambda: hvd.broadcast(three, 0),
    "alltoall": lambda: hvd.alltoall(tf.zeros(2)),
    "broadcast_object": lambda: hvd.broadcast_object({"a": 1}),
    "allgather_object": lambda: hvd.allgather_object({"a": 1}),
    "barrier": hvd.barrier,
    "DistributedOptimizer": lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)),
    "the gradients": lambda: used.apply([tf.constant([1.0])], [weight]),
    "the gradients of": lambda: new.apply([tf.constant([1.0])], [keras.Variable([0.0], name="w")]),
}
wrong = []
for pair in permutations(CALLS, 2):
    if pair[0].startswith("the gradients") or pair[1].startswith("the gradients"):  # a failed step ends its optimizer
        two_optimizers()
    try:
        CALLS[pair[hvd.rank()]]()
        wrong.append(f"{pair}: no error")
    except Exception as error:
        text = str(error)
        named = all(f"rank {rank}: {name}" in text for rank, name in enumerate(pair))
        if not named or not isinstance(error, TrainingFailedError | tf.errors.OpError):
            wrong.append(f"{pair}: {type(error).__name__}: {text}")
print(f"{len(list(permutations(CALLS, 2)))} pairs, wrong: {wrong}", flush=True)

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
rows = 4 * (3 - hvd.rank())  # 3 batches on rank 0, 2 on rank 1
model.fit(
    np.ones((rows, 2)),
    np.ones(rows),
    batch_size=4,
    verbose=0,
    callbacks=[hvd.callbacks.MetricAverageCallback()],
)
