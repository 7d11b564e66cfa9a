"""What lies beside the shards of a dataset: fitted files and rejected input; and where its rows came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etl.clean import clean, clean_quarantine
from etl.config import WriteConfig
from etl.output import refuse_existing
from etl.place import move
from etl.quarantine import write_quarantine
from etl.staging import Staging
from storage.canonical import sha256_hex
from storage.fs import join
from storage.layout import DatasetPaths, fitted_path
from storage.manifest import FileInfo, SourceInfo
from storage.publish import write_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
