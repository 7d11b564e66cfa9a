"""The two ends of every ETL job's writing: the folder in which a dataset grows, and the manifest that publishes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from etl import VERSION
from etl.petastorm.metadata import write_petastorm_metadata
from etl.split.leakage import Leakage
from etl.split.splits import SplitSpec
from etl.split.warnings import label_lines
from etl.write.append import CLASS_COUNTS, Parent
from etl.write.beside import Origin, forget_refused, place_quarantine, quarantine_apart, write_fitted
from etl.write.clean import clean as clean_beside
from etl.write.config import NOT_KEPT, WriteConfig
from etl.write.shards import RUN_AGAIN
from etl.write.staging import Staging, publish_beside
from etl.write.write_late import Late
from lockstep.features.schema.sampled import Sampled
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import Counts, FileInfo
from lockstep.storage.dataset.manifest_shards import SplitInfo
from lockstep.storage.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One dataset to be written, with all that is said of it read and checked."""

    config: WriteConfig
    schema: Schema
    id_columns: tuple[str, ...]
    split: SplitSpec
    origin: Origin
    parent: Parent | None
    late: Late | None
    sampled: Sampled | None = None
    class_counts: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Done:
    """What was written: shards and indexes at their places, and what the manifest says of them; `classes` are those of
    etl.write.place.Sizes.
    """

    schema: Schema
    splits: dict[str, SplitInfo]
    files: dict[str, FileInfo]
    origin: Origin
    dropped: Mapping[str, int]
    leakage: Leakage
    fitted: Mapping[str, bytes]
    classes: Mapping[str, Mapping[str, int]]

    @property
    def written(self) -> int:
        """Records in all splits."""
        return sum(split.records for split in self.splits.values())


def published(job: Job, build: Callable[[Staging, ExitStack], Done]) -> DatasetManifest:
    """Build the dataset of `job` in a folder beside its place, with rejected input and manifest, and publish it.

    What `build` puts on the stack ends before the folder does. Raises what Staging raises.
    """
    config = job.config
    with Staging(config.output) as staging, ExitStack() as stack:
        if config.clean:
            clean_beside(staging.fs, config.output, staging.signed_ms())
        apart = None
        if job.origin.quarantine is not None and config.quarantine not in (None, NOT_KEPT):
            apart = stack.enter_context(quarantine_apart(config))
        manifest = _finished(staging, job, apart, build(staging, stack))
        publish_beside(staging, manifest.to_bytes(), apart)
    if job.origin.quarantine is not None:
        forget_refused(config)
    return manifest


def _finished(staging: Staging, job: Job, apart: Staging | None, done: Done) -> DatasetManifest:
    config, origin, files = job.config, done.origin, done.files
    counted = done.written + origin.quarantined + sum(done.dropped.values())
    read = counted if origin.read is None else origin.read
    if config.petastorm:
        files |= write_petastorm_metadata(staging.fs, staging.root, done.schema, done.splits)
    files |= write_fitted(staging, done.fitted)
    if apart is not None:
        place_quarantine(apart, apart.root, origin, urls_of(origin))
    elif origin.quarantine is not None and config.quarantine != NOT_KEPT:
        files |= place_quarantine(staging, DatasetPaths(staging.root).quarantine, origin, urls_of(origin))
    if read != counted:
        raise DataError(
            "the records that were read and those accounted for differ",
            got=f"{done.written} written, {origin.quarantined} quarantined, {sum(done.dropped.values())} dropped",
            allowed=f"{read} together, as were read",
            next_step=RUN_AGAIN,
        )
    if job.schema.label is not None:
        for line in label_lines(job.schema.label.name, done.classes, sampled=job.sampled is not None):
            log.warning("%s", line)
    return DatasetManifest.build(
        format=config.fmt,
        created_by={"version": VERSION, "config": _created(job), "seed": config.seed},
        schema=done.schema.to_json(),
        splits=done.splits,
        files=files,
        counts=Counts(read, done.written, origin.quarantined, dict(sorted(done.dropped.items()))),
        source=origin.sources,
        parent=None if job.parent is None else job.parent.to_json(),
        leakage=done.leakage.to_json(),
        compression=compression_of(config),
    )


def urls_of(origin: Origin) -> tuple[str, ...]:
    """The names of the sources, by which rows are told."""
    return tuple(source.url for source in origin.sources) or ("the data frame",)


def compression_of(config: WriteConfig) -> str | None:
    """How shards are packed, None for not at all."""
    return None if config.compression == "none" else config.compression


def _created(job: Job) -> dict[str, Any]:
    own = {"job": "write_dataset", "id_columns": list(job.id_columns), **job.config.to_json()}
    counted = {} if job.class_counts is None else {CLASS_COUNTS: dict(job.class_counts)}
    sampled = {} if job.sampled is None else {"sampled": job.sampled.to_json()}
    return {**(job.origin.created_config or own), **counted, **sampled}
