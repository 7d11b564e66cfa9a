"""The README's commands are run, each under a check of what it says one should see; its links lead somewhere."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(<!-- run by \.ci/run -->\n)?```(sh|text)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
CLUSTER = "## On a cluster"
STEP_LIMIT_S = 900  # only against a hang: on a loaded machine a step takes minutes


@dataclass(frozen=True, slots=True)
class Step:
    """A block of commands, the lines that should be seen after it, and whether it wants a cluster."""

    commands: str
    by_ci: bool
    seen: list[str]
    on_cluster: bool


def steps() -> list[Step]:
    """The README's blocks of commands, in order."""
    found = []
    for section in re.split(r"^(?=## )", README, flags=re.MULTILINE):
        on_cluster = section.startswith(CLUSTER)
        blocks = [(bool(ci), kind, text) for ci, kind, text in BLOCK.findall(section)]
        for (by_ci, kind, text), following in pairwise([*blocks, (False, "", "")]):
            if kind == "sh":
                seen = following[2].splitlines() if following[1] == "text" else []
                found.append(Step(text, by_ci, seen, on_cluster))
    return found


def test_every_command_is_followed_by_what_one_should_see() -> None:
    told = [step for step in steps() if not step.by_ci]
    assert len(told) >= 8
    assert all(step.seen for step in told), [step.commands for step in told if not step.seen]
    assert [step.on_cluster for step in told].count(True) >= 3


def test_the_two_commands_are_what_ci_runs() -> None:
    assert [step.commands.strip() for step in steps() if step.by_ci] == ["make demo", "make test"]
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith(("#", "set ", "cd "))] == ["make demo", "make test"]


@pytest.mark.parametrize(
    "path",
    ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))],
)
def test_links_lead_somewhere(path: str) -> None:
    for target in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        assert (ROOT / path).parent.joinpath(target).exists(), f"{path}: {target}"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in which the README's relative paths lead to the project, and results to a temporary place."""
    for entry in ROOT.iterdir():
        if entry.name not in (".demo", ".cluster", ".git", "spark-warehouse"):
            (tmp_path / entry.name).symlink_to(entry)
    yield tmp_path
    subprocess.run(["make", "-s", "cluster-stop"], cwd=tmp_path, capture_output=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("on_cluster", [False, True], ids=["here", "cluster"])
def test_the_commands_do_what_the_readme_says(folder: Path, on_cluster: bool) -> None:
    """In order and in one shell's environment, as a newcomer would: what one step exports the next one has.

    The section on a cluster needs nothing of what comes before but the environment, and goes to another worker.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    wanted = [step for step in steps() if step.on_cluster == on_cluster and not step.by_ci]
    if on_cluster:
        wanted.insert(0, Step("source .venv/bin/activate\n", False, [], True))
    for step in wanted:
        script = f"set -euo pipefail\n{step.commands}\nenv -0 > {folder}/environment\n"
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=STEP_LIMIT_S
        )
        assert done.returncode == 0, f"{step.commands}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        missing = not_seen(step.seen, done.stdout.splitlines())
        assert not missing, f"{step.commands}\nnot seen: {missing}\n{done.stdout[-3000:]}"
        saved = (folder / "environment").read_text().split("\0")
        environment = dict(entry.split("=", 1) for entry in saved if entry)


def not_seen(wanted: list[str], lines: list[str]) -> str | None:
    """The first wanted line that no line matches, in order; `...` stands for anything, spaces count once."""
    rest = iter([" ".join(line.split()) for line in lines])
    for want in wanted:
        pattern = " ".join(want.split()).replace("[", "[[]").replace("...", "*")
        if not any(fnmatch.fnmatchcase(line, pattern) for line in rest):
            return want
    return None


def test_not_seen_notices_a_missing_line_and_a_wrong_order() -> None:
    assert not_seen(["a ... c", "d"], ["x", "a  b c", "d"]) is None
    assert not_seen(["a ... c", "d"], ["d", "a b c"]) == "d"
    assert not_seen(["e"], ["d"]) == "e"
