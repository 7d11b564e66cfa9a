"""Logs of other formats to published datasets, on Spark: a combined log, a click log, and forty columns."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from lockstep.etl.input.files import Source, check_lines
from lockstep.etl.logs import job
from lockstep.etl.logs.config import LogsConfig
from lockstep.jobs import etl_logs
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.verify import verify
from tests.etl.conftest import ELASTIC, OPEN_BANDIT, tree
from tests.etl.write.test_append import published
from tests.training._tiny import write_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLICKS = """
[[fields]]
name = "click"
dtype = "bool"
kind = "label"

[[fields]]
name = "position"
dtype = "int64"
encoding = {kind = "bucketise", boundaries = [2, 3]}

[[fields]]
names = ["user_feature_0", "user_feature_1", "user_feature_2", "user_feature_3"]
dtype = "string"
encoding = {kind = "hash", buckets = 50}

[[fields]]
names = ["propensity_score", "user-item_affinity_0", "user-item_affinity_33"]
dtype = "float32"
"""
NUMBERS, HASHES = [f"i{n}" for n in range(1, 14)], [f"c{n}" for n in range(1, 27)]
WIDE = f"""
[[fields]]
name = "label"
dtype = "bool"
kind = "label"

[[fields]]
names = {NUMBERS}
dtype = "int64"
nullable = true
encoding = {{kind = "standardise"}}

[[fields]]
names = {HASHES}
dtype = "string"
nullable = true
encoding = {{kind = "hash", buckets = 1000}}
"""


def config(source: Path, output: Path, **more: Any) -> LogsConfig:
    return LogsConfig(**{"inputs": (str(source),), "output": str(output), "log_format": "csv", **more})


def table(folder: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = ds.dataset(folder, partitioning="hive").to_table().to_pydict()
    return found


@pytest.mark.slow
def test_a_combined_log(spark: SparkSession, tmp_path: Path) -> None:
    manifest = job.run(spark, config(ELASTIC, tmp_path / "out", log_format="combined", fmt="parquet"))
    counts = manifest.counts
    assert (counts.read, counts.quarantined) == (1500, 1)
    assert counts.read == counts.written + 1 + sum(counts.dropped.values())
    assert counts.dropped == {"not_a_page": 943, "censored": 17}  # all 17 page requests of the last half hour
    agents = table(tmp_path / "out")["agent_tokens"]
    assert sum("mozilla" in tokens for tokens in agents) > 0.5 * len(agents)
    assert sorted(path for path in manifest.files if "_tokens" in path) == [
        f"_fitted/{name}_tokens.json" for name in ("agent", "page", "query", "referrer")
    ]


@pytest.mark.slow
def test_a_click_log(spark: SparkSession, tmp_path: Path) -> None:
    lines = gzip.decompress(OPEN_BANDIT.read_bytes()).splitlines()
    bad = {5: "bad_value:click", 17: "too_few_fields", 40: "missing_value:timestamp", 41: "bad_value:timestamp"}
    for number, reason in bad.items():
        fields = lines[number].split(b",")
        wrong = {"click": b"maybe", "timestamp": b"" if reason.startswith("missing") else b"noon"}
        fields[{"click": 4, "timestamp": 1}.get(reason.rpartition(":")[2], -1)] = wrong.get(
            reason.rpartition(":")[2], b""
        )
        lines[number] = b",".join(fields[:3] if reason == "too_few_fields" else fields)
    (tmp_path / "schema.toml").write_text(CLICKS)
    (tmp_path / "clicks.csv").write_bytes(b"\r\n".join([*lines[:50], b"", *lines[50:]]) + b"\r\n")
    flags = ["--input", str(tmp_path / "clicks.csv"), "--output", str(tmp_path / "out"), "--log-format", "csv"]
    flags += ["--schema", str(tmp_path / "schema.toml"), "--id-columns", "timestamp,item_id", "--format", "parquet"]
    flags += ["--time-columns", "timestamp", "--split", "time:timestamp:80/20"]
    manifest = job.run(spark, etl_logs.config_of(etl_logs.parser().parse(flags)))
    counts = manifest.counts
    assert (counts.read, counts.written, counts.quarantined, counts.dropped) == (2001, 1996, 4, {"empty_line": 1})
    assert (manifest.splits["train"].records, manifest.splits["test"].records) == (1597, 399)
    rows = table(tmp_path / "out")
    assert sum(rows["click"]) == 18 and set(rows["position"]) == {1, 2, 3}
    assert "timestamp" not in rows, "an id is no feature"
    found = pq.read_table(tmp_path / "out" / "_quarantine" / "part-00000.parquet").to_pylist()
    details = {5: ': "maybe" is no bool', 41: ': "noon" is no time in ISO 8601'}
    assert [row["reason"] for row in found] == [bad[number] + details.get(number, "") for number in sorted(bad)]
    data = (tmp_path / "clicks.csv").read_bytes()
    for row in found:
        assert data[row["position"] :].startswith(row["raw"] + b"\r\n")
    # The same clicks as JSON lines are the same dataset.
    kept = [lines[0], *(line for number, line in enumerate(lines) if number and number not in bad)]
    (tmp_path / "clicks.jsonl").write_text("".join(map(as_json, csv.DictReader(line.decode() for line in kept))))
    flags[1], flags[3], flags[5] = str(tmp_path / "clicks.jsonl"), str(tmp_path / "two"), "json"
    again = job.run(spark, etl_logs.config_of(etl_logs.parser().parse(flags)))
    assert (again.counts.read, again.digest) == (1996, manifest.digest)


def as_json(click: dict[str, str]) -> str:
    """A line of the click log as an object: its numbers and booleans as such."""
    reads: dict[str, Callable[[str], object]] = {"click": "1".__eq__, "item_id": int, "position": int}
    values = {
        name: reads.get(name, float if "score" in name or "affinity" in name else str)(text)
        for name, text in click.items()
    }
    return json.dumps(values) + "\n"


def wide_lines(count: int) -> bytes:
    """Rows in the layout of Criteo's click logs: a label, 13 numbers, 26 hashes; tabs, no header, empty for null."""
    rng = np.random.default_rng(0)
    numbers, hashes = rng.integers(-3, 1000, (count, 13)), rng.integers(0, 1 << 32, (count, 26))
    lines = []
    for n in range(count):
        row = [str(n % 4 // 3)]
        row += [str(value) if value % 9 else "" for value in numbers[n].tolist()]
        row += [f"{value:08x}" if value % 11 else "" for value in hashes[n].tolist()]
        lines.append("\t".join(row))
    lines[7] = lines[7].replace("\t", " ", 1)
    return "\n".join(lines).encode()


@pytest.mark.slow
def test_forty_columns_however_the_file_is_cut_and_packed(spark: SparkSession, tmp_path: Path) -> None:
    data = wide_lines(600)
    (tmp_path / "day").write_bytes(data)
    (tmp_path / "wide.toml").write_text(WIDE)
    more = {"log_format": "tsv", "schema": str(tmp_path / "wide.toml"), "columns": ("label", *NUMBERS, *HASHES)}
    manifest = job.run(spark, config(tmp_path / "day", tmp_path / "one", **more))
    job.run(spark, config(tmp_path / "day", tmp_path / "four", split_bytes=-(-len(data) // 4), **more))
    assert (manifest.counts.written, manifest.counts.quarantined) == (599, 1)
    assert tree(tmp_path / "one") == tree(tmp_path / "four")
    assert not list(verify(str(tmp_path / "one")))
    # Packed, a record keeps its place in the decompressed bytes and its file's name, so it is the same dataset.
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "day.zst").write_bytes(pa.compress(data, codec="zstd", asbytes=True))
    packed = job.run(spark, config(tmp_path / "packed", tmp_path / "three", **more))
    assert packed.digest == manifest.digest


def test_what_is_told_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.toml").write_text(CLICKS)
    Path("tensor.toml").write_text('[[fields]]\nname = "x"\ndtype = "float32"\nshape = [2]\n')
    Path("bare.toml").write_text('[[fields]]\nname = "position"\ndtype = "int64"\n')
    Path("t.csv").write_bytes(b"click,position\n1,2\n")
    Path("twice.csv").write_bytes(CLICK_HEADER + b",click\n1\n")
    Path("good.csv").write_bytes(CLICK_HEADER + b"\n1\n")
    Path("latin.csv").write_bytes("größe,click\n1,0\n".encode("latin-1"))
    Path("t.json").write_bytes(b'{"host":"h"}\n')
    base = ["--output", "out", "--log-format", "csv"]
    table, good = ["--schema", "schema.toml"], ["--input", "good.csv"]
    cases: list[tuple[list[str], type[Exception], str]] = [
        (["--input", "t.csv"], DataError, "holds no web requests"),
        (["--input", "t.json", "--log-format", "json"], DataError, "no column for time, status"),
        (["--input", "latin.csv"], DataError, "names no fields"),
        (["--input", "*.log"], NotFoundError, "names no file"),
        (["--input", "t.csv", *table], ConfigError, "no column user_feature_0"),
        (["--input", "twice.csv", *table], ConfigError, "more than one click"),
        ([*good, *table, "--id-columns", "user"], ConfigError, "no column user"),
        ([*good, *table, "--split", "group:visitor:80/20"], ConfigError, "no column visitor"),
        ([*good, "--schema", "tensor.toml"], ConfigError, "field `x` cannot be read from a text"),
        ([*good, *table, "--time-columns", "user_feature_0"], ConfigError, "cannot hold a time"),
        ([*good, "--schema", "none.toml"], NotFoundError, "none.toml"),
        ([*good, "--id-columns", "a"], ConfigError, "with --schema"),
        ([*good, "--split", "group:item_id:80/20"], ConfigError, "names the column `item_id`"),
        ([*good, "--split", "stratified:page_tokens:80/20"], ConfigError, "`page_tokens` cannot decide the split"),
        ([*good, *table, "--split", "stratified:propensity_score:8/2"], ConfigError, "cannot decide the split"),
        ([*good, *table, "--split", "time:propensity_score:8/2"], ConfigError, "cannot decide the split"),
        ([*good, *table, "--split", "time:timestamp:8/2"], ConfigError, "--time-columns reads ISO 8601"),
        ([*good, *table, "--sample", "user=1:1%"], ConfigError, "no column user"),
        ([*good, "--sample", "host=a:1%"], ConfigError, "--sample names the column `host`"),
        ([*good, "--sample", "stays=maybe:1%"], ConfigError, "a class that column `stays` cannot have"),
        ([*good, *table, "--sample", "position=1.5:1%"], ConfigError, "a class that column `position` cannot have"),
        ([*good, *table, "--sample", "propensity_score=1:1%"], ConfigError, "whole numbers, text or booleans"),
        ([*good, "--schema", "bare.toml", "--weights", "balanced"], ConfigError, "needs classes to weigh"),
        ([*good, "--append-to", "other"], ConfigError, "its schema is another one"),
        ([*good, "--append-to", "other", "--seed", "1"], ConfigError, "its seed is another one"),
        ([*good, "--append-to", "other", "--weights", "balanced"], ConfigError, "its weights is another one"),
    ]
    published(tmp_path, "other", write_table(tmp_path / "tiny"), None, weights="none")
    for flags, kind, text in cases:
        with pytest.raises(kind) as caught:
            etl_logs.main([*base, *flags])
        assert text in str(caught.value), str(caught.value)
        assert str(caught.value).count("\n") == 3, str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "got"),
    [
        ("bom.csv", "click,position\n1,2\n".encode("utf-16"), "UTF-16, by its first bytes ff fe 63 00"),
        ("plain.csv", "click,position\n1,2\n".encode("utf-16-be"), "UTF-16BE"),
        ("little.json", '{"größe": 1}\n'.encode("utf-16-le"), "UTF-16LE"),
        ("wide.tsv", "click\tposition\n".encode("utf-32"), "UTF-32"),
        ("packed.csv.gz", gzip.compress("click,position\n1,2\n".encode("utf-16-le") * 9000, mtime=0), "UTF-16LE"),
        ("packed.csv.bz2", bz2.compress("click,position\n1,2\n".encode("utf-16-le") * 9000), "UTF-16LE"),
        ("mac.csv", b"click,position\r1,2\r", r"\r and no \n"),
        ("mac access's.log", b'h - - [09/Jul/1995:00:00:00 -0400] "GET / HTTP/1.0" 200 1\r' * 99, r"\r and no \n"),
        ("mac.tsv.gz", gzip.compress(b"click\tposition\r1\t2\r" * 9, mtime=0), r"\r and no \n"),
    ],
)
def test_text_that_is_not_lines_of_utf8_is_refused_with_a_command(
    tmp_path: Path, name: str, text: bytes, got: str
) -> None:
    path, kind = tmp_path / name, {"csv": "csv", "tsv": "tsv", "json": "json"}.get(name.split(".")[1], "common")
    path.write_bytes(text)
    (tmp_path / "schema.toml").write_text(CLICKS)
    more = {} if kind == "common" else {"schema": str(tmp_path / "schema.toml")}
    with pytest.raises(DataError, match=r"is not in UTF-8|carriage return only") as caught:
        job.check(config(path, tmp_path / "out", log_format=kind, **more))
    assert caught.value.got.startswith(got) and str(path) in caught.value.what
    # What it says to do, done.
    command = caught.value.next_step.removeprefix("Convert it: ").removesuffix(", and give NEW to --input.")
    subprocess.run(["bash", "-c", command.replace("NEW", str(tmp_path / "new"))], check=True)
    lines = (tmp_path / "new").read_bytes()
    assert lines.decode("utf-8").isprintable() is False and b"\n" in lines and b"\r" not in lines and b"\0" not in lines
    check_lines(Source(str(tmp_path / "new"), len(lines), "none"), lines[:4096])


def test_text_that_is_fine() -> None:
    for text in (
        b"one line",
        b"one line\r",
        b"a\r\nb\r\n",
        b"a\rb\n",
        "größe\n".encode(),
        b"",
        b"\0",
        bytes(range(256)),
    ):
        check_lines(Source("none", len(text), "none"), text)


CLICK_HEADER = (
    b"click,position,user_feature_0,user_feature_1,user_feature_2,user_feature_3,propensity_score"
    b",user-item_affinity_0,user-item_affinity_33"
)


@pytest.mark.slow
def test_a_quote_that_swallowed_lines_is_counted_by_lines(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One text in quotes without an end is one record, and all the lines behind it; an empty file beside is skipped."""
    folder = tmp_path / "in"
    folder.mkdir()
    schema = json.dumps(
        {"fields": [{"name": "name", "dtype": "string"}, {"name": "sold", "dtype": "bool", "kind": "label"}]}
    )
    lines = [f"{number},item {number},{'yes' if number % 2 else 'no'}" for number in range(600)]
    lines[100] = lines[580] = '1,pipe 5" long,no'  # inches: no quote at a field's start
    (folder / "items.csv").write_text("\n".join(["id,name,sold", *lines, ""]))
    (folder / "rotated.csv").touch()
    made = LogsConfig(
        inputs=(str(folder),),
        output=str(tmp_path / "out"),
        log_format="csv",
        schema=schema,
        quoted_newlines=True,
        split="1/1",
    )
    counts = job.run(spark, made).counts
    assert (counts.read, counts.written, counts.quarantined) == (600, 598, 2)
    assert any("skipped" in told and told.endswith("rotated.csv") for told in caplog.messages)
    lines[100] = '100,"pipe 5 long,no'  # opens, and the next quote is 480 lines on
    (folder / "items.csv").write_text("\n".join(["id,name,sold", *lines, ""]))
    with pytest.raises(DataError, match=r"1 of 120 records are bad \(481 of 600 lines\)") as caught:
        job.run(spark, replace(made, output=str(tmp_path / "other")))
    assert "bad_quotes (481 lines)" in caught.value.got and "stops at column" in caught.value.got
