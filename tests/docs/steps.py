"""Documents as tests see them: blocks of commands, each followed by lines that should be seen."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- run by \.ci/run -->\n)?```(sh|text)\n(.*?)```", re.DOTALL)
STEP_LIMIT_S = 1800  # only against a hang: on a loaded machine a step takes minutes
ACTIVATE = "source .venv/bin/activate\n"


@dataclass(frozen=True, slots=True)
class Step:
    """A block of commands, the lines that should be seen after it, and the section that it stands in."""

    commands: str
    by_ci: bool
    seen: list[str]
    section: str


def steps_of(text: str) -> list[Step]:
    """A document's blocks of commands, in order."""
    found = []
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        blocks = [(bool(ci), kind, body) for ci, kind, body in BLOCK.findall(section)]
        for (by_ci, kind, body), following in pairwise([*blocks, (False, "", "")]):
            if kind == "sh":
                seen = following[2].splitlines() if following[1] == "text" else []
                found.append(Step(body, by_ci, seen, section.partition("\n")[0]))
    return found


def link_project(folder: Path) -> None:
    """Let relative paths in the folder lead to the project, and results to a temporary place."""
    for entry in ROOT.iterdir():
        if entry.name not in (".demo", ".cluster", ".airflow", ".kubernetes", ".git", "spark-warehouse"):
            (folder / entry.name).symlink_to(entry)


@contextmanager
def project_in(folder: Path) -> Iterator[Path]:
    """A folder that `link_project` has filled; the servers that commands start there end with it."""
    link_project(folder)
    try:
        yield folder
    finally:
        for target in ("airflow-stop", "cluster-stop", "kubernetes-stop"):
            subprocess.run(["make", "-s", target], cwd=folder, capture_output=True, timeout=120, check=False)


def run_steps(steps: Sequence[Step], folder: Path) -> list[str]:
    """Run them in order and in one shell's environment, as a newcomer would: what one exports the next one has.

    Returns what each printed; the first that fails, or does not show all that should be seen, raises AssertionError.
    """
    printed = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    for step in steps:
        script = f"set -euo pipefail\n{step.commands}\nenv -0 > {folder}/environment\n"
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=STEP_LIMIT_S
        )
        assert done.returncode == 0, f"{step.commands}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        missing = not_seen(step.seen, done.stdout.splitlines())
        assert not missing, f"{step.commands}\nnot seen: {missing}\n{done.stdout[-3000:]}"
        printed.append(done.stdout)
        saved = (folder / "environment").read_text().split("\0")
        environment = dict(entry.split("=", 1) for entry in saved if entry)
    return printed


def not_seen(wanted: Sequence[str], lines: Sequence[str]) -> str | None:
    """The first wanted line that no line matches, in order; `...` stands for anything, spaces count once."""
    rest = iter([" ".join(line.split()) for line in lines])
    for want in wanted:
        pattern = " ".join(want.split()).replace("[", "[[]").replace("...", "*")
        if not any(fnmatch.fnmatchcase(line, pattern) for line in rest):
            return want
    return None
