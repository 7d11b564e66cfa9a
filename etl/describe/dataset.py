"""What is in a dataset: schema, counts, sizes, statistics and sample images, from its manifest and a look at blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from etl.columns import class_field
from etl.describe.describe_tables import Table, dataset_tables, indexed_tables, quarantine_table
from etl.describe.sample_images import Picture, image_field, pictures
from etl.describe.statistics import ColumnStats, ColumnSummary
from etl.split.warnings import label_lines
from lockstep.features.schema.fields import Field
from lockstep.features.schema.sampled import sampled_of
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.blocks import Block, dataset_blocks, indexed_blocks, indexed_fields
from lockstep.storage.dataset.indexed import is_indexed, read_indexed
from lockstep.storage.dataset.layout import MANIFEST_NAME
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join

MAX_RECORDS = 100_000
MAX_IMAGES = 24
MAX_CLASSES = 100  # rows of the table of classes


@dataclass(frozen=True)
class Description:
    """All that is told of a dataset; every text in it may come from data and is not to be trusted."""

    url: str
    tables: tuple[Table, ...]
    looked_at: str
    columns: tuple[ColumnSummary, ...]
    pictures: tuple[Picture, ...]


def describe(url: str, max_records: int = MAX_RECORDS) -> Description:
    """Describe the dataset or indexed directory at `url`.

    Counts and sizes are the manifest's. Values are those of about `max_records` records at most (from blocks that lie
    evenly over each split, in proportion), so memory and time do not grow with the dataset. Raises ConfigError for
    max_records below 1, NotFoundError where there is no dataset, CorruptionError or DataError for what is damaged.
    """
    if max_records < 1:
        raise ConfigError(
            "no records would be looked at", got=str(max_records), allowed="1 or more", next_step="Raise --max-records."
        )
    fs, where = filesystem(url), join(url, MANIFEST_NAME)
    if fs.exists(where) and is_indexed(data := fs.read_bytes(where), where):
        indexed = read_indexed(data, where)
        blocks = {"all files": indexed_blocks(url, indexed)}
        return _described(url, indexed_tables(indexed), blocks, indexed_fields(indexed), max_records)
    try:
        manifest = load_dataset(url)
    except NotFoundError as error:
        error.next_step = "Check the path; files of somebody else can be described once jobs.index has been there."
        raise
    schema = Schema.from_json(manifest.schema)
    tables = [*dataset_tables(manifest), *quarantine_table(url, manifest)]
    sampled = sampled_of(manifest) is not None
    return _described(url, tables, dataset_blocks(url, manifest), schema.fields, max_records, schema, sampled)


def _described(
    url: str,
    tables: Sequence[Table],
    blocks: Mapping[str, list[Block]],
    fields: Sequence[Field],
    max_records: int,
    schema: Schema | None = None,
    sampled: bool = False,
) -> Description:
    label = None if schema is None or schema.label is None else schema.label.name
    total = sum(block.records for split in blocks.values() for block in split)
    stats = [ColumnStats(field.name, field.dtype, field.shape, field.kind) for field in fields]
    classes: dict[str, Counter[str]] = {}
    seen = 0
    found: list[Picture] = []
    image = image_field(fields)
    for name, split in sorted(blocks.items()):
        records = sum(block.records for block in split)
        wanted = -(-max_records * records // max(total, 1))
        counts = classes.setdefault(name, Counter())
        share = -(-MAX_IMAGES // len(blocks))
        shown: list[Picture] = []
        for batch in _look(split, wanted):
            seen += len(batch)
            for column in stats:
                column.add(batch.column(column.name))
            if label is not None:
                counts.update(str(value) for value in batch.column(label).to_pylist())
            if image is not None:
                # From each batch its share, so that they come from all over the split.
                here = -(-share * len(batch) // max(1, min(wanted, records)))
                shown += pictures(batch, image, label, name, min(here, share - len(shown)))
        found += shown
    looked_at = f"{seen} of {total} records" if seen < total else f"all {total} records"
    if label is not None and seen:
        tables = [*tables, _classes(label, classes, looked_at)]
        few = schema is not None and class_field(schema) and all(len(of) <= MAX_CLASSES for of in classes.values())
        lines = label_lines(label, classes, sampled=sampled) if few else []
        tables += [Table("What to look at", (), tuple((line,) for line in lines))] if lines else []
    summaries = tuple(column.summary() for column in stats)
    return Description(url, tuple(tables), looked_at, summaries, tuple(found[:MAX_IMAGES]))


def _look(blocks: Sequence[Block], wanted: int) -> Iterator[pa.RecordBatch]:
    """Batches of blocks that lie evenly among all, until there are `wanted` records."""
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
    return Table(f"Classes by `{label}` ({looked_at})", ("class", *classes), tuple(rows))


def _class_row(value: str, classes: Mapping[str, Counter[str]]) -> tuple[str, ...]:
    cells = []
    for counts in classes.values():
        total = sum(counts.values())
        cells.append(f"{counts[value]} ({100 * counts[value] / total:.2f} %)" if total else "0")
    return value, *cells


def _by_number(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value
