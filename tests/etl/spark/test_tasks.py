"""What a task gets, and what comes of it."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from etl.spark.tasks import MIN_ROWS, OPEN_BYTES, joined, slices

MIB = 1 << 20


@given(st.lists(st.integers(0, 200 * MIB), min_size=1, max_size=60), st.integers(1, 64 * MIB), st.integers(1, 40))
def test_slices_are_all_items_in_order_and_no_more_than_are_worth_it(sizes: list[int], step: int, cores: int) -> None:
    found = slices(sizes, step, cores)
    assert [at for run in found for at in run] == list(range(len(sizes))) and all(found)
    costs = [size + OPEN_BYTES for size in sizes]
    assert len(found) <= max(-(-sum(costs) // (step + OPEN_BYTES)), cores)
    target = sum(costs) / min(len(sizes), max(-(-sum(costs) // (step + OPEN_BYTES)), cores))
    assert all(sum(costs[at] for at in run[:-1]) <= target * 1.001 for run in found), "only its last item goes beyond"


def test_ranges_of_a_large_file_keep_a_task_each_and_small_files_share_one() -> None:
    assert len(slices([64 * MIB] * 10 + [5], 64 * MIB, 2)) == 11
    assert len(slices([3000] * 2000, 64 * MIB, 2)) == 3
    assert len(slices([3000] * 2000, 64 * MIB, 16)) == 16
    assert len(slices([3000] * 3, 64 * MIB, 16)) == 3
    assert len(slices([1] * 10_000_000, 1, 2)) == 10_000


def test_small_batches_are_joined_in_order() -> None:
    schema = pa.schema([("n", pa.int64()), ("s", pa.string())])
    batches = [
        pa.record_batch([pa.array([n] * (n % 7)), pa.array([str(n)] * (n % 7))], schema=schema) for n in range(2000)
    ]
    found = list(joined(iter(batches)))
    assert pa.Table.from_batches(found) == pa.Table.from_batches(batches, schema)
    assert all(batch.num_rows >= MIN_ROWS for batch in found[:-1]) and len(found) < 7
    assert list(joined(iter([]))) == []
