"""What `make package` packs; tests/cluster/test_cluster_mode.py runs it on YARN."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.jobs._archives import ARCHIVES, Packed, closure, named_by_digest, shell_lines
from lockstep.jobs._yarn import report_failure
from lockstep.process.installed import ROOMS, ROOT
from lockstep.spark.session import ship_rooms
from lockstep.storage.errors import ConfigError


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(ship_rooms(str(tmp_path_factory.mktemp("code"))))


def test_the_zip_has_each_room_s_code_and_nothing_else_and_equal_files_make_equal_bytes(
    code: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(code) as archive:
        names = archive.namelist()
    of_rooms = [name for name in names if name.endswith(".py") and name.partition("/")[0] in ROOMS]
    assert sorted({*names} - {*of_rooms}) == ["constraints.txt", "requirements.txt"]
    assert len(of_rooms) == sum(len([*(ROOT / room).rglob("*.py")]) for room in (*ROOMS, "etl", "training", "jobs"))
    assert {"lockstep/etl/columns.py", "lockstep/training/config/train_config.py", "lockstep/jobs/train.py"} <= {
        *of_rooms
    }
    assert Path(ship_rooms(str(tmp_path))).read_bytes() == code.read_bytes()


def test_a_job_runs_from_the_zip_and_ships_that_zip(code: Path, tmp_path: Path) -> None:
    """A file with tables of other jobs is read there too; flags are made from docstrings, which need the sources."""
    (tmp_path / "run.toml").write_text("[train]\nnum_ranks = 0\n[etl_logs]\nsplit = '80/20'\n")

    def job(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(code)},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    flags = ["--dataset", "d", "--run", "r", "--model", "logistic", "--global-batch", "8", "--epochs", "1"]
    done = job("-m", "lockstep.jobs.train", "--config", "run.toml", *flags)
    assert done.returncode == 2 and "\n  got: num_ranks = 0\n" in done.stderr, done.stderr
    done = job("-c", "from lockstep.spark.session import ship_rooms; print(ship_rooms('nowhere'))")
    assert done.stdout.strip() == str(code), done.stderr


def test_packages_are_the_requirements_and_what_these_require() -> None:
    etl, training = (set(closure(name)) for name in ARCHIVES)
    assert {"numpy", "pyarrow", "numba", "llvmlite", "hdfs-native", "petastorm", "cffi"} <= etl < training
    assert {"tensorflow", "keras", "optuna", "grpcio"} <= training - etl
    assert not {"pyspark", "py4j", "pytest", "mypy", "pip", "libclang"} & training
    assert "pytest" in closure("etl", ["pytest"])
    with pytest.raises(ConfigError, match="no-such-package"):
        closure("etl", ["no-such-package"])


def test_files_are_named_by_their_digests(tmp_path: Path) -> None:
    path = tmp_path / "lockstep-etl.tar.gz"
    path.write_bytes(b"12345")
    files = [Packed(path, "LOCKSTEP_ETL", "0123456789abcdef" * 4, True)]
    items = named_by_digest(files, "hdfs://host/folder of ours")
    assert [(item.path, item.size_bytes) for item in items] == [(str(path), 5)]
    assert shell_lines(files, items) == (
        "export LOCKSTEP_ETL='hdfs://host/folder of ours/lockstep-etl-0123456789abcdef.tar.gz'\n"
    )


class Java:
    """The classes of Spark's application master that an error is handed to."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        field = SimpleNamespace(getName=lambda: "a$$master", setAccessible=lambda _: None, get=lambda _: self)
        found = SimpleNamespace(getDeclaredFields=lambda: [field], getField=lambda _: field)
        system = SimpleNamespace(err=SimpleNamespace(println=self.calls.append))
        self.java = SimpleNamespace(lang=SimpleNamespace(System=system, Class=SimpleNamespace(forName=lambda _: found)))
        records = SimpleNamespace(FinalApplicationStatus=SimpleNamespace(FAILED="failed"))
        yarn = SimpleNamespace(api=SimpleNamespace(records=records))
        self.org = SimpleNamespace(apache=SimpleNamespace(hadoop=SimpleNamespace(yarn=yarn)))

    def finish(self, *arguments: object) -> None:
        self.calls.append(arguments)


def test_an_error_is_handed_to_yarn_only_by_a_driver_in_an_application_master(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyspark import SparkContext

    java = Java()
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(jvm=java))
    monkeypatch.delenv("SPARK_YARN_STAGING_DIR", raising=False)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    report_failure("error: no", 1)
    assert java.calls == []
    monkeypatch.setenv("SPARK_YARN_STAGING_DIR", "hdfs://host/staging")
    report_failure("error: no", 1)
    assert java.calls == ["error: no", ("failed", 1, "exit code 1\nerror: no")]
    java.org = None  # type: ignore[assignment]  # Java has ended, or is of another version: the exit code stays
    report_failure("error: no", 1)
    assert capsys.readouterr().out == "YARN's diagnostics lack this error: AttributeError\n"
