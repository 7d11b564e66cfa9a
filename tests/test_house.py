"""Rules of the house that import-linter cannot see: what an import loads, and how jobs and files are named."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.process.installed import python_files

ROOT = Path(__file__).resolve().parents[1]
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if not path.stem.startswith("_"))

# Where a rank does not run, TensorFlow must not be loaded: a driver, an ETL task and a verifier start without it.
WITHOUT_TENSORFLOW = [
    *(f"lockstep.jobs.{name}" for name in JOBS),
    "lockstep.training.plan.epoch_plan",
    "lockstep.training.run.checkpoint",
    "lockstep.training.comm",
    "lockstep.training.comm.tcp.communicator",
    "lockstep.training.comm.tf.communicator",  # nor by itself: only the call that joins
    "lockstep.training.devices",  # or CUDA_VISIBLE_DEVICES would come too late
    "lockstep.training.driver.train",
    "lockstep.training.rank.__main__",
    "lockstep.training.config",
    "lockstep.horovod",  # so that lockstep.horovod.torch needs none either
    "lockstep.horovod.runtime",
    "lockstep.training.launch",
    "lockstep.training.launch.script_rank",
    "lockstep.training.launch.script_driver",
    "etl",
    "lockstep.features.encode.encoder",
    "lockstep.storage.fs",
]
WITHOUT_SPARK = [
    "lockstep.storage.fs",
    "lockstep.storage.verify",
    "lockstep.features.encode.encoder",
    "lockstep.training.plan.epoch_plan",
    "lockstep.training.comm.tcp.communicator",
    "lockstep.training.strategies.server_process",
    "lockstep.training.rank.__main__",
    "lockstep.training.rank.runtime",
]


IMPORT_EACH = """
import importlib, json, sys
heavy, loaded = ("tensorflow", "keras", "pyspark"), {}
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    loaded[module] = [name for name in heavy if name in sys.modules]
print(json.dumps(loaded))
"""
# Each answer is that of a fork of one process that has imported the command `lockstep` alone.
HELP_OF_EACH = """
import contextlib, importlib, io, json, os, sys
import lockstep.__main__
found = {}
for job in json.loads(sys.argv[1]):
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            importlib.import_module(f"lockstep.jobs.{job}").main(["--help"])
        with open(writes, "w") as file:
            json.dump(sorted(sys.modules), file)
        os._exit(0)
    os.close(writes)
    with open(reads) as file:
        found[job] = json.load(file)
    os.waitpid(child, 0)
print(json.dumps(found))
"""
# Each call is a fork of one process that has imported what jobs share, since most of a call's time is these imports.
CALL_EACH = """
import contextlib, io, json, os, runpy, sys
import lockstep.jobs._etl, lockstep.jobs._train, pyspark.sql
found = {}
for job, path, *flags in json.loads(sys.argv[1]):
    name = f"{path or job} {' '.join(flags)}"
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(writes, 1); os.dup2(writes, 2)
        sys.argv = [path or job, *flags]
        sys.path[0] = os.path.dirname(path) if path else os.getcwd()
        try:
            runpy.run_path(path, None, "__main__") if path else runpy.run_module(job, None, "__main__", alter_sys=True)
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(ended.code or 0)
        os._exit(99)
    os.close(writes)
    with open(reads) as file:
        text = file.read()
    found[name] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text]
print(json.dumps(found))
"""


def answer(code: str, asked: object, folder: Path = ROOT) -> dict[str, list[Any]]:
    """What `code` prints as JSON, run in `folder` by a Python of its own, with `asked` as its argument."""
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", code, json.dumps(asked)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_what_needs_no_tensorflow_loads_none() -> None:
    loaded = answer(IMPORT_EACH, [*WITHOUT_TENSORFLOW, "keras"])
    assert "keras" in loaded.pop("keras"), "the probe sees what an import loads"
    assert not [module for module, names in loaded.items() if {"tensorflow", "keras"} & {*names}]


def test_what_needs_no_spark_loads_none() -> None:
    loaded = answer(IMPORT_EACH, [*WITHOUT_SPARK, "pyspark"])
    assert "pyspark" in loaded.pop("pyspark"), "the probe sees what an import loads"
    assert not [module for module, names in loaded.items() if "pyspark" in names]


def test_help_loads_what_a_command_line_needs() -> None:
    """NumPy, PyArrow and their kin take longer than all else of a command line, and each of our modules some; each way
    to exchange is a small module, whose options are flags.
    """
    heavy = {"jinja2", "keras", "numba", "numpy", "pandas", "psutil", "pyarrow", "pyspark", "requests", "tensorflow"}
    loaded = answer(HELP_OF_EACH, JOBS)
    assert len(loaded) == len(JOBS) and all(f"lockstep.jobs.{name}" in modules for name, modules in loaded.items())
    assert {name: sorted(heavy & {*modules}) for name, modules in loaded.items() if heavy & {*modules}} == {}
    ours = {name: sum(module.startswith("lockstep") for module in modules) for name, modules in loaded.items()}
    most = 58 + len(list((ROOT / "training/ways").glob("[a-z]*.py")))
    assert {name: number for name, number in ours.items() if number > most} == {}


@pytest.mark.parametrize("name", JOBS)
def test_no_job_bears_a_standard_modules_name(name: str) -> None:
    assert name not in sys.stdlib_module_names, f"jobs/{name}.py shadows the standard module in every job"


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_a_thin_script(name: str) -> None:
    text = (ROOT / "jobs" / f"{name}.py").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 80
    assert "sys.path" not in text and 'if __name__ == "__main__":\n    run_job(main)' in text


def test_help_works_from_any_folder_and_a_bad_flag_is_one_error_of_four_parts(tmp_path: Path) -> None:
    calls = [(f"lockstep.jobs.{name}", "", "--help") for name in JOBS]
    calls += [(f"lockstep.jobs.{name}", str(ROOT / "jobs" / f"{name}.py"), "--no-such-flag") for name in JOBS]
    found = answer(CALL_EACH, calls, tmp_path)
    assert len(found) == len(calls)
    for name, (code, text) in found.items():
        if name.endswith("--help"):
            assert code == 0 and "--config" in text and "--debug" in text, name
        else:
            assert code == 2 and text.startswith("error: ") and "Traceback" not in text, f"{name}: {text}"
            assert all(part in text for part in ("\n  got: ", "\n  allowed: ", "\n  next: ")), name


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
    files = [path for _, path in python_files()]
    nodes = ((path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    others = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.test)}"
        for path, node in nodes
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert not others and len(files) > 100


def test_each_test_can_fail() -> None:
    """Each asserts something that is no constant, or expects an error, itself or by a function of the tests it uses."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in (ROOT / "tests").rglob("*.py")}
    uses: dict[str, set[str]] = {}
    tests = []
    for path, tree in trees.items():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            nodes = list(ast.walk(function))
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            if any(isinstance(node, ast.Assert) and says_something(node.test) for node in nodes):
                names.add("raises")
            uses.setdefault(function.name, set()).update(names)
            if path.name.startswith("test_") and function.name.startswith("test_"):
                tests.append((str(path.relative_to(ROOT)), function.name))
    able = {"raises", "warns", "fail", "assert_array_equal", "assert_allclose"}
    while more := {name for name, used in uses.items() if name not in able and used & able}:
        able |= more
    assert len(tests) > 1000 and [test for test in tests if test[1] not in able] == []


def says_something(test: ast.expr) -> bool:
    """Whether an assertion may fail: a tuple is always true, and a constant never changes."""
    names = any(isinstance(node, ast.Name | ast.Call | ast.Attribute) for node in ast.walk(test))
    return names and not isinstance(test, ast.Tuple | ast.GeneratorExp | ast.Lambda)
