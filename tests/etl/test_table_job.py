"""lockstep etl_table, as far as it goes without Spark: what its call may say, told before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.features.schema.declare import load_schema
from lockstep.jobs import etl_logs, etl_table
from lockstep.storage.errors import ConfigError, ExistsError, LockstepError, NotFoundError

GOOD = ["--table", "t", "--id-columns", "a,b", "--output", "out"]


@pytest.mark.parametrize(
    ("flags", "kind", "told"),
    [
        ([*GOOD, "--query", "SELECT 1"], ConfigError, "the input"),
        (GOOD[2:], ConfigError, "the input"),
        ([*GOOD, "--id-columns", ""], ConfigError, "--id-columns"),
        ([*GOOD, "--id-columns", "a,a"], ConfigError, "--id-columns"),
        ([*GOOD, "--schema", "s.toml", "--label", "y"], ConfigError, "--schema"),
        ([*GOOD, "--schema", "s.toml"], NotFoundError, "s.toml"),
        ([*GOOD, "--output", "there"], ExistsError, "there"),
        ([*GOOD, "--append-to", "nothing"], NotFoundError, "no dataset at"),
        ([*GOOD, "--append-to", "there", "--split", "time:1/1"], ConfigError, "--append-to"),
        ([*GOOD, "--row-group-bytes", "100"], ConfigError, "--row-group-bytes"),  # TFRecord has none
        ([*GOOD, "--row-group-bytes", "0", "--format", "parquet"], ConfigError, "--row-group-bytes"),
        ([*GOOD, "--weights", "heavy"], ConfigError, "--weights"),
        ([*GOOD, "--sample", "click"], ConfigError, "--sample"),
        ([*GOOD, "--split", "kfold:1"], ConfigError, "--split"),
        ([*GOOD[2:], "--input", "x.csv", "--input-format", "csv"], ConfigError, "--input-format"),
        ([*GOOD, "--max-bad", "1%"], ConfigError, "invalid arguments"),  # a table has no lines to reject
    ],
)
def test_calls_that_cannot_be_right(
    flags: list[str], kind: type[LockstepError], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    with pytest.raises(kind) as caught:
        etl_table.main(flags)
    assert caught.value.exit_code == 2 and told in caught.value.what
    assert caught.value.got and caught.value.allowed and caught.value.next_step


def test_a_configuration_holds_what_the_flags_say() -> None:
    flags = [*GOOD, "--exclude", "c,d", "--weights", "balanced", "--clean", "--format", "parquet", "--seed", "3"]
    config = etl_table.config_of(etl_table.parser().parse(flags))
    assert (config.id_columns, config.exclude, config.table, config.inputs) == (("a", "b"), ("c", "d"), "t", ())
    assert (config.weights, config.clean, config.fmt, config.seed) == ("balanced", True, "parquet", 3)
    assert config.to_json()["table"] == "t" and "clean" not in config.to_json()  # what changes no byte is not kept


def test_a_schema_for_csv_files_is_the_one_of_the_job_that_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for name, rows in (("a", "1,0.5,yes\n2,,no\n"), ("b", "3,2.5,no\n")):
        (tmp_path / "in" / f"{name}.csv").write_text(f"visit,seconds,bought\n{rows}")
    flags = ["--propose-schema", "--input", str(tmp_path / "in")]
    assert etl_table.main([*flags, "--input-format", "csv", "--output", str(tmp_path / "table.toml")]) == 0
    assert f"run lockstep etl_logs with --log-format csv --input {tmp_path}/in" in capsys.readouterr().out
    assert etl_logs.main([*flags, "--log-format", "csv", "--output", str(tmp_path / "logs.toml")]) == 0
    assert (tmp_path / "table.toml").read_bytes() == (tmp_path / "logs.toml").read_bytes()
    found = {field.name: field.dtype for field in load_schema(str(tmp_path / "table.toml"))}
    assert found == {"sample_id": "int64", "visit": "int64", "seconds": "float64", "bought": "bool"}
    with pytest.raises(ConfigError, match="--label"):
        etl_table.main([*flags, "--input-format", "csv", "--label", "bought", "--output", str(tmp_path / "x.toml")])
