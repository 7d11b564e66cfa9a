"""Runs are read exactly, and what is damaged is refused with its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.blocks import dataset_blocks
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ConfigError, CorruptionError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.training.plan.order import Run
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.parquet_shard import ParquetShard
from lockstep.training.reading.reader import SplitReader
from lockstep.training.reading.shards import TFRecordShard
from tests.builders.blocks import read_all, read_block, read_records
from tests.storage.make_dataset import footer_of
from tests.training._tiny import encoder_of, write_images, write_rows, write_table

Write = Callable[..., DatasetManifest]
FORMATS = ("tfrecord", "parquet")


def opened(root: Path, split: str = "train") -> SplitReader:
    return OpenSplit.at(str(root), split).reader


def everything(reader: SplitReader) -> pa.RecordBatch:
    return read_all(reader)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("write", [write_table, write_images])
def test_every_run_of_a_block_is_the_slice_of_all_rows(tmp_path: Path, fmt: str, write: Write) -> None:
    write(tmp_path / "d", fmt=fmt, records={"train": 43}, shards=3)
    reader = opened(tmp_path / "d")
    rows = everything(reader)
    assert len(rows) == 43 and rows.column("sample_id").null_count == 0
    before = 0
    for shard, records in enumerate(reader.table.shard_records.tolist()):
        for first in range(0, records, 8):
            for skip in range(min(8, records - first)):
                for count in range(1, min(8, records - first) - skip + 1):
                    run = Run(shard, first + skip, count)
                    assert reader.read(run).equals(rows.slice(before + first + skip, count)), run
        before += records


def test_both_formats_hold_the_same_rows(tmp_path: Path) -> None:
    write_images(tmp_path / "t", fmt="tfrecord")
    write_images(tmp_path / "p", fmt="parquet")
    assert everything(opened(tmp_path / "t")).equals(everything(opened(tmp_path / "p")))


def test_a_reader_may_be_collected_in_a_thread_that_holds_its_locks(tmp_path: Path) -> None:
    write_table(tmp_path / "d", records={"train": 20})
    reader = opened(tmp_path / "d")
    reader.prefetch([reader.table.run(0)])
    reader.read(reader.table.run(0))
    fetcher, files = reader._fetcher, reader._files
    held = [reader]
    del reader

    def collect() -> None:
        with fetcher._lock, files._lock:
            held.clear()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    for worker in fetcher._workers:
        worker.join(20)
        assert not worker.is_alive()


def test_an_unknown_split_is_refused_by_naming_those_there_are(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path / "d", "validation")
    assert caught.value.allowed == "test, train"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_a_flipped_record_is_named_by_file_record_and_offset(tmp_path: Path) -> None:
    manifest = write_table(tmp_path / "d", fmt="tfrecord")
    shard = tmp_path / "d" / "split=train" / "part-00001.tfrecord"
    block = manifest.splits["train"].shards[1].block_offsets[2]  # record 16
    flip(shard, block + 20)
    with pytest.raises(CorruptionError) as caught:
        everything(opened(tmp_path / "d"))
    assert (caught.value.file, caught.value.record, caught.value.offset) == (str(shard), 16, block)


def test_a_flipped_page_is_named_by_file_and_first_record(tmp_path: Path) -> None:
    write_images(tmp_path / "d", fmt="parquet")
    shard = tmp_path / "d" / "split=train" / "part-00000.parquet"
    pages = shard.read_bytes().index(b"PAR1", 4) - 2000  # well before the footer
    flip(shard, pages)
    with pytest.raises(CorruptionError) as caught:
        everything(opened(tmp_path / "d"))
    assert caught.value.file == str(shard)
    assert caught.value.record is None or caught.value.record % 8 == 0


@pytest.mark.parametrize(
    ("fmt", "path", "damage", "message"),
    [
        ("tfrecord", "split=train/part-00000.tfrecord", "cut", "another length"),  # a cut at a record's end looks whole
        ("tfrecord", "split=train/part-00000.tfrecord", "remove", "a shard is missing"),
        ("tfrecord", "_index/train/part-00001.idx", "flip", "does not match its digest"),
        ("tfrecord", "_index/train/part-00001.idx", "cut", "another length"),
        ("parquet", "split=train/part-00001.parquet", "cut", "another length"),
        ("parquet", "split=train/part-00001.parquet", "magic", "footer is damaged"),
        ("tfrecord", "_manifest.json", "flip", "manifest"),
    ],
)
def test_damage_is_refused_at_the_start(tmp_path: Path, fmt: str, path: str, damage: str, message: str) -> None:
    write_table(tmp_path / "d", fmt=fmt)
    file = tmp_path / "d" / path
    data = file.read_bytes()
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[:-1])
    else:
        flip(file, len(data) - 1 if damage == "magic" else len(data) // 2)
    with pytest.raises(LockstepError, match=message) as caught:
        opened(tmp_path / "d")
    assert str(file) in str(caught.value)


def test_any_flipped_byte_of_a_parquet_footer_is_refused_at_the_start(tmp_path: Path) -> None:
    """Before it is parsed; changed pages are in test_every_bit."""
    write_table(tmp_path / "d", fmt="parquet", records={"train": 19}, shards=1)
    shard = tmp_path / "d" / "split=train" / "part-00000.parquet"
    manifest = load_dataset(str(tmp_path / "d"))
    encoder = encoder_of(manifest)
    whole = shard.read_bytes()
    footer = len(whole) - len(footer_of(whole))
    for offset in range(footer, len(whole)):
        flip(shard, offset)
        with pytest.raises(CorruptionError, match="footer is damaged") as caught:
            SplitReader(str(tmp_path / "d"), manifest, "train", encoder)
        assert caught.value.file == str(shard)
        assert caught.value.offset == footer or offset >= len(whole) - 8  # a changed length points elsewhere
        shard.write_bytes(whole)


def test_a_block_table_that_contradicts_the_shard_is_refused(tmp_path: Path) -> None:
    manifest = write_table(tmp_path / "d", records={"train": 40}, shards=1)
    fs = filesystem(str(tmp_path))
    paths = DatasetPaths(str(tmp_path / "d"))
    index = fs.read_bytes(paths.index("train", 0))
    info = manifest.splits["train"].shards[0]
    ninth = int(index.split()[2 * 9])  # where record 9 begins, one past the first block's end
    moved = replace(info, block_offsets=(0, ninth, *info.block_offsets[2:]))
    url, index_url = paths.shard("train", 0, "tfrecord"), paths.index("train", 0)
    shard = TFRecordShard(fs, url, moved, 8, encoder_of(manifest).schema, index_url, index)
    with pytest.raises(CorruptionError, match="another number of records"):
        read_records(shard, url, 0, 8)
    with pytest.raises(CorruptionError, match="index lines do not fit"):
        read_records(shard, url, 8, 3)
    with pytest.raises(CorruptionError, match="not have one line a record"):
        TFRecordShard(fs, url, info, 8, encoder_of(manifest).schema, index_url, index[: index.rindex(b"\n", 0, -1) + 1])


def test_a_forged_block_over_a_sparse_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_table(tmp_path / "d", records={"train": 40}, shards=1)
    fs = filesystem(str(tmp_path))
    paths = DatasetPaths(str(tmp_path / "d"))
    index, info = fs.read_bytes(paths.index("train", 0)), manifest.splits["train"].shards[0]
    forged = replace(info, bytes=1 << 40, block_offsets=(0, 1 << 39, *range((1 << 39) + 1, (1 << 39) + 4)))
    url, index_url = paths.shard("train", 0, "tfrecord"), paths.index("train", 0)
    shard = TFRecordShard(fs, url, forged, 8, encoder_of(manifest).schema, index_url, index)
    monkeypatch.setattr(type(fs), "read_range", None)
    with pytest.raises(CorruptionError, match="a block is too long"):
        read_records(shard, url, 0, 8)


def test_a_parquet_file_that_is_not_the_one_published_is_refused(tmp_path: Path) -> None:
    manifest = write_table(tmp_path / "d", fmt="parquet", records={"train": 40}, shards=1)
    info = manifest.splits["train"].shards[0]
    fs, url = filesystem(str(tmp_path)), str(tmp_path / "d" / info.path)
    schema = encoder_of(manifest).schema
    assert len(read_block(ParquetShard(fs, url, info, 8, schema), url, 4, 8)) == 8
    with pytest.raises(CorruptionError, match="row groups of"):
        ParquetShard(fs, url, info, 10, schema)  # blocks of another size
    with pytest.raises(CorruptionError, match="columns"):
        ParquetShard(fs, url, info, 8, Schema(schema.fields[:-1]))  # a column more than declared


@pytest.mark.parametrize("shape", [(), (None,)])
@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_a_parquet_number_that_is_no_uint64_is_refused_with_its_place(
    tmp_path: Path, shape: tuple[None, ...], value: int
) -> None:
    """A decimal of 20 digits holds more than 64 bits do."""
    schema = Schema((sample_id_field(), Field(name="u", dtype="uint64", shape=shape)))
    numbers = [Decimal((1 << 64) - 1), *map(Decimal, range(9)), Decimal(value)]
    columns = {"sample_id": range(11), "u": [[number] for number in numbers] if shape else numbers}
    rows = pa.RecordBatch.from_pydict(columns, schema=schema.arrow_schema())
    manifest = write_rows(str(tmp_path / "d"), schema, rows, {"train": 11}, "parquet", 1, 8, 0)
    info = manifest.splits["train"].shards[0]
    url = str(tmp_path / "d" / info.path)
    shard = ParquetShard(filesystem(url), url, info, 8, schema)
    assert read_block(shard, url, 0, 8).equals(rows.slice(0, 8))
    told = dataset_blocks(str(tmp_path / "d"), manifest)["train"][1]  # what lockstep describe reads
    for read in (lambda: read_block(shard, url, 1, 8), lambda: list(told.read())):
        with pytest.raises(CorruptionError, match="`u` has a number that is not a uint64") as caught:
            read()
        assert (caught.value.file, caught.value.record, caught.value.got) == (url, 8, str(value))
