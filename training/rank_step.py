"""A model's `train_step` on ranks: batch statistics and losses of the global batch, while the step is traced."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from storage.errors import ConfigError
from training.batchnorm import batchnorm_as
from training.comm.base import Communicator
from training.denominators import Denominators
from training.ordered import OrderedCalls
from training.sync_batchnorm import SyncMoments

log = logging.getLogger(__name__)


class RankStep:
    """What differs between a rank's step and that of one process, besides the optimizer's exchange.

    `communicator` is a group of its own (`comm.group(range(n))`), `scale` this rank's share n_r / G of the global
    batch. `group_rows` makes BatchNormalization `ghost`, `sync` makes it see all ranks' rows, neither leaves it
    `local`. Nothing of the model stays changed: layers and losses are Keras' own again once a step has been traced, and
    so is what is saved. With one rank only `ghost` changes anything.
    """

    def __init__(
        self, communicator: Communicator, scale: float, *, group_rows: int | None = None, sync: bool = False
    ) -> None:
        if group_rows is not None and sync:
            raise ConfigError(
                "batch statistics are either over lane groups or over all ranks",
                got=f"group_rows={group_rows} and sync",
                allowed="one of them",
                next_step="Leave out group_rows or sync.",
            )
        alone = communicator.num_ranks == 1
        self.calls = OrderedCalls(communicator)
        self._group_rows = group_rows
        self._of_ranks = SyncMoments(self.calls, scale) if sync and not alone else None
        self._denominators = None if alone else Denominators(self.calls, scale)

    @contextmanager
    def tracing(self, model: keras.Model) -> Iterator[None]:
        """For a training loop of one's own: the forward pass, loss and gradients of one step."""
        with self.calls.tracing(), batchnorm_as(model, group_rows=self._group_rows, of_ranks=self._of_ranks):
            if self._denominators is None:
                yield
            else:
                with self._denominators.of(model):
                    yield

    def install(self, model: keras.Model) -> None:
        """Have `model.fit` and `train_on_batch` trace their steps so, until `remove`. The model must be compiled."""
        own = type(model)
        if self._denominators is not None and (
            own.train_step is not keras.Model.train_step or own.compute_loss is not keras.Model.compute_loss
        ):
            log.warning(
                "%s computes its loss itself: what it adds to that of compile() is taken for means over rows",
                own.__name__,
            )
        plain = model.train_step

        def train_step(*args: Any, **kwargs: Any) -> Any:
            with self.tracing(model):
                return plain(*args, **kwargs)

        object.__setattr__(model, "train_step", train_step)  # past Keras' tracking
        model.train_function = None

    def remove(self, model: keras.Model) -> None:
        """Give the model its own train_step back."""
        object.__delattr__(model, "train_step")
        model.train_function = None
