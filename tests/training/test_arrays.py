"""A split as plain arrays: every record once and in order, whatever the format, block and batch size."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import CorruptionError
from tests.training._tiny import write_images, write_table
from training.arrays import rebatched, split_arrays


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
@pytest.mark.parametrize("batch_rows", [1, 7, 64, 1000])
def test_all_records_in_order(tmp_path: Path, fmt: str, batch_rows: int) -> None:
    write_images(tmp_path / "images", fmt=fmt)
    batches = list(split_arrays(str(tmp_path / "images"), "train", batch_rows))
    assert [len(batch["label"]) for batch in batches[:-1]] == [batch_rows] * (len(batches) - 1)
    images = np.concatenate([batch["image"] for batch in batches])
    labels = np.concatenate([batch["label"] for batch in batches])
    assert images.shape == (100, 8, 8, 1) and images.dtype == np.uint8 and labels.dtype == np.int64
    sums = images.reshape(-1, 2, 4, 2, 4).sum(axis=(2, 4)).reshape(-1, 4)  # (n, 8, 8, 1) -> (n, 4) quadrants
    assert (sums.argmax(axis=1) == labels).all()


def test_both_formats_give_the_same(tmp_path: Path) -> None:
    found = []
    for fmt in ("tfrecord", "parquet"):
        write_table(tmp_path / fmt, fmt=fmt)
        found.append(list(split_arrays(str(tmp_path / fmt), "train", 33)))
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_damage_is_told(tmp_path: Path, fmt: str) -> None:
    write_images(tmp_path / "images", fmt=fmt)
    path = sorted((tmp_path / "images" / "split=train").iterdir())[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=path.name):
        list(split_arrays(str(tmp_path / "images"), "train", 10))


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 7))
def test_rebatching_keeps_rows_and_order(sizes: list[int], rows: int) -> None:
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    parts = [pa.record_batch({"n": np.arange(a, b)}) for a, b in pairwise(ends)]
    found = list(rebatched(parts, rows))
    assert [n for batch in found for n in batch.column("n").to_pylist()] == list(range(int(ends[-1])))
    assert all(len(batch) == rows for batch in found[:-1]) and all(0 < len(batch) <= rows for batch in found[-1:])
