"""What goes into shards of rows: their exact size, and for TFRecord the framed records."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl import columns as c
from etl.spark.tasks import rows_too_large
from lockstep.features.examples.encoder import RecordEncoder
from lockstep.features.examples.sequence_example import SequenceEncoder
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Schema


@dataclass(frozen=True)
class Stored:
    """The columns that rows of a schema have on their way to shards of a format: BYTES, for TFRecord RECORD, and
    `fields`: all of them for Parquet, else the sample id and what `also` names.
    """

    schema: Schema
    fmt: str
    also: tuple[Field, ...] = ()

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields that go on as columns."""
        return self.schema.fields if self.fmt == "parquet" else (self.schema.id_field, *self.also)

    def ddl(self) -> list[str]:
        """Those columns in their order, in Spark's notation."""
        record = [f"{c.RECORD} binary"] if self.fmt == "tfrecord" else []
        return [f"{c.BYTES} bigint", *record, *c.ddl(self.fields)]

    def columns(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        """Those columns, by name, of rows whose columns are the schema's.

        Raises DataError for rows that do not fit it, or whose records are more than Arrow's offsets of 32 bits hold.
        """
        if self.fmt == "tfrecord":
            records = self._records(rows)
            made = {c.BYTES: pc.binary_length(records).cast(pa.int64()), c.RECORD: records}
        else:
            sizes = [c.logical_bytes(field, rows.column(field.name)) for field in self.schema]
            made = {c.BYTES: pa.array(np.sum([np.asarray(size) for size in sizes], axis=0, dtype=np.int64))}
        return made | {field.name: rows.column(field.name) for field in self.fields}

    @cached_property
    def encoder(self) -> RecordEncoder | SequenceEncoder:
        """What encodes records (TFRecord)."""
        return SequenceEncoder(self.schema) if self.schema.record == SEQUENCE_EXAMPLE else RecordEncoder(self.schema)

    def _records(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        data, offsets = self.encoder.encode(rows)
        if len(data) >= 1 << 31:
            raise rows_too_large(len(data), rows.num_rows)
        # A copy: Spark takes a batch over when it likes, and the encoder's buffer is used again for the next one.
        buffers: list[Any] = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data.tobytes())]
        return pa.Array.from_buffers(pa.binary(), rows.num_rows, buffers)
