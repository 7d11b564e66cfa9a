"""The words that people read: docs, docstrings, comments, help and errors have none of the habits that once made them
hard to read. A short list of the worst; the review of a change looks at the rest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_CODE = ("lockstep", "etl", "training", "jobs", "pyspark_tfrecord", "benchmarks", "notebooks", "examples")
ROOMS = (*OF_CODE, "docs", ".github")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")
# instead of: reports, prints, says; again; no one; if you ...; next to; continues; results from; is stored; removes
HABITS = re.compile(
    r"\b(told|tells?|anew|nobody|whoever|beside|go(es|ing|ne)? on|went on|c[oa]mes? of|lies|lain|t[ao]kes? away"
    r"|taken away|has to ask|what is left)\b",
    re.IGNORECASE,
)


def habits_in(text: str) -> list[str]:
    """The lines of a text that have one, with their numbers; `tell` with a bracket is a method."""
    lines = enumerate(re.sub(r"(def |\.)tell\(", "", text).splitlines(), 1)
    return [f"{number}: {line.strip()}" for number, line in lines if HABITS.search(line)]


def test_texts_have_none_of_the_worst_habits() -> None:
    listed = subprocess.run(["git", "ls-files", *ROOMS, *PAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split() if name.endswith((".py", ".md", "Makefile"))]
    assert len(paths) > 300, "the rooms' files were not found"
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in habits_in(path.read_text())]
    assert not found, "\n".join(found)


def test_a_habit_is_seen_in_any_case_and_only_as_a_word() -> None:
    assert habits_in("fine\nWhoever waits") == ["2: Whoever waits"]
    assert habits_in("the untold besides a golden gone onward") == []
