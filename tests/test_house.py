"""Rules of the house that import-linter cannot see: what an import loads, and how jobs and files are named."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs._session import ROOMS

ROOT = Path(__file__).resolve().parents[1]
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if not path.stem.startswith("_"))

# Where a rank does not run, TensorFlow must not be loaded: a driver, an ETL task and a verifier start without it.
WITHOUT_TENSORFLOW = [
    *(f"jobs.{name}" for name in JOBS),
    "training.plan.epoch_plan",
    "training.run.checkpoint",
    "training.comm",
    "training.comm.tcp.communicator",
    "training.comm.tf.communicator",  # nor by itself: only the call that joins
    "training.devices",  # or CUDA_VISIBLE_DEVICES would come too late
    "training.driver.train",
    "training.rank.__main__",
    "training.config",
    "training.launch",
    "training.launch.script_rank",
    "training.launch.script_driver",
    "etl",
    "lockstep.features.encode.encoder",
    "lockstep.storage.fs",
]
WITHOUT_SPARK = [
    "lockstep.storage.fs",
    "lockstep.storage.verify",
    "lockstep.features.encode.encoder",
    "training.plan.epoch_plan",
    "training.comm.tcp.communicator",
    "training.rank.__main__",
]


def loaded_by(module: str) -> list[str]:
    """The heavy packages that importing `module` in a fresh interpreter loads."""
    code = (
        f"import json, sys, importlib; importlib.import_module({module!r})\n"
        "print(json.dumps([name for name in ('tensorflow', 'keras', 'pyspark') if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", WITHOUT_TENSORFLOW)
def test_importing_it_loads_no_tensorflow(module: str) -> None:
    assert not {"tensorflow", "keras"} & set(loaded_by(module))


@pytest.mark.parametrize("module", WITHOUT_SPARK)
def test_importing_it_loads_no_spark(module: str) -> None:
    assert "pyspark" not in loaded_by(module)


def test_the_probe_sees_what_an_import_loads() -> None:
    assert "pyspark" in loaded_by("pyspark")


@pytest.mark.parametrize("name", JOBS)
def test_no_job_bears_a_standard_modules_name(name: str) -> None:
    assert name not in sys.stdlib_module_names, f"jobs/{name}.py shadows the standard module in every job"


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_a_thin_script(name: str) -> None:
    text = (ROOT / "jobs" / f"{name}.py").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 80
    assert "sys.path[:1] = [ROOT]" in text and 'if __name__ == "__main__":\n    run_job(main)' in text


@pytest.mark.parametrize("name", JOBS)
def test_help_works_from_any_folder(name: str, tmp_path: Path) -> None:
    for command in (["-m", f"jobs.{name}"], [str(ROOT / "jobs" / f"{name}.py")]):
        done = subprocess.run(
            [sys.executable, *command, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert "--config" in done.stdout and "--debug" in done.stdout


@pytest.mark.parametrize("name", JOBS)
def test_a_bad_flag_is_one_error_of_four_parts(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"jobs.{name}", "--no-such-flag"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in ("\n  got: ", "\n  allowed: ", "\n  next: "))


def narrows(test: ast.expr) -> bool:
    """Whether an assert only tells mypy a type: `x is not None`, `isinstance(...)`, its negation, several by `and`."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and all(map(narrows, test.values))
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and narrows(test.operand)
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.IsNot) and ast.unparse(test.comparators[0]) == "None"
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


def test_asserts_only_narrow_types_since_optimised_python_leaves_them_out() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    nodes = ((path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    others = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.test)}"
        for path, node in nodes
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert not others and len(files) > 100
