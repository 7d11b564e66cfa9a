"""A description of a dataset from its manifest and some of its blocks: schema, counts, sizes, statistics, pictures."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from etl.columns import class_field
from etl.describe.by_split import ComparedColumn, compared, in_order
from etl.describe.statistics import ColumnStats, ColumnSummary
from etl.split.warnings import label_lines
from lockstep.features.schema.fields import Field
from lockstep.features.schema.sampled import sampled_of
from lockstep.features.schema.schema import Schema, class_names_of
from lockstep.features.shards.blocks import Block, dataset_blocks, indexed_blocks, indexed_fields
from lockstep.storage.dataset.indexed import IndexedManifest, is_indexed, read_indexed
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset, read_checked
from lockstep.storage.errors import ConfigError, CorruptionError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import join

MAX_SOURCES = 20  # input files that are listed
LOOK_AT, CLASSES, QUARANTINE = "What to look at", "Classes", "Quarantine"  # how titles begin
MAX_LISTED = 8  # values of a list in an encoding or in the configuration
Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    """A titled table: the names of its columns (none where a row is a name and a value) and its rows."""

    title: str
    head: tuple[str, ...]
    rows: Rows


def dataset_tables(manifest: DatasetManifest) -> Iterator[Table]:
    """The tables of a dataset's manifest: counts, splits, schema, leakage, fitted files, input, configuration."""
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
    config = [(key, words(value)) for key, value in sorted(manifest.created_by["config"].items())]
    if config:
        yield Table("Configuration", (), tuple(config))


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for field in schema["fields"]:
        shape = "x".join("any" if size is None else str(size) for size in field["shape"]) or "one value"
        encoding = "" if field["encoding"] is None else words(field["encoding"])
        yield field["name"], field["dtype"], shape, field["kind"], "yes" if field["nullable"] else "no", encoding


def _baked(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for field in Schema.from_json(schema):
        if field.is_baked:
            assert field.encoding is not None
            declared, ids = field.declared.encoding or {}, field.encoding.get("ids")
            kinds = [one["kind"] for one in (declared, declared.get("of", {})) if one]
            fitted = field.encoding.get("fitted", {"file": "", "splits": []})
            stored = f"{field.dtype} list" if field.is_list else field.dtype
            ids = "" if ids is None else str(ids)
            yield field.name, " of ".join(kinds) or "none", stored, ids, fitted["file"], ", ".join(fitted["splits"])


def indexed_tables(manifest: IndexedManifest) -> list[Table]:
    """The tables of the manifest of an indexed directory."""
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
    """Why input was rejected; the raw bytes that the files hold are never shown."""
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
    return [Table(QUARANTINE, ("reason", "records"), tuple((str(why), str(n)) for why, n in rows))] if rows else []


def words(value: Any) -> str:
    """A JSON value as words: a list up to MAX_LISTED of its values, an object by its `kind` and its other keys."""
    if isinstance(value, Mapping):
        rest = [f"{name.replace('_', ' ')} {words(one)}" for name, one in sorted(value.items()) if name != "kind"]
        kind = [words(value["kind"])] if "kind" in value else []
        return ": ".join([*kind, *([", ".join(rest)] if rest else [])])
    if isinstance(value, list):
        more = [f"... ({len(value)} in all)"] if len(value) > MAX_LISTED else []
        return ", ".join([*map(words, value[:MAX_LISTED]), *more]) or "none"
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def size(count: int) -> str:
    """A number of bytes, exactly and in KiB, MiB or GiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count} ({count / unit:.1f} {name})"
    return str(count)


def spread(sizes: Sequence[int]) -> str:
    """Minimum, mean and maximum of some sizes, and how far the maximum is above the mean."""
    mean = sum(sizes) / len(sizes)
    over = f", the largest {100 * (max(sizes) / mean - 1):.1f} % above the mean" if mean and len(sizes) > 1 else ""
    return f"{min(sizes)} / {mean:.0f} / {max(sizes)}{over}"


MAX_STORED_BYTES = 256 << 10  # larger pictures would make the page too large
MAX_SIDE = 1024
# Formats that a browser shows as pictures only: no SVG, which may hold scripts.
_STORED = ((b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"))
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Picture:
    """One picture as a data URL, and its caption."""

    url: str
    caption: str


def image_field(fields: Sequence[Field]) -> Field | None:
    """The first field that may hold pictures: a uint8 tensor (height, width) or (height, width, channels), else a
    scalar of bytes.
    """
    for field in fields:
        sides = [size for size in field.shape if size is not None]
        flat = len(sides) == 2 or (len(sides) == 3 and sides[2] in _CHANNELS)
        if field.is_tensor and field.dtype == "uint8" and flat and min(sides[:2]) >= 2 and max(sides[:2]) <= MAX_SIDE:
            return field
    return next((field for field in fields if field.dtype == "bytes" and not field.shape), None)


def pictures(
    batch: pa.RecordBatch, field: Field, label: str | None, split: str, count: int, names: Sequence[str] | None = None
) -> list[Picture]:
    """Up to `count` pictures, evenly spaced in a batch; values that are no pictures are skipped. `names` are those of
    the classes.
    """
    if count <= 0 or not len(batch):
        return []
    step = max(1, len(batch) // count)
    rows = batch.slice(0, step * count).take(pa.array(range(0, min(len(batch), step * count), step)))
    found = []
    labels = rows.column(label).to_pylist() if label is not None else [None] * len(rows)
    for value, name in zip(rows.column(field.name).to_pylist(), labels, strict=True):
        url = None if value is None else data_url(value, field)
        if url is not None:
            found.append(Picture(url, split if label is None else f"{split}: {class_name(name, names)}"))
    return found[:count]


def class_name(value: object, names: Sequence[str] | None) -> str:
    """A label's value, with the name of its class if there is one: `3 dress`."""
    if names is None or not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(names):
        return str(value)
    return f"{value} {names[value]}"


def data_url(value: bytes, field: Field) -> str | None:
    """A value as a data URL, None if it is no picture."""
    if field.is_tensor:
        sides = [size for size in field.shape if size is not None]
        pixels = np.frombuffer(value, np.uint8).reshape(sides[0], sides[1], -1)
        return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode('ascii')}"
    kind = next((name for magic, name in _STORED if value.startswith(magic)), None)
    if value[:4] == b"RIFF" and value[8:12] == b"WEBP":
        kind = "webp"
    if kind is None or len(value) > MAX_STORED_BYTES:
        return None
    return f"data:image/{kind};base64,{base64.b64encode(value).decode('ascii')}"


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of pixels (height, width, channels) uint8; channels 1 grey, 3 RGB, 4 RGBA."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(target, "PNG")
    return target.getvalue()


MAX_RECORDS = 100_000
MAX_IMAGES = 24
MAX_CLASSES = 100  # rows of the table of classes


@dataclass(frozen=True)
class Description:
    """The description of a dataset. Its texts may come from data and must be escaped."""

    url: str
    tables: tuple[Table, ...]
    looked_at: str
    columns: tuple[ColumnSummary, ...]
    pictures: tuple[Picture, ...]
    by_split: tuple[ComparedColumn, ...] = ()


def describe(url: str, max_records: int = MAX_RECORDS) -> Description:
    """Describe the dataset or indexed directory at `url`.

    Counts and sizes come from the manifest, values from about `max_records` records at most, out of evenly spaced
    blocks of each split, in proportion: memory and time do not grow with the dataset. Raises ConfigError for
    max_records below 1, NotFoundError if there is no dataset, CorruptionError or DataError for damage.
    """
    if max_records < 1:
        raise ConfigError(
            "no records would be read", got=str(max_records), allowed="1 or more", next_step="Raise --max-records."
        )
    fs, where = filesystem(url), join(url, MANIFEST_NAME)
    if fs.exists(where) and is_indexed(data := fs.read_bytes(where), where):
        indexed = read_indexed(data, where)
        blocks = {"all files": indexed_blocks(url, indexed)}
        return _described(url, indexed_tables(indexed), blocks, indexed_fields(indexed), max_records)
    try:
        manifest = load_dataset(url)
    except NotFoundError as error:
        error.next_step = "Check the path; run jobs.index first to describe TFRecord files of other programs."
        raise
    schema = Schema.from_json(manifest.schema)
    tables = [*dataset_tables(manifest), *quarantine_table(url, manifest)]
    found = sampled_of(manifest)
    sampled, names = found is not None and bool(found.shares), class_names_of(manifest)
    return _described(url, tables, dataset_blocks(url, manifest), schema.fields, max_records, schema, sampled, names)


def _described(
    url: str,
    tables: Sequence[Table],
    blocks: Mapping[str, list[Block]],
    fields: Sequence[Field],
    max_records: int,
    schema: Schema | None = None,
    sampled: bool = False,
    names: Sequence[str] | None = None,
) -> Description:
    label = None if schema is None or schema.label is None else schema.label.name
    total = sum(block.records for split in blocks.values() for block in split)
    stats = [ColumnStats(field.name, field.dtype, field.shape, field.kind) for field in fields]
    of_splits: dict[str, list[ColumnStats]] = {}
    classes: dict[str, Counter[str]] = {}
    seen = 0
    found: list[Picture] = []
    image = image_field(fields)
    for name in in_order(blocks):
        split = blocks[name]
        of_splits[name] = [ColumnStats(field.name, field.dtype, field.shape, field.kind) for field in fields]
        records = sum(block.records for block in split)
        wanted = -(-max_records * records // max(total, 1))
        counts = classes.setdefault(name, Counter())
        share = -(-MAX_IMAGES // len(blocks))
        shown: list[Picture] = []
        for batch in _look(split, wanted):
            seen += len(batch)
            for column in (*stats, *of_splits[name]):
                column.add(batch.column(column.name))
            if label is not None:
                counts.update(class_name(value, names) for value in batch.column(label).to_pylist())
            if image is not None:
                # Each batch gives its share, so that they are spread over the split.
                here = -(-share * len(batch) // max(1, min(wanted, records)))
                shown += pictures(batch, image, label, name, min(here, share - len(shown)), names)
        found += shown
    looked_at = f"{seen} of {total} records" if seen < total else f"all {total} records"
    if label is not None and seen:
        tables = [*tables, _classes(label, classes, looked_at)]
        few = schema is not None and class_field(schema) and all(len(of) <= MAX_CLASSES for of in classes.values())
        lines = label_lines(label, classes, sampled=sampled) if few else []
        tables += [Table(LOOK_AT, (), tuple((line,) for line in lines))] if lines else []
    summaries = tuple(column.summary() for column in stats)
    by_split = tuple(
        compared(column, {name: of[number] for name, of in of_splits.items()}) for number, column in enumerate(stats)
    )
    return Description(url, tuple(tables), looked_at, summaries, tuple(found[:MAX_IMAGES]), by_split)


def _look(blocks: Sequence[Block], wanted: int) -> Iterator[pa.RecordBatch]:
    """Batches of evenly spaced blocks, up to `wanted` records."""
    mean = sum(block.records for block in blocks) / max(len(blocks), 1)
    count = min(len(blocks), max(1, -(-wanted // max(1, int(mean)))))
    left = wanted
    for number in range(count):
        if left <= 0:
            return
        for batch in blocks[number * len(blocks) // count].read():
            yield batch.slice(0, left)
            left -= len(batch)
            if left <= 0:
                break


def _classes(label: str, classes: Mapping[str, Counter[str]], looked_at: str) -> Table:
    values = sorted({value for counts in classes.values() for value in counts}, key=_by_number)
    shown = values[:MAX_CLASSES]
    rows = [_class_row(value, classes) for value in shown]
    if len(values) > len(shown):
        rows.append((f"and {len(values) - len(shown)} more", *("" for _ in classes)))
    return Table(f"{CLASSES} by `{label}` ({looked_at})", ("class", *classes), tuple(rows))


def _class_row(value: str, classes: Mapping[str, Counter[str]]) -> tuple[str, ...]:
    cells = []
    for counts in classes.values():
        total = sum(counts.values())
        cells.append(f"{counts[value]} ({100 * counts[value] / total:.2f} %)" if total else "0")
    return value, *cells


def _by_number(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value.partition(" ")[0]), value  # a class may have its name after its number
    except ValueError:
        return 1, 0.0, value
