"""The publication of a built dataset: rejected input, fitted files and the manifest join it, and one rename follows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lockstep.etl.petastorm.metadata import write_petastorm_metadata
from lockstep.etl.split.leakage import Leakage
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.split.warnings import fed_group_line, label_lines
from lockstep.etl.write.append import CLASS_COUNTS
from lockstep.etl.write.carried import CARRIED, Carried, Carry
from lockstep.etl.write.checks import Target
from lockstep.etl.write.config import NOT_KEPT, WriteConfig
from lockstep.etl.write.late import LateImages
from lockstep.etl.write.quarantine import Origin, place_quarantine, quarantine_apart
from lockstep.etl.write.refusal import forget_refused
from lockstep.etl.write.shards import RUN_AGAIN
from lockstep.etl.write.staging import Staging, publish_beside
from lockstep.etl.write.staging import clean as clean_beside
from lockstep.features.schema.sampled import Sampled
from lockstep.features.schema.schema import Schema
from lockstep.process.installed import VERSION
from lockstep.storage.dataset.layout import DatasetPaths, fitted_path
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import Counts, FileInfo, SplitInfo
from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import DataError
from lockstep.storage.publish import write_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One dataset to be written: its checked target, the columns that identify a record, where the rows come from, what
    they leave for appends, and the records of each class that balanced weights are computed for.
    """

    target: Target
    id_columns: tuple[str, ...]
    origin: Origin
    late: LateImages | None = None
    carry: Carry | None = None
    sampled: Sampled | None = None
    class_counts: Mapping[str, int] | None = None
    files: bool = False
    """Whether rows have lockstep.etl.columns.FILE, which the dataset keeps by sample id."""

    @property
    def config(self) -> WriteConfig:
        """The configuration."""
        return self.target.config

    @property
    def schema(self) -> Schema:
        """The schema as written."""
        return self.target.schema

    @property
    def split(self) -> SplitSpec:
        """How records are split."""
        return self.config.split_spec


@dataclass(frozen=True, kw_only=True)
class Done:
    """What was written: shards and indexes, renamed to their places, with their manifest entries. `classes` are those
    of lockstep.etl.write.shards.Sizes.
    """

    schema: Schema
    splits: dict[str, SplitInfo]
    files: dict[str, FileInfo]
    origin: Origin
    dropped: Mapping[str, int]
    leakage: Leakage
    fitted: Mapping[str, bytes]
    classes: Mapping[str, Mapping[str, int]]
    carried: Carried | None = None

    @property
    def written(self) -> int:
        """Records in all splits."""
        return sum(split.records for split in self.splits.values())


@dataclass(frozen=True)
class Place:
    """The folder in which a dataset is built, and that of its rejected input if it goes to a separate URL."""

    staging: Staging
    apart: Staging | None


@contextmanager
def building(job: Job) -> Iterator[Place]:
    """Build a dataset in a folder next to its place; the folder is removed at the end unless `publish` was called."""
    config = job.config
    with Staging(config.output) as staging:
        if config.clean:
            clean_beside(staging.fs, config.output, staging.signed_ms())
        if job.origin.quarantine is None or config.quarantine in (None, NOT_KEPT):
            yield Place(staging, None)
        else:
            with quarantine_apart(config) as apart:
                yield Place(staging, apart)


def publish(place: Place, job: Job, done: Done) -> DatasetManifest:
    """Add rejected input and manifest to what was built, and publish it. Raises what Staging raises."""
    manifest = _finished(place.staging, job, place.apart, done)
    publish_beside(place.staging, manifest.to_bytes(), place.apart)
    if job.origin.quarantine is not None:
        forget_refused(job.config)
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
    if (line := fed_group_line(job.split, job.schema)) is not None:
        log.warning("%s", line)
    if job.schema.label is not None:
        for line in label_lines(job.schema.label.name, done.classes, sampled=job.sampled is not None):
            log.warning("%s", line)
    return DatasetManifest.build(
        format=config.fmt,
        created_by={"version": VERSION, "config": _created(job, done), "seed": config.seed},
        schema=done.schema.to_json(),
        splits=done.splits,
        files=files,
        counts=Counts(read, done.written, origin.quarantined, dict(sorted(done.dropped.items()))),
        source=origin.sources,
        parent=None if job.target.parent is None else job.target.parent.to_json(job.config.output),
        leakage=done.leakage.to_json(),
        compression=compression_of(config),
    )


def urls_of(origin: Origin) -> tuple[str, ...]:
    """The names of the sources, for errors about rows."""
    return tuple(source.url for source in origin.sources) or ("the data frame",)


def compression_of(config: WriteConfig) -> str | None:
    """The compression of shards, None for none."""
    return None if config.compression == "none" else config.compression


def _created(job: Job, done: Done) -> dict[str, Any]:
    own = {"job": "write_dataset", "id_columns": list(job.id_columns), **job.config.to_json()}
    counted = {} if job.class_counts is None else {CLASS_COUNTS: dict(job.class_counts)}
    sampled = {} if job.sampled is None else {"sampled": job.sampled.to_json()}
    carried = {} if done.carried is None else {CARRIED: done.carried.to_json()}
    return {**(job.origin.created_config or own), **counted, **sampled, **carried}


def write_fitted(staging: Staging, documents: Mapping[str, bytes]) -> dict[str, FileInfo]:
    """Write fitted files by name below `_fitted/`; returns their manifest entries."""
    files = {}
    for name, data in sorted(documents.items()):
        write_file(staging.fs, DatasetPaths(staging.root).fitted(name), data)
        files[fitted_path(name)] = FileInfo(len(data), sha256_hex(data))
    return files
