"""A run's model on one rank: built, joined to the other ranks, and trained by Keras' `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.training import ways
from lockstep.training.batches.tf_dataset import FeedPipeline, to_device
from lockstep.training.comm.base import Communicator
from lockstep.training.comm.tree_sums import TreeSums
from lockstep.training.compression.method import NONE, Compression
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.messages import RankMemory
from lockstep.training.embeddings.sharded_embedding import Tables, check_combination, plain_lookups, table_bytes
from lockstep.training.exchange.agreement import Agreement, NonFinitePolicy
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.models import ModelOptions, build
from lockstep.training.models.lora import enable_lora
from lockstep.training.models.own_classes import check_loads, registered_by
from lockstep.training.models.ready import ready_model
from lockstep.training.plan.client_plan import RunPlan
from lockstep.training.plan.lane_count import units_of
from lockstep.training.plan.mixture import Plan
from lockstep.training.rank.callbacks import RunCallbacks
from lockstep.training.rank.memory import arena_bytes, optimizer_bytes, reckoned_bytes, variable_bytes
from lockstep.training.rank.metrics import resident_bytes
from lockstep.training.rules import VALIDATION, StopRule, check_metric
from lockstep.training.scoring.score_split import DATA_LOSS
from lockstep.training.scoring.scores import BINARY, CLASSES
from lockstep.training.steps.batchnorm import normalisations, statistics_of
from lockstep.training.steps.canonical import CanonicalStep
from lockstep.training.steps.distribute import distribute, exchange_of, finalize, steps_of
from lockstep.training.steps.ewc import Earlier, check_model
from lockstep.training.steps.metric_sums import check_metric_sums
from lockstep.training.steps.model_state import build_all, zeros_of
from lockstep.training.steps.optimizers import Scaled, scale_learning_rate, without_loss_scale
from lockstep.training.steps.other_optimizers import build_others, optimizers_of, others_of
from lockstep.training.steps.rank_step import RankStep
from lockstep.training.steps.reduction import exchange_for
from lockstep.training.steps.row_means import Steps, check_row_means, some_rows
from lockstep.training.strategies.every_step import EveryStep, OwnStep, exchanging


@dataclass(frozen=True, slots=True)
class Prepared:
    """A compiled model with all its variables."""

    model: keras.Model
    callbacks: list[Any]
    group_rows: int | None
    """Rows of a lane group if batch statistics are over lane groups."""
    learning_rate: Scaled | None
    """How the learning rate was changed; None if it was not."""
    compression: Compression = NONE
    """How gradients are sent."""


def prepare(config: TrainConfig, plan: RunPlan, signature: Signature, rows: int, groups: int | None) -> Prepared:
    """Build the model of `config` for ranks of `rows` rows. Raises ConfigError for a model that cannot run on ranks."""
    steps, micro, accumulated = plan.steps(config.data.epochs), config.step.micro_batches, config.accumulated
    group_rows = plan.global_batch // groups if groups else None
    options = ModelOptions(
        seed=config.data.seed,
        group_rows=group_rows,
        learning_rate=config.step.learning_rate,
        global_batch=plan.global_batch,
        steps=steps,
        shard_embeddings=config.step.shard_embeddings,
        tasks=config.data.tasks,
        extra=config.model.extra,
    )
    own = ":" in config.model.model
    registered = registered_by(config.model.model) if own else frozenset()
    model, callbacks = build(config.model.model, signature, options)
    if model.steps_per_execution != 1:
        raise ConfigError(
            f"the model {config.model.model} runs several steps in one call",
            got=f"steps_per_execution={model.steps_per_execution}",
            allowed="1: ranks agree after each step",
            next_step="Compile the model without steps_per_execution.",
        )
    check_combination(config, model)
    if config.model.ewc is not None:
        check_model(model, signature)
    model.jit_compile = False  # the exchange calls Python, and XLA makes these models slower on a CPU
    if group_rows is not None and (rows // micro) % group_rows and normalisations(model):
        raise ConfigError(
            f"micro-batches of {rows // micro} rows do not hold whole lane groups",
            got=f"{micro} micro-batches of a rank's {rows} rows, lane groups of {group_rows} for BatchNormalization",
            allowed=f"micro-batches of a multiple of {group_rows} rows",
            next_step="Use fewer --micro-batches, or --batchnorm local.",
        )
    if accumulated > 1:
        _accumulate(model, accumulated)
    elif steps_of(without_loss_scale(model.optimizer)) > 1:
        raise ConfigError(
            f"the model {config.model.model} accumulates gradients itself",
            got="gradient_accumulation_steps of its optimizer",
            allowed="one step of the optimizer for each global batch: ranks agree and save checkpoints between these",
            next_step="Leave it out of the model, and use a larger --global-batch with --micro-batches.",
        )
    learning_rate = None
    if config.step.learning_rate_scaling != "none" or config.step.warm_up_epochs or accumulated > 1:
        learning_rate = scale_learning_rate(
            model,
            config.step.learning_rate_scaling,
            global_batch=plan.global_batch,
            base_batch=config.step.base_batch,
            warm_up_steps=round(config.step.warm_up_epochs * plan.total / plan.global_batch),
            calls_per_step=accumulated,
        )
    compression = _compression(model.optimizer, config, plan)
    # Others build the optimizer on this rank's parts.
    whole = not isinstance(way := ways.way_of(config), ways.Zero) and way.mates == (1, 1)
    lora_rank = config.model.lora_rank
    build_all(model, signature, rows // micro, optimizer=whole and not lora_rank)
    if own:
        check_loads(model, config.model.model, registered)
    if lora_rank:
        enable_lora(model, lora_rank, config.data.seed)
        if whole:
            model.optimizer.build(model.trainable_variables)
    if len(found := optimizers_of(model)) > 1:
        seen = Steps(model, model.train_step, found, plain_lookups).see(zeros_of(signature, 2), [0, 1], whole=2)
        _check_others(build_others(model, seen.applied, config.model.model), config)
    return Prepared(model, callbacks, group_rows, learning_rate, compression)


def _compression(optimizer: keras.optimizers.Optimizer, config: TrainConfig, plan: RunPlan) -> Compression:
    """The method of `config`; deep gradient compression takes momentum and clipping over from the optimizer."""
    method = Compression.parse(config.step.compression, seed=config.data.seed)
    if method.name != "dgc":
        return method
    others = [
        name for name in ("nesterov", "clipvalue", "global_clipnorm", "use_ema") if getattr(optimizer, name, None)
    ]
    if type(optimizer) is not keras.optimizers.SGD or others or optimizer.built:
        raise ConfigError(
            "--compression dgc needs the momentum of SGD, which it adds up itself",
            got=f"{type(optimizer).__name__}{' with ' if others else ''}{', '.join(others)}",
            allowed="keras.optimizers.SGD, not built yet, with momentum and clipnorm only",
            next_step="Compile the model with SGD(rate, momentum=0.9), give a ready ResNet --set nesterov=false, "
            "or use --compression topk:1%.",
        )
    momentum, clip_norm = float(optimizer.momentum), optimizer.clipnorm
    optimizer.momentum, optimizer.clipnorm = 0.0, None
    steps = round(plan.total / plan.global_batch)  # an epoch, as in the source for its language model
    return replace(method, momentum=momentum, clip_norm=clip_norm, warm_up_steps=steps)


def _check_others(others: Sequence[keras.optimizers.Optimizer], config: TrainConfig) -> None:
    """Raise ConfigError for a run that cannot have optimizers other than that of `compile`."""
    reasons = {
        config.way.flag: not isinstance(config.way, ways.EveryStep),
        "--canonical": config.exactness.canonical,
        "--micro-batches": config.step.micro_batches > 1,
        "--compression": config.step.compression != "none",
        "--lora-rank": config.model.lora_rank > 0,
        "--non-finite skip": config.exactness.non_finite == "skip",
        "--learning-rate-scaling or --warm-up-epochs": config.step.learning_rate_scaling != "none"
        or config.step.warm_up_epochs,
        "--precision mixed_float16": config.step.precision == "mixed_float16",
    }
    wrong = [what for what, is_so in reasons.items() if is_so]
    if others and wrong:
        raise ConfigError(
            f"{wrong[0]} cannot be combined with optimizers other than that of `compile`",
            got=f"{', '.join(one.name for one in others)}, and {wrong[0]}",
            allowed="each optimizer's gradients summed whole in each step",
            next_step=f"Leave out {wrong[0]}.",
        )


def check_metrics(model: keras.Model, config: TrainConfig, of_search: str | None) -> None:
    """Raise ConfigError if --keep-best, --early-stop or `of_search`, the --metric of a search, names a metric that no
    epoch of a built model has.
    """
    if type(model).train_step is not keras.Model.train_step:  # it may return other metrics
        return
    names = metric_names(model, config)
    check_metric(config.checkpoints.keep_best, names)
    if config.validation.early_stop is not None:
        check_metric(StopRule.parse(config.validation.early_stop).best, names, "--early-stop")
    check_metric(of_search, names, "--metric")


def metric_names(model: keras.Model, config: TrainConfig) -> dict[str, None]:
    """The metrics that an epoch of a built model may have, those that a validation adds among them."""
    own = list(model.get_metrics_result())
    added = [] if config.validation.validate is None else [*own, DATA_LOSS, *BINARY, *CLASSES]
    if added and config.data.tasks is not None:
        added += [f"{name}_{number}" for name in added for number in range(len(config.data.datasets))]
    return dict.fromkeys([*own, *(f"{VALIDATION}{name}" for name in added)])


def split(dataset: tf.data.Dataset, micro_batches: int) -> tf.data.Dataset:
    """Split each batch into `micro_batches` equal parts, in order; shapes stay static."""
    if micro_batches == 1:
        return dataset

    def parts(*batch: Any) -> Any:
        cut = tf.nest.map_structure(
            lambda x: tf.reshape(x, (micro_batches, x.shape[0] // micro_batches, *x.shape[1:])), batch
        )
        return cut if len(cut) > 1 else cut[0]

    return dataset.map(parts).unbatch()


def _accumulate(model: keras.Model, micro_batches: int) -> None:
    optimizer = without_loss_scale(model.optimizer)
    if optimizer.gradient_accumulation_steps or optimizer.built or hasattr(optimizer, "optimizers"):
        raise ConfigError(
            f"{type(optimizer).__name__} cannot take --micro-batches",
            got=f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}, built={optimizer.built}",
            allowed="one optimizer that is not built yet and does not accumulate gradients itself",
            next_step="Leave gradient_accumulation_steps out of the model's function, or use --micro-batches 1.",
        )
    optimizer.gradient_accumulation_steps = micro_batches


def distributed(
    config: TrainConfig,
    plan: Plan,
    prepared: Prepared,
    communicator: Communicator,
    rows: int,
    groups: int | None,
    non_finite: NonFinitePolicy,
    make_exchange: Callable[..., Exchange] | None = None,
) -> RankStep | CanonicalStep:
    """The train step of a rank of `rows` rows; also distributes the model's optimizer over the ranks."""
    model, scale = prepared.model, rows / plan.global_batch
    statistics = tuple(statistics_of(model))
    step: RankStep | CanonicalStep
    if config.exactness.canonical:
        units = units_of(config, plan.lanes, groups)
        count = units // communicator.num_ranks
        step = CanonicalStep(
            model,
            units=units,
            first=communicator.rank * count,
            count=count,
            seed=config.data.seed,
            group_rows=prepared.group_rows,
        )
        communicator, scale, statistics = TreeSums(communicator), 1.0, (*statistics, *step.metric_sums)
    else:
        step = RankStep(
            scale,
            group_rows=prepared.group_rows,
            sync=config.step.batchnorm == "sync",
            micro_batches=config.step.micro_batches,
            seed=config.data.seed,
            checked=True,
        )
    distribute(
        model.optimizer,
        communicator,
        scale,
        statistics=statistics,
        auto_scale_loss=False,  # compile has decided
        finalizes=False,  # one fit call is one epoch
        same_start=False,  # the run compares its ranks when it has restored the model
        non_finite=non_finite,
        make_exchange=make_exchange or partial(exchange_for, compression=prepared.compression),
    )
    for other in others_of(model):
        group = communicator.group(range(communicator.num_ranks))
        group.deadline_s = communicator.deadline_s
        distribute(other, group, scale, auto_scale_loss=False, finalizes=False, same_start=False, non_finite=non_finite)
    return step


def agreement_on(exchange: Exchange, step: int) -> Agreement:
    """What the ranks agreed on in optimizer step `step`, which has just ended.

    Raises LockstepError where the model's train_step has exchanged no gradients, or more than once.
    """
    agreement = exchange.agreement
    if agreement is None or agreement.step != step:
        raise LockstepError(
            f"step {step} was not exchanged between the ranks",
            got="a train_step that does not call optimizer.apply_gradients once",
            allowed="one call a step",
            next_step="Call self.optimizer.apply_gradients or apply once in the model's train_step.",
        )
    return agreement


class JoinedModel:
    """The compiled model of one rank, joined to the other ranks. Every rank makes the same calls in the same order.

    A subclass sets `exchange` and `strategy`.
    """

    exchange: Exchange
    strategy: EveryStep
    tables: Tables | None = None
    """The tables in shards; None if the model has none."""
    earlier: Earlier | None = None
    """What earlier runs have learned, once the run has begun or is restored; None if nothing pulls towards it."""

    def __init__(
        self,
        context: RankContext,
        config: TrainConfig,
        plan: RunPlan,
        signature: Signature,
        rows: int,
        groups: int | None,
        metric: str | None,
    ) -> None:
        """`metric` is that of a search, which the model must have."""
        control, world = context.control, context.world
        self._config = config
        control.beat(0, "build the model")
        before_bytes = resident_bytes()
        self.prepared = prepared = prepare(config, plan, signature, rows, groups)
        check_metrics(prepared.model, config, metric)
        self.model, self.callbacks, self.learning_rate = prepared.model, prepared.callbacks, prepared.learning_rate
        if world.is_leader and not tf.config.list_physical_devices("GPU"):  # on a GPU the model is in its own memory
            needed = reckoned_bytes(before_bytes, self.model, world.num_ranks, config.way.stage)
            needed += 2 * table_bytes(self.model) // world.num_ranks  # its rows, and a checkpoint's copy of them
            plain = isinstance(config.way, ways.EveryStep)  # others hold less, or more
            about = (
                RankMemory(rank_mib=needed >> 20)
                if not plain
                else RankMemory(
                    rank_mib=needed >> 20,
                    weights_bytes=variable_bytes(self.model.weights),
                    gradient_bytes=variable_bytes(self.model.trainable_variables),
                    state_bytes=optimizer_bytes(self.model),
                )
            )
            control.request("memory", config.limits.stall_limit_s, **about.to_json())
        control.beat(0, "join the ranks")
        self._whole = context.communicator(arena_bytes=arena_bytes(self.model))  # of ranks and parameter servers
        self._whole.deadline_s = config.limits.stall_limit_s
        self.communicator = self._whole.group(range(config.ranks.num_ranks)) if config.num_servers else self._whole

    def to_score(self) -> keras.Model:
        """The model to validate, with its weights now."""
        return self.model

    def close(self) -> None:
        """End the exchanges of gradients."""
        self.exchange.close()

    def abort(self, error: BaseException) -> None:
        """End the exchange, whose thread may wait for ranks that will never come."""
        self._whole.abort(str(error))


class RankModel(JoinedModel):
    """A model whose optimizer sums the gradients of all ranks. `rows` are the rank's samples of each global batch."""

    def __init__(
        self,
        context: RankContext,
        config: TrainConfig,
        plan: Plan,
        signature: Signature,
        rows: int,
        non_finite: NonFinitePolicy,
        metric: str | None = None,
    ) -> None:
        groups = config.step.lane_groups
        self._plan, self._signature = plan, signature
        self._copy: keras.Model | None = None
        self._way = way = exchanging(config, context)
        rows = way.rows(rows)
        with way.scope():
            super().__init__(context, config, plan, signature, rows, groups, metric)
        way.check_callbacks(self.callbacks)
        self._own_step = self.model.train_step
        self._others: list[Exchange] = []  # of optimizers other than that of compile
        self._step: RankStep | CanonicalStep | OwnStep
        self._of_tensorflow = way.own_step(self.model, self.communicator, non_finite, self.prepared.group_rows)
        if self._of_tensorflow is not None:
            self._step, self.exchange = self._of_tensorflow, self._of_tensorflow.exchange
            self.strategy = way.between_steps(self.model, self.exchange)
            return
        make = way.exchange_maker(self._whole)
        self._step = distributed(config, plan, self.prepared, self.communicator, rows, groups, non_finite, make)
        self.exchange = exchange_of(self.model.optimizer)
        self._others = [exchange_of(one) for one in others_of(self.model)]
        self.strategy = way.between_steps(self.model, self.exchange)
        self.tables = Tables.of(self.model, self.communicator)

    def install_step(self) -> None:
        """Give the model the train step that computes this rank's part of a global batch."""
        adds = self.strategy.adds
        group = adds.group(range(adds.num_ranks))
        group.deadline_s = self._config.limits.stall_limit_s
        self._step.install(self.model, group)
        self.strategy.install(self.model)
        if self.tables is not None:
            self.tables.install()

    def check_rows(self, batch: Callable[[], Any]) -> None:
        """Raise ConfigError if ranks would train another model than one rank; `batch` is the next step's, as of fit.
        Checked on several ranks, and where a rank takes its rows in parts. A collective.
        """
        config = self._config
        parts = self.communicator.num_ranks > 1 or config.step.micro_batches > 1
        parts = parts or config.exactness.canonical or self._of_tensorflow is not None
        if not parts or not self._way.sums_gradients or ready_model(config.model.model) is not None:
            return
        self.strategy.complete()
        model = self.to_score()  # under a strategy of TensorFlow a copy outside of it
        own_step = self._own_step if model is self.model else model.train_step
        steps = Steps(model, own_step, optimizers_of(model), self._alone, config.data.seed)
        rows = some_rows(batch(), self.strategy.data.on_host)
        with self.strategy.whole_weights():
            check_row_means(steps, rows, config.model.model)
            with self._alone(model):
                check_metric_sums(model, rows, config.model.model)

    @contextmanager
    def _alone(self, model: keras.Model) -> Iterator[None]:
        """While this is open, the layers of `model` call no other rank."""
        with plain_lookups(model), self.strategy.alone():
            yield

    def fit(
        self,
        dataset: tf.data.Dataset,
        steps: int,
        callbacks: RunCallbacks,
        *,
        epoch: int = 0,
        pipeline: FeedPipeline | None = None,
    ) -> None:
        """Train `steps` optimizer steps as one epoch of Keras. Raises the first cause of a failure.

        `dataset` are the rank's batches: those of `pipeline`, if it is given.
        """
        micro_batches = self._config.step.micro_batches
        # Keras restarts a dataset of known length at the end of an epoch, and would read it twice.
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        try:
            if self._of_tensorflow is not None:
                self._of_tensorflow.fit(dataset, steps, callbacks, epoch)
                return
            self.model.fit(
                to_device(split(dataset, micro_batches).apply(endless)),
                initial_epoch=epoch,
                epochs=epoch + 1,
                steps_per_epoch=steps * micro_batches,
                callbacks=callbacks,
                verbose=0,
                shuffle=False,
            )
        except Exception as error:
            # TensorFlow repeats only the text of an exception that Python code raised.
            failed_input = None if pipeline is None else pipeline.failure
            of_tables = None if self.tables is None else self.tables.error
            of_others = next((fault for one in self._others if (fault := one.fault())), None)
            cause = self.exchange.fault() or of_others or self._step.error or of_tables or failed_input or error
            if cause is error:
                raise
            raise cause from None

    def to_score(self) -> keras.Model:
        """The model to validate: itself, or under a strategy of TensorFlow a copy outside of it, with its weights now:
        ranks score rows of unequal number, and TensorFlow's metrics would wait for each other.
        """
        if not self._way.scores_a_copy:
            return self.model
        if self._copy is None:
            data, extra = self._config.data, self._config.model.extra
            options = ModelOptions(seed=data.seed, tasks=data.tasks, extra=extra)
            self._copy = build(self._config.model.model, self._signature, options).model
            self._copy.jit_compile = False
            build_all(self._copy, self._signature, 1)  # its metrics too: a rank may have no rows to score
        for variable, trained in zip(self._copy.weights, self.model.weights, strict=True):
            variable.assign(view_of(trained))
        return self._copy

    def finalize(self) -> None:
        """Do what Keras' `fit` does last: with `use_ema`, the averages become the weights."""
        if self._of_tensorflow is not None:
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
            return
        finalize(self.model.optimizer, self.model.trainable_variables)
        for other in others_of(self.model):
            finalize(other, other._trainable_variables)

    def close(self) -> None:
        super().close()
        for other in self._others:
            other.close()

    def abort(self, error: BaseException) -> None:
        self.exchange.error = self.exchange.error or error  # closing it then waits for no rank
        super().abort(error)
