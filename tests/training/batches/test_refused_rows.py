"""A value that no model can be fed is refused with its file, record and block, in training and in evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.features.encode.transforms import refused_row
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError
from lockstep.training.batches.feed import RankFeed, eval_batches
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.world import World
from tests.training._tiny import write_rows

ROWS = 60
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="n", dtype="int64"),
        Field(name="label", dtype="int64", kind="label", num_classes=4),
        Field(name="weight", dtype="float32", kind="weight"),
    )
)
PLACES = {
    # Of two shards, 30 rows each, and blocks of 8: row 57 is number 27 of the second.
    "tfrecord": r"part-00001\.tfrecord, record 27 \(block 3\)$",
    "parquet": r"part-00001\.parquet, record 27 \(row group 3, row 3\)$",
}


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
@pytest.mark.parametrize(
    ("column", "value", "got"),
    [
        ("label", 4, "4"),
        ("weight", -1.0, "-1.0"),
        ("n", (1 << 24) + 1, "16777217"),  # no float32; copied by the kernel that finds it, which knows no records
    ],
)
def test_file_record_and_block_are_named(tmp_path: Path, fmt: str, column: str, value: Any, got: str) -> None:
    columns: dict[str, list[Any]] = {
        "sample_id": list(range(ROWS)),
        "n": [1] * ROWS,
        "label": [1] * ROWS,
        "weight": [1.0] * ROWS,
    }
    columns[column][57] = value
    rows = pa.RecordBatch.from_pydict(columns, schema=SCHEMA.arrow_schema())
    write_rows(str(tmp_path / "d"), SCHEMA, rows, {"train": ROWS}, fmt, 2, 8, 0)
    opened = OpenSplit.at(str(tmp_path / "d"), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=3, global_batch=12, lanes=4, window_bytes=900)
    for read in (
        lambda: RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1)).batches(0, 5),
        lambda: eval_batches(opened.reader, opened.encoder, 1, 2, 16),
    ):
        with pytest.raises(DataError) as caught:
            list(read())
        assert re.search(PLACES[fmt], caught.value.what) and f"`{column}`" in caught.value.what
        assert caught.value.got == got and caught.value.allowed and caught.value.next_step


@given(st.lists(st.booleans(), min_size=1).filter(any))
def test_the_first_refused_row_is_found(wrong: list[bool]) -> None:
    def attempt(start: int, stop: int) -> None:
        if any(wrong[start:stop]):
            raise DataError(f"rows {start} to {stop}")

    row, error = refused_row(attempt, len(wrong))
    assert row == wrong.index(True) and error.what == f"rows {row} to {row + 1}"
