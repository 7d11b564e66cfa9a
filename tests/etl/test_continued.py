"""An append takes what its flags leave out from the dataset that it continues, and refuses by name what differs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.etl import continued as continuing
from lockstep.etl.continued import continued
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.features.schema.schema import Schema
from lockstep.jobs import etl_images, etl_logs, etl_table
from lockstep.storage.errors import ConfigError
from tests.training._tiny import TABLE_SCHEMA, write_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEW = {"output": "b", "inputs": ("new",), "append_to": "/a"}
NOT_TAKEN = {"quarantine", "max_bad"}  # where rejected input goes, and how much of it: of each job
of_all = {
    "fmt": st.sampled_from(["tfrecord", "parquet"]),
    "split": st.sampled_from(["80/20", "8/1/1", "group:visitor:80/20", "kfold:5"]),
    "shard_bytes": st.integers(1, 1 << 40),
    "sample": st.none() | st.just("label=false:10%"),
    "weights": st.sampled_from(["none", "balanced"]),
    "seed": st.integers(0, 9),
}
of_tables = {
    "log_format": st.just("csv"),
    "schema": st.just(TABLE_SCHEMA),
    "label": st.none() | st.just("a > b"),
    "id_columns": st.lists(st.sampled_from("abc"), unique=True).map(tuple),
    "time_columns": st.lists(st.sampled_from("de"), unique=True).map(tuple),
    "columns": st.just(()) | st.just(("a", "b", "c")),
    "null_texts": st.just(()) | st.just(("NA",)),
    "delimiter": st.none() | st.just(";"),
}
of_web = {
    "log_format": st.just("csv"),
    "label": st.none() | st.just("page = '/'"),
    "visitor_column": st.none() | st.just("host"),
    "page_suffixes": st.just(()) | st.just(("aspx",)),
    "columns": st.just(()) | st.just(("host", "path", "at")),
}
of_images = {
    "source": st.sampled_from(["folder", "tar", "parquet"]),
    "image_size": st.tuples(st.integers(1, 64), st.integers(1, 64)),
    "fit": st.sampled_from(["resize", "crop"]),
    "rotate": st.sampled_from([0, 90]),
    "channels": st.sampled_from([None, 1, 3]),
    "num_classes": st.none() | st.integers(2, 9),
    "split": st.sampled_from(["80/20", "kfold:5", "stratified:label:8/2"]),
}


def made_as(config: LogsConfig | ImagesConfig, schema: Schema = TABLE_SCHEMA) -> Any:
    """What `load_dataset` returns of a dataset that a job of this configuration made."""
    created = {"config": config.to_json(), "seed": config.seed}
    return SimpleNamespace(created_by=created, format=config.fmt, schema=schema.to_json())


def kept(config: LogsConfig | ImagesConfig) -> dict[str, Any]:
    """What decides the content of a dataset, without what is the job's own."""
    settings = {name: value for name, value in config.to_json().items() if name not in NOT_TAKEN}
    return {**settings, "seed": config.seed, "schema": getattr(config, "schema", None)}


@given(st.data())
@pytest.mark.parametrize(
    ("kind", "fields"),
    [(LogsConfig, of_all | of_tables), (LogsConfig, of_all | of_web), (ImagesConfig, of_all | of_images)],
)
def test_an_append_without_flags_has_the_settings_of_its_parent(kind: Any, fields: dict[str, Any], data: Any) -> None:
    given_fields = {name: data.draw(values, label=name) for name, values in fields.items()}
    parent = kind(output="a", inputs=("old",), **given_fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuing, "load_dataset", lambda url: made_as(parent))
        append = kind(**continued(NEW, NEW.keys()))
        assert kept(append) == kept(parent) and append.append_to == "/a"
        # All flags repeated are the same, one that differs is refused by its name.
        again = {**given_fields, **NEW}
        assert kept(kind(**continued(again, again.keys()))) == kept(parent)
        for name, other in (
            ("id_columns", ("z",)),
            ("time_columns", ("z",)),
            ("rotate", 180),
            ("image_size", (99, 99)),
        ):
            if name in given_fields:
                with pytest.raises(ConfigError, match="cannot be continued") as caught:
                    continued({**again, name: other}, again.keys())
                assert f"--{name.replace('_', '-')}" in caught.value.got


def test_another_format_of_lines_takes_no_columns_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = LogsConfig(output="a", inputs=("old",), log_format="csv", schema=TABLE_SCHEMA, columns=("a", "b", "label"))
    monkeypatch.setattr(continuing, "load_dataset", lambda url: made_as(parent))
    values = {**NEW, "log_format": "json"}
    append = LogsConfig(**continued(values, values.keys()))
    assert (append.log_format, append.columns, append.schema) == ("json", (), TABLE_SCHEMA)


def test_flags_that_are_defaults_are_not_given(tmp_path: Path) -> None:
    """A flag counts as given if it is on the command line or in a file, also with the value of its default."""
    (tmp_path / "job.toml").write_text("[etl_logs]\nseed = 0\n")
    argv = ["--config", str(tmp_path / "job.toml"), "--input", "x", "--output", "y", "--split", "80/20"]
    job = etl_logs.parser()
    assert job.given(argv) == {"config", "input", "output", "seed", "split"}
    assert job.parse(argv).fmt == "tfrecord", "the parser is as it was"
    write_table(tmp_path / "a")
    flags = ["--input", "x", "--output", str(tmp_path / "b"), "--append-to", str(tmp_path / "a")]
    for each in (etl_logs, etl_images):
        config: Any = each.config_of(each.parser().parse(flags), each.parser().given(flags))
        assert (config.fmt, config.seed, config.split) == ("tfrecord", 0, "80/20"), "what that dataset does not tell"
    assert etl_table.parser().given(flags) == {"input", "output", "append_to"}


@pytest.mark.slow
def test_a_second_day_needs_no_flags_but_its_input(spark: SparkSession, tmp_path: Path) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text(
        '[[fields]]\nname = "a"\ndtype = "float32"\n[[fields]]\nname = "label"\ndtype = "bool"\nkind = "label"\n'
    )
    for day in (0, 1):
        rows = [f"{day}-{n},{n}.5,{'true' if n % 3 else 'false'}" for n in range(60)]
        (tmp_path / f"{day}.csv").write_text("\n".join(["id,a,label", *rows, ""]))

    def run(day: int, *flags: str) -> Any:
        argv = ["--input", str(tmp_path / f"{day}.csv"), "--output", str(tmp_path / f"d{day}"), *flags]
        job = etl_logs.parser()
        return logs.run(spark, etl_logs.config_of(job.parse(argv), job.given(argv)))

    more = ["--weights", "balanced", "--split", "3/1", "--seed", "4", "--format", "parquet", "--id-columns", "id"]
    whole = run(0, "--log-format", "csv", "--schema", str(schema), *more)
    append = run(1, "--append-to", str(tmp_path / "d0"))
    assert {name: append.created_by["config"][name] for name in ("split", "weights", "id_columns", "log_format")} == {
        "split": "3/1", "weights": "balanced", "id_columns": ["id"], "log_format": "csv",
    }  # fmt: skip
    assert append.schema == whole.schema and append.parent is not None
    assert (append.counts.written, append.created_by["seed"], append.format) == (60, 4, "parquet")
    with pytest.raises(ConfigError, match="--id-columns"):
        run(1, "--append-to", str(tmp_path / "d0"), "--id-columns", "a")
