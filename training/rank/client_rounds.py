"""Trains the rounds of a federated run in one rank: its clients train in turn, then ranks average their changes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf

from lockstep.features.encode.encoder import Encoded
from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training import ways
from lockstep.training.batches.audit_log import AuditLog
from lockstep.training.batches.clients import ClientRows, check_client_field, read_table
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.plan.client_plan import ClientPlan, RunPlan
from lockstep.training.rank.callbacks import RunCallbacks
from lockstep.training.rank.class_counts import ClassCounts
from lockstep.training.rank.metrics import StepClock
from lockstep.training.rank.opening import RankData
from lockstep.training.rank.prepare import JoinedModel
from lockstep.training.rank.validation import Beats
from lockstep.training.steps.draws import draws_of_step
from lockstep.training.steps.model_state import as_floats, derive_seeds
from lockstep.training.strategies.federated import Federated, check_normalisation
from lockstep.training.strategies.local_steps import LocalExchange

MEMORY_SHARE = 0.25
"""The share of a host's free memory that the samples of its ranks' clients may take; while they are read they take
twice as much."""


class ClientModel(JoinedModel):
    """The model of a rank that trains clients; ranks meet at the ends of rounds only."""

    def __init__(
        self, context: RankContext, config: TrainConfig, plan: RunPlan, signature: Signature, metric: str | None
    ) -> None:
        super().__init__(context, config, plan, signature, min(plan.global_batch, plan.total), None, metric)
        check_normalisation(self.model, config.step.batchnorm)
        self.local_exchange = self.exchange = LocalExchange(self.communicator, 1.0)
        self.local_exchange.part()
        way = config.way
        assert isinstance(way, ways.Federated)
        self.federated = self.strategy = Federated(
            self.model,
            self.local_exchange,
            learning_rate=way.outer_learning_rate,
            momentum=way.outer_momentum,
            clip=way.update_clip,
            noise_multiplier=way.noise_multiplier,
        )
        self._names = list(signature.features)
        self._seed = config.data.seed
        self._step = tf.function(self._traced, reduce_retracing=True)

    def _traced(self, words: Any, batch: Any) -> Any:
        with draws_of_step(self._seed, tf.unstack(words)):
            return self.model.train_step(batch)

    def train(self, rows: Encoded, *numbers: int) -> None:
        """One step of the model's own optimizer on a batch; `numbers` name it in the run, and decide what it draws."""
        others = [array for array in (rows.y, rows.weight) if array is not None]
        batch = ({name: rows.x[name] for name in self._names}, *others)
        self._step(tf.constant(numbers, tf.int64), tf.nest.map_structure(tf.convert_to_tensor, batch))

    def loss(self) -> float:
        """The mean loss of all rows since metrics were reset; 0 for a train_step without one."""
        return float(self.model.get_metrics_result().get("loss", 0.0))


class ClientRounds:
    """The rounds of one rank, which are steps and epochs at once. A client stays on one rank."""

    def __init__(self, context: RankContext, config: TrainConfig, data: RankData, counts: ClassCounts) -> None:
        self._context, self._config, self._data, self._counts = context, config, data, counts
        self.plan = plan = ClientPlan.of(data.order.plan, data.training.manifest)
        check_client_field(data.training.encoder.schema, plan.clients)
        self.audit: AuditLog | None = AuditLog() if config.exactness.audit else None
        self.joined = ClientModel(context, config, plan, data.signature, data.order.metric)
        if unseen := _callbacks_of_batches(self.joined.callbacks):
            raise ConfigError(
                f"a callback of the model {config.model.model} counts batches, which clients have on different ranks",
                got=", ".join(unseen),
                allowed="callbacks of epochs, which are rounds",
                next_step="Leave it out of the model's function.",
            )
        self.share = 1 / self.joined.communicator.num_ranks

    def begin(self, clock: StepClock) -> None:
        """Read this rank's clients."""
        control, world, reader = self._context.control, self._context.world, self._data.training.readers[0]
        control.beat(0, "read the table of clients")
        self._table = table = read_table(reader, self.plan.clients, self.joined.strategy.communicator)
        count = len(table.counts)
        if world.num_ranks > count:
            raise ConfigError(
                "there are more ranks than clients",
                got=f"{world.num_ranks} ranks, {count} clients in `{self.plan.clients}`",
                allowed=f"1 to {count} ranks",
                next_step=f"Use --num-ranks {count}, or another field for --clients.",
            )
        assert isinstance(self._config.way, ways.Federated)
        delta = self._config.way.privacy_delta
        if delta is not None and delta * count >= 1:
            raise ConfigError(
                "delta is too large to protect a client",
                got=f"--privacy-delta {delta}, {count} clients",
                allowed=f"less than {1 / count:g}: at 1 / clients, publishing one client at random would be private",
                next_step=f"Use --privacy-delta {0.1 / count:g} or less.",
            )
        self._mine = table.owners(world.num_ranks) == world.rank
        most = int(MEMORY_SHARE * psutil.virtual_memory().available / world.ranks_per_node)
        beat, mine = Beats(control, 0, "read"), np.flatnonzero(self._mine).tolist()
        self._rows = ClientRows(reader, self._data.training.encoder, table, mine, most, beat)
        self.joined.model.stop_training = False

    def check(self, step: int) -> None:
        """Do nothing: a client trains by itself, whose model is that of one rank."""

    def train(self, epoch: int, first: int, last: int, callbacks: RunCallbacks) -> None:
        """Train one round."""
        table, plan, federated = self._table, self.plan, self.joined.federated
        federated.begin_epoch(epoch, epoch + 1)
        self.joined.model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        callbacks.loop.step_begins()
        drawn = plan.drawn(epoch, len(table.counts))
        samples, trained = int(table.counts[drawn].sum()), 0
        beat = Beats(self._context.control, epoch, "round")
        audit: list[tuple[int, Any]] = []
        self._seen: list[Any] = [np.zeros(0, np.int64)]  # labels
        for number, client in enumerate(drawn[self._mine[drawn]].tolist()):
            beat(number, f"client {table.names[client]}, number")
            weight = 1.0 if plan.each else float(table.counts[client])
            federated.client_begins()
            derive_seeds(self.joined.model, self._config.data.seed, epoch, client)  # the same at any number of ranks
            audit += self._train_client(epoch, client)
            federated.client_ends(table.names[client], weight)
            trained += int(table.counts[client])
        if self.audit is not None:
            epochs = [np.full(len(ids), local, np.int64) for local, ids in audit]
            nothing = [np.zeros(0, np.int64)]
            ids = np.concatenate(nothing + [ids for _, ids in audit])
            self.audit.add_rows(epoch + 1, np.concatenate(nothing + epochs), ids)
        self._counts.add(epoch, np.concatenate(self._seen))
        loss = self.joined.loss() * trained / samples if trained else 0.0
        federated.round_ends(plan.client_fraction * len(table.counts) if plan.each else samples, plan.noise(epoch))
        self.joined.local_exchange.agree_alone(np.asarray(loss), [], ())
        callbacks.loop.step_ends(epoch)
        callbacks.on_epoch_end(epoch, as_floats(self.joined.model.get_metrics_result()))

    def forget(self, step: int) -> None:
        """Do nothing: an error names the client."""

    def end(self) -> None:
        """Do nothing: rounds read by clients, and none ahead."""

    def finalize(self) -> None:
        """Do nothing: the last round's weights are the result."""

    def samples(self, first: int, last: int) -> int:
        """Samples that all ranks train on in rounds first..last-1."""
        counts = self._table.counts
        rounds = (counts[self.plan.drawn(each, len(counts))].sum() for each in range(first, last))
        return int(sum(rounds)) * self.plan.local_epochs

    def left_over(self, step: int) -> list[str]:
        """None: each client trains on all its samples."""
        return []

    def _train_client(self, round_: int, client: int) -> list[tuple[int, Any]]:
        """Train a client's local epochs; returns (local epoch, sample ids) of each batch."""
        found, plan, count = [], self.plan, int(self._table.counts[client])
        for local in range(plan.local_epochs):
            order = plan.order(round_, client, local, count)
            for start in range(0, count, plan.global_batch):
                rows = self._rows.of(client, order[start : start + plan.global_batch])
                self.joined.train(rows, round_, client, local, start)
                if rows.y is not None:
                    self._seen.append(rows.y)
                found.append((local, rows.sample_id))
        return found


def _callbacks_of_batches(callbacks: list[Any]) -> list[str]:
    """Return the names of callbacks with a hook of batches."""
    plain = keras.callbacks.Callback
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    return [
        type(callback).__name__
        for callback in callbacks
        if any(getattr(type(callback), hook) is not getattr(plain, hook) for hook in hooks)
    ]
