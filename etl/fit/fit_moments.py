"""Means and variances of columns: exact sums of each task, added up on the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl import columns as c
from etl.fit.exact_sums import FLOAT_UNIT, ExactSums
from etl.spark.errors import in_task
from etl.spark.session import described
from etl.spark.tasks import mapped
from lockstep.features.encode.transforms import plain_values
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Moments
from lockstep.storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DDL = "field int, split string, count bigint, total string, squares string"
_ROW = pa.schema(
    [
        ("field", pa.int32()),
        ("split", pa.string()),
        ("count", pa.int64()),
        ("total", pa.string()),
        ("squares", pa.string()),
    ]
)


class Fit(Protocol):
    """The splits that are counted, and the fold that is not."""

    @property
    def splits(self) -> tuple[str, ...]: ...
    @property
    def held_out(self) -> str | None: ...


def fit_moments(rows: DataFrame, fields: Sequence[Field], plan: Sequence[Fit]) -> dict[tuple[str, str | None], Moments]:
    """The moments of each field and held-out fold, in one pass over the rows.

    Null and NaN are left out. Raises DataError for an infinite value and for a field without any value.
    """
    if not fields:
        return {}
    from pyspark.sql import functions as f

    used = {name for fit in plan for name in fit.splits}
    # By number: mapInArrow cannot take a column with a dot in its name.
    columns = [f.col(c.quoted(field.name)).alias(str(number)) for number, field in enumerate(fields)]
    counted = rows.where(f.col(c.SPLIT).isin(*used)).select(c.SPLIT, *columns)
    parts = mapped(counted, Sums(tuple(fields)), _DDL)
    sums = {(field.name, name): ExactSums(_unit(field)) for field in fields for name in used}
    with described(rows.sparkSession, "add up means and variances"):
        collected = parts.collect()
    for row in collected:
        field = fields[row["field"]]
        part = ExactSums(_unit(field), row["count"], int(row["total"], 16), int(row["squares"], 16))
        sums[field.name, row["split"]].merge(part)
    found = {}
    for field in fields:
        for fit in plan:
            whole = ExactSums(_unit(field))
            for name in fit.splits:
                whole.merge(sums[field.name, name])
            found[field.name, fit.held_out] = whole.moments(field.name, fit.splits)
    return found


@dataclass(frozen=True)
class Sums:
    """The function for mapInArrow: `_split` and the fields as columns `0`, `1`... in; a row of _DDL for each split and
    field out.
    """

    fields: tuple[Field, ...]

    @in_task
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Add up what the task gets."""
        sums: dict[tuple[int, str], ExactSums] = {}
        for batch in batches:
            for name in pc.unique(batch.column(c.SPLIT)).to_pylist():
                part = batch.filter(pc.equal(batch.column(c.SPLIT), name))
                for number, field in enumerate(self.fields):
                    add(sums.setdefault((number, name), ExactSums(_unit(field))), field, part.column(str(number)))
        rows = [
            {"field": number, "split": name, "count": s.count, "total": f"{s.total:x}", "squares": f"{s.squares:x}"}
            for (number, name), s in sums.items()
        ]
        yield pa.RecordBatch.from_pylist(rows, schema=_ROW)


def add(sums: ExactSums, field: Field, column: pa.Array) -> None:
    """Add the values of a column but null and NaN. Raises DataError for one that is infinite."""
    values = plain_values(column.drop_null())
    if sums.unit:
        values = values.astype(np.float64)[~np.isnan(values)]
        if np.isinf(values).any():
            raise DataError(
                f"field `{field.name}` holds a value that is infinite",
                got=str(values[np.isinf(values)][0]),
                allowed="finite numbers, NaN and null (which count as missing), where a mean is fitted",
                next_step="Drop or cap such values before the dataset is written.",
            )
    sums.add(values)


def _unit(field: Field) -> int:
    return 0 if field.dtype in ("int64", "uint64") else FLOAT_UNIT
