"""`--bake`: encodings are applied before rows are written, with statistics of the training split only.

Statistics need the splits, and splits need all rows: so the rows are kept as declared, counted, and encoded in
one more pass over what Spark keeps of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from lockstep.etl import columns as c
from lockstep.etl.spark.tasks import mapped
from lockstep.etl.split.assign import Stored
from lockstep.etl.split.splits import SplitSpec
from lockstep.features.encode.bake import Baker, check_bakeable
from lockstep.features.schema.fitted import Fitted, read_fitted
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, require

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_OWN = pa.schema(
    [
        (c.SPLIT, pa.string()),
        (c.DROPPED, pa.string()),
        (c.KEY, pa.int64()),
        (c.SOURCE, pa.int32()),
        (c.POSITION, pa.int64()),
    ]
)


def check_bake(schema: Schema, split: SplitSpec) -> None:
    """Raise ConfigError if the inputs of a model cannot be stored instead of these fields."""
    check_bakeable(schema)
    for field in schema:
        require(
            field.default is None,
            "--bake",
            f"field `{field.name}` with a default",
            "fields without a default: a baked dataset stores inputs of a model, not columns",
            "Leave out --bake, or the default.",
        )
    if split.kind == "kfold" and schema.fitted_fields:
        raise _folds(schema, f"--split {split.text}")


def fitted_of(schema: Schema, documents: Mapping[str, bytes]) -> dict[str, Fitted]:
    """The statistics of each field that needs some, from the contents of the files in `_fitted/` by name.

    Raises ConfigError for statistics of folds: a field has several of these.
    """
    fields = schema.fitted_fields
    if any(field.fitted_file not in documents for field in fields):
        raise _folds(schema, f"files {', '.join(documents)}"[:500])
    return {field.name: read_fitted(json.loads(documents[str(field.fitted_file)])) for field in fields}


@contextmanager
def baked_rows(rows: DataFrame, bake: Bake) -> Iterator[DataFrame]:
    """Rows of lockstep.etl.split.assign, baked, without those that are dropped; cached until the end of the context."""
    from pyspark.sql import functions as f

    # By number: mapInArrow cannot take a column with a dot in its name.
    fields = [f.col(c.quoted(field.name)).alias(str(number)) for number, field in enumerate(bake.schema)]
    kept = rows.where(f.col(c.DROPPED).isNull()).select(*_OWN.names, *fields)
    baked = mapped(kept, bake, bake.output).persist()
    try:
        yield baked
    finally:
        baked.unpersist()


@dataclass(frozen=True)
class Bake:
    """The function for mapInArrow: the columns of `_OWN` and the fields as columns `0`, `1` ... in, `output` out.

    Raises DataError for a value that would become another number as a model's input.
    """

    schema: Schema
    fmt: str
    fitted: Mapping[str, Fitted]

    @cached_property
    def baker(self) -> Baker:
        """The encoder; its `schema` is that of the dataset."""
        return Baker(self.schema, self.fitted)

    @cached_property
    def _stored(self) -> Stored:
        return Stored(self.baker.schema, self.fmt)

    @property
    def output(self) -> pa.Schema:
        """The columns of the rows that come out."""
        return pa.schema([*_OWN, *self._stored.output])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Bake the rows of the task."""
        names = [field.name for field in self.schema]
        for batch in batches:
            declared = pa.RecordBatch.from_arrays([batch.column(str(n)) for n in range(len(names))], names=names)
            start = 0
            for rows in self.baker.batches(declared):
                own = {name: batch.column(name).slice(start, len(rows)) for name in _OWN.names}
                start += len(rows)
                yield pa.RecordBatch.from_pydict(own | self._stored.columns(rows))


def _folds(schema: Schema, got: str) -> ConfigError:
    fields = ", ".join(field.name for field in schema.fitted_fields)
    return ConfigError(
        "folds cannot be baked: each fold that is held out has its own statistics, and shards hold one encoding",
        got=f"{got}, statistics for {fields}"[:500],
        allowed="a split `train` to fit on, or encodings that need nothing fitted: hash, bucketise, number",
        next_step="Remove --bake, and training applies the statistics of the fold held out; or use --split 80/20.",
    )
