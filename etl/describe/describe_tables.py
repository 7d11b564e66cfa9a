"""The tables of a description: what a manifest says, and why input was rejected."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.features.encode.baked import is_baked, raw_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.indexed import IndexedManifest
from lockstep.storage.dataset.manifest import DatasetManifest, read_checked
from lockstep.storage.errors import CorruptionError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join

MAX_SOURCES = 20  # of many input files the first are named
Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    """A titled table: the names of its columns (none where a row is a name and a value) and its rows."""

    title: str
    head: tuple[str, ...]
    rows: Rows


def dataset_tables(manifest: DatasetManifest) -> Iterator[Table]:
    """What a dataset's manifest says: counts, splits, schema, leakage, fitted files, input, configuration."""
    counts = manifest.counts
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    dropped = [(f"dropped: {why}", str(count)) for why, count in sorted(counts.dropped.items())]
    facts = [
        ("format", manifest.format if manifest.compression is None else f"{manifest.format}, {manifest.compression}"),
        ("digest", manifest.digest),
        ("made by version", str(manifest.created_by["version"])),
        ("seed", str(manifest.created_by["seed"])),
        ("read", str(counts.read)),
        ("written", str(counts.written)),
        ("quarantined", str(counts.quarantined)),
        *dropped,
        ("size of shards", size(sum(shard.bytes for shard in shards))),
    ]
    if manifest.compression is not None:
        facts.append(("size unpacked", size(sum(shard.unpacked_bytes for shard in shards))))
    if manifest.parent is not None:
        facts.append(("appends to", f"{manifest.parent['url']} ({manifest.parent['digest']})"))
    yield Table("Dataset", (), tuple(facts))
    head = ("split", "records", "size", "shards", "records a shard (least / mean / most)", "bytes a shard")
    rows = [
        (
            name,
            str(split.records),
            size(sum(shard.bytes for shard in split.shards)),
            str(len(split.shards)),
            spread([shard.records for shard in split.shards] or [0]),
            spread([shard.bytes for shard in split.shards] or [0]),
        )
        for name, split in sorted(manifest.splits.items())
    ]
    yield Table("Splits", head, tuple(rows))
    yield Table("Schema", ("field", "dtype", "shape", "kind", "nullable", "encoding"), tuple(_fields(manifest.schema)))
    baked = tuple(_baked(manifest.schema))
    if baked:
        yield Table("Baked: stored as a model is fed", ("field", "encoding", "stored", "ids", "fitted", "on"), baked)
    if manifest.leakage is not None:
        more = [manifest.leakage.get(key, {}) for key in ("by_chance", "distinct")]
        found = tuple(
            (name, str(count), *(str(values.get(name, "")) for values in more))
            for name, count in sorted(manifest.leakage["found"].items())
        )
        title = f"Leakage: on two sides of the split ({manifest.leakage['kind']})"
        yield Table(title, ("what", "found", "by chance", "distinct"), found)
    fitted = [(path, size(info.bytes)) for path, info in sorted(manifest.files.items()) if path.startswith("_fitted/")]
    if fitted:
        yield Table("Fitted files", ("file", "size"), tuple(fitted))
    named = [(source.url, size(source.bytes)) for source in manifest.source[:MAX_SOURCES]]
    if len(manifest.source) > MAX_SOURCES:
        named.append((f"and {len(manifest.source) - MAX_SOURCES} more", ""))
    yield Table("Input", ("file", "size"), tuple(named))
    config = [
        (key, json.dumps(value, ensure_ascii=False)) for key, value in sorted(manifest.created_by["config"].items())
    ]
    if config:
        yield Table("Configuration", (), tuple(config))


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for field in schema["fields"]:
        shape = "x".join("any" if size is None else str(size) for size in field["shape"]) or "one value"
        encoding = "" if field["encoding"] is None else json.dumps(field["encoding"], sort_keys=True)
        yield field["name"], field["dtype"], shape, field["kind"], "yes" if field["nullable"] else "no", encoding


def _baked(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for field in Schema.from_json(schema):
        if is_baked(field):
            assert field.encoding is not None
            declared, ids = raw_field(field).encoding or {}, field.encoding.get("ids")
            kinds = [one["kind"] for one in (declared, declared.get("of", {})) if one]
            fitted = field.encoding.get("fitted", {"file": "", "splits": []})
            stored = f"{field.dtype} list" if field.is_list else field.dtype
            told = "" if ids is None else str(ids)
            yield field.name, " of ".join(kinds) or "none", stored, told, fitted["file"], ", ".join(fitted["splits"])


def indexed_tables(manifest: IndexedManifest) -> list[Table]:
    """What the manifest of an indexed directory says."""
    sizes = [file.bytes for file in manifest.files]
    facts = (
        ("kind", "TFRecord files of somebody else, with an index"),
        ("files", str(len(sizes))),
        ("gzip files", str(len(manifest.gzip))),
        ("records", str(sum(file.records for file in manifest.files))),
        ("size", size(sum(sizes))),
        ("records a file (least / mean / most)", spread([file.records for file in manifest.files])),
        ("bytes a file", spread(sizes)),
        ("schema inferred from", f"{manifest.sampled} records"),
    )
    columns = tuple((name, dtype, "any number" if many else "one value") for name, dtype, many in manifest.columns)
    return [Table("Files", (), facts), Table("Schema", ("feature", "dtype", "values"), columns)]


def quarantine_table(url: str, manifest: DatasetManifest) -> list[Table]:
    """Why input was rejected; the files hold raw bytes of the input too, of which nothing is told."""
    reasons: Counter[str] = Counter()
    for path, info in sorted(manifest.files.items()):
        if not path.startswith("_quarantine/"):
            continue
        data = read_checked(filesystem(url), url, path, info)
        try:
            reasons.update(pq.read_table(pa.BufferReader(data), columns=["reason"]).column("reason").to_pylist())
        except (pa.ArrowException, OSError, KeyError) as error:
            raise CorruptionError(
                "a quarantine file cannot be read",
                file=join(url, path),
                got=str(error).splitlines()[0],
                allowed="Parquet with a column `reason`",
            ) from None
    rows = sorted(reasons.items(), key=lambda item: (-item[1], str(item[0])))
    return [Table("Quarantine", ("reason", "records"), tuple((str(why), str(n)) for why, n in rows))] if rows else []


def size(count: int) -> str:
    """A number of bytes, exactly and in words."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count} ({count / unit:.1f} {name})"
    return str(count)


def spread(sizes: Sequence[int]) -> str:
    """Least, mean and greatest of some sizes, and how far the greatest is above the mean."""
    mean = sum(sizes) / len(sizes)
    over = f", the largest {100 * (max(sizes) / mean - 1):.1f} % above the mean" if mean and len(sizes) > 1 else ""
    return f"{min(sizes)} / {mean:.0f} / {max(sizes)}{over}"
