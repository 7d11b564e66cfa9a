"""The manifest of a dataset: what it holds, byte by byte, and the digest that names it for training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from storage import strict
from storage.canonical import canonical_bytes, sha256_hex
from storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from storage.fs import FileSystem, filesystem, join
from storage.layout import FORMATS, MANIFEST_NAME, DatasetPaths, index_path, safe_relative, shard_path, split_name
from storage.sealed import seal, unseal

__all__ = [
    "Counts", "DatasetManifest", "FileInfo", "ShardInfo", "SourceInfo", "SplitInfo",
    "dataset_digest", "load_dataset", "read_checked", "seal", "unseal",
]  # fmt: skip

FORMAT_VERSION = 1
_KEYS = ("format_version", "format", "created_by", "schema", "splits", "files", "counts", "source", "parent", "digest")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard: path relative to the dataset, records, bytes, SHA-256 and CRC-32C (hex) of the file, and where
    blocks begin: byte offsets of their first records (TFRecord), numbers of their first rows (Parquet row groups).
    """

    path: str
    records: int
    bytes: int
    sha256: str
    crc32c: str
    block_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """One split: records in a full block, and the shards in order."""

    block_records: int
    shards: tuple[ShardInfo, ...]

    @property
    def records(self) -> int:
        """Records of all shards."""
        return sum(shard.records for shard in self.shards)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Length and SHA-256 (hex) of any other published file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Input records: read = written + quarantined + all dropped, by reason."""

    read: int
    written: int
    quarantined: int
    dropped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """One input file: URL, length in bytes and SHA-256 (hex) as it was read."""

    url: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """All of `_manifest.json`. Make one with `build`, read one with `from_bytes` or `load_dataset`."""

    format_version: int
    format: str
    created_by: Mapping[str, Any]
    schema: Mapping[str, Any]
    splits: Mapping[str, SplitInfo]
    files: Mapping[str, FileInfo]
    counts: Counts
    source: tuple[SourceInfo, ...]
    parent: Mapping[str, Any] | None
    digest: str
    manifest_sha256: str

    @classmethod
    def build(
        cls,
        *,
        format: str,
        created_by: Mapping[str, Any],
        schema: Mapping[str, Any],
        splits: Mapping[str, SplitInfo],
        files: Mapping[str, FileInfo],
        counts: Counts,
        source: tuple[SourceInfo, ...],
        parent: Mapping[str, Any] | None = None,
    ) -> Self:
        """A manifest with both digests worked out and everything checked as if it were read.

        `created_by` is {"version", "config", "seed"}; `files` is keyed by path relative to the dataset; `parent`
        is {"url", "digest"} of the dataset that this one appends to.
        """
        doc = {
            "format_version": FORMAT_VERSION,
            "format": format,
            "created_by": dict(created_by),
            "schema": dict(schema),
            "splits": {name: _split_json(split) for name, split in splits.items()},
            "files": {path: {"bytes": info.bytes, "sha256": info.sha256} for path, info in files.items()},
            "counts": {
                "read": counts.read,
                "written": counts.written,
                "quarantined": counts.quarantined,
                "dropped": dict(counts.dropped),
            },
            "source": [{"url": item.url, "bytes": item.bytes, "sha256": item.sha256} for item in source],
            "parent": None if parent is None else dict(parent),
            "digest": dataset_digest(schema, files, splits),
        }
        return cls.from_bytes(seal(doc), MANIFEST_NAME)

    def to_bytes(self) -> bytes:
        """The file's bytes: sealed canonical JSON."""
        return seal(self._json())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read a manifest strictly; `where` names it in errors.

        Raises CorruptionError for changed bytes, DataError for content that we never write: another version,
        unknown or missing keys, wrong types, paths out of the dataset, counts that do not add up.
        """
        doc = unseal(data, where)
        version = doc.get("format_version")
        if version != FORMAT_VERSION or type(version) is not int:
            raise DataError(
                f"{where}: unknown version of the dataset format",
                got=repr(version),
                allowed=str(FORMAT_VERSION),
                next_step="Use the version of Lockstep that wrote the dataset, or build the dataset anew.",
            )
        strict.obj(doc, _KEYS, where=where)
        fmt = strict.string(doc["format"], where=f"{where}: format", choices=FORMATS)
        splits = {name: _read_split(name, value, fmt, where) for name, value in _named(doc, "splits", where)}
        manifest = cls(
            format_version=FORMAT_VERSION,
            format=fmt,
            created_by=_read_created_by(doc["created_by"], where),
            schema=strict.mapping(doc["schema"], where=f"{where}: schema"),
            splits=splits,
            files={path: _read_file(path, value, where) for path, value in _named(doc, "files", where)},
            counts=_read_counts(doc["counts"], splits, where),
            source=tuple(_read_source(item, where) for item in strict.items(doc["source"], where=f"{where}: source")),
            parent=_read_parent(doc["parent"], where),
            digest=strict.sha256(doc["digest"], where=f"{where}: digest"),
            manifest_sha256=sha256_hex(canonical_bytes(doc)),
        )
        actual = dataset_digest(manifest.schema, manifest.files, manifest.splits)
        if actual != manifest.digest:
            raise CorruptionError(
                "the dataset digest does not follow from the manifest", file=where, got=actual, allowed=manifest.digest
            )
        manifest._check_files(where)
        return manifest

    def _json(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "format_version": self.format_version,
            "format": self.format,
            "created_by": self.created_by,
            "schema": self.schema,
            "splits": {name: _split_json(split) for name, split in self.splits.items()},
            "files": {path: {"bytes": info.bytes, "sha256": info.sha256} for path, info in self.files.items()},
            "counts": {
                "read": counts.read,
                "written": counts.written,
                "quarantined": counts.quarantined,
                "dropped": dict(counts.dropped),
            },
            "source": [{"url": item.url, "bytes": item.bytes, "sha256": item.sha256} for item in self.source],
            "parent": self.parent,
            "digest": self.digest,
        }

    def _check_files(self, where: str) -> None:
        if self.format != "tfrecord":
            return
        wanted = {index_path(name, i) for name, split in self.splits.items() for i in range(len(split.shards))}
        listed = {path for path in self.files if path.startswith("_index/")}
        if wanted != listed:
            raise DataError(
                f"{where}: offset indexes and shards do not match",
                got=f"{len(listed)} indexes listed, odd ones {sorted(wanted ^ listed)[:3]}",
                allowed="one index a shard",
                next_step="Build the dataset anew.",
            )


def dataset_digest(schema: Mapping[str, Any], files: Mapping[str, FileInfo], splits: Mapping[str, SplitInfo]) -> str:
    """The identity for training: SHA-256 over canonical JSON of schema, fitted files (those of `files` under
    `_fitted/`) and splits with their shards.
    """
    fitted = {
        path: {"bytes": info.bytes, "sha256": info.sha256}
        for path, info in files.items()
        if path.startswith("_fitted/")
    }
    shards = {name: _split_json(split) for name, split in splits.items()}
    return sha256_hex(canonical_bytes({"schema": dict(schema), "fitted": fitted, "splits": shards}))


def load_dataset(url: str) -> DatasetManifest:
    """Read and check the manifest of the dataset at `url`. Raises NotFoundError where there is no dataset."""
    fs = filesystem(url)
    where = DatasetPaths(url).manifest
    try:
        data = fs.read_bytes(where)
    except NotFoundError:
        there = fs.exists(url)
        raise NotFoundError(
            f"no dataset at {url}",
            got=f"{'a directory without ' + MANIFEST_NAME if there else 'nothing there'}",
            allowed="a directory that jobs.etl_logs or jobs.etl_images has published",
            next_step="Check the path, or run the ETL job first.",
        ) from None
    return DatasetManifest.from_bytes(data, where)


def read_checked(fs: FileSystem, root: str, path: str, info: FileInfo) -> bytes:
    """Read a file that a manifest lists. Raises CorruptionError where length or SHA-256 differ."""
    url = join(root, path)
    data = fs.read_bytes(url)
    if len(data) != info.bytes:
        raise CorruptionError(
            "a file has another length than its manifest says",
            file=url,
            offset=min(len(data), info.bytes),
            got=f"{len(data)} bytes",
            allowed=f"{info.bytes} bytes",
        )
    if sha256_hex(data) != info.sha256:
        raise CorruptionError(
            "a file does not match its digest", file=url, got=f"sha256 {sha256_hex(data)}", allowed=info.sha256
        )
    return data


def _split_json(split: SplitInfo) -> dict[str, Any]:
    shards = [
        {
            "path": shard.path,
            "records": shard.records,
            "bytes": shard.bytes,
            "sha256": shard.sha256,
            "crc32c": shard.crc32c,
            "block_offsets": list(shard.block_offsets),
        }
        for shard in split.shards
    ]
    return {"block_records": split.block_records, "shards": shards}


def _named(doc: dict[str, Any], key: str, where: str) -> list[tuple[str, Any]]:
    return list(strict.mapping(doc[key], where=f"{where}: {key}").items())


def _read_split(name: str, value: Any, fmt: str, where: str) -> SplitInfo:
    try:
        split_name(name)
    except ConfigError as error:
        raise DataError(
            f"{where}: {error.what}", got=error.got, allowed=error.allowed, next_step="Build it anew."
        ) from None
    place = f"{where}: split {name}"
    doc = strict.obj(value, ("block_records", "shards"), where=place)
    size = strict.count(doc["block_records"], where=f"{place}: block_records", least=1)
    shards = strict.items(doc["shards"], where=f"{place}: shards")
    return SplitInfo(
        size, tuple(_read_shard(item, shard_path(name, i, fmt), size, fmt, place) for i, item in enumerate(shards))
    )


def _read_shard(value: Any, path: str, block_records: int, fmt: str, where: str) -> ShardInfo:
    place = f"{where}: {path}"
    doc = strict.obj(value, ("path", "records", "bytes", "sha256", "crc32c", "block_offsets"), where=place)
    strict.string(doc["path"], where=f"{place}: path", choices=(path,))
    offsets = strict.items(doc["block_offsets"], where=f"{place}: block_offsets")
    shard = ShardInfo(
        path=path,
        records=strict.count(doc["records"], where=f"{place}: records"),
        bytes=strict.count(doc["bytes"], where=f"{place}: bytes"),
        sha256=strict.sha256(doc["sha256"], where=f"{place}: sha256"),
        crc32c=strict.crc32c(doc["crc32c"], where=f"{place}: crc32c"),
        block_offsets=tuple(strict.count(item, where=f"{place}: block_offsets") for item in offsets),
    )
    starts = shard.block_offsets
    blocks = -(-shard.records // block_records)
    if fmt == "parquet":
        good = starts == tuple(range(0, shard.records, block_records))
    else:
        rising = all(a < b for a, b in itertools.pairwise(starts))
        good = len(starts) == blocks and rising and (not starts or (starts[0] == 0 and starts[-1] < shard.bytes))
    if not good:
        raise DataError(
            f"{place}: block_offsets do not fit the shard",
            got=f"{len(starts)} offsets, {list(starts[:3])}...",
            allowed=f"{blocks} rising offsets from 0, below the shard's end",
            next_step="Build the dataset anew.",
        )
    return shard


def _read_file(path: str, value: Any, where: str) -> FileInfo:
    safe_relative(path, where=f"{where}: files")
    place = f"{where}: {path}"
    if path.split("/")[0] not in ("_index", "_quarantine", "_fitted"):
        raise DataError(
            f"{place} is not a file that a dataset lists",
            got=path,
            allowed="_index/, _quarantine/, _fitted/",
            next_step="Build the dataset anew.",
        )
    doc = strict.obj(value, ("bytes", "sha256"), where=place)
    size = strict.count(doc["bytes"], where=f"{place}: bytes")
    return FileInfo(size, strict.sha256(doc["sha256"], where=f"{place}: sha256"))


def _read_counts(value: Any, splits: Mapping[str, SplitInfo], where: str) -> Counts:
    place = f"{where}: counts"
    doc = strict.obj(value, ("read", "written", "quarantined", "dropped"), where=place)
    dropped = strict.mapping(doc["dropped"], where=f"{place}: dropped")
    counts = Counts(
        read=strict.count(doc["read"], where=f"{place}: read"),
        written=strict.count(doc["written"], where=f"{place}: written"),
        quarantined=strict.count(doc["quarantined"], where=f"{place}: quarantined"),
        dropped={why: strict.count(n, where=f"{place}: dropped: {why}") for why, n in dropped.items()},
    )
    total = counts.written + counts.quarantined + sum(counts.dropped.values())
    records = sum(split.records for split in splits.values())
    if counts.read != total or counts.written != records:
        raise DataError(
            f"{place} do not add up",
            got=f"read {counts.read}, written + quarantined + dropped {total}, records in shards {records}",
            allowed="read = written + quarantined + dropped, written = records in shards",
            next_step="Build the dataset anew.",
        )
    return counts


def _read_created_by(value: Any, where: str) -> dict[str, Any]:
    place = f"{where}: created_by"
    doc = strict.obj(value, ("version", "config", "seed"), where=place)
    strict.string(doc["version"], where=f"{place}: version")
    strict.mapping(doc["config"], where=f"{place}: config")
    strict.count(doc["seed"], where=f"{place}: seed")
    return doc


def _read_source(value: Any, where: str) -> SourceInfo:
    place = f"{where}: source"
    doc = strict.obj(value, ("url", "bytes", "sha256"), where=place)
    url = strict.string(doc["url"], where=f"{place}: url")
    return SourceInfo(url, strict.count(doc["bytes"], where=place), strict.sha256(doc["sha256"], where=place))


def _read_parent(value: Any, where: str) -> dict[str, Any] | None:
    if value is None:
        return None
    doc = strict.obj(value, ("url", "digest"), where=f"{where}: parent")
    strict.string(doc["url"], where=f"{where}: parent: url")
    strict.sha256(doc["digest"], where=f"{where}: parent: digest")
    return doc
