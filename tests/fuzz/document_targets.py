"""Fuzz targets: manifests, fitted files and declared schemas. Digests in a forged document are right."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.fitted import Moments, Vocabulary, read_fitted
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.ranges import cut
from lockstep.storage.dataset.indexed import IndexedManifest, is_indexed, read_indexed
from lockstep.storage.dataset.layout import index_path, shard_path
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import Counts, FileInfo, ShardInfo, SourceInfo, SplitInfo
from lockstep.storage.documents import SEAL, canonical_bytes, parse_canonical, seal, sha256_hex
from tests.fuzz.target import Take, Target, refused

_DIGEST = sha256_hex(b"")
# Which document the first byte of an input chooses; 0 and 1 are datasets of both formats.
_INDEXED, _TEXT, _PACKED = 2, 3, 4
_ODD: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: 0, lambda: -1, lambda: 1, lambda: 1 << 62, lambda: (1 << 63) - 1,
    lambda: 1 << 63, lambda: 10**40, lambda: 1.0, lambda: -0.5, lambda: 1e308, lambda: "", lambda: "..",
    lambda: "../x", lambda: "/etc/passwd", lambda: "a\nb", lambda: "é" * 300, lambda: _DIGEST, list, dict,
    lambda: [1], lambda: {"kind": "vocabulary"}, lambda: nested([], 5), lambda: [0] * 5000,
)  # fmt: skip


def nested(value: Any, depth: int) -> Any:
    """A list in a list in a list."""
    for _ in range(depth):
        value = [value]
    return value


def edited(document: Any, take: Take) -> Any:
    """A copy with some values exchanged, left out, put in or moved."""
    document = copy.deepcopy(document)
    for _ in range(1 + take.number(4)):
        holder, key = _somewhere(document, take)
        if holder is None:
            continue
        what = take.number(8)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[str(_ODD[take.number(len(_ODD))]())[:50]] = _ODD[take.number(len(_ODD))]()
        elif what == 2:
            other, at = _somewhere(document, take)
            holder[key] = copy.deepcopy(holder[key] if other is None else other[at])
        elif what == 3 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += take.number(256) - 128
        elif what == 4 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            holder[key] = _ODD[take.number(len(_ODD))]()
    return document


def _somewhere(document: Any, take: Take) -> tuple[Any, Any]:
    """A container within a document and one of its keys; (None, None) where there is none."""
    holder: Any = None
    key: Any = None
    for _ in range(1 + take.number(6)):
        inner = document if holder is None else holder[key]
        if not isinstance(inner, dict | list) or not inner:
            break
        keys: Sequence[Any] = list(inner) if isinstance(inner, dict) else range(len(inner))
        holder, key = inner, keys[take.number(min(len(keys), 60000))]
    return holder, key


def manifests(data: bytes) -> None:
    """A forged manifest of a dataset, or of files of others, is refused, or stays within what it may name."""
    take = Take(data)
    which = take.number(5)
    if which == _TEXT:
        with refused():
            parse_canonical(take.rest(), file="f")
        return
    document = edited(_documents()[which], take)
    if isinstance(document, dict) and which != _INDEXED:
        document["digest"] = _digest_of(document)
    if not isinstance(document, dict) or SEAL in document:
        return
    with refused():
        raw = seal(document)
        if is_indexed(raw, "f"):
            found = read_indexed(raw, "f")
            assert found.to_bytes() == raw
            return
        manifest = DatasetManifest.from_bytes(raw, "f")
        assert manifest.to_bytes() == raw
        for split in manifest.splits.values():
            for shard in split.shards:
                parts = cut(shard.path, shard, split.block_records, 1 << 20)
                assert sum(part.records for part in parts) == shard.records
                assert all(part.unpacked is None or len(part.unpacked) == len(part.offsets) for part in parts)
        Schema.from_json(manifest.schema)


def _digest_of(document: dict[str, Any]) -> Any:
    """The digest of a dataset's manifest, where it has the parts that it is made of."""
    files = document.get("files")
    if not isinstance(files, dict):
        return document.get("digest")
    fitted = {path: value for path, value in files.items() if path.startswith("_fitted/")}
    try:
        parts = {"schema": document["schema"], "fitted": fitted, "splits": document["splits"]}
    except KeyError:
        return document.get("digest")
    return sha256_hex(canonical_bytes(parts))


@cache
def _documents() -> dict[int, dict[str, Any]]:
    made = [_manifest("tfrecord"), _manifest("parquet"), _indexed().to_bytes(), _manifest("tfrecord", "gzip")]
    documents = {which: json.loads(raw) for which, raw in zip((0, 1, _INDEXED, _PACKED), made, strict=True)}
    for document in documents.values():
        del document[SEAL]
    return documents


def _manifest(fmt: str, compression: str | None = None) -> bytes:
    footer, offsets = (None, (0, 300, 600)) if fmt == "tfrecord" else (_DIGEST, (0, 8, 16))
    packed = compression is not None
    offsets, unpacked = ((10, 300, 600), (0, 2000, 4000, 5000)) if packed else (offsets, None)
    shards = tuple(
        ShardInfo(shard_path("train", i, fmt, compression), 20, 1000, _DIGEST, "00000000", footer, offsets, unpacked)
        for i in range(2)
    )
    files = {"_fitted/page.json": FileInfo(3, _DIGEST), "_quarantine/part-00000.parquet": FileInfo(9, _DIGEST)}
    if fmt == "tfrecord" and compression is None:
        files |= {index_path("train", i): FileInfo(4, _DIGEST) for i in range(2)}
    return DatasetManifest.build(
        format=fmt,
        created_by={"version": "0.1.0", "config": {"job": "x"}, "seed": 1},
        schema=_schema().to_json(),
        splits={"train": SplitInfo(8, shards)},
        files=files,
        counts=Counts(43, 40, 1, {"censored": 2}),
        source=(SourceInfo("file:///in", 3, _DIGEST),),
        parent={"url": "file:///p", "digest": _DIGEST},
        leakage={"kind": "random", "checked": ["content"], "found": {"content": 3}},
        compression=compression,
    ).to_bytes()


def _schema() -> Schema:
    encoding = {"kind": "vocabulary", "file": "page.json", "max_size": 9, "min_count": 1, "oov_buckets": 1}
    return Schema(
        (
            sample_id_field(),
            Field(name="page", dtype="string", encoding=encoding),
            Field(name="pixels", dtype="uint8", shape=(2, 2)),
            Field(name="y", dtype="bool", kind="label"),
        )
    )


def _indexed() -> IndexedManifest:
    files = (
        ShardInfo("a.tfrecord", 20, 1000, _DIGEST, "00000000", None, (0, 300, 600)),
        ShardInfo("b/c.tfrecord", 1, 100, _DIGEST, "00000000", None, ()),
    )
    columns = (("x", "int64", False), ("y", "bytes", True))
    return IndexedManifest(
        "0.1.0", 9, columns, 8, files, frozenset(["b/c.tfrecord"]), {"a.tfrecord": FileInfo(1, _DIGEST)}
    )


_FITTED = (
    Vocabulary(name="page", tokens=("a", "b"), counts=(2, 1), fitted_on=("train",)),
    Moments(name="x", count=3, mean=0.5, variance=1.5, fitted_on=("train",)),
)


def fitted_files(data: bytes) -> None:
    """A fitted file that is taken is one that we would write."""
    take = Take(data)
    document = edited(_FITTED[take.number(2)].to_json(), take)
    with refused():
        found = read_fitted(document)
        assert read_fitted(json.loads(json.dumps(found.to_json()))) == found


_DECLARED: dict[str, Any] = {
    "record": "example",
    "fields": [
        {"name": "click", "dtype": "bool", "kind": "label"},
        {"names": ["a", "b"], "dtype": "string", "nullable": True, "encoding": {"kind": "hash", "buckets": 10}},
        {"name": "t", "dtype": "string", "list": True,
         "encoding": {"kind": "sequence", "length": 8, "of": {"kind": "vocabulary", "max_size": 500}}},
        {"name": "n", "dtype": "float32", "encoding": {"kind": "bucketise", "boundaries": [1, 2.5]}},
        {"name": "p", "dtype": "uint8", "shape": [2, 2, 3],
         "encoding": {"kind": "normalise", "mean": [0.5], "deviation": [1.0], "divide_by": 255}},
        {"name": "j", "dtype": "bytes", "encoding": {"kind": "image", "height": 8, "width": 8, "channels": 3}},
    ],
}  # fmt: skip


def declared_schemas(data: bytes) -> None:
    """A declared schema, as JSON whose values are changed or as any text, is refused or can be kept in a manifest."""
    take = Take(data)
    which = take.number(3)
    text = json.dumps(edited(_DECLARED, take)) if which == 0 else take.rest().decode("utf-8", errors="replace")
    with refused():
        schema = load_schema(text if which < 2 else "\n" + text)
        assert Schema.from_json(json.loads(canonical_bytes(schema.to_json()))) == schema


_TOML = b"""[[fields]]
name = "click"
dtype = "bool"
kind = "label"
[[fields]]
names = ["a", "b"]
dtype = "string"
nullable = true
encoding = {kind = "hash", buckets = 0x10}
"""


TARGETS = (
    Target(
        "manifests",
        manifests,
        lambda: [*(bytes([which, 0, 1, 5]) for which in (0, 1, _INDEXED, _PACKED)), b"\3" + _manifest("parquet")],
    ),
    Target("fitted_files", fitted_files, lambda: [b"\0\1\2\3", b"\1\1\2\3"], 256),
    Target(
        "declared_schemas",
        declared_schemas,
        lambda: [b"\0\1\1\1", b"\2" + _TOML, b"\1" + json.dumps(_DECLARED).encode()],
    ),
)
