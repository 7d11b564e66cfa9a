"""A description of a dataset from its manifest and some of its blocks: schema, counts, sizes, statistics, pictures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from lockstep.etl.choices import MAX_DESCRIBED_RECORDS
from lockstep.etl.columns import class_field
from lockstep.etl.describe.by_split import ComparedColumn, compared, in_order
from lockstep.etl.describe.statistics import ColumnStats, ColumnSummary
from lockstep.etl.reasons import DROPPED, REJECTED, sentence_of
from lockstep.etl.split.warnings import label_lines
from lockstep.etl.write.quarantine import rejected_of
from lockstep.features.images.intake import IMAGE
from lockstep.features.schema.fields import Field
from lockstep.features.schema.pictures import data_url, image_field
from lockstep.features.schema.sampled import sampled_of
from lockstep.features.schema.schema import Schema, class_names_of, class_word
from lockstep.features.shards.blocks import Block, dataset_blocks, indexed_blocks, indexed_fields
from lockstep.storage.dataset.indexed import IndexedManifest, is_indexed, read_indexed
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import join

MAX_SOURCES = 20  # input files that are listed
LOOK_AT, CLASSES, QUARANTINE = "What to look at", "Classes", "Quarantine"  # how titles begin
MAX_LISTED = 8  # values of a list in an encoding or in the configuration
Rows = tuple[tuple[str, ...], ...]
MAX_IMAGES = 24
MAX_CLASS_IMAGES = 60  # where each class has one
MAX_IMAGES_BYTES = 4 << 20  # of all data URLs of a page
MAX_CLASSES = 100  # rows of the table of classes


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
    dropped = [
        (f"dropped: {why}", f"{n}: {sentence_of(DROPPED, why)}".removesuffix(": "))
        for why, n in sorted(counts.dropped.items())
    ]
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
    if manifest.indexed is not None:
        facts.append(("files of", "another program, with a manifest by lockstep index"))
        facts.append(("sample ids of", ", ".join(manifest.indexed) or "file and row"))
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
    if named:  # the input of indexed files are the shards
        yield Table("Input", ("file", "size"), tuple(named))
    config = [(key, words(value)) for key, value in sorted(_used(manifest).items()) if value is not None]
    if config:
        yield Table("Configuration", (), tuple(config))


def _used(manifest: DatasetManifest) -> dict[str, Any]:
    """The configuration, with what the job used where a flag was left out: the place of the quarantine, and size,
    channels and number of classes of pictures.
    """
    config = dict(manifest.created_by["config"])
    used: dict[str, Any] = {}
    if any(path.startswith("_quarantine/") for path in manifest.files):
        used["quarantine"] = "_quarantine, in the dataset"
    if config.get("job") == "etl_images":
        fields = {field.name: field for field in Schema.from_json(manifest.schema)}
        image, label = fields[IMAGE], fields["label"]
        sides = image.encoding or dict(zip(("height", "width", "channels"), image.shape, strict=False))
        used |= {"image_size": [sides["height"], sides["width"]], "channels": sides["channels"]}
        used["num_classes"] = label.num_classes
    return config | {name: value for name, value in used.items() if config.get(name) is None}


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
    found = rejected_of(url, manifest)
    counts = {} if found is None else found.reasons
    rows = tuple((why, str(count), sentence_of(REJECTED, why)) for why, count in counts.items())
    return [Table(QUARANTINE, ("reason", "records", "meaning"), rows)] if rows else []


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


@dataclass(frozen=True)
class Picture:
    """One picture as a data URL, and its caption."""

    url: str
    caption: str


class _Samples:
    """Pictures of each class of `label`, up to MAX_CLASS_IMAGES classes; without classes, of each split.

    They are the first ones in the order of reading, so the same dataset has the same pictures.
    """

    def __init__(self, image: Field, label: Field | None, names: Sequence[str] | None, splits: Sequence[str]) -> None:
        self._image, self._names = image, names
        classes = 0 if label is None else _number_of_classes(label, names)
        self._label = label if classes else None
        self._each = max(1, MAX_IMAGES // classes) if classes else MAX_IMAGES
        self._of_split = -(-self._each // len(splits))
        self._found: dict[str, dict[str, list[Picture]]] = {}  # by class, by split
        self._bytes = 0

    @property
    def title(self) -> str:
        """The heading above the pictures."""
        if self._label is None:
            return "Sample pictures"
        more = f", the first {MAX_CLASS_IMAGES} classes" if len(self._found) == MAX_CLASS_IMAGES else ""
        return f"Pictures: {'one' if self._each == 1 else f'up to {self._each}'} of each class{more}"

    def add(self, batch: pa.RecordBatch, split: str, share: float) -> None:
        """Take some of a batch, which is this share of what is read of the split: all of them are spread over it."""
        column = batch.column(self._image.name)
        if self._label is None:
            wanted = min(len(batch), math.ceil(self._of_split * share))
            rows = [(len(batch) * number // wanted, split) for number in range(wanted)]
        else:
            labels = batch.column(self._label.name).to_pylist()
            rows = [(row, class_name(label, self._names)) for row, label in enumerate(labels)]
        for row, name in rows:
            taken = self._found.get(name, {})
            if len(taken.get(split, [])) >= self._of_split or sum(map(len, taken.values())) >= self._each:
                continue
            if not taken and len(self._found) >= MAX_CLASS_IMAGES:
                continue
            value = column[row].as_py()
            url = None if value is None else data_url(value, self._image)
            if url is not None and self._bytes + len(url) <= MAX_IMAGES_BYTES:
                self._bytes += len(url)
                caption = split if self._label is None else f"{name}, {split}"
                self._found.setdefault(name, {}).setdefault(split, []).append(Picture(url, caption))

    def pictures(self) -> tuple[Picture, ...]:
        """Return the pictures that were taken, by class and split."""
        ordered = self._found if self._label is None else sorted(self._found, key=_by_number)
        return tuple(one for name in ordered for of_split in self._found[name].values() for one in of_split)


def class_name(value: object, names: Sequence[str] | None) -> str:
    """A label's value, with the name of its class if there is one: `3 dress`, `True bought`."""
    if names is None or not isinstance(value, int) or not 0 <= value < len(names):
        return str(value)
    return f"{value} {class_word(value, names)}"


@dataclass(frozen=True)
class Description:
    """The description of a dataset. Its texts may come from data and must be escaped."""

    url: str
    tables: tuple[Table, ...]
    looked_at: str
    columns: tuple[ColumnSummary, ...]
    pictures: tuple[Picture, ...]
    by_split: tuple[ComparedColumn, ...] = ()
    pictures_title: str = ""


def describe(url: str, max_records: int = MAX_DESCRIBED_RECORDS) -> Description:
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
        error.next_step = "Check the path; run lockstep index first to describe files of other programs."
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
    image = image_field(fields)
    samples = None if image is None else _Samples(image, None if schema is None else schema.label, names, list(blocks))
    for name in in_order(blocks):
        split = blocks[name]
        of_splits[name] = [ColumnStats(field.name, field.dtype, field.shape, field.kind) for field in fields]
        records = sum(block.records for block in split)
        wanted = -(-max_records * records // max(total, 1))
        counts = classes.setdefault(name, Counter())
        for batch in _look(split, wanted):
            seen += len(batch)
            for column in (*stats, *of_splits[name]):
                column.add(batch.column(column.name))
            if label is not None:
                counts.update(class_name(value, names) for value in batch.column(label).to_pylist())
            if samples is not None:
                samples.add(batch, name, len(batch) / max(1, min(wanted, records)))
    looked_at = f"{seen} of {total} records" if seen < total else f"all {total} records"
    if label is not None and seen:
        tables = [*tables, _classes(label, classes, looked_at)]
        few = schema is not None and class_field(schema) and all(len(of) <= MAX_CLASSES for of in classes.values())
        lines = label_lines(label, classes, sampled=sampled) if few else []
        tables += [Table(LOOK_AT, (), tuple((line,) for line in lines))] if lines else []
    summaries = tuple(column.summary() for column in stats)
    by_split = [
        compared(column, {name: of[number] for name, of in of_splits.items()}) for number, column in enumerate(stats)
    ]
    of_classes = None if schema is None or schema.label is None else _class_texts(schema.label, names)
    if of_classes is not None:
        by_split = [_as_classes(column, of_classes) if column.kind == "label" else column for column in by_split]
    pictures, title = ((), "") if samples is None else (samples.pictures(), samples.title)
    return Description(url, tuple(tables), looked_at, summaries, pictures, tuple(by_split), title)


def _number_of_classes(label: Field, names: Sequence[str] | None) -> int:
    """The classes of a label, of texts at least MAX_IMAGES; 0 for a number."""
    if names is not None:
        return len(names)
    return label.num_classes or {"bool": 2, "string": MAX_IMAGES}.get(label.dtype, 0)


def _class_texts(label: Field, names: Sequence[str] | None) -> Sequence[str] | None:
    """What a page calls each class of a label; None for a label that is a number, or a text."""
    if label.dtype == "bool":
        return [class_name(value, names) for value in (False, True)]
    classes = 0 if label.dtype == "string" else _number_of_classes(label, names)
    return [class_name(number, names) for number in range(classes)] or None


def _as_classes(column: ComparedColumn, classes: Sequence[str]) -> ComparedColumn:
    """A label's column by its classes: bars have their names, and there is no mean of their numbers."""
    histograms = []
    for one in column.histograms:
        known = all(label.isdecimal() and int(label) < len(classes) for label in one.labels)
        histograms.append(replace(one, labels=tuple(classes[int(label)] for label in one.labels)) if known else one)
    facts = tuple(fact for fact in column.facts if fact[0] in ("rows", "null", "distinct"))
    return replace(column, facts=facts, histograms=tuple(histograms))


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
