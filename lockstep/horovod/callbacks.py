"""Horovod's callbacks for Keras' `fit`: equal weights at the start, averaged logs, learning rates that warm up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from lockstep.horovod.arrays import Average, Min
from lockstep.horovod.collectives import allgather, allreduce, broadcast_variables
from lockstep.horovod.runtime import absent, check, rank, size
from lockstep.storage.errors import ConfigError
from lockstep.training.steps.optimizers import CorrectedSGD, without_loss_scale

# Known to Horovod, not here: name -> what to do instead.
ABSENT = {
    "BestModelCheckpoint": "Use keras.callbacks.ModelCheckpoint(path, save_best_only=True) on rank 0.",
    **dict.fromkeys(
        ("CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"),
        "Start with lockstep launch --max-restarts N and resume from a checkpoint of keras.callbacks.ModelCheckpoint.",
    ),
}


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Sends the weights and the optimizer's state of rank `root_rank` to all ranks.

    Before the first step if every rank's model is built by then; else after it, as Horovod always does: the first batch
    builds a model without an Input. Each rank keeps its own random seeds.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        check("callbacks.BroadcastGlobalVariablesCallback", device=device, local_variables=local_variables)
        self.root_rank = root_rank
        self.broadcast_done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # All ranks decide the same: rank 0 may have loaded its model, while those of the others are new.
        built = allreduce(np.int64(self.model.built), op=Min, name="whether the model is built")
        self.broadcast_done = False
        if built:
            optimizer = self.model.optimizer
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._compare_counts(len(self.model.optimizer.variables))
        broadcast_variables([*self.model.weights, *self.model.optimizer.variables], self.root_rank)
        self.broadcast_done = True

    def _compare_counts(self, mine: int) -> None:
        """Raise ConfigError on every rank if the optimizers of two ranks have different numbers of variables."""
        counts = allgather(np.array([mine]), name="how many variables the optimizer has").numpy().tolist()
        root = self.root_rank
        other = next((rank for rank, count in enumerate(counts) if count != counts[root]), None)
        if other is not None:
            raise ConfigError(
                f"the optimizers of ranks {root} and {other} have different numbers of variables",
                got=f"rank {root}: {counts[root]}; rank {other}: {counts[other]}",
                allowed="as many on all ranks, which get the values of one rank",
                next_step="If a rank has loaded its model from an .h5 file: Keras 3 reads it without momentum and the "
                "like. Save and load .keras files. Else build the same model and optimizer on all ranks.",
            )


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces each value of an epoch's logs by its mean over ranks; put it before callbacks that read them.

    Like Horovod's, it takes the mean of the ranks' results. That differs from the result over all samples for metrics
    that are not means (AUC, precision), and if ranks have different numbers of samples; see docs/moving.md.
    """

    def __init__(self, device: str = "", process_set: Any = None) -> None:
        super().__init__()
        check("callbacks.MetricAverageCallback", device=device, process_set=process_set)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs:
            names = sorted(logs)
            values = np.array([float(logs[name]) for name in names], np.float64)
            means = allreduce(values, op=Average, name=f"logs {', '.join(names)}").numpy()
            logs.update(zip(names, map(float, means), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` to before `end_epoch`.

    `multiplier` is a number or a function of the epoch. With `staircase` it is evaluated at the start of each epoch,
    else at each batch with a fraction of the epoch; `steps_per_epoch` defaults to the number that `fit` knows.
    `momentum_correction` scales SGD's accumulated momentum by new rate / old rate (Goyal et al., 2017, section 3), so
    that a higher rate takes effect at once. An optimizer that does so itself is unchanged.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if not (math.isfinite(initial_lr) and initial_lr > 0):
            raise ConfigError(
                f"{type(self).__name__} got an invalid learning rate",
                got=f"initial_lr={initial_lr}",
                allowed="a number above 0: that of all ranks together, as given to the optimizer",
                next_step="Pass the scaled rate, such as 0.001 * hvd.size().",
            )
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.multiplier = multiplier
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.steps_per_epoch = self.steps_per_epoch or (self.params or {}).get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise ConfigError(
                f"{type(self).__name__} does not know how many batches an epoch has",
                got="a dataset of unknown length, and no steps_per_epoch",
                allowed="steps_per_epoch, or a dataset that knows its length",
                next_step="Pass steps_per_epoch to the callback or to fit.",
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.epoch < self.start_epoch or (self.end_epoch is not None and self.epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None  # checked in on_train_begin
            self._set(self.epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        rate = self.initial_lr * (self.multiplier(epoch) if callable(self.multiplier) else self.multiplier)
        optimizer = self.model.optimizer
        old = float(optimizer.learning_rate)
        optimizer.learning_rate = rate
        inner = without_loss_scale(optimizer)
        scales = self.momentum_correction and getattr(inner, "momentum", None) and not isinstance(inner, CorrectedSGD)
        if scales and old > 0 and rate != old:
            # The step is momentum * velocity - rate * gradient: the velocity includes the old rate.
            for velocity in getattr(inner, "momentums", ()):
                if velocity is not None:
                    velocity.assign(velocity * (rate / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate over `warmup_epochs` from `initial_lr / size()` to `initial_lr`, at each batch.

    `initial_lr` is the rate of all ranks together: gradual warm-up after Goyal et al., 2017, section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.warmup_epochs, self.verbose = warmup_epochs, verbose
        end = math.ceil(warmup_epochs)
        super().__init__(initial_lr, self._share, 0, end, False, momentum_correction, steps_per_epoch)

    def _share(self, epoch: float) -> float:
        assert self.steps_per_epoch is not None
        done = min(1.0, (epoch + 1 / self.steps_per_epoch) / self.warmup_epochs)  # 1 at the last batch of the warm-up
        return (1 + done * (size() - 1)) / size()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and rank() == 0:
            reached = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {reached:g}.")


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        absent(f"`callbacks.{name}`", f"hvd.callbacks.{name}", ABSENT[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; docs/models.md lists what is there")
