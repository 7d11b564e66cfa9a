"""The memory that a rank is said to need, by the stage of --zero."""

from __future__ import annotations

import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.launch.executors import ExecutorMemory

pytestmark = pytest.mark.slow
MIB = 1 << 20


def test_a_container_that_is_too_small_for_one_rank_holds_each_of_two() -> None:
    import keras

    from lockstep.training.rank.memory import reckoned_bytes

    inputs = x = keras.Input((1024,))
    for _ in range(40):
        x = keras.layers.Dense(1024)(x)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse", jit_compile=False)
    weights = 4 * model.count_params()
    start = 500 * MIB
    needed = {zero: reckoned_bytes(start, model, 2, zero) for zero in range(4)}
    alone = reckoned_bytes(start, model, 1, 3)
    assert alone == reckoned_bytes(start, model, 1)
    assert needed[0] > needed[1] > needed[2] > needed[3]
    # 8 bytes of the state, of a checkpoint's copy and of two tensors each: weights, gradients and Adam in halves.
    assert needed[3] - start == pytest.approx(weights * (1 + 1 / 2 + 1 + 3 / 2 / 1) + 108 * MIB, rel=0.25)
    container = ExecutorMemory(container_mib=1900, heap_mib=256, overhead_mib=1644, ranks=1)
    with pytest.raises(ConfigError, match="cannot fit"):
        container.judge(alone // MIB, "a rank")
    container.judge(needed[3] // MIB, "a rank")
