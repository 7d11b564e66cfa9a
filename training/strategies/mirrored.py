"""TensorFlow's own strategies: tf.distribute adds the gradients, all else is as with ours.

`mirrored` divides a rank's batch over devices of its process, `multi-worker-mirrored` is a worker on each rank. A step
is a custom loop's (`strategy.run`), since `fit` of Keras 3.15 fails under MultiWorkerMirroredStrategy. Unlike in `fit`,
moving averages are means over replicas, and a seed generator draws by seed, step and replica: under `fit` replica 0's
averages are saved, and all replicas drop the same units. docs/decisions/071-pytorch.md.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.storage.errors import ConfigError
from lockstep.training import ways
from lockstep.training.comm.base import Communicator
from lockstep.training.comm.hosts import require_trust
from lockstep.training.comm.tf.cluster import JOB, addresses, written
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.exchange.agreement import NonFinitePolicy
from lockstep.training.exchange.exchange import Array, Exchange
from lockstep.training.steps.batchnorm import batchnorm_as, statistics_of
from lockstep.training.steps.draws import drawn_from, draws_of_step, step_of
from lockstep.training.steps.losses import Denominators, weigh_tests, weighed_by_rows
from lockstep.training.steps.model_state import SEEDS, variables_of
from lockstep.training.steps.over_ranks import StepOverRanks, step_over_ranks
from lockstep.training.steps.patching import swapped
from lockstep.training.strategies.every_step import Exchanging


def start_strategy(config: TrainConfig, context: RankContext) -> tf.distribute.Strategy:
    """TensorFlow's strategy for this rank; call it before the first tensor. With several workers it is a collective:
    the ranks have joined before, since TensorFlow's servers wait for an absent one without limit.

    Raises ConfigError for devices that are not there, and without a network to trust.
    """
    gpus = len(tf.config.list_physical_devices("GPU"))
    if isinstance(config.way, ways.Mirrored):
        return tf.distribute.MirroredStrategy(_devices(config.way.devices, gpus))
    world, address = context.world, require_trust(config.ranks.trust_network, "multi-worker-mirrored")
    context.communicator()
    with addresses(world.rank, world.num_ranks, address, context.control.rendezvous) as table:
        cluster = {JOB: [written(host, port) for host, port in table]}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": JOB, "index": world.rank}})
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=config.limits.stall_limit_s)
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def _devices(wanted: int | None, gpus: int) -> list[str]:
    if gpus == 0:
        count = wanted or 1
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    elif (count := wanted or gpus) > gpus:
        raise ConfigError(
            "this rank has too few GPUs for --strategy mirrored",
            got=f"--devices {count}",
            allowed=f"1 to {gpus}",
            next_step="Lower --devices, or give the rank more GPUs (docs/gpu.md).",
        )
    return [f"{'GPU' if gpus else 'CPU'}:{number}" for number in range(count)]


def share_of_replica(config: TrainConfig, strategy: tf.distribute.Strategy, rows: int) -> int:
    """The rows of a replica, of a rank's `rows`. Raises ConfigError unless all replicas of all ranks have equally many:
    TensorFlow adds means of losses.
    """
    replicas = strategy.num_replicas_in_sync
    here = len(strategy.extended.worker_devices)
    if rows % here or rows // here * replicas != config.data.global_batch:
        raise ConfigError(
            f"--strategy {config.step.strategy} cannot divide a global batch into equal parts",
            got=f"{rows} of {config.data.global_batch} rows on a rank with {here} of {replicas} devices",
            allowed="equally many rows on each device",
            next_step="Choose --global-batch and --lanes as multiples of the number of devices.",
        )
    return rows // here


class TensorflowExchange(Exchange):
    """What ranks agree on after a step whose gradients TensorFlow's strategy has added."""

    sums_metrics = True

    def ends(self, losses: Sequence[Any], wrong: Sequence[Any], names: Sequence[str]) -> None:
        """End a step: each replica's part of the loss (), and which of its gradients are not finite (names,).

        A collective. Raises NonFiniteError on every rank; the run ends, and no checkpoint has the step.
        """
        try:
            if self.error is not None:
                raise self.error
            own = np.any([np.asarray(one) for one in wrong], axis=0)
            self._names, self._here = tuple(names), [name for name, bad in zip(names, own, strict=True) if bad]
            loss = np.asarray(sum(float(part) for part in losses))
            words = np.array(self._words(loss))
            words[1] = bool(self._here)
            self.communicator.all_reduce(words)
            self._agree(words.tolist(), ["a gradient"] if words[1] else [], names, loss)
        except BaseException as error:
            self._fail(error)
            raise

    def close(self, reason: BaseException | None = None) -> None:
        """End the exchange as `Exchange.close` does; ranks end together, since TensorFlow's servers end with the first
        that is missing.
        """
        if self.error is None:
            self.communicator.barrier()
        super().close(reason)


class TensorflowStep:
    """A step of a built model whose variables `strategy` has made, each replica with its share of the rank's rows."""

    error: BaseException | None = None
    """Always None: what fails is raised by TensorFlow, or by the exchange."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        exchange: TensorflowExchange,
        *,
        seed: int,
        group_rows: int | None,
        name: str,
    ) -> None:
        """`group_rows`: rows of a lane group of `ghost` statistics; None: each replica's own. `name`: the flag."""
        if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ConfigError(
                f"--strategy {name} takes no optimizer that scales the loss",
                got=type(model.optimizer).__name__,
                allowed="one without loss scaling",
                next_step="Use --strategy sync.",
            )
        self._strategy, self._model, self._seed = strategy, model, seed
        self.exchange = exchange
        self._group_rows, self._flag = group_rows, f"--strategy {name}"
        self._seeds, self._statistics = variables_of(model, SEEDS), statistics_of(model)
        self._names: list[str] = []
        self._replica = threading.local()  # what a replica's trace has seen; each is traced in a thread of its own
        self._function = tf.function(self._step, autograph=False)

    def install(self, model: keras.Model, communicator: Any) -> None:
        """Change the model's step, as `RankStep.install` does."""
        weigh_tests(model)

    def fit(self, dataset: tf.data.Dataset, steps: int, callbacks: Any, epoch: int) -> None:
        """Train `steps` batches of `dataset` as one epoch, with the calls of Keras' `fit`."""
        model = self._model
        model.stop_training = False
        model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        for number, batch in zip(range(steps), dataset, strict=False):
            callbacks.on_train_batch_begin(number)
            losses, wrong, logs = self._function(batch)
            self.exchange.ends(self._of_replicas(losses), self._of_replicas(wrong), self._names)
            logs = {name: self._of_replicas(value)[0] for name, value in logs.items()}
            callbacks.on_train_batch_end(number, logs)
            if model.stop_training:
                break
        callbacks.on_epoch_end(epoch, model.get_metrics_result())

    def _of_replicas(self, value: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._strategy.experimental_local_results(value)
        return found

    def _step(self, data: Any) -> Any:
        model, optimizer = self._model, self._model.optimizer
        plain_scale, plain_apply = optimizer.scale_loss, optimizer.apply

        def scale_loss(loss: Any) -> Any:
            self._replica.losses.append(loss)
            return plain_scale(loss)

        def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            variables = model.trainable_variables if trainable_variables is None else list(trainable_variables)
            present = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
            self._names = [f"the gradient of {variable.path}" for _, variable in present]
            self._replica.wrong.append(tf.stack([_is_wrong(grad) for grad, _ in present]))
            plain_apply(grads, trainable_variables)

        # Around all replicas: their traces take turns, and each would find the other's changes.
        with ExitStack() as stack:
            stack.enter_context(swapped(optimizer, "scale_loss", scale_loss))
            stack.enter_context(swapped(optimizer, "apply", apply))
            stack.enter_context(weighed_by_rows(model, data))
            stack.enter_context(batchnorm_as(model, group_rows=self._group_rows))
            stack.enter_context(Denominators(None, 1.0, refused=self._flag).of(model))
            return self._strategy.run(self._on_replica, (data,))

    def _on_replica(self, data: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Runs in each replica; `data` are the rank's rows, of which it takes a share."""
        seen, replicas = self._replica, len(self._strategy.extended.worker_devices)
        seen.losses, seen.wrong = [], []
        context = tf.distribute.get_replica_context()
        number = tf.convert_to_tensor(context.replica_id_in_sync_group)
        mine = tf.nest.map_structure(
            lambda x: tf.gather(tf.reshape(x, (replicas, -1, *x.shape[1:])), number % replicas), data
        )
        words = [step_of(self._model.optimizer), tf.cast(number, tf.int64)]
        for place, variable in enumerate(self._seeds):
            variable.assign(drawn_from(self._seed, f"seed generator {place} of a unit", words, variable.dtype))
        parts = StepOverRanks(None, 1.0, refused=self._flag)
        with draws_of_step(self._seed, words), step_over_ranks(parts):
            logs = self._model.train_step(mine)
        if len(seen.wrong) != 1:
            raise ConfigError(
                f"the model's train_step does not suit {self._flag}",
                got=f"{len(seen.wrong)} calls of optimizer.apply_gradients",
                allowed="one call a step",
                next_step="Call self.optimizer.apply_gradients once, or use --strategy sync.",
            )
        if self._statistics:
            values = [tf.identity(variable.value) for variable in self._statistics]
            means = context.all_reduce(tf.distribute.ReduceOp.MEAN, values)
            for variable, mean in zip(self._statistics, means, strict=True):
                variable.assign(mean)
        loss = seen.losses[0] if seen.losses else tf.zeros(())
        return tf.cast(loss, tf.float32), seen.wrong[0], logs


def _is_wrong(grad: Any) -> tf.Tensor:
    values: Array = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(values)))


class OfTensorflow(Exchanging):
    """The ways of --strategy mirrored and multi-worker-mirrored."""

    scores_a_copy = True

    def __init__(self, config: TrainConfig, context: RankContext) -> None:
        super().__init__(config, context)
        context.control.beat(0, "start TensorFlow's strategy")
        self.strategy = start_strategy(config, context)

    def scope(self) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = self.strategy.scope()
        return scope

    def rows(self, rows: int) -> int:
        return share_of_replica(self._config, self.strategy, rows)

    def own_step(
        self, model: keras.Model, communicator: Communicator, non_finite: NonFinitePolicy, group_rows: int | None
    ) -> TensorflowStep:
        exchange = TensorflowExchange(communicator, non_finite=non_finite)
        seed, name = self._config.data.seed, self._config.step.strategy
        return TensorflowStep(self.strategy, model, exchange, seed=seed, group_rows=group_rows, name=name)


WAY = OfTensorflow
