"""What a run does between its steps, by its way to exchange; the way by default is one sum in each step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.training.comm.base import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.exchange.agreement import Agreement, NonFinitePolicy
from lockstep.training.exchange.compare_ranks import WeightCheck
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.run.checkpoint import Tensors
from lockstep.training.ways import way_of

if TYPE_CHECKING:
    import keras

    from lockstep.features.schema.signature import Signature


class EveryStep:
    """One sum of gradients in each step, applied in that step. Other ways change what they need to.

    Every rank makes the same calls after the same steps.
    """

    def __init__(self, communicator: Communicator, data: Communicator | None = None) -> None:
        self.communicator = communicator
        """The communicator for collectives between steps."""
        self.data = communicator if data is None else data
        """The ranks that divide the rows of a step: all, unless several compute on the same rows."""
        self.adds = self.data
        """The ranks that add their gradients in a step: those that divide its rows, unless these train copies."""

    def weight_check(self, model: keras.Model) -> WeightCheck:
        """The comparison of weights between ranks that have the same ones."""
        return WeightCheck(self.data, self.alike(model))

    def alike(self, model: keras.Model) -> list[keras.Variable]:
        """The weights that the ranks of `data` have alike."""
        return list(model.weights)

    def install(self, model: keras.Model) -> None:
        """Change the step of `model`, which has been installed."""

    def serve(self, model: keras.Model, signature: Signature) -> None:
        """Take part in tests of ranks that have more batches, after this rank's last one. A collective."""

    def whole_weights(self) -> AbstractContextManager[None]:
        """The context in which each rank has all weights. A collective."""
        return nullcontext()

    def begin_epoch(self, epoch: int, last: int) -> None:
        """The next step is the first of epoch `epoch`, or of the rest of it that this process trains; `last` is the
        number of its last step.
        """

    def step_begins(self) -> None:
        """A step begins; callbacks have been called."""

    def step_ends(self, agreement: Agreement, *, epoch_ends: bool) -> Agreement:
        """What ranks agree on after a step, of which `agreement` is what its exchange found."""
        return agreement

    def alone(self) -> AbstractContextManager[Any]:
        """While this is open, layers call no other rank: each computes the same function of a row in another way."""
        return nullcontext()

    def undivide(self, model: keras.Model) -> None:
        """Make the layers of `model` compute with whole weights, which they have now, on this rank alone."""

    def complete(self) -> None:
        """Make the model's weights whole on this rank until the next epoch. A collective."""

    def state(self) -> Tensors:
        """What a checkpoint needs besides weights and optimizer, the same on all ranks; called by one of them."""
        return {}

    def load(self, tensors: Tensors, where: str) -> None:
        """Restore the `state` among the `tensors` of the checkpoint `where`, also on another number of ranks."""

    def end(self) -> None:
        """The last step is done; the last checkpoint follows."""

    def finish(self) -> None:
        """The last checkpoint is written; the weights are exported next."""


class OwnStep(Protocol):
    """A step of a way that does not train by Keras' `fit`."""

    @property
    def error(self) -> BaseException | None:
        """What ended it, if that is not raised."""

    @property
    def exchange(self) -> Exchange:
        """What ranks agree on."""

    def install(self, model: keras.Model, communicator: Any) -> None:
        """Change the model's step, as `RankStep.install` does."""

    def fit(self, dataset: Any, steps: int, callbacks: Any, epoch: int) -> None:
        """Train `steps` batches of `dataset` as one epoch, with the calls of Keras' `fit`."""


class Exchanging:
    """How the code of a way takes part in a rank's model; by default one sum of gradients in each step."""

    scores_a_copy = False
    """Whether a validation needs a copy of the model."""
    sums_gradients = True
    """Whether all ranks apply the same sums: else a rank's step is its own."""

    def __init__(self, config: TrainConfig, context: RankContext) -> None:
        """Called before the model is built and the first tensor is made."""
        self._config, self._context = config, context

    def scope(self) -> AbstractContextManager[Any]:
        """The context in which the model is built."""
        return nullcontext()

    def rows(self, rows: int) -> int:
        """The rows of the model's batch on this rank, of the `rows` that the rank reads."""
        return rows

    def check_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Raise ConfigError for callbacks of the model that this way cannot call."""

    def exchange_maker(self, whole: Communicator) -> Callable[..., Exchange] | None:
        """What makes the exchange; None for plain sums. `whole` has all processes of the launch."""
        return None

    def own_step(
        self, model: keras.Model, communicator: Communicator, non_finite: NonFinitePolicy, group_rows: int | None
    ) -> OwnStep | None:
        """The step, fit and exchange of a model that was built in `scope`; None for the ranks' common ones.
        `group_rows`: rows of a lane group of `ghost` statistics; None: each replica's own.
        """
        return None

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        """What the run does between its steps."""
        return EveryStep(exchange.communicator)


WAY: type[Exchanging] = Exchanging


def exchanging(config: TrainConfig, context: RankContext) -> Exchanging:
    """The code of the configuration's way, for this rank."""
    module = importlib.import_module(f"lockstep.training.strategies.{way_of(config).module}")
    way: type[Exchanging] = module.WAY
    return way(config, context)
