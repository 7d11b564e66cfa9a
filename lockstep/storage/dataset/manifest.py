"""The manifest of a dataset: its files with their digests, and the digest that identifies it for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from lockstep.storage import documents
from lockstep.storage.dataset.layout import FILES_FOLDER, FORMATS, SUFFIXES, DatasetPaths, files_of_shard, index_path
from lockstep.storage.dataset.manifest_entries import (
    Counts,
    FileInfo,
    ShardInfo,
    SourceInfo,
    SplitInfo,
    read_counts,
    read_created_by,
    read_file,
    read_leakage,
    read_parent,
    read_source,
    read_split,
    source_json,
    split_json,
)
from lockstep.storage.documents import canonical_bytes, seal, sha256_hex, unseal
from lockstep.storage.errors import CorruptionError, DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.shown import short
from lockstep.storage.urls import at_path, basename, join, path_between, split_url

__all__ = [
    "Counts", "DatasetManifest", "FileInfo", "ShardInfo", "SourceInfo", "SplitInfo",
    "chain_too_long", "dataset_digest", "link_to", "load_chain", "load_dataset", "read_checked", "seal", "unseal",
]  # fmt: skip

MAX_CHAIN = 1000  # datasets that continue one another

FORMAT_VERSION = 1
MOST_KIND = 40  # letters of a kind in an error
_KEYS = (
    "format_version", "format", "created_by", "schema", "splits", "files", "counts", "leakage", "source", "parent",
    "digest",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """The content of `_manifest.json`. Make one with `build`, read one with `from_bytes` or `load_dataset`."""

    format_version: int
    format: str
    created_by: Mapping[str, Any]
    schema: Mapping[str, Any]
    splits: Mapping[str, SplitInfo]
    files: Mapping[str, FileInfo]
    counts: Counts
    leakage: Mapping[str, Any] | None
    source: tuple[SourceInfo, ...]
    parent: Mapping[str, Any] | None
    digest: str
    manifest_sha256: str
    compression: str | None = None
    indexed: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        counts, dropped = self.counts, sum(self.counts.dropped.values())
        lines = [
            f"dataset of {self.format}, digest {self.digest[:12]}: {counts.read} read, {counts.written} written, "
            f"{counts.quarantined} quarantined, {dropped} dropped"
        ]
        lines += [f"  {name}: {one.records} records in {len(one.shards)} shards" for name, one in self.splits.items()]
        return short("\n".join(lines))

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
        leakage: Mapping[str, Any] | None = None,
        compression: str | None = None,
        indexed: tuple[str, ...] | None = None,
    ) -> Self:
        """Make a manifest: compute both digests, and check everything as if it were read.

        `created_by` is {"version", "config", "seed"}; `files` is keyed by path relative to the dataset; `parent`
        is `link_to` the dataset that this one appends to; `leakage` is {"kind", "checked", "found"}: the
        kind of split, the checks, and how many records each found on two sides of the split. For a check of content,
        {"by_chance", "distinct"} say how many chance would give and how many contents there are. None: not checked.
        `compression` is that of all shards: "gzip" (only TFRecord, docs/decisions/068-gzip-shards.md) or None.
        `indexed`: the shards are Parquet files of another program, and these columns of theirs make the sample ids, or
        file and row if there are none; None: Lockstep wrote the shards.
        """
        made = cls(
            format_version=FORMAT_VERSION,
            format=format,
            created_by=dict(created_by),
            schema=dict(schema),
            splits=splits,
            files=files,
            counts=counts,
            leakage=None if leakage is None else dict(leakage),
            source=source,
            parent=None if parent is None else dict(parent),
            digest=dataset_digest(schema, files, splits, indexed),
            manifest_sha256="",
            compression=compression,
            indexed=indexed,
        )
        return cls.from_bytes(made.to_bytes(), MANIFEST_NAME)

    def to_bytes(self) -> bytes:
        """The file's bytes: sealed canonical JSON."""
        return seal(self._json())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read a manifest strictly; `where` names it in errors.

        Raises CorruptionError for changed bytes, DataError for content that Lockstep never writes: another version,
        unknown or missing keys, wrong types, paths out of the dataset, counts that do not add up.
        """
        doc = unseal(data, where)
        if doc.get("kind") == "indexed":
            raise DataError(
                f"{where}: indexed files of other programs are no dataset",
                got="files that lockstep index has indexed",
                allowed="a dataset: records with sample ids, in splits",
                next_step='Read them by spark.read.format("tfrecord"), and write a dataset by lockstep.write_dataset.',
            )
        if "kind" in doc:
            kind = str(doc["kind"])[:MOST_KIND]
            raise DataError(
                f"{where}: this is a {kind}, not a dataset",
                got=f"kind {kind!r}",
                allowed="a dataset: records with sample ids, in splits",
                next_step="Name the dataset itself, such as the --dataset of the run that it comes from.",
            )
        version = doc.get("format_version")
        if version != FORMAT_VERSION or type(version) is not int:
            raise DataError(
                f"{where}: unknown version of the dataset format",
                got=repr(version),
                allowed=str(FORMAT_VERSION),
                next_step="Use the version of Lockstep that wrote the dataset, or build the dataset again.",
            )
        packed, foreign = "compression" in doc, "indexed" in doc  # only those of compressed shards and of indexed files
        more = [key for key, there in (("compression", packed), ("indexed", foreign)) if there]
        documents.obj(doc, (*_KEYS, *more), where=where)
        choices = ("tfrecord",) if packed else ("parquet",) if foreign else FORMATS
        fmt = documents.string(doc["format"], where=f"{where}: format", choices=choices)
        compression = None
        if packed:
            known = [name for name in SUFFIXES if name is not None]
            compression = documents.string(doc["compression"], where=f"{where}: compression", choices=known)
        splits = {
            name: read_split(name, value, fmt, where, compression, indexed=foreign)
            for name, value in _named(doc, "splits", where)
        }
        manifest = cls(
            format_version=version,
            format=fmt,
            created_by=read_created_by(doc["created_by"], where),
            schema=documents.mapping(doc["schema"], where=f"{where}: schema"),
            splits=splits,
            files={path: read_file(path, value, where) for path, value in _named(doc, "files", where)},
            counts=read_counts(doc["counts"], splits, where),
            leakage=read_leakage(doc["leakage"], where),
            source=tuple(read_source(item, where) for item in documents.items(doc["source"], where=f"{where}: source")),
            parent=read_parent(doc["parent"], where),
            digest=documents.sha256(doc["digest"], where=f"{where}: digest"),
            manifest_sha256=sha256_hex(canonical_bytes(doc)),
            compression=compression,
            indexed=_read_indexed(doc["indexed"], where) if foreign else None,
        )
        actual = dataset_digest(manifest.schema, manifest.files, manifest.splits, manifest.indexed)
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
            "splits": {name: split_json(split) for name, split in self.splits.items()},
            "files": {path: {"bytes": info.bytes, "sha256": info.sha256} for path, info in self.files.items()},
            "counts": {
                "read": counts.read,
                "written": counts.written,
                "quarantined": counts.quarantined,
                "dropped": dict(counts.dropped),
            },
            "leakage": self.leakage,
            "source": [source_json(item) for item in self.source],
            "parent": self.parent,
            "digest": self.digest,
            **({} if self.compression is None else {"compression": self.compression}),
            **({} if self.indexed is None else {"indexed": {"id_columns": list(self.indexed)}}),
        }

    def _check_files(self, where: str) -> None:
        named = {path for path in self.files if path.startswith(f"{FILES_FOLDER}/")}
        own = self.splits.values() if self.indexed is None else ()
        shards = {files_of_shard(shard.path) for split in own for shard in split.shards}
        if named and named != shards:
            raise DataError(
                f"{where}: names of files and shards do not match",
                got=f"{len(named)} in {FILES_FOLDER}/, odd ones {sorted(named ^ shards)[:3]}",
                allowed="one a shard, or none",
                next_step="Build the dataset again.",
            )
        if self.format != "tfrecord":
            return
        plain = self.splits if self.compression is None else {}  # compressed shards have no index
        wanted = {index_path(name, i) for name, split in plain.items() for i in range(len(split.shards))}
        listed = {path for path in self.files if path.startswith("_index/")}
        if wanted != listed:
            raise DataError(
                f"{where}: offset indexes and shards do not match",
                got=f"{len(listed)} indexes listed, odd ones {sorted(wanted ^ listed)[:3]}",
                allowed="one index a shard" if self.compression is None else "no index of compressed shards",
                next_step="Build the dataset again.",
            )


def dataset_digest(
    schema: Mapping[str, Any],
    files: Mapping[str, FileInfo],
    splits: Mapping[str, SplitInfo],
    indexed: tuple[str, ...] | None = None,
) -> str:
    """The identity for training: SHA-256 over canonical JSON of schema, fitted files (those of `files` under
    `_fitted/`), splits with their shards and, of indexed files, the columns of their ids.
    """
    fitted = {
        path: {"bytes": info.bytes, "sha256": info.sha256}
        for path, info in files.items()
        if path.startswith("_fitted/")
    }
    shards = {name: split_json(split) for name, split in splits.items()}
    ids = {} if indexed is None else {"indexed": list(indexed)}
    return sha256_hex(canonical_bytes({"schema": dict(schema), "fitted": fitted, "splits": shards, **ids}))


def has_files(manifest: DatasetManifest) -> bool:
    """Whether the dataset says which file each record was (lockstep.storage.dataset.layout.files_path)."""
    return any(path.startswith(f"{FILES_FOLDER}/") for path in manifest.files)


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
            allowed="a directory that lockstep etl_logs, etl_images or etl_table or write_dataset has published",
            next_step="Check the path, or run the ETL job first.",
        ) from None
    return DatasetManifest.from_bytes(data, where)


def load_chain(url: str) -> tuple[tuple[str, DatasetManifest], ...]:
    """URL and manifest of the dataset at `url` and of all that it continues, nearest first.

    An earlier dataset that was moved or copied together with the later one is the one at the same relative path; else
    it is the one at its recorded URL. Its digest decides. Raises NotFoundError for a missing dataset, DataError if an
    earlier one has changed, or if there are more than MAX_CHAIN.
    """
    chain = [(url, load_dataset(url))]
    while (link := chain[-1][1].parent) is not None:
        if len(chain) == MAX_CHAIN:
            raise chain_too_long(url)
        chain.append(_continued_by(chain[-1][0], link))
    return tuple(chain)


def link_to(url: str, digest: str, child: str) -> dict[str, Any]:
    """The `parent` of a dataset at `child` that continues the one at `url`."""
    path = path_between(url, child)
    return {"url": url, "digest": digest, **({} if path is None else {"path": path})}


def chain_too_long(url: str) -> DataError:
    """The error for a dataset at `url` that continues too many."""
    return DataError(
        f"{url} continues more datasets than a chain may have",
        got=f"{MAX_CHAIN} datasets, and another one",
        allowed=f"{MAX_CHAIN} in a chain",
        next_step="Make one dataset of all inputs: the same command without --append-to or, with --increment, with an"
        " empty --output. Later datasets then continue this one.",
    )


def _continued_by(child: str, link: Mapping[str, Any]) -> tuple[str, DatasetManifest]:
    """URL and manifest of the dataset that the one at `child` continues, as its `parent` says."""
    # Manifests without a path are of datasets that, as a rule, lay side by side.
    near, found = at_path(child, link.get("path", f"../{basename(link['url'])}")), []
    if split_url(near) in (split_url(link["url"]), split_url(child.rstrip("/"))):
        near = link["url"]
    for place in dict.fromkeys([near, link["url"]]):
        try:
            manifest = load_dataset(place)
        except NotFoundError:
            found.append(f"no dataset at {place}")
            continue
        except DataError as error:
            if place == link["url"]:
                raise
            found.append(error.what)
            continue
        if manifest.digest == link["digest"]:
            return place, manifest
        found.append(f"digest {manifest.digest} at {place}")
    lost = all(one.startswith("no dataset at") for one in found)
    raise (NotFoundError if lost else DataError)(
        f"the dataset that {child} continues is {'missing' if lost else 'another one now'}",
        got="; ".join(found),
        allowed=f"digest {link['digest']} at {link['url']}{'' if near == link['url'] else f', or at {near}'}",
        next_step="Put that dataset back, or move and copy all datasets of a chain together; or build one dataset from"
        " all inputs.",
    )


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


def _read_indexed(value: Any, where: str) -> tuple[str, ...]:
    place = f"{where}: indexed"
    names = documents.items(documents.obj(value, ("id_columns",), where=place)["id_columns"], where=place)
    return tuple(documents.string(name, where=place) for name in names)


def _named(doc: dict[str, Any], key: str, where: str) -> list[tuple[str, Any]]:
    return list(documents.mapping(doc[key], where=f"{where}: {key}").items())
