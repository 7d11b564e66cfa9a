"""Gives users' own `fit`, `evaluate` and `predict` the same results and decisions on each of several ranks.

    comm = context().communicator()
    model.optimizer = distribute(model.optimizer, comm)
    rank_step(model, comm, batchnorm="sync")
    model.fit(mine, callbacks=callbacks_on_ranks(callbacks, model, comm), validation_data=my_validation)
    evaluate(model, comm, x_test, y_test)

lockstep train does all this by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator, part_bounds
from lockstep.training.steps.distribute import exchange_of
from lockstep.training.steps.losses import weigh_tests
from lockstep.training.steps.model_state import as_floats, summed_metrics
from lockstep.training.steps.other_optimizers import optimizers_of
from lockstep.training.steps.rank_step import RankStep
from lockstep.training.steps.row_means import Steps, check_row_means, some_rows

Statistics = Literal["sync", "local"]
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.OrbaxCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
MOST = 64  # rows of a rank that a check may need
_INSTALLED: WeakKeyDictionary[keras.Model, RankStep] = WeakKeyDictionary()


def rank_step(model: keras.Model, communicator: Communicator, *, batchnorm: Statistics = "sync") -> RankStep:
    """Make `model`, compiled with a distributed optimizer, train on masks, weights and batch statistics of all ranks.

    A collective: it makes a group of the communicator. Call it again after another `compile`. Returns the installed
    step, whose `remove` undoes this. Raises ConfigError for another value of `batchnorm`. The next `fit` on several
    ranks raises it for a loss that is no mean over rows, unless its rows come from a Python generator.

    >>> import keras, numpy as np
    >>> from lockstep import on_ranks
    >>> comm = on_ranks.communicator()
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(on_ranks.distribute(keras.optimizers.SGD(0.1), comm), "mse", jit_compile=False)
    >>> step = on_ranks.rank_step(model, comm)
    >>> history = model.fit(np.ones((8, 3), "float32"), np.ones(8, "float32"), verbose=0)
    >>> step.remove(model)
    """
    if batchnorm not in get_args(Statistics):
        raise ConfigError(
            "rank_step got an unknown batch normalisation",
            got=f"batchnorm={batchnorm!r}",
            allowed=" or ".join(get_args(Statistics)),
            next_step="Correct it; ghost needs the lane groups of lockstep train.",
        )
    before = _INSTALLED.pop(model, None)
    if before is not None and "train_step" in vars(model):  # compiled again since; two steps would undo each other
        before.remove(model)
    step = _INSTALLED[model] = RankStep(exchange_of(model.optimizer).scale, sync=batchnorm == "sync")
    own_step = model.train_step
    group = communicator.group(range(communicator.num_ranks))
    step.install(model, group)
    if communicator.num_ranks > 1:
        _check_at_fit(model, own_step, group)
    return step


def _check_at_fit(model: keras.Model, own_step: Any, communicator: Communicator) -> None:
    """Make the next `fit` of `model` check its loss first; `own_step` is its train_step without other ranks."""
    plain = partial(type(model).fit, model)

    def fit(x: Any = None, y: Any = None, *args: Any, **options: Any) -> Any:
        vars(model).pop("fit", None)
        data = _first_rows(x, y, options.get("sample_weight"))
        if data is not None and model.built:
            steps = Steps(model, own_step, optimizers_of(model), lambda _: nullcontext())
            check_row_means(steps, some_rows(data, communicator), model.name)
        return plain(x, y, *args, **options)

    object.__setattr__(model, "fit", fit)  # bypasses Keras' tracking


def _first_rows(x: Any, y: Any, weights: Any) -> Any:
    """The first rows of what fit is given, in a batch; None if they can be read only once."""
    if isinstance(x, tf.data.Dataset):
        return next(iter(x.take(1)), None)
    if isinstance(x, keras.utils.PyDataset):
        return x[0]
    data = tuple(part for part in (x, y, weights) if part is not None)
    if y is None or not all(hasattr(part, "shape") for part in keras.tree.flatten(data)):
        return None
    return keras.tree.map_structure(lambda part: part[:MOST], data)


def evaluate(
    model: keras.Model,
    communicator: Communicator,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int = 32,
) -> dict[str, Any]:
    """Loss and metrics over all ranks' rows, the same on each rank, by summed states of the metrics.

    Arrays hold all rows and each rank takes its part of them, which may be empty; a tf.data.Dataset or PyDataset is a
    rank's own part, in batches. Ranks communicate once, at the end. Losses, also of single outputs, are means over rows
    of batches' losses: if masks or the sum of weights divide them, they depend on batch boundaries, as in Keras.

    >>> import keras, numpy as np
    >>> from lockstep import on_ranks
    >>> comm = on_ranks.communicator()
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(on_ranks.distribute(keras.optimizers.SGD(0.1), comm), "mse", jit_compile=False)
    >>> sorted(on_ranks.evaluate(model, comm, np.ones((8, 3), "float32"), np.ones(8, "float32")))
    ['loss']
    """
    weigh_tests(model)
    model.reset_metrics()
    if isinstance(x, tf.data.Dataset | keras.utils.PyDataset):
        model.evaluate(x, verbose=0)
    else:
        data = tuple(part for part in (x, y, sample_weight) if part is not None)
        mine = share_of(data, communicator.rank, communicator.num_ranks)
        if _rows(mine):
            more = dict(zip(("y", "sample_weight"), mine[1:], strict=False))
            model.evaluate(mine[0], **more, batch_size=batch_size, verbose=0)
        else:  # metrics make their variables at the first batch, and this rank has none
            first = keras.tree.map_structure(lambda array: np.asarray(array)[:1], data)
            model._symbolic_build(data_batch=first if len(first) > 1 else first[0])
    summed_metrics(model, communicator)
    return as_floats(model.get_metrics_result())


def predict(model: keras.Model, communicator: Communicator, x: Any, *, batch_size: int = 32) -> Any:
    """Predictions for all rows of arrays `x`, on each rank; a rank computes its part, which may be empty.

    Like `model.predict`, returns arrays in the structure of the model's output, with all rows on every rank.

    >>> import keras, numpy as np
    >>> from lockstep import on_ranks
    >>> comm = on_ranks.communicator()
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(on_ranks.distribute(keras.optimizers.SGD(0.1), comm), "mse", jit_compile=False)
    >>> on_ranks.predict(model, comm, np.ones((8, 3), "float32")).shape
    (8, 1)
    """
    mine = share_of(x, communicator.rank, communicator.num_ranks)
    if _rows(mine):
        outputs = model.predict(mine, batch_size=batch_size, verbose=0)
    else:
        outputs = keras.tree.map_structure(
            lambda array: array[:0], model.predict(share_of(x, 0, _rows(x)), batch_size=1, verbose=0)
        )
    return keras.tree.map_structure(lambda array: _gathered(array, communicator), outputs)


def callbacks_on_ranks(callbacks: Sequence[Any], model: keras.Model, communicator: Communicator) -> list[Any]:
    """The callbacks for a user's own `fit`: all see the epoch's logs of all ranks, writers only write on rank 0.

    So EarlyStopping or ReduceLROnPlateau decide the same on all ranks; a callback that stops on one rank stops all
    after the next step, at the latest with the epoch. Raises ConfigError for BackupAndRestore, which would restore only
    rank 0.

    >>> import keras, numpy as np
    >>> from lockstep import on_ranks
    >>> comm = on_ranks.communicator()
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(on_ranks.distribute(keras.optimizers.SGD(0.1), comm), "mse", jit_compile=False)
    >>> stop = keras.callbacks.EarlyStopping(monitor="loss")
    >>> callbacks = on_ranks.callbacks_on_ranks([stop], model, comm)
    >>> history = model.fit(np.ones((8, 3), "float32"), np.ones(8, "float32"), callbacks=callbacks, verbose=0)
    """
    kept = [only_on_leader(callback, communicator.rank) for callback in callbacks]
    return [LogsOfAllRanks(communicator), *kept, AgreedStop(communicator)]


def only_on_leader(callback: Any, rank: int) -> Any:
    """The callback itself; on ranks other than 0, one that does nothing instead of one that writes files.

    Raises ConfigError for BackupAndRestore.
    """
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise ConfigError(
            "BackupAndRestore cannot restore several ranks",
            got=type(callback).__name__,
            allowed="callbacks that do not change weights",
            next_step="Leave it out: lockstep train resumes from checkpoints; elsewhere load weights on every rank.",
        )
    if rank == 0 or not isinstance(callback, WRITERS):
        return callback
    # With the same name, since a checkpoint compares the names of callbacks.
    return type(type(callback).__name__, (keras.callbacks.Callback,), {"__doc__": "Rank 0 writes."})()


class LogsOfAllRanks(keras.callbacks.Callback):
    """First in the list: replaces an epoch's logs, of training and validation, by those over all ranks' rows."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._comm = communicator
        self._training: dict[str, Any] = {}
        self._validation: dict[str, Any] = {}
        self._fitting = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._training, self._validation, self._fitting = {}, {}, True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._fitting:  # the states are still the epoch's; Keras resets them next
            self._training = self._summed()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._fitting:
            self._validation = {f"val_{name}": value for name, value in self._summed().items()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._fitting = False
        values = {**(self._training or self._summed()), **self._validation}
        mine = {} if logs is None else logs
        strange = sorted(name for name in mine if name not in values)
        if strange:
            raise ConfigError(
                "the logs of an epoch have values that belong to no metric",
                got=", ".join(strange),
                allowed=", ".join(sorted(values)),
                next_step="Return metrics' results from train_step, so that ranks can add up their states.",
            )
        mine.update(values)

    def _summed(self) -> dict[str, Any]:
        summed_metrics(self.model, self._comm)
        return as_floats(self.model.get_metrics_result())


class AgreedStop(keras.callbacks.Callback):
    """Last in the list: if a callback stops training on one rank, all ranks stop after the same step."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._comm = communicator
        self._asked = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        exchange = exchange_of(self.model.optimizer)
        if self.model.stop_training:
            self.model.stop_training, self._asked = False, True
            exchange.want("stop")
        agreement = exchange.agreement
        if agreement is not None and agreement.stop and not exchange.pending:  # of this step, not of an earlier fit's
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        stop = np.array([self.model.stop_training or self._asked], np.uint8)
        self._comm.all_reduce(stop, "max")
        self.model.stop_training, self._asked = bool(stop[0]), False
        exchange_of(self.model.optimizer).withdraw("stop")  # a flag that no step has sent is agreed on here


def share_of(data: Any, rank: int, num_ranks: int) -> Any:
    """A rank's rows of nested arrays of equal length: a contiguous part, whose size differs by one at most."""
    if not (rows := _rows(data)):
        raise _no_rows("0 rows")
    start, stop = part_bounds(rows, num_ranks)[rank]
    return keras.tree.map_structure(lambda array: array[start:stop], data)


def _rows(data: Any) -> int:
    first = keras.tree.flatten(data)[0]
    if not hasattr(first, "shape"):
        raise _no_rows(type(first).__name__)
    return len(first)


def _no_rows(got: str) -> ConfigError:
    return ConfigError(
        "there are no rows to divide over the ranks",
        got=got,
        allowed="arrays in any structure; for evaluate also a rank's own tf.data.Dataset or PyDataset",
        next_step="Pass arrays, or call the model's own method with this rank's part.",
    )


def _gathered(array: Any, communicator: Communicator) -> Any:
    """All ranks' rows of one output, in rank order."""
    array = np.ascontiguousarray(array)
    parts = communicator.all_gather_ragged(array.reshape(-1))
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def of_all_ranks(model: keras.Model, communicator: Communicator, scale: float, logs: dict[str, Any]) -> dict[str, Any]:
    """Metrics over all ranks, the same on each; `logs` are this rank's, `scale` its share of the rows. A collective.

    What a train_step of the user's returns next to its metrics, numbers and arrays, is the mean weighted by rows.
    """
    mine, own = as_floats(logs), as_floats(model.get_metrics_result())
    summed_metrics(model, communicator)
    result = as_floats(model.get_metrics_result())
    if set(result) == set(mine):
        return result
    names = sorted(mine)
    differs = np.array([name not in own or own[name] != mine[name] for name in names], np.uint8)
    communicator.all_reduce(differs, "max")
    others = {name: _numbers(name, mine[name]) for name, other in zip(names, differs, strict=True) if other}
    flat = np.concatenate([np.zeros(0), *(value.reshape(-1) for value in others.values())]) * scale
    communicator.all_reduce(flat)
    parts = np.split(flat, np.cumsum([value.size for value in others.values()])[:-1]) if others else []
    means = {name: part.reshape(value.shape) for (name, value), part in zip(others.items(), parts, strict=True)}
    return {name: means[name].tolist() if name in means else result[name] for name in names}


def _numbers(name: str, value: Any) -> NDArray[np.float64]:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ConfigError(
            f"train_step returns `{name}` among its logs, which is no number",
            got=f"{type(value).__name__}: {value!r}"[:200],
            allowed="numbers and arrays of numbers, whose means over ranks an epoch reports",
            next_step="Leave it out of what train_step returns.",
        ) from None
