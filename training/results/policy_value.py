"""What the policy of a run would have earned where another one decided: the caller's side, and the entry of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import PurePosixPath
from typing import Any

from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError, require
from lockstep.storage.urls import absolute
from lockstep.training.control.context import RankContext
from lockstep.training.control.protocol import Message
from lockstep.training.launch.session import Launch
from lockstep.training.plan.datasets import rows_of
from lockstep.training.rank import runtime
from lockstep.training.results.evaluate import Scored, aligned, clusters_of, number, span
from lockstep.training.results.stored_model import StoredModel, task_of
from lockstep.training.run import notes
from lockstep.training.scoring.scores import BATCH_ROWS
from lockstep.training.scoring.slices import NUMBERS

ENTRY = "lockstep.training.results.policy_value:main"


@dataclass(frozen=True)
class PolicyRequest(Message):
    """Whose policy to judge, on which decisions. Raises ConfigError without rows or ranks."""

    run: str
    dataset: str
    split: str
    _: KW_ONLY
    reward: str
    """The stored column of what the logged action earned."""
    propensity: str
    """The stored column of the probability with which the action was taken."""
    num_ranks: int = 1
    batch: int = BATCH_ROWS
    """Rows that a rank computes at a time."""
    clusters: str | None = None
    """A stored column: decisions of one of its values depend on each other. None: that of a split by group."""
    checkpoint: int | str | None = None
    """`last`, `best` or a step; None: the newest model, else the weights of the last checkpoint."""

    def __post_init__(self) -> None:
        got = f"{self.batch} rows, {self.num_ranks} ranks"
        require(self.batch >= 1 and self.num_ranks >= 1, "--batch or --num-ranks", got, "1 or more")
        for name in ("run", "dataset"):
            object.__setattr__(self, name, absolute(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class PolicyOrder(Message):
    """What ranks are asked to judge."""

    request: PolicyRequest
    members: list[StoredModel]
    """One."""


def evaluate_policy(request: PolicyRequest, launch: Launch) -> dict[str, Any]:
    """Estimate what the policy of a run would have earned on logged decisions, whose label is the action.

    Returns {run, model, dataset, split, reward, propensity, clusters} and what
    lockstep.training.scoring.off_policy.policy_value returns. The reward model of DR is the mean reward of each action
    on the run's training rows. Prints notes on doubtful values to standard error. Raises ConfigError and
    NotFoundError, where possible before any rank is started; DataError for propensities outside of (0, 1].
    """
    manifest = load_dataset(request.dataset)
    rows_of(manifest, request.split)
    _check_columns(request, Schema.from_json(manifest.schema))
    clusters = clusters_of(manifest, request.clusters)[1]
    stored = Scored.of(request.run, request.checkpoint, manifest).stored
    order = PolicyOrder(request=PolicyRequest.from_json({**request.to_json(), "clusters": clusters}), members=[stored])
    found = launch(task_of(ENTRY, order, [stored]), request.num_ranks)[0]
    notes.show(found["doubts"])
    head = {"run": request.run, "model": stored.url, "dataset": request.dataset, "split": request.split}
    return head | {"reward": request.reward, "propensity": request.propensity, "clusters": clusters} | found


def _check_columns(request: PolicyRequest, schema: Schema) -> None:
    """Raise ConfigError unless the reward and the propensity are stored numbers, and the label is an action."""
    stored = [field.name for field in schema if field.shape in ((), (1,)) and field.dtype in NUMBERS]
    for flag, name in (("--reward", request.reward), ("--propensity", request.propensity)):
        require(name in stored, flag, name, f"a stored column of one number a row: {', '.join(stored) or '(none)'}")
    label = schema.label
    if label is None or not label.num_classes:
        raise ConfigError(
            "the dataset has no logged actions",
            got="no label" if label is None else f"the label `{label.name}`, which has no num_classes",
            allowed="a label of classes: the number of the action that was taken",
            next_step="Declare the action as the label, an int64 with num_classes (docs/logged-decisions.md).",
        )


def summary(result: Mapping[str, Any]) -> str:
    """A small table of a result."""
    words = {"logged": "as logged", "ips": "IPS", "snips": "SNIPS", "dr": "DR"}
    table = [["mean reward", "value", "95 % interval"]]
    table += [[words[name], number(one["value"]), span(one["interval"])] for name, one in result["values"].items()]
    head = f"{result['split']} of {PurePosixPath(result['dataset']).name}: {result['samples']} decisions"
    head += f", which count as {result['effective_samples']:.0f}; mean weight {result['mean_weight']['value']:.3f}"
    return "\n".join([head, *aligned(table)])


def main(context: RankContext) -> dict[str, Any]:
    """Judge this rank's share; rank 0 returns what policy_value returns, other ranks {}."""
    config = PolicyOrder.from_json(context.payload).members[0].config
    runtime.configure(context.world, precision=config.step.precision, seed=config.data.seed)
    from lockstep.training.results.policy_rank import run  # here, since it imports TensorFlow, which is set up now

    return run(context)
