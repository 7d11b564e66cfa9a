"""`model.fit` by ranks as threads, each with its part of the same rows, beside plain Keras with all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.training import _threads  # sets TensorFlow's threads before it makes them

UNEVEN = (slice(0, 3), slice(3, 4), slice(4, 12))  # of 12 rows


def part(data: Any, rows: slice, batches: int = 1) -> Any:
    """The rows of nested arrays (dicts, lists, tuples, None); of each of several batches that lie end to end."""
    import keras

    def of(x: Any) -> Any:
        cut = x.reshape(batches, -1, *x.shape[1:])[:, rows]  # (batches, rows, ...)
        return cut.reshape(-1, *x.shape[1:])

    return keras.tree.map_structure(lambda x: None if x is None else of(x), data)


def fresh(make: Callable[[], Any], seed: int = 1) -> Any:
    """A compiled model, the same at every call."""
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    model = make()
    model.jit_compile = False
    return model


def alone(
    make: Callable[[], Any],
    x: Any,
    y: Any,
    weights: Any = None,
    *,
    steps: int = 5,
    seed: int = 1,
    batches: int = 1,
) -> Any:
    """The model after `steps` times `batches` steps of plain Keras on all rows.

    `losses_of_steps` are those of each step, or of each round of the batches.
    """
    model = fresh(make, seed)
    model.losses_of_steps = _fit(model, x, y, weights, steps, batches)
    return model


def on_ranks(
    make: Callable[[], Any],
    x: Any,
    y: Any,
    weights: Any = None,
    *,
    shares: Sequence[slice] = UNEVEN,
    steps: int = 5,
    seed: int = 1,
    batches: int = 1,
    **options: Any,
) -> list[Any]:
    """The models of all ranks after `steps` times `batches` steps on their shares of each batch.

    `options` are RankStep's.
    """
    from lockstep.training.steps.batchnorm import statistics_of
    from lockstep.training.steps.distribute import distribute, undistribute
    from lockstep.training.steps.rank_step import RankStep

    rows = sum(share.stop - share.start for share in shares)
    comms, groups = (_threads._join(len(shares), 1) for _ in range(2))
    models = [fresh(make, seed) for _ in shares]
    steps_of: list[RankStep] = []
    for model, comm, group, share in zip(models, comms, groups, shares, strict=True):
        scale = (share.stop - share.start) / rows
        _build(model, *(part(array, share, batches) for array in (x, y, weights)))
        distribute(model.optimizer, comm, scale=scale, statistics=statistics_of(model))
        steps_of.append(RankStep(scale, **options))
        steps_of[-1].install(model, group)

    def one(rank: int) -> list[float]:
        share = shares[rank]
        try:
            mine, labels, weighted = (part(array, share, batches) for array in (x, y, weights))
            return _fit(models[rank], mine, labels, weighted, steps, batches)
        except BaseException as error:
            for comm in (comms[rank], groups[rank]):
                comm.abort(str(error))
            raise
        finally:
            comms[rank].close()
            groups[rank].close()

    with ThreadPoolExecutor(len(shares)) as pool:
        losses = [future.result() for future in [pool.submit(one, rank) for rank in range(len(shares))]]
    for model, step, of_steps, share in zip(models, steps_of, losses, shares, strict=True):
        undistribute(model.optimizer)
        step.remove(model)
        model.losses_of_steps = [loss * (share.stop - share.start) / rows for loss in of_steps]
    return models


def assert_as_one(plain: Any, ranks: Sequence[Any], tolerance: float = 1e-9) -> None:
    """Weights and optimizer state of all ranks are those of the plain model; ranks are equal bit for bit."""
    for i, value in enumerate([*plain.weights, *plain.optimizer.variables]):
        mine = np.asarray(value, np.float64)
        others = [np.asarray([*model.weights, *model.optimizer.variables][i]) for model in ranks]
        assert all(np.array_equal(others[0], other) for other in others[1:]), f"ranks differ in {value.path}"
        worst = float(np.max(np.abs(mine - others[0]), initial=0.0))
        assert worst <= tolerance * max(float(np.max(np.abs(mine), initial=0.0)), 1e-3), (value.path, worst)
    summed = np.sum([model.losses_of_steps for model in ranks], axis=0)
    np.testing.assert_allclose(summed, plain.losses_of_steps, rtol=max(tolerance, 1e-9), atol=1e-12)


def _build(model: Any, x: Any, y: Any, weights: Any) -> None:
    model._symbolic_build(data_batch=(x, y) if weights is None else (x, y, weights))
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _fit(model: Any, x: Any, y: Any, weights: Any, steps: int, batches: int = 1) -> list[float]:
    import keras

    size = len(keras.tree.flatten(x)[0]) // batches
    history = model.fit(x, y, sample_weight=weights, batch_size=size, epochs=steps, verbose=0, shuffle=False)
    return [float(loss) for loss in history.history["loss"]]


@contextmanager
def precision(floatx: str) -> Iterator[None]:
    """Keras' floatx, and the dtype of layers, for models that are made and trained meanwhile."""
    from lockstep.training.rank.runtime import set_precision

    set_precision(floatx)
    try:
        yield
    finally:
        set_precision("float32")
