"""Image sets in Parquet: a column of encoded images and a column of labels; a piece is a row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.etl import columns as c
from lockstep.etl.images import source as r
from lockstep.etl.images.source import ImagePlan, Piece, split_word
from lockstep.etl.images.tar_format import MAX_NAME_BYTES
from lockstep.etl.input.files import find_sources, source_name
from lockstep.etl.input.footers import damaged, parquet_footer
from lockstep.etl.reasons import LABEL_OUT_OF_RANGE, LABEL_TOO_LONG, NO_IMAGE, NO_LABEL
from lockstep.features.images.decode import ImageError
from lockstep.features.images.intake import Intake
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute

_COLUMNS = (c.PACKED, c.POSITION, "number", "label", "class")
_BATCH_ROWS = 64  # images may have some MiB each


@dataclass(frozen=True, slots=True)
class ParquetPiece(Piece):
    """One row group of a file; its first row is the row `first` of the file. `columns` are dotted paths."""

    source: int
    url: str
    group: int
    first: int
    image: str
    label: str
    name: str
    split: str | None

    def read(self, intake: Intake, num_classes: int | None) -> Iterator[pa.RecordBatch]:
        """Raises DataError for a file that Arrow cannot read."""
        fixed = {c.SOURCE: self.source, "name": self.name, c.OCCURRENCE: 0, c.SPLIT: self.split}
        gather = r.Gather(_COLUMNS, **fixed)
        number = self.first
        with filesystem(self.url).open_read(self.url) as file:
            try:
                opened = pq.ParquetFile(pa.PythonFile(file, mode="r"), page_checksum_verification=True)
                columns = [self.image, self.label]
                for batch in opened.iter_batches(_BATCH_ROWS, row_groups=[self.group], columns=columns):
                    images, labels = (_values(batch, path) for path in columns)
                    for image, label in zip(images, labels, strict=True):
                        self._take(image, label, number, intake, num_classes, gather)
                        number += 1
                        yield from gather.full()
            except (pa.ArrowException, OSError) as error:
                raise damaged(self.url, "Parquet", error) from None
        yield from gather.rest()

    def _take(
        self, image: bytes | None, label: Any, number: int, intake: Intake, num_classes: int | None, gather: r.Gather
    ) -> None:
        # A row of a Parquet file has no byte position: its number takes this place.
        if image is None or label is None:
            gather.bad(NO_IMAGE if image is None else NO_LABEL, number, image or b"")
            return
        if isinstance(label, int) and not (num_classes is not None and 0 <= label < num_classes):
            gather.bad(LABEL_OUT_OF_RANGE, number, image)
            return
        if isinstance(label, str) and len(label) > MAX_NAME_BYTES:
            gather.bad(LABEL_TOO_LONG, number, image)
            return
        try:
            taken, packed = intake.hand_on(image)
        except ImageError as error:
            gather.bad(error.reason, number, image)
            return
        named = (None, r.composed(label)) if isinstance(label, str) else (label, None)
        gather.record(taken, packed, number, number, *named)


def plan(
    inputs: Sequence[str], *, image: str, label: str, given: bool, num_classes: int | None, root: str | None = None
) -> ImagePlan:
    """Read the footers: find the row groups, and check the types of the columns.

    Raises ConfigError for a missing or wrong column, DataError for other files than Parquet and for files without rows.
    """
    sources = find_sources(inputs, root=root)
    pieces: list[ParquetPiece] = []
    named: set[bool] = set()
    for number, source in enumerate(sources):
        metadata = parquet_footer(source.url, source.size_bytes)
        named.add(_labels_are_text(source.url, metadata.schema.to_arrow_schema(), image, label))
        name = source_name(source.url)
        split = split_word(name)
        if given and split is None:
            raise ConfigError(
                f"{source.url} does not name its split",
                got=name,
                allowed="*train*, *validation* or *test*",
                next_step="Use --split 80/20.",
            )
        first = 0
        for group in range(metadata.num_row_groups):
            place = (absolute(source.url), group, first, image, label, source.path, split if given else None)
            pieces.append(ParquetPiece(number, *place))
            first += metadata.row_group(group).num_rows
    if len(named) > 1 or (named == {False} and num_classes is None):
        raise ConfigError(
            f"labels of column `{label}` cannot be counted",
            got="text in one file and numbers in another" if len(named) > 1 else "numbers, and no --num-classes",
            allowed="text in all files, or numbers with --num-classes",
            next_step="Give --num-classes, or build a dataset from each kind of file.",
        )
    if not pieces:
        raise DataError(
            "the inputs hold no record",
            got=f"{len(sources)} Parquet files without a row group",
            allowed="a row or more",
            next_step="Check --input, and the program that wrote these files.",
        )
    holding = sorted({piece.source for piece in pieces})
    return ImagePlan(
        sources=sources,
        pieces=pieces,
        num_classes=num_classes if named == {False} else None,
        named=[sources[number] for number in holding],
    )


def _labels_are_text(url: str, schema: pa.Schema, image: str, label: str) -> bool:
    kinds = {path: _type_of(schema, path) for path in (image, label)}
    good_image = kinds[image] in (pa.binary(), pa.large_binary(), pa.binary_view())
    kind = kinds[label]
    text = kind in (pa.string(), pa.large_string(), pa.string_view())
    if not good_image or not (text or (kind is not None and pa.types.is_integer(kind))):
        raise ConfigError(
            f"{url} does not have the columns that --image-column and --label-column name",
            got=", ".join(f"{path}: {'not there' if kind is None else kind}" for path, kind in kinds.items()),
            allowed="a column of bytes and one of text or whole numbers; a struct's field as column.field",
            next_step=f"Columns are: {', '.join(f'{f.name} ({f.type})' for f in schema)[:500]}.",
        )
    return text


def _type_of(schema: pa.Schema, path: str) -> pa.DataType | None:
    kind: pa.DataType | None = pa.struct(list(schema))
    for part in path.split("."):
        at = kind.get_field_index(part) if kind is not None and pa.types.is_struct(kind) else -1
        kind = kind.field(at).type if kind is not None and at >= 0 else None
        if kind is not None and pa.types.is_dictionary(kind):
            kind = kind.value_type  # pandas' and polars' categories: in the file they are plain values
    return kind


def _values(batch: pa.RecordBatch, path: str) -> list[Any]:
    first, *rest = path.split(".")
    column = batch.column(first)
    for part in rest:
        column = pa.compute.struct_field(column, part)
    return list(column.to_pylist())
