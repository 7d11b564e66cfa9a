"""What lies beside the shards of a dataset: fitted files and rejected input; and where its rows came from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etl.write.clean import clean, clean_quarantine, remove_refused
from etl.write.config import NOT_KEPT, WriteConfig
from etl.write.output import refuse_existing
from etl.write.place import move
from etl.write.quarantine import PART_BYTES, write_quarantine
from etl.write.staging import Staging
from lockstep.storage.dataset.layout import DatasetPaths, fitted_path
from lockstep.storage.dataset.manifest_entries import FileInfo, SourceInfo
from lockstep.storage.documents import sha256_hex
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import absolute, basename, join, parent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

REFUSED_RECORDS = 1000  # enough to see what is wrong; with RAW_BYTES of each they are one file


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a data frame's rows come from, for counts, quarantine and the manifest; `read` None: as many as it has."""

    sources: tuple[SourceInfo, ...] = ()
    read: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
    quarantined_raw_bytes: int = 0
    quarantine: DataFrame | None = None
    created_config: Mapping[str, Any] = field(default_factory=dict)


def write_fitted(staging: Staging, documents: Mapping[str, bytes]) -> dict[str, FileInfo]:
    """Write fitted files by name below `_fitted/`; returns what the manifest lists."""
    files = {}
    for name, data in sorted(documents.items()):
        write_file(staging.fs, DatasetPaths(staging.root).fitted(name), data)
        files[fitted_path(name)] = FileInfo(len(data), sha256_hex(data))
    return files


def quarantine_apart(config: WriteConfig) -> Staging:
    """The folder of rejected input at the place of its own that `config` names; with `clean`, after what killed jobs
    left there is gone. Raises ExistsError where the place is not free.
    """
    apart = Staging(str(config.quarantine), mode=0o700, part_of=config.output)
    if config.clean:
        with Staging(apart.url) as clock:  # its sign tells the time of that file system
            now_ms = clock.signed_ms()
            clean(apart.fs, apart.url, now_ms)
            clean_quarantine(apart.fs, apart.url, config.output, now_ms)
        refuse_existing(apart.url)
    return apart


def place_quarantine(staging: Staging, folder: str, origin: Origin, urls: tuple[str, ...]) -> dict[str, FileInfo]:
    """Write the rejected input of `origin` as files of `folder`, which nobody else may read; returns their digests."""
    assert origin.quarantine is not None
    staging.fs.mkdirs(folder, mode=0o700)
    written = write_quarantine(
        origin.quarantine,
        count=origin.quarantined,
        raw_bytes=origin.quarantined_raw_bytes,
        attempts=staging.attempts,
        source_urls=urls,
    )
    files = {}
    for number, (attempt, info) in enumerate(written):
        name = f"part-{number:05d}.parquet"
        move(staging.fs, attempt, join(folder, name))
        files[f"_quarantine/{name}"] = info
    return files


def keep_refused(config: WriteConfig, bad_rows: DataFrame, urls: Sequence[str], bad: int) -> str | None:
    """Keep the first REFUSED_RECORDS of the `bad` records in `bad_rows`, for which a job is refused, as a quarantine
    beside its output, or beside the place that --quarantine names; returns the URL.

    The folder is published whole by one rename, only its owner may read it (mode 0700), and it replaces the one that an
    earlier job kept for the same output; `forget_refused` removes it. None where rejected input is not kept, or where
    this fails, which is logged: the job then ends with the error of its input all the same.
    """
    if config.quarantine == NOT_KEPT:
        return None
    url = _refused(config)
    named = [name for name in ("source", "place", "position") if name in bad_rows.columns]
    rows = bad_rows.orderBy(*named).limit(REFUSED_RECORDS)
    try:
        with Staging(url, mode=0o700, part_of=config.output) as staging:
            origin = Origin(quarantine=rows, quarantined=min(bad, REFUSED_RECORDS), quarantined_raw_bytes=PART_BYTES)
            place_quarantine(staging, staging.root, origin, tuple(urls))
            remove_refused(staging.fs, url, config.output)
            staging.publish(None)
    except Exception as error:  # of storage or of Spark; the error that says what is wrong with the input comes next
        log.warning("the rejected records were not kept in %s: %s", url, error)
        return None
    return url


def forget_refused(config: WriteConfig) -> None:
    """Remove what an earlier job kept of the input that this one, whose dataset is published, has read."""
    url = _refused(config)
    remove_refused(filesystem(url), url, config.output)


def _refused(config: WriteConfig) -> str:
    place = absolute(config.output if config.quarantine in (None, NOT_KEPT) else str(config.quarantine))
    return join(parent(place), f"_quarantine-{basename(place)}")
