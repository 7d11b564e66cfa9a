"""The manifest that lockstep index adds to TFRecord files of other programs: their digests, and where records begin.

Such a directory is no dataset: its files have their own names and its records no sample ids, so training does not read
it. Its manifest is sealed canonical JSON with `kind` "indexed". It lists an index for each file that is not gzip, so
that readers can start in the middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.storage import documents
from lockstep.storage.dataset.layout import safe_relative
from lockstep.storage.dataset.manifest_entries import FileInfo, ShardInfo
from lockstep.storage.documents import seal, unseal, unseal_as
from lockstep.storage.errors import DataError

DATA_GLOB = "*.tfrecord*"  # the default names of TFRecord files without a manifest
PARQUET_GLOB = "*.parquet"
SAMPLE_RECORDS = 1000  # of which their columns are inferred
KIND = "indexed"
INDEX_FOLDER = "_index"
FORMAT_VERSION = 1
DTYPES = ("int64", "float32", "string", "bytes")
_KEYS = ("kind", "format_version", "created_by", "schema", "block_records", "files", "indexes")
_FILE_KEYS = ("path", "gzip", "records", "bytes", "sha256", "crc32c", "block_offsets")


@dataclass(frozen=True, slots=True)
class IndexedManifest:
    """The content of such a `_manifest.json`.

    `columns` are (name, dtype of DTYPES, whether it is a list), `sampled` how many records they were inferred from.
    `files` have a relative path, records, bytes, digests and block offsets (none for gzip, whose paths `gzip` holds).
    `indexes` maps the path of each file that is not gzip to its index under `_index/`.
    """

    version: str
    sampled: int
    columns: tuple[tuple[str, str, bool], ...]
    block_records: int
    files: tuple[ShardInfo, ...]
    gzip: frozenset[str]
    indexes: Mapping[str, FileInfo]

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return seal(
            {
                "kind": KIND,
                "format_version": FORMAT_VERSION,
                "created_by": {"version": self.version, "sampled": self.sampled},
                "schema": [{"name": name, "dtype": dtype, "list": many} for name, dtype, many in self.columns],
                "block_records": self.block_records,
                "files": [
                    {
                        "path": file.path,
                        "gzip": file.path in self.gzip,
                        "records": file.records,
                        "bytes": file.bytes,
                        "sha256": file.sha256,
                        "crc32c": file.crc32c,
                        "block_offsets": list(file.block_offsets),
                    }
                    for file in self.files
                ],
                "indexes": {path: {"bytes": i.bytes, "sha256": i.sha256} for path, i in self.indexes.items()},
            }
        )


def index_name(path: str) -> str:
    """The path, below INDEX_FOLDER, of the index of the file at `path`."""
    return f"{path}.idx"


def is_indexed(data: bytes, where: str) -> bool:
    """Whether the bytes of a `_manifest.json` are of this kind. Raises CorruptionError where they are not sealed."""
    return unseal(data, where).get("kind") == KIND


def read_indexed(data: bytes, where: str) -> IndexedManifest:
    """Read a manifest strictly. Raises CorruptionError for changed bytes, DataError for what we never write."""
    doc = unseal_as(KIND, data, where, version=FORMAT_VERSION)
    documents.obj(doc, _KEYS, where=where)
    made = documents.obj(doc["created_by"], ("version", "sampled"), where=f"{where}: created_by")
    block_records = documents.count(doc["block_records"], where=f"{where}: block_records", least=1)
    files, gzip = [], set()
    for item in documents.items(doc["files"], where=f"{where}: files"):
        file, packed = _read_file(item, block_records, where)
        files.append(file)
        if packed:
            gzip.add(file.path)
    indexes = {
        safe_relative(path, where=where): _read_index(value, f"{where}: index of {path}")
        for path, value in documents.mapping(doc["indexes"], where=f"{where}: indexes").items()
    }
    paths = [file.path for file in files]
    if paths != sorted(set(paths)) or set(indexes) != set(paths) - gzip:
        raise DataError(
            f"{where}: files and indexes do not match",
            got=f"{len(paths)} files, {len(gzip)} of them gzip, {len(indexes)} indexes",
            allowed="each file once, in order, with an index unless it is gzip",
            next_step="Delete _manifest.json and _index/, and run lockstep index again.",
        )
    return IndexedManifest(
        version=documents.string(made["version"], where=f"{where}: version"),
        sampled=documents.count(made["sampled"], where=f"{where}: sampled"),
        columns=tuple(_read_column(item, where) for item in documents.items(doc["schema"], where=f"{where}: schema")),
        block_records=block_records,
        files=tuple(files),
        gzip=frozenset(gzip),
        indexes=indexes,
    )


def _read_column(value: Any, where: str) -> tuple[str, str, bool]:
    place = f"{where}: schema"
    doc = documents.obj(value, ("name", "dtype", "list"), where=place)
    if type(doc["list"]) is not bool:
        raise DataError(
            f"{place}: `list` is not true or false",
            got=repr(doc["list"])[:200],
            allowed="true or false",
            next_step="Delete _manifest.json and _index/, and run lockstep index again.",
        )
    return (
        documents.string(doc["name"], where=place),
        documents.string(doc["dtype"], where=place, choices=DTYPES),
        doc["list"],
    )


def _read_file(value: Any, block_records: int, where: str) -> tuple[ShardInfo, bool]:
    place = f"{where}: files"
    doc = documents.obj(value, _FILE_KEYS, where=place)
    path = safe_relative(doc["path"], where=place)
    place = f"{where}: {path}"
    packed = doc["gzip"]
    starts = tuple(
        documents.count(item, where=place)
        for item in documents.items(doc["block_offsets"], where=f"{place}: block_offsets")
    )
    records, size = documents.count(doc["records"], where=place), documents.count(doc["bytes"], where=place)
    blocks = 0 if packed is True else -(-records // block_records)
    rising = all(a < b for a, b in itertools.pairwise(starts))
    fit = len(starts) == blocks and rising and (not starts or (starts[0] == 0 and starts[-1] < size))
    if type(packed) is not bool or not fit:
        raise DataError(
            f"{place}: its blocks do not fit the file",
            got=f"gzip {packed!r}, {len(starts)} offsets, {list(starts[:3])}..."[:200],
            allowed=f"true or false, {blocks} rising offsets from 0, below the file's end",
            next_step="Delete _manifest.json and _index/, and run lockstep index again.",
        )
    sha256 = documents.sha256(doc["sha256"], where=f"{place}: sha256")
    return ShardInfo(path, records, size, sha256, documents.crc32c(doc["crc32c"], where=place), None, starts), packed


def _read_index(value: Any, place: str) -> FileInfo:
    doc = documents.obj(value, ("bytes", "sha256"), where=place)
    return FileInfo(documents.count(doc["bytes"], where=place), documents.sha256(doc["sha256"], where=place))
