"""The cost of `distribute` for a step of Keras' `fit` with one rank: pairs of plain and distributed, in turns.

    python -m benchmarks.fit_overhead [--model resnet20|dense] [--pairs 15] [--steps 10]

Both models live in one process on one core and train on the same batch. A pair is one call of `fit` for each, in
alternating order; its figure is the ratio of their times for a step, from the end of the first step to that of the
last. Printed: the median of the pairs' ratios minus one, with a 95 % bootstrap interval of the median, in wall time and
in CPU time (which other work on a shared machine disturbs less).
"""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import version

import numpy as np

from benchmarks.shared import step_models, step_worker


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """Median and its 95 % interval by 10,000 resamples (Efron, 1979)."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(step_models.BATCH_ROWS), default="resnet20")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    os.sched_setaffinity(0, {0})
    import keras

    from lockstep.training.comm import SoloCommunicator
    from lockstep.training.steps.batchnorm import statistics_of
    from lockstep.training.steps.distribute import distribute

    models = [step_models.build(keras, args.model) for _ in range(2)]
    models[1].optimizer.build(models[1].trainable_variables)
    distribute(models[1].optimizer, SoloCommunicator(), scale=1.0, statistics=statistics_of(models[1]))
    data = step_worker.dataset(args.model, 0)
    for model in models:
        model.fit(data, steps_per_epoch=3, verbose=0)
    ratios: list[list[float]] = []
    for pair in range(args.pairs):
        spent = [[0.0, 0.0], [0.0, 0.0]]
        for which in (0, 1) if pair % 2 else (1, 0):
            clock = step_worker.clock(keras)
            models[which].fit(data, steps_per_epoch=args.steps, verbose=0, callbacks=[clock])
            spent[which] = [last - first for first, last in zip(clock.first, clock.last, strict=True)]
        ratios.append([ours / plain for plain, ours in zip(*spent, strict=True)])
    print(
        f"{args.model}, one rank on one core, {args.pairs} pairs of {args.steps} steps, "
        f"Python {platform.python_version()}, TensorFlow {version('tensorflow')}, Keras {version('keras')}"
    )
    for name, column in zip(("wall", "CPU"), np.array(ratios).T, strict=True):
        median, low, high = interval(column)
        print(f"{name:<5} overhead {median - 1:+.2%}   95 % interval {low - 1:+.2%} to {high - 1:+.2%}")


if __name__ == "__main__":
    main()
