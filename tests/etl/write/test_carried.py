"""Carried rows in files, without Spark: the same bytes however they come, read back as they were, damage is noticed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl import columns as c
from lockstep.etl.logs.past import carried_schema
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.write import carried
from lockstep.etl.write.carried import ReadCarried, WriteCarried
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.errors import CorruptionError

SCHEMA = carried_schema(("visitor", "page", "query"))


def rows(count: int) -> pa.RecordBatch:
    """Carried requests, of which each third is open."""
    found = [
        {"visitor": f"v{n:03d}", "page": "/é", "query": "", "time": n, "part": 1, "source": 0, "position": n * 9,
         "requests": 1 + n % 2, "since": n - 5, "stays": None if n % 3 == 0 else n % 2 == 0, "open": n % 3 == 0}
        for n in range(count)
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(found, schema=SCHEMA)


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 40), max_size=6).map(sorted))
def test_the_bytes_do_not_depend_on_the_batches(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    folder, whole = tmp_path_factory.mktemp("carried"), rows(40)
    edges = [0, *cuts, 40]
    parts = [whole.slice(start, stop - start) for start, stop in pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carried, "GROUP_ROWS", 7)
        written = [WriteCarried(str(folder), SCHEMA).write(0, iter(some)).to_pylist()[0] for some in ([whole], parts)]
        assert written[0] | {"path": ""} == written[1] | {"path": ""}
        assert (written[0]["rows"], written[0]["open"]) == (40, 14)
        data = Path(written[1]["path"])
        info = FileInfo(written[1]["bytes"], written[1]["sha256"])
        read = ReadCarried(str(folder), ((data.name, info),), SCHEMA)
        numbers = pa.RecordBatch.from_pydict({"id": [0]})
        assert pa.Table.from_batches(list(read([numbers]))).equals(pa.Table.from_batches([whole]))
        some = ReadCarried(str(folder), ((data.name, info),), carried_schema(("visitor",)))
        assert next(some([numbers])).schema.names == carried_schema(("visitor",)).names
        data.write_bytes(data.read_bytes()[:-1] + b"?")
        with pytest.raises(CorruptionError):
            list(read([numbers]))


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_what_rows_carry_comes_out_as_rows_that_count_nowhere(fmt: str) -> None:
    schema = Schema((sample_id_field(), Field(name="x", dtype="int64")))
    left = pa.schema([("visitor", pa.string()), ("open", pa.bool_())])
    assign = Assign(schema, ("x",), SplitSpec.parse("1/1"), 0, fmt, carried=tuple(left))
    dropped = [None, c.PAST, "censored", None]
    held = [None, {"visitor": "a", "open": False}, {"visitor": "b", "open": True}, {"visitor": "c", "open": False}]
    batch = pa.RecordBatch.from_pydict(
        {
            "x": pa.array([1, 2, 3, 4]),
            c.OCCURRENCE: pa.array([0] * 4, pa.int64()),
            c.SOURCE: pa.array([0] * 4, pa.int32()),
            c.POSITION: pa.array([0] * 4, pa.int64()),
            c.LEAK: pa.array([0] * 4, pa.int64()),
            c.DROPPED: pa.array(dropped, pa.string()),
            c.CARRIED: pa.array(held, pa.struct(left)),
        }
    )
    out = pa.Table.from_batches(list(assign([batch]))).to_pylist()
    assert [row[c.DROPPED] for row in out] == [None, None, "censored", c.PAST, c.PAST, c.PAST]
    assert [row[c.CARRIED] for row in out] == [None] * 3 + held[1:]
    plain = pa.Table.from_batches(list(Assign(schema, ("x",), SplitSpec.parse("1/1"), 0, fmt)([batch]))).to_pylist()
    assert [{k: v for k, v in row.items() if k != c.CARRIED} for row in out[:2]] == plain[:2]
