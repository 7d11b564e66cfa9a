"""The benchmark of the write job puts classes in place of the job's: they must give what the job expects."""

from __future__ import annotations

import pyarrow as pa
import pytest

from benchmarks.shared.shapes import tab_rows, tab_schema
from benchmarks.write_job import CountedAssign, LateAssign, PlainAssign
from lockstep.etl import columns as c
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.splits import SplitSpec
from lockstep.features.schema.fields import SAMPLE_ID

COUNT = 20


@pytest.mark.parametrize("kind", [CountedAssign, PlainAssign, LateAssign])
def test_rows_have_the_columns_that_spark_is_told(kind: type[Assign], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tab_rows(COUNT, 0.0).rename_columns({SAMPLE_ID: "key"})
    for name, kind_of in ((c.SOURCE, pa.int32()), (c.POSITION, pa.int64()), (c.OCCURRENCE, pa.int64())):
        values = list(range(COUNT)) if name == c.POSITION else [0] * COUNT
        rows = rows.append_column(name, pa.array(values, kind_of))
    rows = rows.append_column(c.LEAK, pa.nulls(COUNT, pa.int64()))
    parts = (tab_schema(False), ("key",), SplitSpec.parse("80/20"), 0, "tfrecord")
    job = Assign(*parts).rows(rows)
    monkeypatch.setattr(CountedAssign, "canned", job.column(c.RECORD), raising=False)
    stand_in = kind(*parts)
    found = stand_in.rows(rows)
    # A batch of mapInArrow is taken by place, not by name.
    assert found.schema.names == stand_in.output.names
    assert found.column(c.BYTES) == job.column(c.BYTES)
    if kind is PlainAssign:
        assert found == job
        assert "_records" in vars(type(stand_in._stored)), "the kernel encoded them"
