"""What the driver of a run and its ranks say to each other, as types; on the wire each is a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.training.config import TrainConfig
from lockstep.training.control.protocol import Message
from lockstep.training.control.task import CommOrder


@dataclass(frozen=True, kw_only=True)
class TrainOrder(Message):
    """What a rank is asked to train."""

    config: TrainConfig
    plan: Mapping[str, Any]
    """The plan's identity."""
    comm: CommOrder = field(default_factory=CommOrder)
    shares: tuple[int, ...] | None = None
    """Lanes of each rank, where they are not equal."""
    first_weights: str | None = None
    """The URL of a new run's first weights."""
    model_function: str | None = None
    """The model's function as a text, where ranks cannot import it."""
    metric: str | None = None
    """--metric of a search, which the model must have."""
    suspect: int | None = None
    """The batch in which a rank of the generation before died: its sample ids are reported."""


@dataclass(frozen=True, kw_only=True)
class SizeOrder(Message):
    """What a rank of a dry run is asked to build and measure."""

    config: TrainConfig
    plan: Mapping[str, Any]
    """The plan's identity."""
    rows: int
    """The rows of the largest rank's batch."""
    timed: bool = False
    """Whether it also measures steps."""


@dataclass(frozen=True, kw_only=True)
class ModelSize(Message):
    """What a model is and needs on a rank."""

    parameters: int
    weights_bytes: int
    gradient_bytes: int
    checkpoint_bytes: int
    rank_bytes: int
    """The most resident memory of a rank, without what layers keep for the backward pass."""
    kept_bytes: int | None
    """What layers keep of a step, without loops; None with sharded tables, whose rows come from other ranks, and with a
    train_step of the model's own."""
    metrics: list[str]
    step_s: float | None = None
    """Seconds of a step on one rank with all cores of this host; None if it was not asked for."""


@dataclass(frozen=True, kw_only=True)
class Restore(Message):
    """The driver's answer to a rank that asks from where it trains."""

    checkpoint: str | None
    """The URL of the checkpoint; None at the start."""
    step: int
    staging: str
    """The URL of the folder for what ranks upload."""
    generation: int
    parent: Mapping[str, Any] | None
    """The checkpoint's reference, as the claim has it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReport(Message):
    """A rank's part of a checkpoint, which it has uploaded."""

    step: int
    files: list[dict[str, Any]]
    """{name, bytes, sha256} of each file."""
    tensors: dict[str, Any] = field(default_factory=dict)
    audit: list[dict[str, Any]] = field(default_factory=list)
    """{path, bytes, sha256} of each part of the audit."""
    state: dict[str, Any] = field(default_factory=dict)
    base: int | None = None
    """The step of this generation's checkpoint to which this one is the difference."""


@dataclass(frozen=True, kw_only=True)
class RankResult(Message):
    """What a rank says at its end; the driver takes rank 0's."""

    steps: int
    left: bool = False
    """Whether the rank has left after a checkpoint, before the end of the run; then it says no more."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The metrics of the last epoch, over all ranks."""
    samples: int = 0
    seconds: float = 0.0
    """Since the first step of this generation, without validation."""
    first_step_s: float | None = None
    samples_per_s: float | None = None
    validation_s: float = 0.0
    stopped_by: str | None = None
    watching: list[str] = field(default_factory=list)
    """Callbacks that could have ended the run."""
    left_over: list[str] = field(default_factory=list)
    """Ids (hex) of samples after the last whole batch; of rank 0 only."""
    class_counts: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class MetricRows(Message):
    """Rows of a rank for the run's metrics, each with its `kind`."""

    rows: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RankMemory(Message):
    """What a rank of the built model needs."""

    rank_mib: int
    weights_bytes: int = 0
    gradient_bytes: int = 0
    """The bytes of all gradients."""
    state_bytes: int = 0
    """What the whole optimizer keeps."""


@dataclass(frozen=True, kw_only=True)
class Suspect(Message):
    """The sample ids (hex) of a rank's part of the batch that TrainOrder.suspect asks for."""

    step: int
    samples: list[str]


@dataclass(frozen=True, kw_only=True)
class MadePlan(Message):
    """The communication plan that the ranks have calibrated."""

    plan: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BestCheckpoint(Message):
    """The driver's answer to a rank that asks for the best checkpoint."""

    checkpoint: str | None
    """Its URL; None if no epoch has been judged."""
