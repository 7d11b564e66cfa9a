"""What ETL jobs are told: bad values are refused before anything is read."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.spark.errors import from_text, to_wire
from lockstep.etl.split.sampling import parse_share
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.tables import TableConfig
from lockstep.etl.write.config import WriteConfig, parse_size
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, LockstepError

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": ()},
        {"fmt": "csv"},
        {"split": "80"},
        {"split": "80/20/10/5"},
        {"split": "80/0"},
        {"split": "group::80/20"},
        {"split": "given"},
        {"split": "-80/20"},
        {"max_bad": "2"},
        {"max_bad": "x%"},
        {"max_bad": "1/0"},
        {"max_bad": "-1%"},
        {"max_bad": "1e99999999"},
        {"max_bad": "nan"},
        {"split": "9" * 5000 + "/20"},
        {"shard_bytes": 0},
        {"seed": -1},
        {"log_format": "xml"},
        {"schema": "s.toml"},
        {"log_format": "csv", "id_columns": ("a", "a")},
        {"log_format": "json", "columns": ("a",)},
        {"log_format": "tsv", "quoted_newlines": True},
        {"log_format": "tsv", "delimiter": ";"},
        *({"log_format": "csv", "delimiter": mark} for mark in ("", ";;", '"', "a", "1", "\n", "\0", "§")),
        {"log_format": "csv", "columns": ("a", "a")},
        {"label_window": -1, "split": "time:80/20"},
        {"label_window": 60},
    ],
)
def test_bad_log_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LogsConfig(**{"inputs": ("a",), "output": "b", **wrong})
    assert caught.value.exit_code == 2 and caught.value.got and caught.value.allowed and caught.value.next_step


def test_one_text_is_a_list_of_one() -> None:
    """And not one of its characters: of `logs` those would be four inputs."""
    told: dict[str, Any] = {"log_format": "csv", "schema": "s.toml", "id_columns": "visit", "columns": "seen"}
    log = LogsConfig(inputs="logs", output="out", **told, time_columns="when", null_texts="NA")  # type: ignore[arg-type]  # as people call it
    assert (log.inputs, log.id_columns, log.columns) == (("logs",), ("visit",), ("seen",))
    assert (log.time_columns, log.null_texts) == (("when",), ("NA",))
    table = TableConfig(inputs=Path("a", "b"), output="out", id_columns="user", exclude="name")  # type: ignore[arg-type]  # as people call it
    assert (table.inputs, table.id_columns, table.exclude) == (("a/b",), ("user",), ("name",))
    assert LogsConfig(inputs=["a", "b"], output="out").inputs == ("a", "b")  # type: ignore[arg-type]  # as people call it


@pytest.mark.parametrize(
    ("output", "quarantine", "good"),
    [
        ("/d/out", "/d/out", False),
        ("/d/out", "file:///d/./out/", False),
        ("/d/out", "/d/out/bad", False),
        ("/d/out", "/d", False),
        ("/d/out", "/", False),
        ("out", "out/../out", False),
        ("hdfs://nn:1/d/out", "hdfs://nn:1/d", False),
        ("/d/out", "none", True),
        ("/d/out", "/d/out-bad", True),  # begins alike, but lies beside it
        ("/d/out", "/d/bad", True),
        ("hdfs://nn:1/d/out", "hdfs://other:1/d/out", True),
        ("hdfs://nn:1/d/out", "/d/out", True),
    ],
)
def test_rejected_input_goes_beside_the_output(output: str, quarantine: str, good: bool) -> None:
    if good:
        assert WriteConfig(output=output, quarantine=quarantine).quarantine == quarantine
        return
    with pytest.raises(ConfigError, match="--quarantine"):
        WriteConfig(output=output, quarantine=quarantine)


@pytest.mark.parametrize("wrong", [{"source": "tar"}, {"num_classes": 1}, {"num_classes": 257}, {"image_size": (0, 5)}])
def test_bad_image_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ImagesConfig(**{"inputs": ("a",), "output": "b", **wrong})


@pytest.mark.parametrize(
    ("told", "window", "in_units"),
    [
        ({"split": "time:80/20"}, 1800, 1800),  # of the default label
        ({"split": "time:80/20", "label_window": 0}, 0, 0),
        ({"split": "time:80/20", "label": "true"}, None, None),  # nobody knows how far it looks
        ({"split": "time:80/20", "label": "true", "label_window": 60}, 60, 60),
        ({"split": "time:hour:80/20"}, None, None),
        ({"split": "group:visitor:80/20"}, None, None),
        ({"split": "time:time:80/20", "schema": "s", "log_format": "csv"}, None, None),
        (
            {"split": "time:at:8/2", "schema": "s", "log_format": "csv", "time_columns": ("at",), "label_window": 60},
            60,
            60_000_000,  # ISO 8601 becomes microseconds
        ),
    ],
)
def test_how_far_a_label_looks(told: dict[str, Any], window: int | None, in_units: int | None) -> None:
    config = LogsConfig(inputs=("a",), output="b", **told)
    assert (config.window, config.stored_window) == (window, in_units)
    assert config.to_json().get("label_window") == window


def test_a_format_of_files_without_files() -> None:
    told: dict[str, Any] = {"output": "b", "id_columns": ("id",), "input_format": "orc"}
    assert TableConfig(**told, inputs=("a",)).input_format == "orc"
    with pytest.raises(ConfigError, match=r"--input-format is invalid(?s:.*)with --input"):
        TableConfig(**told, table="a")


def test_shares_sizes_and_splits() -> None:
    assert parse_share("1%") == parse_share("0.01") == Fraction(1, 100)
    assert parse_share("0") == 0 and parse_share("100%") == 1
    assert parse_size("28x32") == (28, 32)
    for wrong in ("28", "²x3", "9" * 5000 + "x3"):
        with pytest.raises(ConfigError):
            parse_size(wrong)
    assert SplitSpec.parse("group:a:b:70/30") == SplitSpec(
        kind="group", names=("train", "test"), weights=(70, 30), column="a:b"
    )
    assert SplitSpec.parse("given").given


@pytest.mark.parametrize(
    "error",
    [
        DataError("what\nélse", got="g", allowed="a", next_step="n"),
        CorruptionError("bad", file="f", record=3, offset=9),
        ConfigError("x" * 10_000),
    ],
)
def test_errors_survive_the_way_through_a_stack_trace(error: LockstepError) -> None:
    text = (
        f"org.apache.spark.SparkException: ...\n  File x\netl.spark_errors.TaskError: {to_wire(error)}\n\tat java.base"
    )
    found = from_text(text)
    assert type(found) is type(error) and found is not None and found.exit_code == error.exit_code
    assert str(found) == str(error)[:4000] or found.what == error.what[:4000]
    assert from_text("no such thing") is None
