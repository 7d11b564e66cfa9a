"""Records that meet a condition are counted, planned and read as NumPy selects them, in every format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.etl.index.parquet import ParquetIndexConfig, index_parquet
from lockstep.features.condition import Condition
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.selection import Selection
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import SplitReader
from lockstep.training.reading.selecting import count_kept
from lockstep.training.world import World
from tests.builders.blocks import read_all
from tests.storage.repacked import repacked
from tests.training._tiny import write_rows, write_table

WHERE = "a > 0.25 AND b < 1.0 OR NOT label AND a > -0.5"


def write(root: Path, fmt: str, **options: Any) -> Path:
    if fmt != "gzip":
        write_table(root / fmt, fmt=fmt, **options)
        return root / fmt
    write_table(root / "plain", **options)
    repacked(root / "plain", root / "gzip")
    return root / "gzip"


def select(url: Path, where: str = WHERE, splits: tuple[str, ...] = ("train",)) -> Selection:
    manifest = load_dataset(str(url))
    condition = Condition.parse(where, Schema.from_json(manifest.schema))
    kept = {
        (manifest.digest, name): count_kept(str(url), manifest, name, condition, lambda *_: None) for name in splits
    }
    return Selection(condition.text, kept)


def meets(rows: pa.RecordBatch) -> Any:
    """What WHERE selects, by NumPy."""
    a, b, label = (np.asarray(rows.column(name)).astype(np.float64) for name in ("a", "b", "label"))
    return (a > 0.25) & (b < 1.0) | (label == 0) & (a > -0.5)


@pytest.mark.parametrize("fmt", ["tfrecord", "gzip", "parquet"])
def test_the_rows_and_counts_are_those_that_numpy_selects(tmp_path: Path, fmt: str) -> None:
    url = write(tmp_path, fmt, records={"train": 171, "test": 30}, shards=3)
    whole = read_all(OpenSplit.at(str(url), "train").reader)
    selection = select(url)
    split = OpenSplit.at(str(url), "train", selection=selection)
    wanted = whole.filter(pa.array(meets(whole)))
    assert 20 < len(wanted) < 100
    assert read_all(split.reader).equals(wanted)
    info = split.manifest.splits["train"]
    assert info.records == len(wanted) and info.stored_records == 171
    sizes = [min(8, shard.records - first) for shard in info.shards for first in range(0, shard.records, 8)]
    edges = np.cumsum([0, *sizes])
    assert info.kept == tuple(np.add.reduceat(meets(whole), edges[:-1]).tolist())
    assert OpenSplit.at(str(url), "test").manifest.splits["test"].records == 30


@pytest.mark.parametrize("fmt", ["tfrecord", "gzip", "parquet"])
def test_each_selected_sample_is_in_each_epoch_once_from_any_step_and_rank(tmp_path: Path, fmt: str) -> None:
    url = write(tmp_path, fmt, records={"train": 171}, shards=3)
    whole = read_all(OpenSplit.at(str(url), "train").reader)
    mine = meets(whole)
    ids, a = (np.asarray(whole.column(name)) for name in ("sample_id", "a"))
    a_of = dict(zip(ids.tolist(), a.tolist(), strict=True))
    split = OpenSplit.at(str(url), "train", selection=select(url))
    plan = EpochPlan.for_dataset(split.manifest, "train", seed=5, global_batch=6, lanes=6, window_bytes=400)
    assert plan.identity()["where"] == WHERE and plan.total == mine.sum()
    steps = plan.steps(3)
    whole_feed = RankFeed(plan, split.reader, split.encoder, World.local(0, 1), 0)
    batches = list(whole_feed.batches(0, steps))
    used = Counter(zip(np.concatenate([b.epochs for b in batches]).tolist(), all_ids(batches), strict=True))
    positions = plan.leftover(3)
    left = [split.reader.read(run) for epoch, p in positions for run in plan.runs(epoch, p, p + 1)]
    used.update((epoch, rows.column("sample_id")[0].as_py()) for (epoch, _), rows in zip(positions, left, strict=True))
    assert used == Counter((epoch, int(one)) for epoch in range(3) for one in ids[mine])
    for batch in batches:
        assert [a_of[int(one)] for one in batch.sample_ids] == np.asarray(batch.x["a"]).reshape(-1).tolist()
    for rank, start in ((0, 0), (1, 4)):
        again = OpenSplit.at(str(url), "train", selection=select(url))
        part = list(RankFeed(plan, again.reader, again.encoder, World.local(rank, 2), start).batches(start, steps))
        for one, other in zip(part, batches[start:], strict=True):
            assert np.array_equal(one.sample_ids, other.sample_ids[rank * 3 : rank * 3 + 3])


def all_ids(batches: list[Any]) -> list[int]:
    return [int(one) for batch in batches for one in batch.sample_ids]


NUMBERS = Schema.plain({"n": "int64", "x": "float64"})


def write_numbers(root: Path, n: list[int | None], x: list[float | None]) -> DatasetManifest:
    ids = pa.array(range(len(n)), pa.int64())
    rows = pa.RecordBatch.from_arrays([ids, pa.array(n, pa.int64()), pa.array(x)], schema=NUMBERS.arrow_schema())
    return write_rows(str(root), NUMBERS, rows, {"train": len(n)}, "parquet", 1, 8, 0)


def test_a_row_group_that_statistics_exclude_is_never_read(tmp_path: Path) -> None:
    manifest = write_numbers(tmp_path, list(range(40)), [0.0] * 40)
    (shard,) = manifest.splits["train"].shards
    path = tmp_path / shard.path
    group = pq.ParquetFile(path).metadata.row_group(1)  # rows 8 to 15
    first, last = group.column(0), group.column(group.num_columns - 1)
    start = first.dictionary_page_offset or first.data_page_offset
    stop = (last.dictionary_page_offset or last.data_page_offset) + last.total_compressed_size
    data = bytearray(path.read_bytes())
    data[start:stop] = b"\xff" * (stop - start)
    path.write_bytes(data)
    selection = select(tmp_path, "n >= 30 OR n < 4")
    assert selection.kept[manifest.digest, "train"] == (4, 0, 0, 2, 8)
    selected = selection.applied(manifest, "train")
    rows = read_all(SplitReader(str(tmp_path), selected, "train", NUMBERS))
    assert rows.column("n").to_pylist() == [*range(4), *range(30, 40)]
    with pytest.raises(CorruptionError):
        select(tmp_path, "n > 9")


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("x > 0", (7, 0)),
        ("NOT x > 0", (1, 0)),  # statistics say that all of the first are above 0, and know of no NaN
        ("x <> 1", (1, 0)),
        ("x IS NULL", (0, 8)),
        ("n IS NULL OR x < 0", (8, 0)),
    ],
)
def test_statistics_hide_neither_nan_nor_null(tmp_path: Path, where: str, kept: tuple[int, ...]) -> None:
    n: list[int | None] = [*[None] * 8, *range(8)]
    manifest = write_numbers(tmp_path, n, [float("nan"), *[1.0] * 7, *[None] * 8])
    assert select(tmp_path, where).kept[manifest.digest, "train"] == kept


def test_files_of_others_are_selected_by_their_declared_values(tmp_path: Path) -> None:
    """Partitions are no columns of the files, a row group is no block, and ids are made as rows are read."""
    frame = pd.DataFrame({"n": range(100), "x": [i * 0.5 for i in range(100)], "yes": [i % 3 == 0 for i in range(100)]})
    for day in ("mon", "tue"):
        (tmp_path / f"day={day}").mkdir()
        part = frame[frame.n % 2 == (day == "tue")]
        part.to_parquet(tmp_path / f"day={day}" / "part.parquet", row_group_size=13, index=False)
    index_parquet(ParquetIndexConfig(url=str(tmp_path), label="yes"))
    where = "day = 'tue' AND x < 20.5 OR n >= 90"
    manifest = load_dataset(str(tmp_path))
    schema = Schema.from_json(manifest.schema)
    selected = select(tmp_path, where).applied(manifest, "train")
    rows = read_all(SplitReader(str(tmp_path), selected, "train", schema))
    tuesday = frame.n % 2 == 1
    assert sorted(rows.column("n").to_pylist()) == frame[tuesday & (frame.x < 20.5) | (frame.n >= 90)].n.tolist()


def test_a_split_that_was_not_counted_or_has_changed_is_refused(tmp_path: Path) -> None:
    url = write(tmp_path, "parquet", records={"train": 40, "test": 30})
    selection = select(url)
    with pytest.raises(DataError, match="not counted for split `test`"):
        OpenSplit.at(str(url), "test", selection=selection)
    ((key, kept),) = selection.kept.items()
    wrong = Selection(selection.where, {key: (kept[0] + 1, *kept[1:])})
    with pytest.raises(CorruptionError, match="another number of records that meet --where"):
        read_all(OpenSplit.at(str(url), "train", selection=wrong).reader)


def test_a_selection_is_read_back_as_it_was_stored(tmp_path: Path) -> None:
    url = write(tmp_path, "tfrecord")
    selection = select(url, splits=("train", "test"))
    assert Selection.from_json(selection.to_json(), "selection.json") == selection
    for broken in ({"where": "a > 0"}, {"where": 3, "splits": []}, {"where": "a", "splits": [{"kept": [-1]}]}):
        with pytest.raises(DataError, match=r"selection\.json"):
            Selection.from_json(broken, "selection.json")
