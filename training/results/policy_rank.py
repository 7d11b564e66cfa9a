"""One rank of the evaluation of a policy: the mean reward of each action, then this rank's share of the decisions."""

from __future__ import annotations

import json
import math
from typing import Any

import keras
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.batches.feed import eval_batches
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.comm.base import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.protocol import OPENING, json_safe
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.selecting import selection_of
from lockstep.training.results.policy_value import PolicyOrder
from lockstep.training.results.predict_rank import Carried, Carrying
from lockstep.training.scoring.estimates import Floats
from lockstep.training.scoring.naive_baseline import SMOOTHING
from lockstep.training.scoring.off_policy import Decisions, policy_value
from lockstep.training.scoring.score_split import takes_logits
from lockstep.training.scoring.scores import gathered_on_first
from lockstep.training.scoring.slices import ClusterColumn

COLUMNS = 5  # of a decision


def run(context: RankContext) -> dict[str, Any]:
    """Judge this rank's decisions without any collective, then put those of all ranks together."""
    order, beat = PolicyOrder.from_json(context.payload), context.control.beat
    request, (member,) = order.request, order.members
    config = member.config
    beat(0, OPENING)
    also = [name for name in (request.reward, request.propensity, request.clusters) if name is not None]
    split = OpenSplit.at(request.dataset, request.split, as_trained_on=config.data.split, also=also)
    model = member.load(split.manifest, split.encoder.signature)
    actions = split.encoder.signature.num_classes or 0
    comm = context.communicator()
    comm.deadline_s = config.limits.stall_limit_s
    beat(0, "count the rewards of actions")
    rewards = _mean_rewards(config, request.reward, actions, comm)
    clusters = None if request.clusters is None else ClusterColumn(request.clusters)
    parts = [np.empty((0, COLUMNS))]
    carrying = Carrying(split.encoder, also)
    for step, rows in enumerate(eval_batches(split.reader, carrying, comm.rank, comm.num_ranks, request.batch), 1):
        beat(step, "evaluate")
        assert isinstance(rows, Carried) and rows.y is not None
        shares = _shares(model, rows.x, actions)
        taken = np.arange(len(rows.y)), rows.y.astype(np.int64)
        reward, propensity = (_numbers(rows.stored, name) for name in (request.reward, request.propensity))
        parts.append(np.stack([reward, propensity, shares[taken], shares @ rewards, rewards[taken[1]]], axis=1))
        if clusters is not None:
            clusters.take(rows.stored)
    beat(1, "put the ranks' decisions together")
    mine = np.concatenate(parts)
    columns = [mine] if clusters is None else [mine, clusters.values()[:, None]]
    table = gathered_on_first(np.hstack(columns), comm)
    if comm.rank:
        return {}
    _check(table, request.propensity)
    decisions = Decisions(*(np.ascontiguousarray(column) for column in table.T[:COLUMNS]))
    return json_safe(policy_value(decisions, None if clusters is None else table[:, COLUMNS]))


def _shares(model: keras.Model, x: dict[str, NDArray[Any]], actions: int) -> Floats:
    """The policy's probability of each action, (n, actions)."""
    outputs = np.asarray(model.predict_on_batch(x), np.float64)
    if outputs.ndim != 2 or outputs.shape[1] != actions:
        raise ConfigError(
            "this model is no policy",
            got=f"outputs of shape {outputs.shape}",
            allowed=f"a probability of each of the {actions} actions for each row",
            next_step="Train --model policy, or a classifier of the action.",
        )
    if takes_logits(model):
        outputs = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    shares: Floats = outputs / outputs.sum(axis=1, keepdims=True)
    return shares


def _numbers(rows: pa.RecordBatch, name: str) -> Floats:
    """A stored column (n,); a null is NaN."""
    column: Any = rows.column(name)
    flat = column.flatten() if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type) else column
    numbers: Floats = flat.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return numbers


def _mean_rewards(config: TrainConfig, reward: str, actions: int, comm: Communicator) -> Floats:
    """The mean reward of each action on the run's training rows, of seldom ones drawn to that of all: (actions,).

    Blocks are added exactly, so the sums are the same at any number of ranks. A collective.
    """
    trained_on = TrainingSet.at(
        config.data.datasets, config.data.split, config.data.mix, selection=selection_of(config), also=[reward]
    )
    label = trained_on.encoder.schema.label
    assert label is not None
    mine: list[list[float]] = []  # of each block: the sums of all actions, then their rows
    for reader in trained_on.readers:
        blocks = reader.table.num_blocks
        for block in range(comm.rank * blocks // comm.num_ranks, (comm.rank + 1) * blocks // comm.num_ranks):
            rows = reader.read(reader.table.run(block))
            taken, earned = _numbers(rows, label.name).astype(np.int64), _numbers(rows, reward)
            sums = np.bincount(taken, earned, minlength=actions), np.bincount(taken, minlength=actions)
            mine.append(np.concatenate(sums).tolist())
    every = [block for part in comm.all_gather_bytes(json.dumps(mine).encode()) for block in json.loads(part)]
    totals = np.array([math.fsum(column) for column in zip(*every, strict=True)])
    earned_of, rows_of = totals[:actions], totals[actions:]
    usual = math.fsum(earned_of) / max(1.0, rows_of.sum())
    means: Floats = (earned_of + SMOOTHING * usual) / (rows_of + SMOOTHING)
    return means


def _check(table: Floats, name: str) -> None:
    """Raise DataError for decisions that cannot be weighed."""
    propensities = table[:, 1]
    wrong = ~((propensities > 0) & (propensities <= 1)) | ~np.isfinite(table[:, 0])
    if wrong.any():
        first = table[wrong][0]
        raise DataError(
            f"{int(wrong.sum())} of {len(table)} decisions cannot be weighed",
            got=f"a propensity of {first[1]} with the reward {first[0]}",
            allowed=f"`{name}` above 0 and at most 1, and a finite reward, in each row",
            next_step="Leave these rows out when the dataset is written, or correct the columns.",
        )
