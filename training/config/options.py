"""The options of a run by name and type, for the constructor of TrainConfig and the public calls that train.

A type checker cannot make keywords of the fields of several classes, so they stand here once more; a test compares
names and types with the parts, which explain and check them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from lockstep.training.comm.options import Backend
from lockstep.training.config.exactness import NonFinite, OnBadRecord
from lockstep.training.config.model import Value
from lockstep.training.config.ranks import Launcher, Switch
from lockstep.training.config.reading import BadImages, Verify
from lockstep.training.config.step import BatchNorm, Precision, ScalingRule
from lockstep.training.ways import Strategy
from lockstep.training.ways.pipeline import Schedule


class FoldOptions(TypedDict, total=False):
    """The options of cross_validate: fields of TrainConfig."""

    where: str | None
    init_from: str | None
    lora_rank: int
    ewc: float | None
    extra: Mapping[str, Value]
    seed: int
    validate: str | None
    early_stop: str | None
    max_steps: int | None
    lanes: int | None
    window_bytes: int
    interleave: int
    cache_groups: int | None
    read_ahead_bytes: int
    cache: str | None
    cache_bytes: int
    verify: Verify
    bad_images: BadImages
    augment: str
    batchnorm: BatchNorm
    learning_rate: float | None
    learning_rate_scaling: ScalingRule
    base_batch: int | None
    warm_up_epochs: float
    micro_batches: int
    strategy: Strategy
    clients: str | None
    client_fraction: float
    local_epochs: int
    update_clip: float | None
    noise_multiplier: float
    privacy_delta: float | None
    staleness: int | None
    servers: int | None
    gradient_noise: float
    devices: int | None
    delay: int
    sync_every: int
    sync_until_epoch: int
    outer_learning_rate: float
    outer_momentum: float
    tensor_parallel: int
    zero: int
    pipeline_stages: int
    schedule: Schedule
    cut_after: str
    shard_embeddings: int | None
    compression: str
    precision: Precision
    checkpoint_every: int | str
    keep_checkpoints: int
    keep_every: int | None
    keep_best: str | None
    non_finite: NonFinite
    on_bad_record: OnBadRecord
    canonical: bool
    audit: bool
    min_ranks: int | None
    max_ranks: int | None
    slots_file: str | None
    spare_executors: int
    balance: bool
    tls: Switch
    backend: Backend
    trust_network: str | None
    start_limit_s: float
    stall_limit_s: float
    stop_grace_s: float
    heartbeat_limit_s: float | None
    max_restarts: int
    max_restarts_per_hour: int


class TrainOptions(FoldOptions, total=False):
    """The options of train and tune: fields of TrainConfig."""

    split: str
    since: str | None
    mix: Sequence[int] | None
    tasks: str | None
    replay: float | None
    validate_every: int


class MoreOptions(TrainOptions, total=False):
    """The options that a run may have; it must have the others that TrainConfig names."""

    launcher: Launcher


class Changes(MoreOptions, total=False):
    """All options of a run, each of which `TrainConfig.but` may change."""

    datasets: str | Iterable[str]
    run: str
    model: str
    num_ranks: int
    global_batch: int
    epochs: int
