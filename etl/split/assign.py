"""The second pass, in tasks: the sample id, split, order key and encoded size of each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl import columns as c
from lockstep.etl.reasons import SAMPLED_OUT
from lockstep.etl.spark.tasks import rows_too_large
from lockstep.etl.split.sampling import WEIGHT, ClassWeights, Sampling
from lockstep.etl.split.splits import SplitSpec
from lockstep.features.examples.codec import RecordEncoder
from lockstep.features.examples.sequence_example import SequenceEncoder
from lockstep.features.sample_id import sample_ids, shard_keys, text_of
from lockstep.features.schema.fields import SAMPLE_ID, Field
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Schema
from lockstep.storage.errors import DataError

_SIGN = np.uint64(1 << 63)
_OWN = pa.schema(
    [
        (c.SPLIT, pa.string()),
        (c.DROPPED, pa.string()),
        (c.KEY, pa.int64()),
        (c.LEAK, pa.int64()),
        (c.SOURCE, pa.int32()),
        (c.POSITION, pa.int64()),
    ]
)


@dataclass(frozen=True)
class Stored:
    """The columns that rows of a schema have on their way to shards of a format: BYTES, for TFRecord also RECORD, and
    `fields`: for Parquet all of the schema's, for TFRecord the sample id and `also`.
    """

    schema: Schema
    fmt: str
    also: tuple[Field, ...] = ()

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields that stay columns."""
        return self.schema.fields if self.fmt == "parquet" else (self.schema.id_field, *self.also)

    @property
    def output(self) -> list[pa.Field]:
        """The columns of a written row, in order: its bytes, the record (TFRecord only), and the fields that stay
        columns.
        """
        record = [pa.field(c.RECORD, pa.binary())] if self.fmt == "tfrecord" else []
        return [pa.field(c.BYTES, pa.int64()), *record, *(pa.field(f.name, f.arrow_type) for f in self.fields)]

    def columns(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        """Make the columns of `output`, by name, from rows that have the schema's columns.

        Raises DataError for rows that do not fit the schema, or whose records exceed Arrow's 32-bit offsets.
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
        """The encoder of records (TFRecord)."""
        return SequenceEncoder(self.schema) if self.schema.record == SEQUENCE_EXAMPLE else RecordEncoder(self.schema)

    def _records(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        data, offsets = self.encoder.encode(rows)
        if len(data) >= 1 << 31:
            raise rows_too_large(len(data), rows.num_rows)
        # A copy: Spark may read a batch late, and the encoder reuses its buffer for the next one.
        buffers: list[Any] = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data.tobytes())]
        return pa.Array.from_buffers(pa.binary(), rows.num_rows, buffers)


@dataclass(frozen=True)
class Assign:
    """The function for mapInArrow: rows of the caller in, rows of `output` out. Of dropped rows only the reason stays,
    except those that a `counted` split may need. With `carried`, the fields of CARRIED, what the rows carry comes out
    as rows of its own, whose reason is PAST.

    TFRecord rows are encoded and framed here, once: the number of shards follows from their exact size, and Spark
    shuffles one column of bytes faster than many columns (docs/decisions/060-codec-kernels.md).
    """

    schema: Schema
    id_columns: tuple[str, ...]
    split: SplitSpec
    seed: int
    fmt: str
    sample: Sampling | None = None
    weights: ClassWeights | None = None
    carried: tuple[pa.Field, ...] = ()
    files: bool = False
    """Whether rows have FILE, which then comes out too."""

    @property
    def output(self) -> pa.Schema:
        """The columns of the rows that come out."""
        files = [pa.field(c.FILE, pa.string())] if self.files else []
        carried = [pa.field(c.CARRIED, pa.struct(self.carried))] if self.carried else []
        return pa.schema([*_OWN, *files, *self._stored.output, *carried])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Raises DataError for a null in an id column or a row that does not fit the schema."""
        for batch in batches:
            if not batch.num_rows:
                continue
            if not self.carried:
                yield self.rows(batch)
                continue
            column, old = batch.column(c.CARRIED), pc.equal(batch.column(c.DROPPED), c.PAST)
            yield from self._with_carried(self.rows(batch.filter(pc.invert(pc.fill_null(old, False)))), column)

    def _with_carried(self, rows: pa.RecordBatch, column: pa.StructArray) -> Iterator[pa.RecordBatch]:
        """Yield `rows`, and what `column` carries as rows of PAST."""
        left, schema = column.filter(column.is_valid()).cast(pa.struct(self.carried)), self.output
        if rows.num_rows:
            arrays = [*rows.columns, pa.nulls(rows.num_rows, left.type)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        if len(left):
            own = {c.DROPPED: pa.array([c.PAST] * len(left)), c.CARRIED: left}
            yield pa.RecordBatch.from_arrays(
                [own[f.name] if f.name in own else pa.nulls(len(left), f.type) for f in schema], schema=schema
            )

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of `output` for one batch."""
        lost = pa.nulls(0, pa.string())
        if c.DROPPED in batch.schema.names and batch.column(c.DROPPED).null_count < batch.num_rows:
            reasons = batch.column(c.DROPPED)
            batch, lost = batch.filter(reasons.is_null()), reasons.filter(reasons.is_valid())
        ids = self._ids(batch)
        splits = self.split.assign(batch, ids, self.seed)
        if self.sample is None:
            kept = self._kept(batch, ids, splits)
        elif self.split.counted:
            # Only lockstep.etl.split.counted knows whether a row is in a split that is sampled, so rows that sampling
            # leaves out are kept whole.
            out = pa.array(~self.sample.keeps(batch, ids, self.seed))
            kept = self._kept(batch, ids, splits)
            reasons = pc.if_else(out, SAMPLED_OUT, kept.column(c.DROPPED))
            kept = kept.set_column(kept.schema.get_field_index(c.DROPPED), c.DROPPED, reasons)
        else:
            sampled = np.asarray(pc.is_in(splits, value_set=pa.array(self.split.trained)))
            keeps = self.sample.keeps(batch, ids, self.seed) | ~sampled
            lost = pa.concat_arrays([lost, pa.array([SAMPLED_OUT] * int((~keeps).sum()), pa.string())])
            kept = self._kept(batch.filter(pa.array(keeps)), ids[keeps], splits.filter(pa.array(keeps)))
        if not len(lost):
            return kept
        nulls = [lost if f.name == c.DROPPED else pa.nulls(len(lost), f.type) for f in kept.schema]
        return pa.concat_batches([kept, pa.RecordBatch.from_arrays(nulls, schema=kept.schema)])

    def _kept(self, batch: pa.RecordBatch, ids: NDArray[np.int64], splits: pa.StringArray) -> pa.RecordBatch:
        if self.weights is not None:
            batch = batch.append_column(WEIGHT, self.weights.of(batch))
        full = {field.name: batch.column(field.name) for field in self.schema if field.name != SAMPLE_ID}
        full[SAMPLE_ID] = pa.array(ids)
        fields = pa.RecordBatch.from_arrays(
            [full[f.name].cast(f.arrow_type) for f in self.schema], names=[f.name for f in self.schema]
        )
        keys = (shard_keys(ids, self.seed) ^ _SIGN).view(np.int64)  # flipping the sign keeps unsigned order
        out: dict[str, Any] = {
            c.SPLIT: splits,
            c.DROPPED: pa.nulls(batch.num_rows, pa.string()),
            c.KEY: pa.array(keys),
        }
        out |= {name: batch.column(name) for name in (c.LEAK, c.SOURCE, c.POSITION, *([c.FILE] if self.files else []))}
        return pa.RecordBatch.from_pydict(out | self._stored.columns(fields))

    @property
    def _encoder(self) -> RecordEncoder | SequenceEncoder:
        return self._stored.encoder

    @cached_property
    def _stored(self) -> Stored:
        return Stored(self.schema, self.fmt, also=c.counted_fields(self.schema))

    def _ids(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        columns = [_as_text(name, batch.column(name)) for name in self.id_columns]
        return sample_ids(columns, np.asarray(batch.column(c.OCCURRENCE)))


def _as_text(name: str, column: pa.Array) -> pa.Array:
    """An id column in the form that is hashed, see lockstep.features.sample_id.text_of."""
    if column.null_count:
        raise DataError(
            f"id column `{name}` is null",
            got="null",
            allowed="a value in each row",
            next_step="Fill or drop those rows.",
        )
    return text_of(column)
