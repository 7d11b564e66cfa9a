from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.schema.schema import Columns, foreign_field
from lockstep.features.shards.foreign_files import (
    _pieces,
    _records,
    _whole_records,
    find_files,
    infer_columns,
    is_gzip,
    open_unpacked,
    pieces,
    read_file,
    sample,
)
from lockstep.features.shards.read import Lenient
from lockstep.storage.errors import CorruptionError, DataError, NotFoundError
from lockstep.storage.formats.tfrecord import frame
from lockstep.storage.fs import filesystem
from lockstep.storage.kernels import frames
from tests.builders.records import encode_example

FIELDS = [foreign_field("_n", "int64", False), foreign_field("words", "string", True)]
SCHEMA = Columns(tuple(FIELDS))


def write(path: Path, numbers: range, packed: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"_n": None if n % 5 == 4 else n, "words": [str(n)] * (n % 3)} for n in numbers]
    data = b"".join(frame(encode_example(SCHEMA, row)) for row in rows)
    path.write_bytes(gzip.compress(data) if packed else data)


def test_files_are_found_by_name_in_order_and_hidden_ones_passed_over(tmp_path: Path) -> None:
    for name in (
        "b.tfrecord",
        "a/x.tfrecord-00000-of-00001",
        "c.tfrecord.gz",
        "_x/y.tfrecord",
        ".z.tfrecord",
        "README",
    ):
        write(tmp_path / name, range(1))
    url = str(tmp_path)
    assert [file.path for file in find_files(url, "*.tfrecord*")] == [
        "a/x.tfrecord-00000-of-00001",
        "b.tfrecord",
        "c.tfrecord.gz",
    ]
    assert [file.path for file in find_files(f"{url}/*.tfrecord*", "-")] == ["b.tfrecord", "c.tfrecord.gz"]
    assert [file.path for file in find_files(f"{url}/README", "*.tfrecord*")] == ["README"]  # named outright
    with pytest.raises(DataError, match="no TFRecord files"):
        find_files(url, "*.tfr")
    with pytest.raises(NotFoundError):
        find_files(f"{url}/nothing", "*")


def test_a_linked_folder_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "in/a/x.tfrecord", range(1))
    write(tmp_path / "out/y.tfrecord", range(1))
    (tmp_path / "in/b").symlink_to(tmp_path / "out")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    assert [file.path for file in find_files(str(tmp_path / "in"), "*")] == ["a/x.tfrecord"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_reads_as_columns_and_damage_is_told(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "x.tfrecord"
    write(path, range(7), packed)
    fs, url = filesystem(str(path)), str(path)
    assert is_gzip(fs, url) is packed
    (batch,) = read_file(fs, url, Lenient(FIELDS))
    assert batch.column("_n").to_pylist() == [0, 1, 2, 3, None, 5, 6]
    assert batch.column("words").to_pylist() == [[], ["1"], ["2", "2"], [], ["4"], ["5", "5"], []]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptionError, match=r"x\.tfrecord"), open_unpacked(fs, url) as source:
        list(_records(source, url))
    wrong = [foreign_field("words", "int64", True)]
    write(path, range(7), packed)
    with pytest.raises(DataError, match=r"x\.tfrecord, records from 0 on: record 0 of the batch, field `words`"):
        list(read_file(fs, url, Lenient(wrong)))


def test_the_length_of_a_first_record_may_look_like_gzip(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(frame(bytes(0x088B1F)))
    assert not is_gzip(filesystem(str(path)), str(path))


def test_a_long_record_is_looked_at_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.features.shards.foreign_files.PIECE_BYTES", 1 << 10)
    file = b"".join(map(frame, [b"a", bytes(500_000), b"b" * 3000, b""]))
    looked_at: list[int] = []

    def whole(data: bytes) -> tuple[int, int]:
        looked_at.append(len(data))
        return _whole_records(data)

    found = list(_pieces(io.BytesIO(file), "u", whole))
    assert b"".join(piece.data.tobytes() for piece in found) == file and sum(piece.records for piece in found) == 4
    assert sum(looked_at) < 2 * len(file)  # 244 times, were the long one looked at with each piece


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(0, 60), st.binary(max_size=30))
@settings(max_examples=100, deadline=None)
def test_the_kernel_finds_the_records_that_python_finds(records: list[bytes], cut: int, noise: bytes) -> None:
    data = b"".join(map(frame, records))
    for part in (data[: len(data) - cut] if cut else data, data + noise, data + b"\xff" * 8 + noise):
        raw = np.frombuffer(part, dtype=np.uint8)
        assert frames.whole(raw.ctypes.data, len(raw)) == _whole_records(part)


def test_an_error_of_the_storage_is_no_damaged_gzip() -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise OSError("no route to host")

    with pytest.raises(OSError, match="no route to host"):
        list(pieces(Broken(), "u"))  # type: ignore[arg-type] # broken


def test_a_sample_reaches_over_the_files(tmp_path: Path) -> None:
    for number in range(20):  # the first file is empty, those after the tenth have another feature's type
        write(tmp_path / f"{number:02}.tfrecord", range(number * 10, number * 10 + (10 if number else 0)))
    files = find_files(str(tmp_path), "*")
    records = sample(files, 16)
    assert len(records) == 16 and len(set(records)) == 16
    assert infer_columns(files, records) == [("_n", "int64", False), ("words", "string", True)]
    assert len(sample(files, 10_000)) == 70  # eight files, all there is in them
    with pytest.raises(DataError, match="no record"):
        sample(files[:1], 5)
    with pytest.raises(DataError, match="no one schema fits"):
        infer_columns(files, [b"\x0a\x01"])
