"""A folder of increments: which dataset is the newest, which is next, and which come after another one or a time."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from lockstep.storage.dataset.increments import datasets_since, newest_in, next_in
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, NotFoundError
from tests.training._tiny import TABLE_SCHEMA, write_rows

ENDS = (1_000_000_000, 1_000_086_400, 1_000_172_800)  # 2001-09-09 01:46:40 UTC and the days after


def days(folder: Path, ends: tuple[int, ...] = ENDS) -> list[str]:
    """Datasets that continue one another, each with requests up to one of `ends`."""
    made: list[tuple[str, DatasetManifest]] = []
    for number, end in enumerate(ends):
        url = str(folder / f"{number + 1:06d}")
        rows = pa.RecordBatch.from_pylist(
            [{"sample_id": 10 * number + row, "a": 0.5, "b": row, "label": row > 4} for row in range(10)],
            schema=TABLE_SCHEMA.arrow_schema(),
        )
        config = {} if end == 0 else {"carried": {"log_end": end}}
        records = {"train": 8, "test": 2}
        above = made[-1] if made else None
        manifest = write_rows(url, TABLE_SCHEMA, rows, records, "tfrecord", 1, 4, 0, config=config, parent=above)
        made.append((url, manifest))
    return [url for url, _ in made]


def test_the_newest_is_the_highest_number_with_a_manifest(tmp_path: Path) -> None:
    assert newest_in(str(tmp_path / "nothing")) is None
    assert next_in("/days", None) == "/days/000001" and next_in("/days", "/days/000009") == "/days/000010"
    urls = days(tmp_path)
    (tmp_path / "000004").mkdir()  # as a publication on an object store that was cut off leaves it
    (tmp_path / "_staging-etl-0123456789abcdef").mkdir()
    (tmp_path / "notes.txt").touch()
    assert newest_in(str(tmp_path)) == urls[-1]


def test_a_dataset_or_a_file_is_no_folder_of_increments(tmp_path: Path) -> None:
    first = days(tmp_path)[0]
    for url in (first, f"{first}/_manifest.json"):
        with pytest.raises(ConfigError, match="is not a folder of increments"):
            newest_in(url)


@pytest.mark.parametrize(
    ("since", "first"),
    [
        ("000001", 1),
        ("000002", 2),
        ("2001-09-09T01:46:40", 1),  # the first ends in this second, so that nothing in it is later
        ("2001-09-09T01:46:39", 0),
        ("2001-09-09T03:46:40+02:00", 1),
        ("2001-09-10", 1),
        ("1970-01-01", 0),
    ],
)
def test_since_gives_what_comes_after_a_dataset_or_a_time(tmp_path: Path, since: str, first: int) -> None:
    urls = days(tmp_path)
    mark = str(tmp_path / since) if since.isdecimal() else since
    assert datasets_since(str(tmp_path), mark) == datasets_since(urls[-1], mark) == tuple(urls[first:])
    assert datasets_since(urls[1], f"{urls[0]}/") == (urls[1],)


def test_since_takes_paths_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = days(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert datasets_since(".", "000002") == (urls[2],)


def test_since_refuses_what_is_no_dataset_of_the_chain_and_no_earlier_time(tmp_path: Path) -> None:
    urls = days(tmp_path)
    for since, match in (
        (urls[2], "no dataset comes after"),
        ("2001-09-12", "no dataset comes after"),
        (str(tmp_path / "elsewhere"), "neither a time nor a dataset"),
    ):
        with pytest.raises(ConfigError, match=match):
            datasets_since(str(tmp_path), since)
    with pytest.raises(NotFoundError):
        datasets_since(str(tmp_path / "nothing"), urls[0])
    days(tmp_path / "tables", (0, 0))
    with pytest.raises(ConfigError, match="does not go with"):
        datasets_since(str(tmp_path / "tables"), "2001-09-09")
