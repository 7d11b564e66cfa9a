"""One record of a dataset by its sample id: its fields, its place, the file it was, and its picture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.etl.describe.dataset import class_name
from lockstep.etl.describe.text import shown
from lockstep.features.images.decode import ImageError, decode
from lockstep.features.sample_id import shard_keys, shard_of
from lockstep.features.schema.fields import Field
from lockstep.features.schema.pictures import image_field, png
from lockstep.features.schema.schema import Schema, class_names_of
from lockstep.features.shards.blocks import shard_blocks
from lockstep.storage.dataset.layout import files_path
from lockstep.storage.dataset.manifest import DatasetManifest, has_files, load_dataset, read_checked
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.fs import filesystem

_ID = re.compile(r"(?:0x)?([0-9a-f]{16})|0x([0-9a-f]{1,16})|(-?[0-9]{1,19})", re.IGNORECASE)
MAX_SHOWN = 200  # characters of a value


def sample_id_of(text: str) -> int:
    """The sample id that a text names: hexadecimal as audits and errors write it, or the signed number of the column.
    Raises ConfigError for other texts.
    """
    found = _ID.fullmatch(text.strip())
    if found is not None:
        digits = found[1] or found[2]
        number = int(found[3]) if digits is None else int(digits, 16)
        if digits is not None and number >= 1 << 63:
            number -= 1 << 64
        if -(1 << 63) <= number < 1 << 63:
            return number
    raise ConfigError(
        f"--sample {text[:100]} is no sample id",
        got=text[:100],
        allowed="0x and up to 16 hexadecimal digits, 16 digits without it, or a signed number of 64 bits",
        next_step="Copy the id from an audit, an error, or the column sample_id.",
    )


@dataclass(frozen=True)
class Sample:
    """A record: its id, the split and the path of its shard, its number there, its values by field, and the file that
    it was, if the dataset says it.
    """

    id: int
    split: str
    shard: str
    record: int
    file: str | None
    schema: Schema
    class_names: tuple[str, ...] | None
    values: dict[str, Any]

    def text(self) -> str:
        """The lines that `lockstep describe --sample` prints."""
        lines = [f"sample 0x{self.id & (1 << 64) - 1:016x} ({self.id})"]
        lines.append(f"  split {self.split}, record {self.record} of {shown(self.shard, 500)}")
        if self.file is not None:
            lines.append(f"  file {shown(self.file, 500)}")
        for field in self.schema:
            lines.append(f"  {shown(field.name)} ({field.kind}): {self._value(field)}")
        return "\n".join(lines)

    def _value(self, field: Field) -> str:
        value = self.values[field.name]
        if value is None:
            return "null"
        if field.is_tensor:
            return f"{field.dtype} of shape {'x'.join(map(str, field.shape))}"
        if isinstance(value, bytes):
            return f"{len(value)} bytes, {value[:16].hex()}{'...' if len(value) > 16 else ''}"
        if field.kind == "label":
            return shown(class_name(value, self.class_names), MAX_SHOWN)
        return shown(value if isinstance(value, str) else str(value), MAX_SHOWN)

    def picture(self) -> bytes:
        """The record's picture as a PNG file. Raises DataError where it has none, or one that cannot be decoded."""
        field = image_field(self.schema.fields)
        value = None if field is None else self.values[field.name]
        if field is None or value is None:
            raise DataError(
                "this record has no picture",
                got="no field of pixels or bytes" if field is None else f"null in `{field.name}`",
                allowed="a uint8 field of height and width, or a file of a picture in a field of bytes",
                next_step="Leave --picture out.",
            )
        if field.is_tensor:
            height, width = (size for size in field.shape[:2] if size is not None)
            return png(np.frombuffer(value, np.uint8).reshape(height, width, -1))
        try:
            return png(decode(value, 3))
        except ImageError as error:
            raise DataError(
                f"field `{field.name}` of this record is no picture that can be decoded",
                got=str(error)[:200],
                allowed="a file of a picture",
                next_step="Leave --picture out.",
            ) from None


def find_sample(url: str, sample: int) -> Sample:
    """The record with this id. In a dataset that Lockstep wrote the id says which shard of a split to read first; else
    shards are read one after another. Raises NotFoundError if no record has it, and what reading raises.
    """
    manifest = load_dataset(url)
    for split, number in _in_likely_order(manifest, sample):
        first = 0
        for block in shard_blocks(url, manifest, split, number):
            for batch in block.read():
                schema = Schema.from_json(manifest.schema)
                places = np.flatnonzero(np.asarray(batch.column(schema.id_field.name)) == sample)
                if len(places):
                    row = int(places[0])
                    return Sample(
                        id=sample,
                        split=split,
                        shard=manifest.splits[split].shards[number].path,
                        record=first + row,
                        file=_file_of(url, manifest, split, number, first + row),
                        schema=schema,
                        class_names=class_names_of(manifest),
                        values=batch.slice(row, 1).to_pylist()[0],
                    )
                first += len(batch)
    more = "" if manifest.parent is None else f"; it continues {manifest.parent['url']}, which was not read"
    raise NotFoundError(
        f"no record of {url} has the sample id 0x{sample & (1 << 64) - 1:016x}",
        got=f"{manifest.counts.written} records with other ids{more}",
        allowed="the id of a record in a split",
        next_step="Check the id, and whether the dataset is the one that the audit or error names.",
    )


def _in_likely_order(manifest: DatasetManifest, sample: int) -> Iterator[tuple[str, int]]:
    """Each split and number of a shard, first those where the order of records has this id."""
    key = int(shard_keys(np.array([sample]), manifest.created_by["seed"])[0])
    likely = {name: shard_of(key, len(split.shards)) for name, split in manifest.splits.items()}
    yield from ((name, number) for name, number in likely.items() if number < len(manifest.splits[name].shards))
    for name, split in manifest.splits.items():
        yield from ((name, number) for number in range(len(split.shards)) if number != likely[name])


def _file_of(url: str, manifest: DatasetManifest, split: str, number: int, record: int) -> str | None:
    if not has_files(manifest):
        return None
    path = files_path(split, number)
    data = read_checked(filesystem(url), url, path, manifest.files[path])
    return str(pq.read_table(pa.BufferReader(data), columns=["file"]).column("file")[record].as_py())
