"""Every pair of versions that docs/versions.md names, each in an environment of its own: ETL, verification, training on
two ranks, evaluation; the same digests everywhere.

`python -m tests.soak.versions [CELL ...]` runs all cells, or those named; its last lines are the table of the page. An
environment takes some 3 GB, and is removed behind its cell. A cell whose Python is not on this machine is not run,
which the table says: PYTHON312 and PYTHON313 may name one.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.jobs._checks import requirements
from tests.builders.pins import pins

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".soak" / "versions"
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Cell:
    """A Python and its packages: the pins but for `instead`, or the lowest of all that requirements.txt allows."""

    name: str
    python: str
    instead: dict[str, str] = field(default_factory=dict)
    lowest: bool = False

    @property
    def constraints(self) -> dict[str, str]:
        """Package -> version, `*` for the newest of a series."""
        if not self.lowest:
            return {**pins(), **self.instead}
        return {name: ranges.split(",")[0].lstrip(">=") for name, ranges in requirements().items()}


CELLS = (
    Cell("pins", "3.11"),
    Cell("lowest", "3.11", lowest=True),
    Cell("spark-4.0", "3.11", {"pyspark": "4.0.*"}),
    Cell("spark-4.1", "3.11", {"pyspark": "4.1.*"}),
    Cell("spark-4.2-python-3.12", "3.12", {"pyspark": "4.2.*", "tensorflow": "2.20.*"}),
    Cell("python-3.13", "3.13"),
    Cell("spark-4.0-python-3.13", "3.13", {"pyspark": "4.0.*"}),
    Cell("spark-4.1-python-3.13", "3.13", {"pyspark": "4.1.*"}),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: `why` it failed or was not run, None where all went well."""

    cell: Cell
    why: str | None
    versions: dict[str, str] = field(default_factory=dict)
    datasets: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def run(cell: Cell) -> Outcome:
    """Make the cell's environment, work in it, and remove it."""
    python = find_python(cell.python)
    if python is None:
        return Outcome(cell, f"not run: no Python {cell.python} here")
    folder, start = FOLDER / cell.name, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = folder / "venv" / "bin" / "python"
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in cell.constraints.items()))
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", "requirements.txt"]
    # petastorm needs a setuptools below 70, which Python 3.12 on brings none of
    steps: list[list[str]] = [
        [python, "-m", "venv", str(folder / "venv")],
        [str(own), *install, "-c", str(constraints), "setuptools<70"],
        [str(own), "-m", "tests.spark.datasets", str(folder / "data")],
        *([str(own), "-m", *job] for job in jobs(folder)),
    ]
    told = ""
    try:
        for step in steps:
            done = subprocess.run(
                step, cwd=ROOT, env=environment(own), capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            if done.returncode:
                text = (done.stdout + done.stderr).strip()
                (folder.parent / f"{cell.name}.log").write_text(text)
                return Outcome(cell, f"`{' '.join(step[1:4])}` ended with {done.returncode}: {text[-300:]}")
            told = done.stdout if "tests.spark.datasets" in step else told
        names = ("pyspark", "tensorflow", "keras", "numpy", "pyarrow")
        script = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
        versions = json.loads(subprocess.run([str(own), "-c", script], capture_output=True, text=True).stdout)
    finally:
        shutil.rmtree(folder)
    found = json.loads(told.splitlines()[-1])
    return Outcome(cell, None, {**versions, "python": found["python"]}, found["datasets"], time.monotonic() - start)


def jobs(folder: Path) -> list[list[str]]:
    """Training on two ranks by both launchers, evaluation and verification, as `python -m` takes them."""
    data, train = (
        str(folder / "data" / "tfrecord"),
        ["--model", "logistic", "--num-ranks", "2", "--global-batch", "64", "--epochs", "2"],
    )
    found = [["lockstep.jobs.doctor", "--master", "local[2]"]]
    for launcher in (["--launcher", "local"], ["--launcher", "barrier", "--master", "local[2]"]):
        place = str(folder / f"run-{launcher[1]}")
        found.append(["lockstep.jobs.train", "--dataset", data, "--run", place, *train, *launcher])
        found.append(["lockstep.jobs.evaluate", "--dataset", data, "--run", place, "--split", "test"])
        found.append(["lockstep.jobs.verify", place])
    return found


def environment(python: Path) -> dict[str, str]:
    """This process' environment without what leads Python or Spark to another installation."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "SPARK_HOME", "VIRTUAL_ENV")}
    return {**own, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}


def find_python(minor: str) -> str | None:
    """A Python of that minor version: named by PYTHON312 and the like, on the path, or one that pyenv has built."""
    named = os.environ.get(f"PYTHON{minor.replace('.', '')}")
    built = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{minor}.*/bin/python")))
    for candidate in filter(None, [named, f"python{minor}", *built]):
        try:
            done = subprocess.run(
                [candidate, "-c", "import sys, venv; print(sys.version)"], capture_output=True, text=True
            )
        except FileNotFoundError:
            continue
        if done.returncode == 0 and done.stdout.startswith(f"{minor}."):
            return candidate
    return None


def faults(outcomes: Sequence[Outcome]) -> list[str]:
    """What failed, and datasets that differ from the first cell's; Parquet files name the pyarrow that wrote them.

    Spark 3.5 has no data sources in Python: there, and nowhere else, the data source is "none".
    """
    found = [
        f"{one.cell.name}: {one.why}" for one in outcomes if one.why is not None and not one.why.startswith("not run")
    ]
    ran = [one for one in outcomes if one.why is None]
    for one in ran[1:]:
        for name, digest in one.datasets.items():
            other_parquet = name == "parquet" and one.versions["pyarrow"] != ran[0].versions["pyarrow"]
            no_source = name == "data source" and one.versions["pyspark"].startswith("3.5.")
            expected = "none" if no_source else ran[0].datasets[name]
            if digest != expected and not other_parquet:
                found.append(f"{one.cell.name}: {name} is {digest}, expected {expected}")
    return found if ran else [*found, "no cell was run"]


def table(outcomes: Sequence[Outcome]) -> str:
    """The table of docs/versions.md."""
    names = ("python", "pyspark", "tensorflow", "keras", "numpy", "pyarrow")
    lines = [f"| {' | '.join((*names, 'result'))} |", "| --- " * (len(names) + 1) + "|"]
    for one in outcomes:
        versions = one.versions or {"python": one.cell.python, **one.cell.constraints}
        result = f"whole, {one.seconds / 60:.0f} minutes" if one.why is None else one.why.splitlines()[0][:80]
        lines.append(f"| {' | '.join([*(versions[name] for name in names), result])} |")
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    """Run the cells; 1 where one failed or wrote other bytes."""
    outcomes = []
    for cell in CELLS:
        if not names or cell.name in names:
            print(f"{cell.name} ...", flush=True)
            outcomes.append(run(cell))
            print(f"{cell.name}: {outcomes[-1].why or 'whole'} {json.dumps(outcomes[-1].datasets)}", flush=True)
    print(table(outcomes))
    wrong = faults(outcomes)
    for fault in wrong:
        print(f"FAILED {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
