"""--pipeline-stages: ranks hold the layers of one stage each, and pass micro-batches on to each other.

A rank keeps the weights and the optimizer's state of its stage only. A step passes each micro-batch forward through the
stages, then back, by a schedule (lockstep.training.strategies.schedule); what a forward pass computes is kept until its
backward pass. Gradients are added over micro-batches, then over the ranks of the same stage, which divide the rows, and
each stage updates its own. The ranks of one data rank are neighbours. docs/decisions/084-pipeline.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from lockstep.training import ways
from lockstep.training.comm.base import Communicator, part_bounds
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.exchange.agreement import STOPS, NonFinitePolicy
from lockstep.training.exchange.compare_ranks import WeightCheck, view_of
from lockstep.training.exchange.exchange import Exchange, Reducer
from lockstep.training.exchange.grid_exchange import GridExchange
from lockstep.training.steps.batchnorm import batchnorm_as, statistics_of
from lockstep.training.steps.distribute import distribute, exchange_of, own_class
from lockstep.training.steps.draws import drawn_from, draws_of_step, step_of
from lockstep.training.steps.losses import Denominators, weigh_tests, weighed_by_rows
from lockstep.training.steps.model_state import METRICS, PART, SEEDS, variables_of
from lockstep.training.steps.over_ranks import StepOverRanks, step_over_ranks
from lockstep.training.steps.patching import swapped
from lockstep.training.strategies.cut import Graph, Stage, cuts_of, reckoned_costs, variables_of_stages
from lockstep.training.strategies.every_step import EveryStep, Exchanging
from lockstep.training.strategies.schedule import Pass, passes_of
from lockstep.training.ways.pipeline import Schedule
from lockstep.training.world import Grid

FLAG = "--pipeline-stages"
OF_ALL_WEIGHTS = ("save", "save_weights", "load_weights", "get_weights", "set_weights")
LOSS_BYTES = 8  # of a message forward: the losses of the stages before, float64


@dataclass(frozen=True, slots=True)
class OfStage:
    """What a rank has of a tensor of `shape`: all of it if it is of the rank's stage, else nothing. Of the former the
    ranks of the stage write parts.
    """

    shape: tuple[int, ...]
    saved: tuple[int, int]
    loaded: tuple[int, int]

    @classmethod
    def of(cls, shape: Sequence[int], ranks: int, rank: int, *, mine: bool) -> OfStage:
        """The part of `rank`, of the `ranks` of its stage."""
        size = math.prod(shape)
        return (
            cls(tuple(shape), part_bounds(size, ranks)[rank], (0, size)) if mine else cls(tuple(shape), (0, 0), (0, 0))
        )

    def own(self, held: Any) -> Any:
        """The elements that this rank writes, flat."""
        start, stop = self.saved
        return held.reshape(-1)[start:stop]

    def filled(self, held: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        """The value of the elements `values`."""
        return values.reshape(self.shape) if self.loaded[1] else held


class Shares:
    """Which weights and which of the optimizer's state each stage of `model` has; other ranks' are empty here."""

    def __init__(self, model: keras.Model, grid: Grid, rank: int, weights: Sequence[Sequence[keras.Variable]]) -> None:
        """`weights` are those of each stage."""
        self._model, self._of_stages = model, [list(one) for one in weights]
        self._data_rank, self._stage, _ = grid.place(rank)
        self._ranks = grid.data
        self.mine = self._of_stages[self._stage]
        """The weights of this rank's stage."""
        own = {id(one) for one in self.mine}
        self.others = [one for one in model.weights if id(one) not in own]
        for one in model.weights:
            setattr(one, PART, self._part(one.shape, mine=id(one) in own))

    def _part(self, shape: Sequence[int], *, mine: bool) -> OfStage:
        return OfStage.of(shape, self._ranks, self._data_rank, mine=mine)

    def build(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Build `optimizer` for all weights, in their order and with their names, with values for this stage's only."""
        own, plain, noted = {id(one) for one in self.mine}, optimizer.add_variable_from_reference, []

        def made(reference_variable: keras.Variable, *args: Any, **options: Any) -> keras.Variable:
            mine, shape = id(reference_variable) in own, tuple(reference_variable.shape)
            if not mine:
                path, name = reference_variable.path, reference_variable.name
                reference_variable = keras.Variable(np.zeros(0), dtype=reference_variable.dtype, name=name)
                reference_variable._path = path
            variable = plain(reference_variable, *args, **options)
            setattr(variable, PART, self._part(shape, mine=mine))
            noted.append(variable)
            return variable

        with swapped(optimizer, "add_variable_from_reference", made):
            optimizer.build(self._model.trainable_variables)
        known = {id(one) for one in noted}
        strange = [one.path for one in optimizer.variables if id(one) not in known and math.prod(one.shape) > 1]
        if strange:
            raise _refused("an optimizer whose state is not made of tensors of the weights' shapes", strange[0])

    def empty(self) -> None:
        """Give up the memory of other stages' weights, which `collect` may have filled."""
        for one in self.others:
            _put(one, np.zeros(0, view_of(one).dtype))
        for name in OF_ALL_WEIGHTS:
            object.__setattr__(self._model, name, _needs_all(name))  # bypasses Keras' tracking

    def allow(self) -> None:
        """Let callers take all weights of the model again, which are there now."""
        for name in OF_ALL_WEIGHTS:
            vars(self._model).pop(name, None)

    def collect(self, stages: Communicator) -> None:
        """Fill other stages' weights from the ranks of all `stages`, in their order. A collective of these."""
        for root, weights in enumerate(self._of_stages):
            for one in weights:
                mine = root == self._stage
                value = np.array(view_of(one)) if mine else np.empty(getattr(one, PART).shape, view_of(one).dtype)
                stages.broadcast(value.reshape(-1).view(np.uint8), root)
                if not mine:
                    _put(one, value)
        self.allow()


def _needs_all(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"a rank cannot take all weights of a model with {FLAG}",
            got=f"a call of model.{name}, by a callback such as EarlyStopping(restore_best_weights=True)",
            allowed="callbacks that do not need the weights; the run's checkpoints and its model have all of them",
            next_step=f"Use --keep-best in place of the callback, or leave out {FLAG}.",
        )

    return refuse


def _put(variable: keras.Variable, value: NDArray[Any]) -> None:
    """Replace a value by one of another shape, in a variable that traced steps use."""
    tf.raw_ops.AssignVariableOp(resource=variable._value.handle, value=tf.convert_to_tensor(value))


class Links:
    """Messages between a stage and its neighbours: tensors of a micro-batch forward, their gradients back."""

    def __init__(self, whole: Communicator, members: Sequence[int], stage: Stage, rows: int) -> None:
        """`members` are the ranks of all stages, in order. A collective of these."""
        self._rows, self._received, self._sent = rows, stage.received, stage.sent
        self._before = self._pair(whole, members[stage.number - 1 : stage.number + 1]) if stage.number else None
        self._after = None if stage.is_last else self._pair(whole, members[stage.number : stage.number + 2])
        self._sender = Reducer(whole)
        self._posted = 0
        self.waited_s = 0.0
        """Seconds that this step has waited for messages."""

    @staticmethod
    def _pair(whole: Communicator, members: Sequence[int]) -> tuple[Communicator, Communicator]:
        """Groups of two neighbours for messages forward and back, which other threads send than receive."""
        forward, back = whole.group(members), whole.group(members)
        forward.deadline_s = back.deadline_s = whole.deadline_s
        return forward, back

    def send_forward(self, tensors: Sequence[Any], loss: float) -> None:
        """Send a micro-batch's tensors to the next stage, with the losses up to this one."""
        assert self._after is not None
        self._post(self._after[0], [np.array([loss]), *tensors], 1)

    def send_back(self, gradients: Sequence[Any]) -> None:
        """Send the gradients of what was received to the stage before."""
        assert self._before is not None
        self._post(self._before[1], gradients, 0)

    def receive_forward(self) -> tuple[list[tf.Tensor], float]:
        """What the stage before sends by `send_forward`."""
        assert self._before is not None
        message = self._next(self._before[0], LOSS_BYTES + self._bytes(self._received), 0)
        return self._tensors(message[LOSS_BYTES:], self._received), float(message[:LOSS_BYTES].view(np.float64)[0])

    def receive_back(self) -> list[tf.Tensor]:
        """What the next stage sends by `send_back`."""
        assert self._after is not None
        return self._tensors(self._next(self._after[1], self._bytes(self._sent), 1), self._sent)

    def end_step(self) -> None:
        """Wait until all messages of the step are sent. Raises the sender's error."""
        posted, self._posted = self._posted, 0
        self._sender.wait(posted, "the messages of a step to other stages")

    def close(self) -> None:
        """End the sender's thread."""
        self._sender.close()

    def _post(self, group: Communicator, tensors: Sequence[Any], to: int) -> None:
        flat = [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in tensors]
        message = flat[0] if len(flat) == 1 else np.concatenate(flat)

        def send() -> bool:
            group.send(message, to)
            return True

        self._sender.run(send)
        self._posted += 1

    def _next(self, group: Communicator, size: int, source: int) -> NDArray[np.uint8]:
        message = np.empty(size, np.uint8)
        began = time.perf_counter()
        group.recv(message, source)
        self.waited_s += time.perf_counter() - began
        return message

    def _bytes(self, tensors: Sequence[Any]) -> int:
        return sum(math.prod(self._shape(one)) * tf.as_dtype(one.dtype).size for one in tensors)

    def _shape(self, one: Any) -> tuple[int, ...]:
        return (self._rows, *one.shape[1:])

    def _tensors(self, message: NDArray[np.uint8], tensors: Sequence[Any]) -> list[tf.Tensor]:
        found, start = [], 0
        for one in tensors:
            shape, dtype = self._shape(one), tf.as_dtype(one.dtype)
            stop = start + math.prod(shape) * dtype.size
            found.append(tf.constant(message[start:stop].view(dtype.as_numpy_dtype).reshape(shape)))
            start = stop
        return found


class StageForward:
    """The forward pass of one stage in training: a traced function of a micro-batch."""

    def __init__(
        self, model: keras.Model, stage: Stage, *, scale: float, micro_batches: int, group_rows: int | None,
        seed: int, data_rank: int, statistics: Sequence[keras.Variable],
    ) -> None:  # fmt: skip
        """`statistics` are the moving averages of this stage."""
        self._model, self.stage, self._scale, self._micro_batches = model, stage, scale, micro_batches
        self._group_rows, self._seed, self._data_rank = group_rows, seed, data_rank
        self._functional = model._functional if isinstance(model, keras.Sequential) else model
        self._seeds, self._statistics = variables_of(model, SEEDS), list(statistics)
        self._before, self._sums = (
            [tf.Variable(tf.zeros(one.shape, one.dtype), trainable=False) for one in statistics] for _ in range(2)
        )
        self._function = tf.function(self._forward, autograph=False)

    def __call__(
        self, batch: Any, received: Sequence[tf.Tensor], losses: float, micro: int
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """The tensors for the next stage, this stage's loss () of one micro-batch, and the losses up to this stage.

        `batch` is the rank's batch as of fit, `losses` those of the stages before.
        """
        step = step_of(self._model.optimizer)
        found: tuple[Any, Any, Any] = self._function(
            batch, list(received), tf.constant(losses, tf.float64), step, tf.constant(micro)
        )
        return found

    def average_statistics(self) -> None:
        """Set the moving averages to their mean over the micro-batches; in the graph of the update."""
        for variable, total in zip(self._statistics, self._sums, strict=True):
            variable.assign(total / self._micro_batches)

    def _forward(self, batch: Any, received: Any, losses: Any, step: Any, micro: Any) -> tuple[Any, Any, Any]:
        data = tf.nest.map_structure(partial(self._part, micro), batch)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        self._begin_statistics(micro)
        with self._changes(data, [step, tf.constant(self._data_rank, tf.int64), tf.cast(micro, tf.int64)]):
            given = self._functional._standardize_inputs(x)
            found = self.stage.model([*(given[number] for number in self.stage.inputs), *received], training=True)
            own = [tf.reduce_sum(tf.cast(one, keras.config.floatx())) for one in self.stage.model.losses]
            if self.stage.is_last and self._model._compile_loss is not None:
                own.append(self._model._compile_loss(y, found, weights))
            loss = tf.add_n(own) if own else tf.zeros((), keras.config.floatx())
            losses += tf.cast(loss, losses.dtype)
            if self.stage.is_last:
                total = tf.cast(losses, keras.config.floatx())
                self._model._loss_tracker.update_state(total, sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
                self._model.compute_metrics(x, y, found, sample_weight=weights)
        for variable, total in zip(self._statistics, self._sums, strict=True):
            total.assign_add(variable.value)
        return [] if self.stage.is_last else tf.nest.flatten(found), loss, losses

    def _part(self, micro: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        rows = values.shape[0] // self._micro_batches
        part = values[micro * rows : (micro + 1) * rows]
        part.set_shape((rows, *values.shape[1:]))
        return part

    def _begin_statistics(self, micro: tf.Tensor) -> None:
        """Each micro-batch moves the averages from where they were before the step."""
        first = tf.equal(micro, 0)
        for variable, before, total in zip(self._statistics, self._before, self._sums, strict=True):
            before.assign(tf.where(first, variable.value, before))
            total.assign(tf.where(first, tf.zeros_like(total), total))
            variable.assign(before.read_value())

    @contextmanager
    def _changes(self, data: Any, words: Sequence[tf.Tensor]) -> Iterator[None]:
        """While this is open, losses and draws are those of a micro-batch of a global batch."""
        for place, variable in enumerate(self._seeds):
            variable.assign(drawn_from(self._seed, f"seed generator {place} of a unit", words, variable.dtype))
        scale, parts = self._scale, self._micro_batches
        with ExitStack() as stack:
            stack.enter_context(draws_of_step(self._seed, words))
            stack.enter_context(batchnorm_as(self._model, group_rows=self._group_rows))
            if self.stage.is_last:
                stack.enter_context(weighed_by_rows(self._model, data))
                stack.enter_context(Denominators(None, scale, parts, refused=FLAG, checked=True).of(self._model))
            stack.enter_context(step_over_ranks(StepOverRanks(None, scale, parts, refused=FLAG)))
            yield


class PipelineStep:
    """The step of a built model on a rank of one stage."""

    error: BaseException | None = None
    """Always None: what fails is raised by the exchange, or by the links."""

    def __init__(
        self, model: keras.Model, shares: Shares, forward: StageForward, links: Links, passes: Sequence[Pass]
    ) -> None:
        """`passes` are those of this stage in a step, in order."""
        self._model, self._forward, self._passes, self._stage = model, forward, passes, forward.stage
        self.shares, self.links, self._micro_batches = shares, links, len(passes) // 2
        self._trained = [one for one in shares.mine if one.trainable]
        self._add = tf.function(lambda sums, more: [a + b for a, b in zip(sums, more, strict=True)], autograph=False)
        self._apply = tf.function(self._update, autograph=False)
        exchange = exchange_of(model.optimizer)
        assert isinstance(exchange, GridExchange)
        self.exchange: GridExchange = exchange
        self.most_held = 0
        """The most micro-batches of a step that were between their passes."""

    def install(self, model: keras.Model, communicator: Any) -> None:
        """Change the model's tests, as `RankStep.install` does."""
        weigh_tests(model)

    def fit(self, dataset: tf.data.Dataset, steps: int, callbacks: Any, epoch: int) -> None:
        """Train `steps` batches of `dataset` as one epoch, with the calls of Keras' `fit`."""
        model, micro = self._model, self._micro_batches
        model.stop_training = False
        model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        for number, batch in zip(range(steps), dataset, strict=False):
            callbacks.on_train_batch_begin(number * micro)
            self.train(batch)
            callbacks.on_train_batch_end(number * micro + micro - 1, model.get_metrics_result())
            if model.stop_training:
                break
        self._share_metrics()
        callbacks.on_epoch_end(epoch, model.get_metrics_result())

    def train(self, batch: Any) -> None:
        """One step on the rank's batch, as of fit."""
        self.links.waited_s = 0.0
        held: dict[int, tuple[tf.GradientTape, list[Any], list[Any], Any]] = {}
        sums: list[Any] | None = None
        total = 0.0
        for forward, micro in self._passes:
            if forward:
                held[micro], losses = self._pass_forward(batch, micro)
                total += losses
                self.most_held = max(self.most_held, len(held))
            else:
                gradients = self._pass_back(*held.pop(micro))
                sums = gradients if sums is None else self._add(sums, gradients)
        loss = tf.constant(total / self._micro_batches if self._stage.is_last else 0.0, keras.config.floatx())
        self.links.end_step()
        assert sums is not None
        self._apply(loss, sums)
        self.exchange.waited_s += self.links.waited_s

    def _pass_forward(self, batch: Any, micro: int) -> tuple[tuple[tf.GradientTape, list[Any], list[Any], Any], float]:
        received, before = self.links.receive_forward() if self._stage.number else ([], 0.0)
        with tf.GradientTape() as tape:
            tape.watch(received)
            sent, loss, losses = self._forward(batch, received, before, micro)
        losses = float(losses)
        if not self._stage.is_last:
            self.links.send_forward(sent, losses)
        return (tape, received, sent, loss), losses

    def _pass_back(self, tape: tf.GradientTape, received: list[Any], sent: list[Any], loss: Any) -> list[Any]:
        upstream = [] if self._stage.is_last else self.links.receive_back()
        ends = [*upstream, tf.constant(1 / self._micro_batches, loss.dtype)]
        variables = [one.value for one in self._trained]
        found = tape.gradient(
            [*sent, loss], [*received, *variables], ends, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        found = [tf.convert_to_tensor(one) for one in found]
        if self._stage.number:
            self.links.send_back(found[: len(received)])
        return found[len(received) :]

    def _update(self, loss: tf.Tensor, sums: list[tf.Tensor]) -> None:
        self._forward.average_statistics()
        self._model.optimizer.scale_loss(loss)
        self._model.optimizer.apply(sums, self._trained)

    def _share_metrics(self) -> None:
        """Give all stages the metrics of the last one."""
        for one in variables_of(self._model, METRICS):
            value = np.array(one.numpy())
            mates = self.exchange.mates
            mates.broadcast(value.reshape(-1).view(np.uint8), mates.num_ranks - 1)
            one.assign(value)


class PipelineSteps(EveryStep):
    """Between the steps of a pipeline, other stages' weights are empty."""

    def __init__(self, step: PipelineStep) -> None:
        super().__init__(step.exchange.communicator, step.exchange.data)
        self._shares, self._links, self._mates = step.shares, step.links, step.exchange.mates

    def begin_epoch(self, epoch: int, last: int) -> None:
        self._shares.empty()

    def weight_check(self, model: keras.Model) -> WeightCheck:
        return WeightCheck(self.data, self._shares.mine)

    def complete(self) -> None:
        self._shares.collect(self._mates)

    def undivide(self, model: keras.Model) -> None:
        self._shares.allow()

    def end(self) -> None:
        self._links.close()


class Pipeline(Exchanging):
    """The way of --pipeline-stages."""

    def __init__(self, config: TrainConfig, context: RankContext) -> None:
        super().__init__(config, context)
        assert isinstance(config.way, ways.Pipeline)
        self._way, self._rows = config.way, 0
        self._grid = config.way.grid(config.ranks.num_ranks)

    def rows(self, rows: int) -> int:
        self._rows = rows
        return rows

    def own_step(
        self, model: keras.Model, communicator: Communicator, non_finite: NonFinitePolicy, group_rows: int | None
    ) -> PipelineStep:
        config = self._config
        self._step = pipeline_step(
            model, communicator, self._grid, rows=self._rows, global_batch=config.data.global_batch,
            schedule=self._way.schedule, micro_batches=config.step.micro_batches, cut_after=self._way.layers,
            group_rows=group_rows, seed=config.data.seed, non_finite=non_finite,
        )  # fmt: skip
        return self._step

    def between_steps(self, model: keras.Model, exchange: Exchange) -> EveryStep:
        return PipelineSteps(self._step)


def pipeline_step(
    model: keras.Model, communicator: Communicator, grid: Grid, *, rows: int, global_batch: int, schedule: Schedule,
    micro_batches: int, cut_after: Sequence[str] = (), group_rows: int | None = None, seed: int = 0,
    non_finite: NonFinitePolicy = STOPS,
) -> PipelineStep:  # fmt: skip
    """The step of this rank's stage of a compiled `model`, whose optimizer it builds and distributes over the ranks.

    `rows` are the rank's rows of a global batch. A collective. Raises ConfigError for a model that cannot be cut.
    """
    check_model(model)
    graph, rank = Graph(model), communicator.rank
    cuts = cuts_of(graph, grid.stages, reckoned_costs(graph), cut_after)
    data_rank, number, _ = grid.place(rank)
    stage = graph.stage(cuts, number)
    shares = Shares(model, grid, rank, variables_of_stages(graph, cuts))
    shares.build(model.optimizer)
    shares.empty()
    own, scale = {id(one) for one in shares.mine}, rows / global_batch
    statistics = [one for one in statistics_of(model) if id(one) in own]
    distribute(
        model.optimizer, communicator, scale, statistics=statistics, auto_scale_loss=False, finalizes=False,
        same_start=False, non_finite=non_finite,
        make_exchange=partial(GridExchange, grid=grid, loss_weight=float(stage.is_last)),
    )  # fmt: skip
    links = Links(communicator, grid.stage_group(rank), stage, rows // micro_batches)
    forward = StageForward(
        model, stage, scale=scale, micro_batches=micro_batches, group_rows=group_rows, seed=seed, data_rank=data_rank,
        statistics=statistics,
    )  # fmt: skip
    return PipelineStep(model, shares, forward, links, passes_of(schedule, number, grid.stages, micro_batches))


def check_model(model: keras.Model) -> None:
    """Raise ConfigError for a model that stages cannot train."""
    kind, optimizer = type(model), model.optimizer
    own = [name for name in ("train_step", "compute_loss") if getattr(kind, name) is not getattr(keras.Model, name)]
    if own:
        raise _refused("a model with a step or loss of its own", f"{kind.__name__}.{own[0]}")
    if optimizer.built:
        raise _refused("an optimizer that is built already", own_class(optimizer).__name__)
    wrong = [name for name in ("use_ema", "global_clipnorm") if getattr(optimizer, name, None)]
    if wrong:
        raise _refused(
            "an optimizer that needs all weights at once", f"{own_class(optimizer).__name__} with {wrong[0]}"
        )
    odd = [one.path for one in variables_of(model, METRICS) if one.aggregation != "sum"]
    if odd:
        raise _refused("a metric whose states are no sums over rows", odd[0])


def _refused(what: str, got: str) -> ConfigError:
    return ConfigError(
        f"{FLAG} cannot train {what}",
        got=got,
        allowed="keras.Sequential or keras.Model(inputs, outputs), compiled with losses, metrics that add up and an "
        "optimizer of keras.optimizers that updates each weight by itself",
        next_step=f"Change the model, or leave out {FLAG}.",
    )


WAY = Pipeline
