"""lockstep describe on the terminal and as a page: what it says, and that no text of the data gets out of its
place.
"""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.describe.by_split import ComparedColumn, SharedHistogram
from lockstep.etl.describe.dataset import (
    MAX_CLASS_IMAGES,
    MAX_IMAGES_BYTES,
    Description,
    Picture,
    Table,
    _Samples,
    dataset_tables,
    describe,
    quarantine_table,
)
from lockstep.etl.describe.page import as_page
from lockstep.etl.describe.statistics import ColumnSummary, Histogram
from lockstep.etl.describe.text import as_text, shown
from lockstep.features.schema.fields import Field
from lockstep.features.schema.pictures import data_url, image_field
from lockstep.jobs import describe as job
from lockstep.jobs import index
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.documents import seal, sha256_hex
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, ExistsError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from tests.jobs.test_index import write
from tests.pyspark_tfrecord.published import publish
from tests.storage.make_dataset import make_dataset
from tests.training._tiny import write_images, write_table

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
    assert page.count("data:image/png;base64,") == 12 + 9 and "<svg" in page  # 6 a class of train, all of test
    assert job.main([str(tmp_path / "d"), "--html", str(tmp_path / "d.html")]) == 0  # a page may be made anew
    few = describe(str(tmp_path / "d"), 20)
    assert few.looked_at == "21 of 57 records"
    rates = next(column for column in few.columns if column.name == "rate")
    low, high = re.match(r"([\d.]+) to ([\d.]+)", dict(rates.facts)["values"]).groups()  # type: ignore[union-attr] # it matches
    assert float(low) == 0 and float(high) * 4 > 48  # from the first shard and the last split
    ids = next(column for column in few.columns if column.name == "sample_id")
    assert dict(ids.facts) == {"distinct": "21"}, "a mean of ids says nothing"


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.integers(0, 30), min_size=1, max_size=200),
    classes=st.sampled_from([31, 100]),
    named=st.booleans(),
    cut=st.integers(0, 200),
    batch_rows=st.integers(1, 50),
)
def test_each_class_has_a_picture_in_the_order_of_classes(
    labels: list[int], classes: int, named: bool, cut: int, batch_rows: int
) -> None:
    image = Field(name="image", dtype="uint8", shape=(2, 2))
    label = Field(name="label", dtype="int64", kind="label", num_classes=classes)
    names = [f"name {number}" for number in range(classes)] if named else None

    def pictures() -> tuple[Picture, ...]:
        found = _Samples(image, label, names, ["train", "test"])
        for split, part in (("train", labels[:cut]), ("test", labels[cut:])):
            pixels = [bytes([number, 0, 0, 0]) for number in part]
            batch = pa.RecordBatch.from_pydict({"image": pa.array(pixels, pa.binary(4)), "label": pa.array(part)})
            for start in range(0, len(part), batch_rows):
                found.add(batch.slice(start, batch_rows), split, 1.0)
        return found.pictures()

    found = pictures()
    expected = [
        (f"{number} name {number}" if named else str(number)) + (", train" if number in labels[:cut] else ", test")
        for number in sorted(set(labels))
    ]
    assert [one.caption for one in found] == expected and len(found) <= MAX_CLASS_IMAGES
    for number, one in zip(sorted(set(labels)), found, strict=True):
        assert one.url == data_url(bytes([number, 0, 0, 0]), image), "the picture is of its class"
    assert found == pictures()


def test_pictures_of_a_page_are_bounded_in_number_and_bytes() -> None:
    label = Field(name="label", dtype="int64", kind="label", num_classes=1000)
    for image, value in (
        (Field(name="image", dtype="uint8", shape=(1, 2)), bytes(2)),
        (Field(name="image", dtype="bytes"), b"\xff\xd8\xff" + bytes(200_000)),
    ):
        found = _Samples(image, label, None, ["train"])
        column = pa.array([value] * 200, pa.binary())
        found.add(pa.RecordBatch.from_pydict({"image": column, "label": pa.array(range(200))}), "train", 1.0)
        urls = [one.url for one in found.pictures()]
        assert 0 < len(urls) <= MAX_CLASS_IMAGES and sum(map(len, urls)) <= MAX_IMAGES_BYTES


def test_classes_have_their_names_in_bars_and_pictures(tmp_path: Path) -> None:
    names = ["top-left", "top-right", HOSTILE[0], "bottom-right"]
    manifest = write_images(tmp_path / "d")
    own = {**manifest.created_by, "config": {"class_names": names}}
    write_file(filesystem(str(tmp_path)), str(tmp_path / "d" / "_manifest.json"),
               replace(manifest, created_by=own).to_bytes(), exclusive=False)  # fmt: skip
    found = describe(str(tmp_path / "d"))
    column = next(one for one in found.by_split if one.kind == "label")
    assert column.histograms[0].labels == tuple(f"{number} {name}" for number, name in enumerate(names))
    assert [fact for fact, _ in column.facts] == ["rows", "distinct"], "no mean of numbers of classes"
    assert {one.caption.rpartition(",")[0] for one in found.pictures} == set(column.histograms[0].labels)
    assert len(found.pictures) == 24 and found.pictures_title == "Pictures: up to 6 of each class"
    page = as_page(found)
    assert "Pictures: up to 6 of each class" in page and "<script" not in page and "2 &lt;script&gt;" in page


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
    reasons = ["bad_value:a: 3", HOSTILE[0], "bad_value:a: 4"]
    rows = pa.table({"reason": reasons, "raw": [b"a", b"b", b"c"], "source": ["x"] * 3, "position": [7, 0, 2]})
    (tmp_path / "_quarantine").mkdir()
    pq.write_table(rows, tmp_path / path)
    data = (tmp_path / path).read_bytes()
    manifest: Any = SimpleNamespace(files={path: FileInfo(len(data), sha256_hex(data))}, created_by={"config": {}})
    (table,) = quarantine_table(str(tmp_path), manifest)
    sentence = "The field has no value of its type; VALUE shows 60 characters at most."
    assert table.rows == (("bad_value:a", "2", sentence), (HOSTILE[0], "1", ""))
    assert sentence in as_text(Description("u", (table,), "", (), (), ()))
    (tmp_path / path).write_bytes(data[:-1])
    with pytest.raises(CorruptionError):
        quarantine_table(str(tmp_path), manifest)
    made = make_dataset(str(tmp_path / "d"))
    with pytest.raises(CorruptionError, match="quarantine file cannot be read"):  # there it has no column of reasons
        quarantine_table(str(tmp_path / "d"), made)


def test_a_dropped_record_s_rule_has_its_sentence(tmp_path: Path) -> None:
    manifest = make_dataset(str(tmp_path / "d"))
    counts = replace(manifest.counts, dropped={"no_label": 3, "other": 1})
    facts = {row[0]: row[1] for row in next(dataset_tables(replace(manifest, counts=counts))).rows}
    assert facts["dropped: no_label"] == "3: The `--label` of the record is NULL."
    assert facts["dropped: other"] == "1"


def test_a_shard_that_is_gone_is_damage_and_no_wrong_path(tmp_path: Path) -> None:
    for name, fmt in (("t", "tfrecord"), ("p", "parquet")):
        write_table(tmp_path / name, fmt=fmt)
        next((tmp_path / name).glob(f"split=test/*.{fmt}")).unlink()
        with pytest.raises(CorruptionError, match="file of the manifest does not exist") as caught:
            describe(str(tmp_path / name), 1000)
        assert "lockstep verify" in caught.value.next_step and caught.value.exit_code == 2


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


def test_a_model_is_called_a_model_and_no_changed_dataset(tmp_path: Path) -> None:
    for kind in ("model", "predictions"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "_manifest.json").write_bytes(seal({"format_version": 1, "kind": kind, "files": {}}))
        with pytest.raises(DataError, match=f"this is a {kind}, not a dataset") as caught:
            describe(str(tmp_path / kind))
        assert "changed" not in caught.value.next_step
