"""lockstep doctor: one line a check, exit 1 on a FAIL, never the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.jobs import _checks, doctor
from lockstep.jobs._checks import CheckWarned
from lockstep.jobs._spark_checks import check_modules
from lockstep.spark.session import ship_rooms
from lockstep.storage.errors import LockstepError
from lockstep.training.devices import Gpu
from tests.docs.steps import steps_of

ROOT = Path(__file__).resolve().parents[2]
THERE = ("java there", "glibc there", "modules there", "gpus there")
OF_SPARK = ("spark", "executors", *THERE, "clocks", "slots", "barrier")


def run_doctor(*flags: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "jobs" / "doctor.py"), *flags],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=360,
    )


@pytest.mark.slow
def test_a_healthy_machine_gets_an_ok_for_each_check(tmp_path: Path) -> None:
    done = run_doctor("--master", "local[2]", "--hdfs", str(tmp_path), cwd=tmp_path, LOCKSTEP_SECRET="hunter2")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in lines] == [
        f"OK   {name}" for name in ("python", "java", "packages", "disk", "gpus", "modules", "hdfs", *OF_SPARK)
    ]
    assert "hunter2" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []  # what was written is gone


def test_the_readme_shows_a_line_for_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def passes(name: str, _: object) -> bool:
        told.append(name)
        return True

    monkeypatch.setattr(doctor, "passes", passes)
    assert doctor.main(["--master", "local[2]"]) == 0
    page = (ROOT / "docs/tutorial.md").read_text("utf-8")
    step = next(step for step in steps_of(page) if "lockstep doctor" in step.commands)
    assert step.seen == [f"OK   {name}: ..." for name in told]


def test_a_java_that_does_not_start_is_a_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(_checks.CheckFailed, match="JAVA_HOME does not start"):
        _checks.check_java()


@pytest.mark.parametrize(
    ("version", "right"),
    [("17.0.15", True), ("21.0.2", True), ("11.0.1", False), ("25", False), ("1.8.0_402", False)],
)
def test_only_java_17_and_21_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, right: bool) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-01' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if right:
        assert version in _checks.check_java()
    else:
        with pytest.raises(_checks.CheckFailed, match=version):
            _checks.check_java()


def test_packages_are_judged_by_what_can_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_checks, "requirements", lambda: {"pyarrow": ">=1.0,<2", "numpy": ">=2.1", "petastorm": ""})
    told = _checks.check_packages()
    assert told.startswith("3 packages can be imported; never tried: pyarrow ") and told.endswith("(tried: >=1.0,<2)")
    monkeypatch.setattr(_checks, "requirements", lambda: {"numpy": "", "no-such-package": ">=2"})
    with pytest.raises(_checks.CheckFailed, match=r"no-such-package is missing"):
        _checks.check_packages()
    for code, said in (
        ("raise OSError('no libjpeg')", "OSError: no libjpeg"),
        ("import os; os.abort()", "ended with -6"),
    ):
        (tmp_path / "safetensors.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(_checks, "requirements", lambda: {"safetensors": ""})
        with pytest.raises(_checks.CheckFailed, match=said):
            _checks.check_packages()


def test_packages_are_imported_by_the_names_that_an_installation_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = _checks.requirements(tmp_path / "requirements.txt")
    assert "ml-dtypes" in listed or "ml_dtypes" in listed  # which one, the builder of the wheel decides
    monkeypatch.setattr(_checks, "requirements", lambda: {**listed, "ml-dtypes": "", "ml_dtypes": ""})
    assert _checks.check_packages().startswith(f"{len(listed) + 1} packages can be imported")


def from_zip(folder: Path, code: str) -> str:
    """What a Python prints that runs from our zip, as a driver of YARN's cluster mode."""
    environment = {**os.environ, "PYTHONPATH": ship_rooms(str(folder))}
    command = [sys.executable, "-P", "-c", f"from lockstep.jobs import _checks\n{code}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packages_are_listed_in_the_zip_from_which_a_driver_of_cluster_mode_runs(tmp_path: Path) -> None:
    found = from_zip(tmp_path, "print(len(_checks.requirements()))")
    assert found == f"{len(_checks.requirements())}\n"


def test_a_pretended_archive_without_tensorflow_is_a_warning_there(tmp_path: Path) -> None:
    code = """
import importlib.metadata
def version(name, real=importlib.metadata.version):
    if name in _checks.OF_TRAINING:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
_checks._failed_imports = lambda names: print("tensorflow" in names) or {}
try:
    _checks.check_packages()
except _checks.CheckWarned as error:
    print(error.what)
"""
    found = from_zip(tmp_path, code)
    assert (
        found == "False\nwithout tensorflow, keras, optuna, matplotlib: an archive for ETL jobs, which trains nothing\n"
    )


@pytest.mark.parametrize(
    ("ranges", "version", "right"),
    [
        (">=2.1.0,<2.5", "2.1", True),
        (">=2.1.0,<2.5", "2.4.6", True),
        (">=2.1.0,<2.5", "2.10.0", False),
        (">=2.1.0,<2.5", "2.0.9", False),
        ("==0.13.1", "0.13.1", True),
        ("==0.13.1", "0.13.2", False),
        (">=4.0.0,<4.4", "4.3.0.dev1", True),
        ("", "1", True),
    ],
)
def test_versions_in_a_range(ranges: str, version: str, right: bool) -> None:
    assert _checks.allows(ranges, version) is right


def test_a_full_disk_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_checks, "FREE_DISK_GIB", 1 << 30)
    with pytest.raises(_checks.CheckFailed, match="GiB free"):
        _checks.check_disk(str(tmp_path))


def test_gpus_without_cudas_libraries_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "host_gpus", lambda: ())
    assert "no GPU on this host" in _checks.check_gpus()
    monkeypatch.setattr(
        _checks, "host_gpus", lambda: (Gpu("0", "NVIDIA H100", "GPU-1"), Gpu("1", "NVIDIA H100", "GPU-2"))
    )
    monkeypatch.setattr(_checks, "CUDA_PACKAGE", "no-such-package")
    assert _checks.check_gpus().startswith("0 NVIDIA H100, 1 NVIDIA H100; not used without CUDA's libraries")
    monkeypatch.setattr(_checks, "CUDA_PACKAGE", "numpy")
    assert _checks.check_gpus().endswith("; CUDA's libraries are installed")


def test_each_line_begins_with_ok_or_fail_and_a_fail_tells_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks() -> str:
        raise LockstepError("it is broken", next_step="Mend it.")

    def surprises() -> str:
        raise ZeroDivisionError("by nought\nsecond line")

    assert doctor.passes("good", lambda: "fine")
    assert not doctor.passes("bad", breaks)
    assert not doctor.passes("odd", surprises)
    assert capsys.readouterr().out.splitlines()[:4] == [
        "OK   good: fine",
        "FAIL bad: it is broken",
        "     next: Mend it.",
        "FAIL odd: ZeroDivisionError: by nought",
    ]


def test_a_link_to_our_package_is_no_other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lockstep").symlink_to(ROOT / "lockstep")
    assert "come from" in check_modules()
    (tmp_path / "pyspark_tfrecord").mkdir()
    (tmp_path / "pyspark_tfrecord" / "__init__.py").touch()
    with pytest.raises(CheckWarned, match=r"other packages of our names: pyspark_tfrecord in \S+\n"):
        check_modules()
