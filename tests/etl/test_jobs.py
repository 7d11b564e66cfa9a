"""The ETL jobs as a user runs them: exit codes, four-part errors, nothing half-published."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import etl_images, etl_logs
from lockstep.storage.errors import ConfigError, DataError, ExistsError, LockstepError, NotFoundError

from .conftest import ROOT, run


@pytest.mark.slow
def test_a_log_of_noise_ends_with_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"no log at all\n" * 50)
    done = run(
        str(ROOT / "jobs" / "etl_logs.py"), "--input", "noise", "--output", "out", "--master", "local[1]", cwd=tmp_path
    )
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: ") :].splitlines()
    assert error[0] == "error: 50 of 50 records are bad, more than --max-bad allows"
    assert [line.split(":")[0].strip() for line in error[1:4]] == ["got", "allowed", "next"]
    assert "noise at byte 0: not_common_log" in error[1] and "--log-format" in error[3]
    for trace in ("Traceback", "\tat ", "Exception in task"):
        assert trace not in done.stderr + done.stdout
    there = sorted(path.name for path in tmp_path.iterdir() if path.name != "spark-warehouse")
    assert there == ["_quarantine-out", "noise"] and "_quarantine-out" in error[3]
    assert len(pq.read_table(tmp_path / "_quarantine-out")) == 50


def test_what_is_told_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("log").write_bytes(b"x\n")
    Path("empty").touch()
    cases: list[tuple[list[str], type[LockstepError], int]] = [
        (["--input", "none", "--output", "out"], NotFoundError, 2),
        (["--input", "empty", "--output", "out"], DataError, 1),
        (["--input", "log", "--output", "there"], ExistsError, 2),
        (["--input", "log", "--output", "out", "--split", "x"], ConfigError, 2),
        (["--input", "log", "--output", "out", "--shard-bytes", "x"], ConfigError, 2),
        (["--input", "log", "--output", "out", "--colour", "red"], ConfigError, 2),
        (["--input", "log", "--output", "gopher://x/y"], ConfigError, 2),
        (["--output", "out"], ConfigError, 2),
    ]
    for job in (etl_logs, etl_images):
        for flags, kind, code in cases:
            with pytest.raises(kind) as caught:
                job.main(flags)
            assert caught.value.exit_code == code
            assert caught.value.got and caught.value.allowed and caught.value.next_step


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for job, flags in ((etl_logs, ["--log-format", "--label"]), (etl_images, ["--source", "--image-size"])):
        with pytest.raises(SystemExit) as ended:
            job.main(["--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0
        for flag in [
            *flags,
            "--input",
            "--output",
            "--max-bad",
            "--format",
            "--split",
            "--shard-bytes",
            "--seed",
            "--config",
        ]:
            assert flag in text
