"""Of Parquet shards a reader fetches the columns that are fed, and gives the values that pyarrow reads of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.etl.index.parquet import ParquetIndexConfig, index_parquet
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import CorruptionError
from lockstep.storage.files.local import LocalFileSystem
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import ReadOptions, SplitReader
from lockstep.training.reading.stretches import Stretches
from lockstep.training.world import World
from tests.builders.blocks import read_all
from tests.training._tiny import write_rows

ROWS, COLUMNS = 640, 40
FED = ("c07", "c08", "c31")


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gap is read through: blocks are small here."""
    monkeypatch.setattr(LocalFileSystem, "gap_bytes", 0)


def table(rows: int = ROWS) -> pa.Table:
    rng = np.random.default_rng(4)
    columns: dict[str, Any] = {f"c{n:02d}": rng.standard_normal(rows).astype(np.float32) for n in range(COLUMNS)}
    ids, texts = rng.permutation(rows), pa.array([f"text {n % 7}" for n in range(rows)])
    return pa.table({"sample_id": ids, **columns, "word": texts, "yes": rng.integers(0, 2, rows).astype(bool)})


def schema() -> Schema:
    ignored = {"kind": "ignore"}
    numbers = [f"c{n:02d}" for n in range(COLUMNS)]
    return Schema(
        (
            Field(name="sample_id", dtype="int64", kind="id"),
            *(Field(name=name, dtype="float32", encoding=None if name in FED else ignored) for name in numbers),
            Field(name="word", dtype="string", encoding=ignored),
            Field(name="yes", dtype="bool", kind="label"),
        )
    )


def ours(root: Path, block_records: int = 80) -> Path:
    (batch,) = table().cast(schema().arrow_schema()).combine_chunks().to_batches()
    write_rows(str(root), schema(), batch, {"train": ROWS}, "parquet", 2, block_records, 0)
    return root


def theirs(root: Path, row_group_size: int = 70) -> Path:
    """Files of another program, whose columns are not all in the schema, and whose row groups are not the blocks."""
    root.mkdir()
    whole = table().rename_columns({"sample_id": "key"})
    for number, part in enumerate((whole.slice(0, 300), whole.slice(300))):
        pq.write_table(part, root / f"part-{number}.parquet", row_group_size=row_group_size + 9 * number)
    exclude = tuple(name for name in whole.column_names if name not in (*FED, "yes"))
    index_parquet(ParquetIndexConfig(url=str(root), label="yes", id_columns=("key",), exclude=exclude))
    return root


def chunk_bytes(url: Path, *names: str) -> int:
    """The bytes of some columns' chunks, as the footers count them."""
    found = 0
    for path in url.rglob("*.parquet"):
        metadata = pq.read_metadata(path)
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        chunks = (group.column(number) for group in groups for number in range(group.num_columns))
        found += sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in names)
    return found


def batches_of(split: OpenSplit, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
    plan = EpochPlan.for_dataset(split.manifest, "train", seed=3, global_batch=32, lanes=8, window_bytes=4000)
    return RankFeed(plan, split.reader, split.encoder, World.local(rank, ranks)).batches(0, plan.steps(2))


@pytest.mark.parametrize("write", [ours, theirs])
@pytest.mark.parametrize("far", [False, True])
def test_batches_have_the_values_that_pyarrow_reads_and_only_fed_columns_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, far: bool
) -> None:
    monkeypatch.setattr(SplitReader, "is_local", not far)  # of a far dataset blocks are fetched ahead
    url = write(tmp_path / "d")
    files = [str(path) for path in sorted(url.rglob("*.parquet"))]
    wanted = pq.ParquetDataset(files).read(columns=[*FED, "yes"]).to_pandas()
    split = OpenSplit.at(str(url), "train")
    own = read_all(split.reader).to_pandas()
    wanted.index = own["sample_id"]
    if write is ours:
        assert own["sample_id"].tolist() == table()["sample_id"].to_pylist()
    seen = []
    for batch in batches_of(OpenSplit.at(str(url), "train")):
        rows = wanted.loc[batch.sample_ids]
        for name in FED:
            assert np.array_equal(batch.x[name][:, 0], rows[name].to_numpy())
        assert batch.y is not None and np.array_equal(batch.y, rows["yes"].to_numpy(np.float32))
        seen += list(zip(batch.epochs.tolist(), batch.sample_ids.tolist(), strict=True))
    assert sorted(seen) == sorted((epoch, one) for epoch in range(2) for one in wanted.index)
    fed = chunk_bytes(url, "sample_id", "key", "yes", *FED)
    assert split.reader.pass_bytes == fed < 0.2 * sum(Path(file).stat().st_size for file in files)
    if write is ours:
        assert split.reader.counts.fetched.fetched_bytes == fed


def test_an_indexed_file_without_id_columns_needs_no_bytes_of_ids(tmp_path: Path) -> None:
    for day in ("mon", "tue"):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(
            table(90).select(["c00", "c01", "yes"]), tmp_path / f"day={day}" / "one.parquet", row_group_size=9
        )
    index_parquet(ParquetIndexConfig(url=str(tmp_path), label="yes", exclude=("c00",)))
    split = OpenSplit.at(str(tmp_path), "train")
    frame = read_all(split.reader).to_pandas()
    assert split.reader.pass_bytes == chunk_bytes(tmp_path, "c01", "yes")
    assert frame.sample_id.is_unique and frame.c01.tolist() == table(90)["c01"].to_pylist() * 2


def test_other_columns_are_read_if_they_are_named_and_a_schema_reads_all(tmp_path: Path) -> None:
    url = ours(tmp_path / "d")
    found = read_all(OpenSplit.at(str(url), "train", also=["word", "c00"]).reader)
    assert found.schema.names == ["sample_id", "c00", *FED, "word", "yes"]
    assert found.column("word").to_pylist() == table()["word"].to_pylist()
    manifest = load_dataset(str(url))
    whole = read_all(SplitReader(str(url), manifest, "train", Schema.from_json(manifest.schema)))
    assert pa.Table.from_batches([whole]).equals(table().cast(whole.schema))


def test_only_damage_in_columns_that_are_read_is_found(tmp_path: Path) -> None:
    url = ours(tmp_path / "d")
    path = sorted(url.rglob("*.parquet"))[0]
    whole = path.read_bytes()
    group = pq.read_metadata(path).row_group(1)
    chunks = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    for name, harms in (("c06", False), ("c07", True), ("c30", False), ("c31", True), ("sample_id", True)):
        place = (chunks[name].dictionary_page_offset or chunks[name].data_page_offset) + 40
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        reader = OpenSplit.at(str(url), "train").reader
        if not harms:
            assert len(read_all(reader)) == ROWS
            continue
        with pytest.raises(CorruptionError, match="a block of rows cannot be read") as caught:
            read_all(reader)
        assert caught.value.file == str(path) and caught.value.record == 80
        assert caught.value.offset == chunks["sample_id"].dictionary_page_offset


def test_the_cache_serves_a_set_of_columns_to_the_same_set_only(tmp_path: Path) -> None:
    url = ours(tmp_path / "d")
    options = ReadOptions(cache=str(tmp_path / "cache"), cache_bytes=1 << 20)
    sizes = [chunk_bytes(url, name) for name in ("c12", "c14")]
    assert sizes[0] == sizes[1]  # the same offsets among the parts that are read
    for also, misses in (((), 8), ((), 0), (("c12",), 8), (("c14",), 8), (("c12",), 0)):
        reader = OpenSplit.at(str(url), "train", options=options, also=also).reader
        found = read_all(reader)
        for name in (*FED, *also):
            assert found.column(name).to_pylist() == table()[name].to_pylist()
        assert reader.counts.cached is not None and reader.counts.cached.misses == misses
        reader.close()


@pytest.mark.parametrize("seed", range(30))
def test_packed_offsets_are_those_of_the_parts_end_to_end(seed: int) -> None:
    """Against a file of single bytes, by NumPy."""
    rng = np.random.default_rng(seed)
    file = rng.integers(0, 256, 500).astype(np.uint8)
    starts = rng.integers(0, 480, int(rng.integers(1, 20)))
    edges = np.stack([starts, starts + rng.integers(0, 20, len(starts))], axis=1)
    gap = int(rng.integers(0, 12))
    wanted = np.zeros(500, bool)
    for start, stop in edges:
        wanted[start:stop] = True
    for stop in edges[:, 1].tolist():  # gaps up to the next part that is wanted
        after = [first for first, _ in edges.tolist() if stop <= first <= stop + gap]
        if after:
            wanted[stop : max(after)] = True
    stretches = Stretches(edges, gap)
    packed = file[wanted]
    assert stretches.bytes == len(packed)
    for start, stop in edges.tolist():
        if start < stop:
            at = stretches.pack(start, stop)
            assert at is not None and np.array_equal(packed[at : at + stop - start], file[start:stop])
    assert stretches.pack(int(edges.max()), int(edges.max()) + 1) is None
    for _ in range(20):
        start, stop = sorted(rng.integers(0, len(packed) + 1, 2).tolist())
        ranges = list(stretches.ranges(start, stop))
        found = [file[offset : offset + length] for offset, length in ranges]
        assert np.array_equal(np.concatenate([file[:0], *found]), packed[start:stop])
        assert all(stretches.place(start) == ranges[0][0] for _ in ranges[:1])


def test_a_condition_is_counted_by_its_columns_and_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files of others too: of the columns that the condition does not name, not a byte is read."""
    from tests.training.reading.test_selecting import select

    frame = pd.DataFrame({"n": np.arange(100, dtype=np.int32), "x": np.arange(100) * 0.5, "yes": [True, False] * 50})
    frame.to_parquet(tmp_path / "one.parquet", row_group_size=10, index=False)
    index_parquet(ParquetIndexConfig(url=str(tmp_path), label="yes"))
    read: list[int] = []
    plain = LocalFileSystem.open_ranges

    def counted(self: LocalFileSystem, url: str, size_bytes: int) -> Any:
        file = plain(self, url, size_bytes)
        into = file.read_into  # type: ignore[attr-defined]

        class Counted:
            close = staticmethod(file.close)
            read_at = staticmethod(file.read_at)

            def read_into(self, offset: int, target: memoryview) -> None:
                read.append(len(target))
                into(offset, target)

        return Counted()

    monkeypatch.setattr(LocalFileSystem, "open_ranges", counted)
    selection = select(tmp_path, "n >= 72 AND yes")
    ((_, kept),) = selection.kept.items()
    assert kept == (0, 0, 0, 0, 0, 0, 0, 4, 5, 5)
    group = pq.read_metadata(tmp_path / "one.parquet").row_group(9)
    assert sum(read) <= 3 * 1.2 * (group.column(0).total_compressed_size + group.column(2).total_compressed_size)
    assert len(read) == 6  # two stretches of each of three row groups
    split = OpenSplit.at(str(tmp_path), "train", selection=selection)
    assert read_all(split.reader).column("n").to_pylist() == [n for n in range(72, 100) if n % 2 == 0]
    assert 0 < split.reader.pass_bytes == split.reader.counts.fetched.fetched_bytes == sum(read[6:])


def test_statistics_of_values_that_are_declared_otherwise_decide_nothing(tmp_path: Path) -> None:
    """Labels are stored as texts, and in the order of the classes other rows come first."""
    from tests.training.reading.test_selecting import select

    schema = tmp_path / "schema.toml"
    schema.write_text(
        '[[fields]]\nname = "n"\ndtype = "int64"\n[[fields]]\nname = "pet"\ndtype = "int64"\nkind = "label"\n'
        'num_classes = 2\nclass_names = ["dog", "cat"]\n'
    )
    data = tmp_path / "data"
    data.mkdir()
    frame = pd.DataFrame({"n": range(30), "pet": ["dog"] * 10 + ["cat"] * 10 + ["dog", "cat"] * 5})
    frame.to_parquet(data / "one.parquet", row_group_size=10, index=False)
    index_parquet(ParquetIndexConfig(url=str(data), schema=str(schema)))
    for where, kept in (("pet = 1", (0, 10, 5)), ("pet < 1", (10, 0, 5)), ("pet = 1 AND n > 22", (0, 0, 4))):
        assert list(select(data, where).kept.values()) == [kept]


def test_a_column_whose_name_begins_with_another_ones_is_read_by_itself(tmp_path: Path) -> None:
    ignored = {"kind": "ignore"}
    fields = [Field(name="a", dtype="int64"), Field(name="a.b", dtype="int64", encoding=ignored)]
    dotted = Schema((Field(name="sample_id", dtype="int64", kind="id"), *fields, Field(name="z", dtype="float32")))
    rows = {"sample_id": range(20), "a": range(20, 40), "a.b": range(40, 60), "z": [0.5] * 20}
    batch = pa.RecordBatch.from_pydict(
        {name: pa.array(values) for name, values in rows.items()}, schema=dotted.arrow_schema()
    )
    write_rows(str(tmp_path), dotted, batch, {"train": 20}, "parquet", 1, 10, 0)
    for also, names in ((["a.b"], ["sample_id", "a", "a.b", "z"]), ([], ["sample_id", "a", "z"])):
        found = read_all(OpenSplit.at(str(tmp_path), "train", also=also).reader)
        assert found.equals(batch.select(names))
