"""A split as plain arrays: every record once and in order, whatever the format, block and batch size."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.arrays import _array, cut, split_arrays
from lockstep.features.schema.fields import Field
from lockstep.storage.errors import ConfigError, CorruptionError, DataError
from tests.training._tiny import write_images, write_table


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


def test_tensors_of_another_length_are_not_cut_anew() -> None:
    field = Field(name="t", dtype="uint8", shape=(2,))
    assert np.array_equal(_array(field, pa.array([b"ab", b"cd"])), np.array([[97, 98], [99, 100]], dtype=np.uint8))
    with pytest.raises(DataError, match=r"(?s)`t` has the wrong length.*1 to 3 bytes.*2 bytes"):
        _array(field, pa.array([b"a", b"bcd"]))  # as many bytes in all


def test_batches_without_rows_are_refused() -> None:
    for rows in (0, -1):
        with pytest.raises(ConfigError, match=f"got: {rows}"):
            next(split_arrays("/nowhere", "train", rows))
        with pytest.raises(ConfigError, match=f"got: {rows}"):
            next(cut([{"n": np.zeros(1)}], rows))


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 7))
def test_cutting_keeps_rows_and_order(sizes: list[int], rows: int) -> None:
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    chunks = [{"n": np.arange(a, b), "s": pa.array([str(n) for n in range(a, b)])} for a, b in pairwise(ends)]
    found = list(cut(chunks, rows))
    assert [n for batch in found for n in batch["n"].tolist()] == list(range(int(ends[-1])))
    assert all(pa.array([str(n) for n in batch["n"]], pa.string()).equals(batch["s"]) for batch in found)
    assert all(len(batch["n"]) == rows for batch in found[:-1]) and all(0 < len(b["n"]) <= rows for b in found[-1:])


def test_only_a_batch_across_chunks_is_copied() -> None:
    pixels = np.zeros((10, 2), np.uint8)
    chunks = [{"x": pixels[:7]}, {"x": pixels[7:]}]
    found = [batch["x"] for batch in cut(chunks, 2)]
    assert [np.shares_memory(x, pixels) for x in found] == [True, True, True, False, True]
    assert not found[3].flags.writeable


def test_large_arrays_are_joined_too() -> None:
    whole = np.arange(600_000, dtype="<f4").reshape(-1, 3)
    chunks = [{"x": whole[:150_000]}, {"x": whole[150_000:]}]
    (found,) = cut(chunks, len(whole))
    assert np.array_equal(found["x"], whole) and found["x"].dtype == whole.dtype and not found["x"].flags.writeable


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_what_is_handed_out_is_read_only(tmp_path: Path, fmt: str) -> None:
    write_table(tmp_path / "d", fmt=fmt)
    for batch in split_arrays(str(tmp_path / "d"), "train", 33):
        assert not any(values.flags.writeable for values in batch.values())
