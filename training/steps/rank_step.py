"""A model's `train_step` on ranks: batch statistics and losses of the global batch, while the step is traced."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from lockstep.storage.errors import ConfigError
from training.comm.base import Communicator
from training.steps.batchnorm import GhostBatchNormalization, batchnorm_as, normalisations
from training.steps.draws import draws_of_step, step_of
from training.steps.installed_step import install_step, remove_step
from training.steps.kept_statistics import KeptStatistics
from training.steps.losses import Denominators
from training.steps.micro_statistics import MicroStatistics
from training.steps.ordered import OrderedCalls
from training.steps.output_losses import weighed_by_rows
from training.steps.skipped_step import SkippedStep
from training.steps.sync_batchnorm import SyncMoments

log = logging.getLogger(__name__)


class RankStep:
    """What differs between a rank's step and that of one process, besides the optimizer's exchange.

    `scale` is this rank's share n_r / G of the global batch. `group_rows` makes BatchNormalization `ghost`, `sync`
    makes it see all ranks' rows, neither leaves it `local`. Nothing of the model stays changed: layers and losses are
    Keras' own again once a step has been traced, and so is what is saved. On one rank gradients are Keras' own, but for
    `ghost`; moving averages of a skipped step or of micro-batches, and the weights of reported losses, are not.
    `micro_batches` is the optimizer's gradient accumulation: parts of one batch, of equal size. With `seed`, draws of
    keras.random without a seed are made of it, the step and the rank; else they are the process's own.
    """

    def __init__(
        self,
        scale: float,
        *,
        group_rows: int | None = None,
        sync: bool = False,
        micro_batches: int = 1,
        seed: int | None = None,
    ) -> None:
        if group_rows is not None and sync:
            raise ConfigError(
                "batch statistics are either over lane groups or over all ranks",
                got=f"group_rows={group_rows} and sync",
                allowed="one of them",
                next_step="Leave out group_rows or sync.",
            )
        self._scale, self._group_rows, self._sync, self._micro_batches = scale, group_rows, sync, micro_batches
        self._seed = seed
        self._calls: OrderedCalls | None = None

    @property
    def error(self) -> BaseException | None:
        """What ended a collective of the step: TensorFlow repeats only its text."""
        return None if self._calls is None else self._calls.error

    def install(self, model: keras.Model, communicator: Communicator) -> None:
        """Have `model.fit` and `train_on_batch` trace their steps so, until `remove`. The model must be compiled.

        `communicator` is a group of its own, `comm.group(range(n))`: the exchange uses its own at the same time.
        """
        self._calls = OrderedCalls(communicator)
        if self._sync and self._micro_batches > 1 and normalisations(model):
            raise ConfigError(
                "batch statistics over all ranks cannot be split into micro-batches",
                got=f"sync and {self._micro_batches} micro-batches",
                allowed="sync with one, ghost with micro-batches of whole lane groups",
                next_step="Use --batchnorm ghost or --micro-batches 1.",
            )
        self._tell(model)
        plain, kept, micro = model.train_step, KeptStatistics(model), MicroStatistics(model, self._micro_batches)
        skipped = SkippedStep(model)

        def train_step(data: Any) -> Any:
            logs: dict[str, Any] = {}
            with (
                skipped.step(logs),
                kept.step(),
                micro.step(),
                weighed_by_rows(model, data),
                self.tracing(model),
                self._draws(model, communicator.rank),
            ):
                logs |= plain(data)
            return logs

        install_step(model, train_step)

    def remove(self, model: keras.Model) -> None:
        """Give the model its own train_step and test_step back."""
        remove_step(model)

    @contextmanager
    def tracing(self, model: keras.Model) -> Iterator[None]:
        """The forward pass, loss and gradients of one step, after `install`."""
        calls = self._calls
        assert calls is not None, "install() comes first"
        several = calls.communicator.num_ranks > 1
        of_ranks = SyncMoments(calls, self._scale) if self._sync and several else None
        with calls.tracing(), batchnorm_as(model, group_rows=self._group_rows, of_ranks=of_ranks):
            if not several and self._micro_batches == 1:
                yield
                return
            with Denominators(calls, self._scale, self._micro_batches).of(model):
                yield

    def _draws(self, model: keras.Model, rank: int) -> AbstractContextManager[None]:
        if self._seed is None:
            return nullcontext()
        of_rank = tf.constant(rank, tf.int64)
        return draws_of_step(self._seed, lambda: [step_of(model.optimizer), of_rank])

    def _tell(self, model: keras.Model) -> None:
        """Say what nobody could see in the numbers."""
        own = type(model)
        if own.train_step is not keras.Model.train_step or own.compute_loss is not keras.Model.compute_loss:
            log.warning(
                "%s computes its loss itself: what it adds to compile's is taken for means over rows", own.__name__
            )
        layers = [layer.name for layer in normalisations(model) if not isinstance(layer, GhostBatchNormalization)]
        if layers and self._group_rows == 1:
            log.warning("%s: batch statistics over groups of one row; use a larger global batch or sync", layers[0])
        if layers and self._group_rows is None and not self._sync:
            log.warning("%s: batch statistics are each rank's own, and depend on the number of ranks", layers[0])
