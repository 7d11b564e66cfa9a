"""lockstep etl_table, as far as it goes without Spark: what its call may say, told before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow.parquet as pq
import pytest

from lockstep.etl.logs import job
from lockstep.features.schema.declare import load_schema
from lockstep.jobs import etl_logs, etl_table
from lockstep.storage.errors import ConfigError, ExistsError, LockstepError, NotFoundError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
        ([*GOOD, "--columns", "a,b"], ConfigError, "--columns"),
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
    csv = [*flags, "--input-format", "csv"]
    assert (
        etl_table.main([*csv, "--label", "bought", "--id-columns", "visit", "--output", str(tmp_path / "x.toml")]) == 0
    )
    named = {field.name: field for field in load_schema(str(tmp_path / "x.toml"))}
    assert named["bought"].kind == "label" and named["visit"].encoding == {"kind": "ignore"}
    for flag, value in (("--exclude", "visit"), ("--split", "1/1")):
        with pytest.raises(ConfigError, match=flag):
            etl_table.main([*csv, flag, value, "--output", str(tmp_path / "y.toml")])


def test_a_csv_file_without_a_header_gets_one_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "39, 0.5,<=50K,yes\n50,,>50K,no\n38,2.5,<=50K,no\n"
    (tmp_path / "a.csv").write_text(rows)
    flags = ["--propose-schema", "--input", str(tmp_path / "a.csv"), "--columns", "age,rate,income,left"]
    assert etl_table.main([*flags, "--input-format", "csv", "--output", str(tmp_path / "a.toml")]) == 0
    printed = capsys.readouterr().out
    assert f"--log-format csv --columns age,rate,income,left --input {tmp_path}/a.csv" in printed
    found = {field.name: field.dtype for field in load_schema(str(tmp_path / "a.toml")) if field.kind != "id"}
    frame = pd.read_csv(tmp_path / "a.csv", names=["age", "rate", "income", "left"])
    kinds = {"int64": "int64", "float64": "float64"}
    assert {name: kinds.get(str(dtype), "text") for name, dtype in frame.dtypes.items()} == {
        name: kinds.get(dtype, "text") for name, dtype in found.items()
    }


@pytest.mark.slow
def test_rows_of_a_csv_file_without_a_header_are_those_of_pandas(tmp_path: Path, spark: SparkSession) -> None:
    names = ["age", "rate", "income", "click"]
    (tmp_path / "a.csv").write_text("".join(f'{n},{n / 4 if n % 3 else ""},"a, {n}",{n % 2 == 0}\n' for n in range(50)))
    proposal = ["--propose-schema", "--input-format", "csv", "--input", str(tmp_path / "a.csv")]
    assert etl_table.main([*proposal, "--columns", ",".join(names), "--output", str(tmp_path / "a.toml")]) == 0
    flags = ["--log-format", "csv", "--columns", ",".join(names), "--input", str(tmp_path / "a.csv"), "--split", "1/1"]
    flags += ["--schema", str(tmp_path / "a.toml"), "--format", "parquet", "--output", str(tmp_path / "made")]
    job.run(spark, etl_logs.config_of(etl_logs.parser().parse(flags)))
    found = pq.ParquetDataset(tmp_path / "made").read(columns=names).to_pandas().sort_values("age", ignore_index=True)
    wanted = pd.read_csv(tmp_path / "a.csv", names=names)
    pd.testing.assert_frame_equal(found[names], wanted, check_dtype=False)
