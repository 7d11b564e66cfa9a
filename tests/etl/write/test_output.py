"""What is told of an output before rows are read: columns and classes asked for, weights, what is continued."""

from __future__ import annotations

import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from lockstep.etl.images import job
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.write.checks import check_columns, check_schema
from lockstep.etl.write.config import WriteConfig
from lockstep.etl.write.refusal import check_bad, forget_refused
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from tests.etl.conftest import write_images
from tests.etl.write.test_append import published
from tests.training._tiny import write_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KINDS = {"click": "boolean", "n": "int", "word": "string", "x": "double", "at": "timestamp_ntz", "many": "array<int>"}
KINDS |= {"city": "string collate UTF8_LCASE"}
LABEL = Field(name="n", dtype="int64", kind="label", num_classes=10)


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ({"sample": "click=true:1%,click=0:2%"}, None),
        ({"sample": "click=yes:1%"}, "cannot have"),
        ({"sample": "click=1:10%,click=true:50%"}, "column `click` twice"),  # two texts of one boolean
        ({"sample": "n=1:10%,n=0:50%"}, None),
        ({"sample": "n=9:1%"}, None),
        ({"sample": "n=10:1%"}, "cannot have"),  # the label has ten classes
        ({"sample": "n=07:1%"}, "cannot have"),  # no number is written so, so none would be left out
        ({"sample": "word=07:1%"}, None),
        ({"sample": "x=1:1%"}, "cannot have"),
        ({"sample": "no=1:1%"}, "names the column `no`"),
        ({"split": "stratified:word:1/1"}, None),
        ({"split": "stratified:x:1/1"}, "cannot decide"),
        ({"split": "time:n:1/1"}, None),
        ({"split": "time:at:1/1"}, "cannot decide"),  # a clock's hand without its zone
        ({"split": "group:x:1/1"}, None),
        ({"split": "kfold:3:many"}, "cannot decide"),
        ({"split": "group:city:1/1"}, "text without a collation"),  # Oslo and OSLO would be in two splits
        ({"split": "kfold:3:city:balanced"}, "text without a collation"),
        ({"split": "group:no:1/1"}, "names the column `no`"),
    ],
)
def test_columns_that_are_asked_for(told: dict[str, str], refused: str | None) -> None:
    # the rows give texts to fields of several types; each is a text here
    config, schema = WriteConfig(output="out", **told), Schema((sample_id_field(), LABEL))  # type: ignore[arg-type] # of any types
    if refused is None:
        check_columns(config, schema, KINDS)
        return
    with pytest.raises(ConfigError, match=refused) as caught:
        check_columns(config, schema, KINDS)
    assert caught.value.got and caught.value.allowed and caught.value.next_step


def test_weights_and_petastorm_go_with_the_schema(tmp_path: Path) -> None:
    weighed = WriteConfig(output="out", weights="balanced")
    schema = check_schema(weighed, Schema((sample_id_field(), LABEL)))
    assert schema.weight is not None
    with pytest.raises(ConfigError, match="already has some"):
        check_schema(weighed, schema)
    with pytest.raises(ConfigError, match="needs classes to weigh"):
        check_schema(weighed, Schema((sample_id_field(),)))
    named = Schema((sample_id_field(), Field(name="a-b", dtype="int64")))
    with pytest.raises(ConfigError, match="make_reader cannot name"):
        check_schema(WriteConfig(output="out", petastorm=True, fmt="parquet"), named)


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ({"sample": "label=2:1%"}, None),
        ({"sample": "label=3:1%"}, "cannot have"),
        ({"sample": "image=3:1%"}, "cannot have"),
        ({"sample": "sample_id=5:1%"}, "names the column `sample_id`"),  # which rows do not have yet
        ({"append_to": "other"}, "its schema is another one"),
        ({"append_to": "nowhere"}, "no dataset at"),
        ({"append_to": "other", "weights": "balanced"}, "its weights is another one"),
    ],
)
def test_images_are_not_read_for_a_call_that_cannot_be_right(
    told: dict[str, str], refused: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    write_images(Path("in"), "train", 9)
    published(tmp_path, "other", write_table(tmp_path / "tiny"), None, weights="none", sample=None)
    options: dict[str, Any] = {"inputs": ("in",), "output": "out", "num_classes": 3, **told}
    if refused is None:
        assert job.check(ImagesConfig(**options)).plan.num_classes == 3
        return
    with pytest.raises(ConfigError, match=refused):
        job.check(ImagesConfig(**options))


@pytest.mark.slow
def test_bad_input_in_a_folder_is_named_by_its_file_and_kept_beside_the_output(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = [(0, "cat/2.jpg", 0, "broken"), (0, "cat/1.jpg", 0, "broken"), (1, None, 7, "cut")]
    table = spark.createDataFrame(rows, "_source int, _place string, _position bigint, _reason string")
    bad = table.selectExpr("*", "X'00ff' AS _raw", "2L AS _length", "'0' AS _sha256")
    config = LogsConfig(inputs=("/in", "/in.tar"), output=str(tmp_path / "out"))
    kept = tmp_path / "_quarantine-out"

    def refused(config: LogsConfig) -> DataError:
        with pytest.raises(DataError, match="3 of 4 records are bad") as caught:
            check_bad(config, bad, ["/in", "/in.tar"], 3, 4)
        return caught.value

    error = refused(config)
    told = ("/in/cat/1.jpg at byte 0: broken", "/in/cat/2.jpg at byte 0: broken", "/in.tar at byte 7: cut")
    assert error.got.endswith("first " + "; ".join(told))
    assert f"{kept} holds the bad records until this output is written again" in error.next_step
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert [row["source"] for row in pq.read_table(kept).to_pylist()] == ["/in/cat/1.jpg", "/in/cat/2.jpg", "/in.tar"]
    first = (kept / "_job.json").read_bytes()
    assert refused(config).next_step == error.next_step
    assert (kept / "_job.json").read_bytes() != first, "the next refusal is kept in its place"
    forget_refused(config)
    assert not list(tmp_path.iterdir())

    # What is there of somebody else stays; where nothing is to be kept, nothing is.
    kept.mkdir()
    (kept / "_job.json").write_text('{"kind": "etl-staging"}')
    forget_refused(config)
    for now in (config, replace(config, quarantine="none")):
        assert str(kept) not in refused(now).next_step
    assert [path.name for path in tmp_path.rglob("*")] == [kept.name, "_job.json"]
    shutil.rmtree(kept)
    apart = replace(config, quarantine=str(tmp_path / "apart" / "bad"))
    assert f"{tmp_path / 'apart' / '_quarantine-bad'} holds" in refused(apart).next_step
