"""What `make` sets up, it sets up once; its targets are those that the README names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def setup(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/setup.sh", *arguments],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The set-up script with small requirements and a python that only notes how it was called."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup.sh").write_bytes((ROOT / "scripts" / "setup.sh").read_bytes())
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-airflow.txt", "constraints.txt"):
        (tmp_path / name).write_text("one==1\n")
    python = tmp_path / ".venv-airflow" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    return tmp_path


def calls(copy: Path) -> int:
    """How often pip was called so far; runs the copy's `airflow` target first."""
    done = subprocess.run(
        ["bash", str(copy / "scripts" / "setup.sh"), "airflow"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return (copy / "calls").read_text().count("pip install")


def test_requirements_are_installed_again_only_when_they_change(copy: Path) -> None:
    assert calls(copy) == 1
    assert calls(copy) == 1
    (copy / "requirements-airflow.txt").write_text("one==2\n")
    assert calls(copy) == 2


def test_the_environment_of_another_checkout_is_left_as_it_is(copy: Path) -> None:
    (copy / ".venv-airflow").rename(copy / "other")
    (copy / ".venv-airflow").symlink_to("other")
    (copy / "calls").touch()
    assert calls(copy) == 0 and not (copy / "other" / ".stamp").exists()


def test_an_installation_that_failed_is_tried_again(copy: Path) -> None:
    python = copy / ".venv-airflow" / "bin" / "python"
    good = python.read_text()
    python.write_text(good + 'case "$*" in *"pip install"*) exit 1;; esac\n')
    done = subprocess.run(["bash", str(copy / "scripts" / "setup.sh"), "airflow"], capture_output=True, timeout=240)
    assert done.returncode != 0
    python.write_text(good)
    assert calls(copy) == 2


def test_java_is_found_without_java_home() -> None:
    done = setup("java-home", JAVA_HOME="")
    assert done.returncode == 0
    assert (Path(done.stdout.strip()) / "bin" / "java").is_file()


def test_a_java_of_another_version_is_passed_over(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    assert setup("java-home", JAVA_HOME=str(tmp_path)).stdout.strip() not in ("", str(tmp_path))


def test_ci_runs_the_two_commands_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    about_data = [line for line in commands if "LOCKSTEP_SHARED_DATA" in line or line == "fi"]
    assert len(about_data) == 4 and commands == [*about_data, "make demo", "make test"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_make_help_names_the_targets() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True).stdout
    for target in (
        "demo",
        "test",
        "check",
        "soak",
        "cluster",
        "cluster-stop",
        "venv",
        "airflow-venv",
        "torch-venv",
        "object-store",
        "clean",
    ):
        assert f"make {target} " in told


def test_what_fuzzing_needs_is_installed_again_when_it_changes(tmp_path: Path) -> None:
    """A folder alone says nothing of what lies in it: an installation may have failed, and pins change."""
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    needs, stamp = tmp_path / "requirements-fuzz.txt", tmp_path / ".fuzz" / "packages" / ".stamp"
    needs.write_text("one==1\n")
    stamp.parent.mkdir(parents=True)

    def installs() -> bool:
        done = subprocess.run(
            ["make", "-n", "fuzz"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True
        )
        return "pip install" in done.stdout

    assert installs()
    stamp.touch()
    os.utime(needs, (0, 0))
    assert not installs()
    os.utime(stamp, (0, 0))
    os.utime(needs, (10, 10))
    assert installs()
