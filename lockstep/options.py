"""The options of the public calls, so that editors complete them and type checkers refuse others.

They are the fields of the configurations, which explain and check them; a test compares names and types.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from lockstep.etl.choices import Source, Store, Weights
from lockstep.features.images.choices import Fit
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import Compression, Format
from lockstep.training.config.options import FoldOptions, TrainOptions

__all__ = ["FoldOptions", "ImagesOptions", "InputOptions", "LogsOptions", "TrainOptions"]


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
    unlabelled: bool
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
    delimiter: str | None
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
