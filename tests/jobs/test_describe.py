"""jobs.describe on the terminal and as a page: what it says, and that no text of the data gets out of its place."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.describe.by_split import ComparedColumn, SharedHistogram
from etl.describe.dataset import Description, Picture, Table, data_url, describe, image_field, quarantine_table
from etl.describe.page import as_page
from etl.describe.statistics import ColumnSummary, Histogram
from etl.describe.text import as_text, shown
from jobs import describe as job
from jobs import index
from lockstep.features.schema.fields import Field
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import ConfigError, CorruptionError, ExistsError, NotFoundError
from tests.jobs.test_index import write
from tests.pyspark_tfrecord.published import publish
from tests.storage.make_dataset import make_dataset
from tests.training._tiny import write_table

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></svg><iframe src=//evil.example>",
    "'; x=\"javascript:alert(1)",
    "{{ 7*7 }}{% for %}",
    "\x1b]0;owned\x07\x1b[2J\r\n\u202egnp",
    "\ud7ff\u0000&amp;&#60;",
]


TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "table", "tr", "th", "td", "p", "div"}
TAGS |= {"figure", "img", "figcaption", "svg", "rect", "text", "span", "details", "summary"}


class Seen(HTMLParser):
    """Collects the tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}


def hostile() -> Description:
    """A description in which every text is hostile."""
    text = "\n".join(HOSTILE)
    rows = tuple((one, one) for one in HOSTILE)
    bars = tuple((one, 3) for one in HOSTILE)
    many = Histogram(text, tuple((f"{one}{i}", i) for i in range(1, 4) for one in HOSTILE))
    column = ColumnSummary(text, "string", "feature", 9, 1, rows, (Histogram(text, bars), many))
    pictures = tuple(Picture("data:image/png;base64,AAAA", one) for one in HOSTILE)
    tables = (Table(text, (text, text), rows), Table(text, (), rows))
    shares = {one: (0.5,) * len(HOSTILE) for one in HOSTILE[:2]}
    shared = SharedHistogram(text, tuple(HOSTILE), shares, text)
    standing = SharedHistogram(text, tuple(HOSTILE) * 2, {one: (0.5,) * 2 * len(HOSTILE) for one in HOSTILE[:2]})
    facts = ((text, (text, text)),)
    compared = ComparedColumn(text, "string", "feature", tuple(HOSTILE[:2]), facts, (shared, standing))
    return Description(text, tables, "all 9 records", (column,), pictures, (compared,))


def test_hostile_texts_stay_texts_in_the_page_and_on_the_terminal() -> None:
    page = as_page(hostile())
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    seen = Seen()
    seen.feed(page)
    assert seen.tags <= TAGS
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert {value[:5] for name, value in seen.attributes if name in ("src", "href")} == {"data:"}
    assert "default-src 'none'" in page and "{{ 7*7 }}" in page
    assert "&lt;script&gt;alert(1)" in page  # shown, not lost
    told = as_text(hostile())
    assert all(character == "\n" or character.isprintable() for character in told)
    assert "<script>alert(1)</script>" in told and r"\x1b]0;owned" in told


def test_a_page_takes_no_other_files_place(tmp_path: Path) -> None:
    publish(tmp_path / "d", {"train": (3,)})
    (tmp_path / "mine.html").write_text("<!doctype html>\n<html><p>Mine.")
    for name, error, told in (
        ("mine.html", ExistsError, "another file"),
        ("d", ExistsError, "a folder"),
        ("none/d.html", NotFoundError, "nothing there"),
    ):
        with pytest.raises(error, match="--html") as caught:
            job.main([str(tmp_path / "d"), "--html", str(tmp_path / name)])
        assert caught.value.got == told
    assert (tmp_path / "mine.html").read_text().endswith("Mine.") and not (tmp_path / "none").exists()


def test_a_dataset_is_told_and_a_sample_reaches_over_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path / "d", {"train": (30, 18), "test": (9,)})
    assert job.main([str(tmp_path / "d"), "--html", str(tmp_path / "d.html")]) == 0
    told = capsys.readouterr().out
    for line in (
        r"train  48 .* 2       18 / 24 / 30, the largest 25.0 % above the mean",
        r"clicks     int64    one value  feature  yes",
        r"Classes by `label` \(all 57 records\)",
        r"0      24 \(50.00 %\)  5 \(55.56 %\)",
        r"clicks: int64, feature, 19 null",
        r"pixels: uint8 2x2, feature",
    ):
        assert re.search(line, told), line
    page = (tmp_path / "d.html").read_text()
    assert page.count("data:image/png;base64,") >= 9 and "<svg" in page
    assert job.main([str(tmp_path / "d"), "--html", str(tmp_path / "d.html")]) == 0  # a page may be made anew
    few = describe(str(tmp_path / "d"), 20)
    assert few.looked_at == "21 of 57 records"
    ids = next(column for column in few.columns if column.name == "sample_id")
    low, high = re.match(r"(-?\d+) to (\d+)", dict(ids.facts)["values"]).groups()  # type: ignore[union-attr] # it matches
    assert int(low) == -10 and int(high) > 38  # from the first shard and the last split


def test_indexed_files_are_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "theirs", packed=True)
    index.main([str(tmp_path / "theirs")])
    assert job.main([str(tmp_path / "theirs"), "--max-records", "50"]) == 0
    told = capsys.readouterr().out
    assert "gzip files" in told and "n: int64, feature" in told and "50 of 60 records" in told
    with pytest.raises(NotFoundError):
        describe(str(tmp_path))
    with pytest.raises(ConfigError):
        describe(str(tmp_path / "theirs"), 0)


@pytest.mark.parametrize("fmt", ["parquet", "tfrecord"])
def test_both_formats_tell_the_same(tmp_path: Path, fmt: str) -> None:
    write_table(tmp_path / fmt, fmt=fmt)
    found = describe(str(tmp_path / fmt), 40)
    assert found.looked_at == "41 of 130 records"  # 40 shared out over the splits, and rounded up in each
    columns = {column.name: column for column in found.columns}
    assert columns["label"].type == "bool" and columns["a"].rows == 41
    assert [table.title for table in found.tables][:3] == ["Dataset", "Splits", "Schema"]


def test_a_split_with_one_class_is_named(tmp_path: Path) -> None:
    write_table(tmp_path / "d", records={"train": 100, "test": 1}, shards=1)
    found = describe(str(tmp_path / "d"))
    (notes,) = (table for table in found.tables if table.title == "What to look at")
    ((line,),) = notes.rows
    assert line.startswith("label: all 1 records of test have `label` = ")


def test_reasons_of_the_quarantine_are_counted_and_damage_is_told(tmp_path: Path) -> None:
    path = "_quarantine/part-00000.parquet"
    rows = pa.table({"reason": ["short", HOSTILE[0], "short"], "raw": [b"a", b"b", b"c"]})
    (tmp_path / "_quarantine").mkdir()
    pq.write_table(rows, tmp_path / path)
    data = (tmp_path / path).read_bytes()
    manifest: Any = SimpleNamespace(files={path: FileInfo(len(data), sha256_hex(data))})
    (table,) = quarantine_table(str(tmp_path), manifest)
    assert table.rows == (("short", "2"), (HOSTILE[0], "1"))
    (tmp_path / path).write_bytes(data[:-1])
    with pytest.raises(CorruptionError):
        quarantine_table(str(tmp_path), manifest)
    made = make_dataset(str(tmp_path / "d"))
    with pytest.raises(CorruptionError, match="quarantine file cannot be read"):  # there it has no column of reasons
        quarantine_table(str(tmp_path / "d"), made)


def test_a_shard_that_is_gone_is_damage_and_no_wrong_path(tmp_path: Path) -> None:
    for name, fmt in (("t", "tfrecord"), ("p", "parquet")):
        write_table(tmp_path / name, fmt=fmt)
        next((tmp_path / name).glob(f"split=test/*.{fmt}")).unlink()
        with pytest.raises(CorruptionError, match="file of the manifest does not exist") as caught:
            describe(str(tmp_path / name), 1000)
        assert "jobs.verify" in caught.value.next_step and caught.value.exit_code == 1


def test_pictures_come_from_tensors_and_from_stored_files() -> None:
    pixels = Field(name="x", dtype="uint8", shape=(2, 3, 3))
    stored = Field(name="y", dtype="bytes")
    assert image_field([Field(name="n", dtype="int64"), stored]) is stored
    assert image_field([stored, Field(name="v", dtype="uint8", shape=(5,)), pixels]) is pixels
    url = data_url(bytes(range(18)), pixels)
    assert url is not None and url.startswith("data:image/png;base64,iVBOR")
    assert data_url(b"\xff\xd8\xff\xe0", stored) == "data:image/jpeg;base64,/9j/4A=="
    for refused in (b"<svg onload=alert(1)>", b"", b"\x89PNG\r\n\x1a\n" + bytes(1 << 19)):  # the last is too large
        assert data_url(refused, stored) is None
    assert shown("a\tb\u202e", 10) == r"a\tb\u202e" and shown("abcdef", 4) == "abc…"
