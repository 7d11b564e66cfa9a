"""The options of the public calls, so that editors complete them and type checkers refuse others.

They are the fields of the configurations, which explain and check them; a test compares names and types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from lockstep.etl.choices import Source, Store, Weights
from lockstep.features.images.choices import Fit
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import Compression, Format
from lockstep.training.comm.options import Backend
from lockstep.training.config import (
    BadImages,
    BatchNorm,
    NonFinite,
    OnBadRecord,
    Precision,
    ScalingRule,
    Strategy,
    Switch,
    Value,
    Verify,
)


class FoldOptions(TypedDict, total=False):
    """The options of cross_validate: fields of TrainConfig."""

    init_from: str | None
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
    mix: Sequence[int] | None
    validate_every: int


class InputOptions(TypedDict, total=False):
    """The options that write_logs and write_images share: fields of OutputConfig."""

    fmt: Format
    compression: Compression
    split: str
    shard_bytes: int
    row_group_bytes: int | None
    seed: int
    sample: str | None
    weights: Weights
    quarantine: str | None
    append_to: str | None
    clean: bool
    petastorm: bool
    bake: bool
    label_window: int | None
    max_bad: str
    input_root: str | None
    split_bytes: int


class LogsOptions(InputOptions, total=False):
    """The options of write_logs: fields of LogsConfig."""

    log_format: str
    label: str | None
    schema: str | Schema | None
    id_columns: str | Iterable[str]
    columns: str | Iterable[str]
    time_columns: str | Iterable[str]
    null_texts: str | Iterable[str]
    quoted_newlines: bool
    visitor_column: str | None
    time_column: str | None
    status_column: str | None
    method_column: str | None
    target_column: str | None
    query_column: str | None
    request_column: str | None
    page_suffixes: str | Iterable[str]
    asset_suffixes: str | Iterable[str]


class ImagesOptions(InputOptions, total=False):
    """The options of write_images: fields of ImagesConfig."""

    source: Source
    image_size: tuple[int, int] | None
    fit: Fit
    rotate: int
    channels: int | None
    store: Store
    num_classes: int | None
    classes: tuple[str, ...] | None
    image_column: str
    label_column: str
    image_arrays: str | Iterable[str]
    label_arrays: str | Iterable[str]
    max_pixels: int
