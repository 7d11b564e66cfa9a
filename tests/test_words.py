"""The words that people read: docs, docstrings, comments, help and errors have none of the habits that once made them
hard to read. A short list of the worst; the review of a change looks at the rest."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
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


# A docstring that begins so says what a thing belongs to or resembles, and not what the reader can do with it.
TELEGRAM = re.compile(r"(As|Of|Those|The same)\b")
MOST_IN_A_CELL = 200  # characters, as written: a table is read across


def texts() -> dict[str, str]:
    """Each file of the rooms and each page, by its name."""
    listed = subprocess.run(["git", "ls-files", *ROOMS, *PAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if name.endswith((".py", ".md", "Makefile"))]
    assert len(names) > 300, "the rooms' files were not found"
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names}


def habits_in(text: str) -> list[str]:
    """The lines of a text that have one, with their numbers; `tell` with a bracket is a method."""
    lines = enumerate(re.sub(r"(def |\.)tell\(", "", text).splitlines(), 1)
    return [f"{number}: {line.strip()}" for number, line in lines if HABITS.search(line)]


def docstrings(code: str) -> Iterator[tuple[int, str]]:
    """Each docstring of a module, class, function, field or constant, with its line."""
    for node in ast.walk(ast.parse(code)):
        body = getattr(node, "body", None)
        lines = body if isinstance(body, list) else []
        for before, line in zip([None, *lines], lines, strict=False):
            text = line.value.value if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) else None
            if isinstance(text, str) and isinstance(before, ast.Assign | ast.AnnAssign | None):
                yield line.lineno, text


def telegrams_in(code: str) -> list[str]:
    """The docstrings that begin as no sentence does, with their lines."""
    return [f"{line}: {text.strip()[:80]}" for line, text in docstrings(code) if TELEGRAM.match(text.strip())]


def long_cells_in(page: str) -> list[str]:
    """The cells of tables that are too long to be read across, with their lines."""
    rows = [(number, line) for number, line in enumerate(page.splitlines(), 1) if line.startswith("|")]
    cells = ((number, cell.strip()) for number, line in rows for cell in re.split(r"(?<!\\)\|", line))
    return [f"{number}: {len(cell)} characters: {cell[:60]}" for number, cell in cells if len(cell) > MOST_IN_A_CELL]


def test_texts_have_none_of_the_worst_habits() -> None:
    found = [f"{name}:{line}" for name, text in texts().items() for line in habits_in(text)]
    assert not found, "\n".join(found)


def test_a_habit_is_seen_in_any_case_and_only_as_a_word() -> None:
    assert habits_in("fine\nWhoever waits") == ["2: Whoever waits"]
    assert habits_in("the untold besides a golden gone onward") == []


def test_no_docstring_begins_as_a_telegram() -> None:
    found = [f"{name}:{one}" for name, text in texts().items() if name.endswith(".py") for one in telegrams_in(text)]
    assert not found, "\n".join(found)


def test_a_telegram_is_seen_below_a_field_a_constant_a_class_and_a_function() -> None:
    code = (
        '"""As x."""\nA = 1\n"""Of y."""\nclass B:\n    """Those."""\n    c: int\n    """The same."""\n'
        'def d():\n    """As\n    before."""\n    "Of no one"\n    return "Of a text"\n'
        'def e():\n    """Assign it."""\n    f = "Of a value"\n'
    )
    assert [one.split(":")[0] for one in telegrams_in(code)] == ["1", "3", "5", "7", "9"]


def test_no_cell_of_a_page_is_longer_than_a_reader_follows() -> None:
    found = [f"{name}:{one}" for name, text in texts().items() if name.endswith(".md") for one in long_cells_in(text)]
    assert not found, "\n".join(found)


def test_a_cell_is_measured_without_its_neighbours() -> None:
    whole, half = "x" * 200, "y" * 120
    assert long_cells_in(f"| {whole} | {half} | a \\| b |\n{whole * 2}\n") == []
    assert long_cells_in(f"\n| a | {whole}z |") == [f"2: 201 characters: {'x' * 60}"]
