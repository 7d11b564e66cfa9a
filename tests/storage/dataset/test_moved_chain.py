"""A chain of datasets that was moved or copied, with other tools than ours, is read from its new place or refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.write.append import open_parent
from lockstep.etl.write.config import WriteConfig
from lockstep.storage.dataset.increments import datasets_since
from lockstep.storage.dataset.manifest import MAX_CHAIN, DatasetManifest, link_to, load_chain
from lockstep.storage.documents import seal, unseal
from lockstep.storage.errors import DataError, LockstepError, NotFoundError
from lockstep.storage.urls import at_path, path_between
from tests.training._tiny import TABLE_SCHEMA, write_rows

SEGMENTS = st.lists(st.sampled_from(["a", "b", "c d", "%20", "ü"]), min_size=1, max_size=4)
LAYOUTS = {
    "side by side": ("days/000001", "days/000002", "days/000003"),
    "each in a folder": ("2026/01/31/data", "2026/02/01/data", "2026/02/02/data"),
    "of any depth": ("first", "more/second", "more/of/it/third"),
}
WRITTEN = ("with its path", "by an older version")
AT_OLD = ("nothing", "the same", "another")


def chain(folder: Path, layout: tuple[str, ...], written: str = WRITTEN[0], shift: int = 0) -> list[str]:
    """Datasets of ten rows each, in Parquet, each of which continues the one before."""
    made: list[tuple[str, DatasetManifest]] = []
    for number, name in enumerate(layout):
        url = str(folder / name)
        rows = pa.RecordBatch.from_pylist(
            [{"sample_id": 10 * number + row, "a": 0.5, "b": row + shift, "label": row > 4} for row in range(10)],
            schema=TABLE_SCHEMA.arrow_schema(),
        )
        above = made[-1] if made else None
        config = {"split": "80/20", "weights": "none", "sample": None}
        records = {"train": 8, "test": 2}
        manifest = write_rows(url, TABLE_SCHEMA, rows, records, "parquet", 1, 4, 0, config=config, parent=above)
        if above is not None and written == WRITTEN[0]:
            link = link_to(*(above[0], above[1].digest), url)
            where = Path(url, "_manifest.json")
            where.write_bytes(seal(unseal(where.read_bytes(), url) | {"parent": link}))
            manifest = DatasetManifest.from_bytes(where.read_bytes(), url)
        made.append((url, manifest))
    return [url for url, _ in made]


def rows_by_hand(urls: list[str]) -> list[tuple[int, float]]:
    """What pyarrow reads of all shards below these folders."""
    files = sorted(file for url in urls for file in Path(url).glob("split=*/*.parquet"))
    tables = [pq.ParquetFile(file).read(columns=["sample_id", "b"]) for file in files]
    return sorted((row["sample_id"], row["b"]) for row in pa.concat_tables(tables).to_pylist())


@pytest.mark.parametrize("old", AT_OLD)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chain_that_moved_as_a_whole_is_read_where_it_is(tmp_path: Path, layout: str, written: str, old: str) -> None:
    """Whatever is at its old place: never other rows. What an older version wrote has no path between the two: it is
    found side by side, and else at its old place only.
    """
    urls = chain(tmp_path / "old", LAYOUTS[layout], written)
    expected = rows_by_hand(urls)
    shutil.copytree(tmp_path / "old", tmp_path / "archive" / "new")
    if old != "the same":
        shutil.rmtree(tmp_path / "old")
    if old == "another":
        assert rows_by_hand(chain(tmp_path / "old", LAYOUTS[layout], written, shift=100)) != expected
    moved = [str(tmp_path / "archive" / "new" / name) for name in LAYOUTS[layout]]
    if written == WRITTEN[1] and layout != "side by side":
        if old == "the same":
            assert rows_by_hand([url for url, _ in load_chain(moved[-1])]) == expected
            return
        with pytest.raises(LockstepError) as caught:
            load_chain(moved[-1])
        error = caught.value
        assert isinstance(error, NotFoundError if old == "nothing" else DataError)
        assert moved[-1] in error.what and urls[-2] in error.allowed and error.got and error.next_step
        return
    found = [url for url, _ in load_chain(moved[-1])]
    assert found == moved[::-1] and rows_by_hand(found) == expected
    parent = open_parent(moved[-1], WriteConfig(output=str(tmp_path / "next"), split="80/20", fmt="parquet"))
    assert [url for url, _ in parent.chain] == found
    assert datasets_since(moved[-1], moved[0]) == tuple(moved[1:])


def test_a_dataset_that_was_copied_alone_continues_the_one_at_the_old_place(tmp_path: Path) -> None:
    urls = chain(tmp_path / "old", LAYOUTS["side by side"])
    alone = str(tmp_path / "new" / "000003")
    shutil.copytree(urls[2], alone)
    assert [url for url, _ in load_chain(alone)] == [alone, urls[1], urls[0]]
    chain(tmp_path / "new", ("000002",), shift=7)  # another dataset of that name lies beside it
    assert [url for url, _ in load_chain(alone)] == [alone, urls[1], urls[0]]
    Path(tmp_path / "new" / "000002" / "_manifest.json").write_bytes(b"{}")  # or one that is damaged
    assert [url for url, _ in load_chain(alone)] == [alone, urls[1], urls[0]]
    shutil.rmtree(urls[1])
    with pytest.raises(DataError, match=f"the dataset that {alone} continues is another one now") as caught:
        load_chain(alone)
    assert str(tmp_path / "new" / "000002") in caught.value.got and urls[1] in caught.value.got
    shutil.rmtree(tmp_path / "new" / "000002")
    with pytest.raises(NotFoundError, match=f"the dataset that {alone} continues is missing"):
        load_chain(alone)


@pytest.mark.parametrize("head", ["", "file://", "hdfs://nn:9000", "s3://bucket"])
@settings(max_examples=50)
@given(SEGMENTS, SEGMENTS)
def test_a_path_between_two_urls_leads_from_one_to_the_other(head: str, one: list[str], other: list[str]) -> None:
    urls = [f"{head}/{'/'.join(each)}" for each in (one, other)]
    path = path_between(urls[0], urls[1])
    assert path is not None and at_path(urls[1], path) == at_path(f"{urls[1]}/", path) == urls[0]
    assert path_between(f"hdfs://elsewhere{'/'.join(['', *one])}", urls[1]) is None
    moved = [f"{head}/of/another/root{url.removeprefix(head)}" for url in urls]
    assert at_path(moved[1], path) == moved[0]


def test_a_chain_has_an_end_that_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(f"{number:06d}" for number in range(1, 5))
    urls = chain(tmp_path, names)
    assert MAX_CHAIN == 1000
    monkeypatch.setattr("lockstep.storage.dataset.manifest.MAX_CHAIN", 4)
    monkeypatch.setattr("lockstep.etl.write.append.MAX_CHAIN", 4)
    config = WriteConfig(output=str(tmp_path / "000005"), append_to=urls[-1], split="80/20", fmt="parquet")
    assert len(load_chain(urls[-1])) == 4
    with pytest.raises(DataError, match=r"000005 continues more datasets than a chain may have") as caught:
        open_parent(urls[-1], config)
    assert (caught.value.got, caught.value.allowed) == ("4 datasets, and another one", "4 in a chain")
    assert "--append-to" in caught.value.next_step and "empty --output" in caught.value.next_step
    monkeypatch.setattr("lockstep.storage.dataset.manifest.MAX_CHAIN", 3)
    with pytest.raises(DataError, match="more datasets than a chain may have"):
        load_chain(urls[-1])
