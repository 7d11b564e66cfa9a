"""The cost of `--canonical`: time of a step unit by unit over that of the same step at once; one rank, one core.

    python -m benchmarks.canonical [--rounds 7] [--steps 4]

ResNet-20 (32 x 32 x 3, ghost BatchNorm or over each lane) and logistic regression of 40 columns, G = 128. All models
live in one process and train on the same batch, one after another in each round. Printed: the median over the rounds of
the ratio of CPU times of a step, lowest and highest.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.shared import step_models

ROWS = 128
CASES = {  # name -> units, and whether BatchNormalization is over lane groups
    "8 lane groups, ghost": (8, True),
    "8 lanes": (8, False),
    "64 lanes": (64, False),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    os.sched_setaffinity(0, {0})
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    print(f"one rank on one core, G = {ROWS}, {args.rounds} rounds of {args.steps} steps (logistic: times 50)")
    print(f"{platform.machine()}, TensorFlow {version('tensorflow')}, Keras {version('keras')}")
    for name, more in (("resnet20", 1), ("logistic", 50)):
        plain = {groups: _fit(name, None, groups) for groups in (True, False)}
        ours = {case: _fit(name, units, ghost) for case, (units, ghost) in CASES.items()}
        spent: dict[str, list[float]] = {case: [] for case in CASES}
        for _ in range(args.rounds):
            base = {ghost: fit(args.steps * more) for ghost, fit in plain.items()}
            for case, fit in ours.items():
                spent[case].append(fit(args.steps * more) / base[CASES[case][1]])
        for case, ratios in spent.items():
            print(f"{name:9} {case:21} {statistics.median(ratios):6.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")


def _fit(name: str, units: int | None, ghost: bool) -> Callable[[int], float]:
    """A function that trains so many steps and returns the CPU seconds of one; `units` None: in one piece."""
    import keras

    from lockstep.training.comm import SoloCommunicator
    from lockstep.training.steps.batchnorm import statistics_of
    from lockstep.training.steps.canonical import CanonicalStep
    from lockstep.training.steps.distribute import distribute
    from lockstep.training.steps.rank_step import RankStep

    keras.utils.set_random_seed(0)
    model, x, y = _model(keras, name)
    model._symbolic_build(data_batch=(x, y))
    model.optimizer.build(model.trainable_variables)
    comm, rows = SoloCommunicator(), ROWS // 8 if ghost else None
    step: Any = RankStep(1.0, group_rows=rows)
    sums: list[Any] = []
    if units is not None:
        step = CanonicalStep(model, units=units, first=0, count=units, seed=0, group_rows=rows)
        sums = step.metric_sums
    distribute(model.optimizer, comm, scale=1.0, statistics=(*statistics_of(model), *sums))
    step.install(model, comm)
    data = _dataset(x, y)
    model.fit(data, steps_per_epoch=2, verbose=0)

    def fit(steps: int) -> float:
        began = time.process_time()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        return (time.process_time() - began) / steps

    return fit


def _model(keras: Any, name: str) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    if name == "resnet20":
        model = step_models.build(keras, name)
        x, y = rng.standard_normal((ROWS, 32, 32, 3), dtype=np.float32), rng.integers(0, step_models.CLASSES, ROWS)
        return model, x, y
    inputs = keras.Input((40,))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(inputs))
    model.compile("adam", "binary_crossentropy", jit_compile=False)
    return model, rng.standard_normal((ROWS, 40), dtype=np.float32), rng.integers(0, 2, ROWS).astype(np.float32)


def _dataset(x: Any, y: Any) -> Any:
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors((x, y)).cache().repeat().with_options(options)


if __name__ == "__main__":
    main()
