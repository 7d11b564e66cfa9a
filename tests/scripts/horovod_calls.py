"""Every call of lockstep.horovod on two ranks against what NumPy says; at its end the ranks differ on purpose."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import numpy as np
import tensorflow as tf

import lockstep.horovod as hvd

real = tf.config.list_physical_devices, tf.config.set_visible_devices
used: list[str] = []


def listed_gpus(kind: str) -> list[str]:
    """GPUs that are none: those which CUDA would show now."""
    return [f"{kind} {name}" for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]


tf.config.list_physical_devices, tf.config.set_visible_devices = listed_gpus, lambda gpu, kind: used.append(gpu)
assert not hvd.is_initialized()
hvd.init()
hvd.init()
hvd.shutdown()
hvd.init()
assert used == [f"GPU GPU-{hvd.rank():08}"] and os.environ["CUDA_VISIBLE_DEVICES"] == used[0].removeprefix("GPU ")
tf.config.list_physical_devices, tf.config.set_visible_devices = real
rank, size = hvd.rank(), hvd.size()
assert (size, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (2, rank, 2, 0, 1)
assert hvd.is_homogeneous() and float(sys.argv[1]) == 0.5


def same(got: object, wanted: object) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=1e-3)


# Two ranks hold [1, 4] and [3, 5].
mine = np.array([1 + 2 * rank, 4 + rank])
for dtype in (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64):
    value = tf.cast(mine, dtype)
    for op, wanted in ((hvd.Sum, [4, 9]), (hvd.Min, [1, 4]), (hvd.Max, [3, 5])):
        found = hvd.allreduce(value, op=op)
        assert found.dtype == dtype and found.shape == (2,)
        same(found, wanted)
    same(hvd.allreduce(value), [2, 4.5] if dtype.is_floating else [2, 4])  # a mean of integers is cut off
same(hvd.allreduce(mine.astype(float), average=False), [4, 9])
same(hvd.allreduce(mine.astype(float), "named", False), [4, 9])  # as horovod.tensorflow.keras orders them
same(hvd.allreduce(mine.astype(float), "named", prescale_factor=0.5, postscale_factor=10.0), [10, 22.5])
same(hvd.allreduce(mine / 3, compression=hvd.Compression.fp16), [2 / 3, 1.5])
pair = hvd.grouped_allreduce([tf.constant(float(rank)), tf.fill((2, 3), rank), tf.fill((0, 2), 1.0)], op=hvd.Sum)
assert pair[0].numpy() == 1.0 and pair[1].shape == (2, 3) and int(tf.reduce_sum(pair[1])) == 6
assert pair[2].shape == (0, 2)

same(hvd.allgather(tf.fill((rank + 1, 2), float(rank))), [[0, 0], [1, 1], [1, 1]])
same(hvd.allgather(tf.fill((2 - 2 * rank, 3), 7)), np.full((2, 3), 7))  # rank 1 has no rows
assert hvd.allgather(tf.constant(rank == 0)).numpy().tolist() == [True, False]
same(hvd.broadcast(tf.constant([[rank, 7]]), root_rank=1), [[1, 7]])
# Rank r sends r rows to rank 0 and 3 - r to rank 1.
sent = tf.Variable([[10.0 * rank + row] for row in range(3)])
with tf.GradientTape() as tape:
    rows, sources = hvd.alltoall(sent, splits=[rank, 3 - rank])
    weighed = rows * (rank + 1.0)
same(rows, [[10]] if rank == 0 else [[0], [1], [2], [11], [12]])
assert sources.numpy().tolist() == ([0, 1] if rank == 0 else [3, 2])
same(tape.gradient(weighed, sent), [[2], [2], [2]] if rank == 0 else [[1], [2], [2]])
same(hvd.alltoall(tf.constant([[rank, 0], [rank, 1]])), [[0, rank], [1, rank]])
told = {"epoch": 3, "best": (0.5, None), 7: b"\xff", "array": np.arange(3, dtype=np.int16)}
heard = hvd.broadcast_object(told if rank == 1 else None, root_rank=1)
assert heard["best"] == (0.5, None) and heard[7] == b"\xff" and heard["array"].dtype == np.int16
assert hvd.allgather_object(["ä" * rank, np.float32(rank)]) == [["", np.float32(0)], ["ä", np.float32(1)]]
hvd.barrier()

weights = [tf.Variable([rank + 1.0]), tf.Variable(rank == 0), tf.Variable([[rank]], dtype=tf.int64)]
hvd.broadcast_variables(weights, root_rank=1)
assert [weight.numpy().tolist() for weight in weights] == [[2.0], False, [[1]]]


def late(value: tf.Tensor, number: int) -> tf.Tensor:
    """The value a little later: other ones on each rank, so that the executors have other inputs ready first."""

    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(0.02 * ((number + rank) % 2))
        return array

    return tf.ensure_shape(tf.numpy_function(wait, [value], value.dtype), value.shape)


nothing = tf.Variable([0.0, 0.0])


@tf.function
def graph(value: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Calls that do not depend on each other, in a branch, a loop and a function in the function."""
    apart = [hvd.allreduce(late(value * i, i), op=hvd.Sum, name=f"apart {i}") for i in range(10)]
    # On rank 1 alone the condition takes its time: the loop below could begin before the branch.
    heavy = tf.ones((400, 400)) * value[0]
    for _ in range(6 * rank):
        heavy = tf.matmul(heavy, heavy) / (400 * tf.reduce_max(heavy))
    if heavy[0, 0] > 0.0:  # noqa: SIM108 - autograph makes a branch of a statement alone
        branch = hvd.allreduce(value + nothing, op=hvd.Max, name="in a branch")  # a branch that uses a variable
    else:
        branch = value
    looped = tf.zeros_like(value)
    for i in tf.range(4):
        looped += hvd.allreduce(value * tf.cast(i, value.dtype), op=hvd.Sum, name="in a loop")
    inner = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Min, name="in a function"))(value)
    rows = hvd.allgather(value[: rank + 1])
    return tf.add_n(apart), branch, looped, inner, rows


value = tf.constant(mine, tf.float32)
for _ in range(5):
    found = graph(value)
    same(found[0], np.array([4, 9]) * 45)
    same(found[1], [3, 5])
    same(found[2], np.array([4, 9]) * 6)
    same(found[3], [1, 4])
    same(found[4], [1, 3, 5])

# Gradients: of the sum over ranks, and by the tape that reduces; an embedding's come as rows of all ranks.
variable = tf.Variable([1.0, 2.0])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(hvd.allreduce(variable * float(rank + 1), op=hvd.Sum))
same(tape.gradient(loss, variable), np.array([2.0, 2.0]) * (rank + 1))
table = tf.Variable(tf.zeros((4, 2)))
unused = tf.Variable(1.0)


@tf.function
def gradients(dense: bool) -> list[tf.Tensor]:
    """The gradients of a table's rows `rank` and 3, of a variable, and of one that is not used."""
    with hvd.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=dense) as tape:
        rows = tf.gather(table, [rank, 3])
        loss = tf.reduce_sum(rows) + tf.reduce_sum(variable * float(rank))
    return tape.gradient(loss, [table, variable, unused])


for dense in (False, True):
    grads = gradients(dense)
    assert isinstance(grads[0], tf.IndexedSlices) is not dense and grads[2] is None
    same(tf.convert_to_tensor(grads[0]), [[0.5, 0.5], [0.5, 0.5], [0, 0], [1, 1]])
    same(grads[1], [0.5, 0.5])
with tf.GradientTape() as plain:
    loss = tf.reduce_sum(variable * float(rank + 1))
predivided = hvd.DistributedGradientTape(plain, gradient_predivide_factor=2.0, compression=hvd.Compression.fp16)
same(predivided.gradient(loss, {"a": variable})["a"], [1.5, 1.5])

import keras  # noqa: E402 - where the part that needs it begins

cases: list[tuple[dict[str, Any], float]] = [
    ({}, 1.5),
    ({"op": hvd.Sum}, 3.0),
    ({"backward_passes_per_step": 2}, 3.0),  # sums of the passes, as Horovod's
    ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 1.5),
    ({"compression": hvd.Compression.fp16}, 1.5),
]
for options, step in cases:
    weight = keras.Variable([10.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    for _ in range(options.get("backward_passes_per_step", 1)):
        optimizer.apply([tf.constant([rank + 1.0])], [weight])
    same(weight.numpy(), [10.0 - step])

# In two bytes: 1/3 and 4/3 as float16 has them, halved and added.
weight = keras.Variable([0.0])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.Compression.fp16)
optimizer.apply([tf.constant([rank + 1 / 3])], [weight])
halves = np.array([1 / 3, 4 / 3], np.float16) / np.float16(2)
np.testing.assert_array_equal(weight.numpy(), [-np.float32(halves[0] + halves[1])])

# Rank 0 goes on with a model that has its optimizer's state, as one it has loaded; rank 1's is new.
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
if rank == 0:
    path = os.path.join(tempfile.mkdtemp(), "model.keras")
    model.save(path)
    model = keras.models.load_model(path)  # its variables have other paths than a new model's
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), "mse")
if rank == 0:
    model.optimizer.build(model.trainable_variables)
model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
for first, second in zip(*hvd.allgather_object(model.get_weights()), strict=True):
    np.testing.assert_array_equal(first, second)

print("every call is right", flush=True)
if rank == 0:
    hvd.allreduce(tf.zeros(3), name="odd")
else:
    hvd.broadcast(tf.zeros(3), root_rank=0)
