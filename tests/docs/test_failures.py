"""docs/failures.md: each row's test exists and runs where the row says; each error text is one of the code's."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.steps import ROOT

PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`( \(soak\))?")


def tables() -> dict[str, list[list[str]]]:
    """The rows of each table by its heading."""
    found = {}
    for part in PAGE.split("\n## ")[1:]:
        rows = [line for line in part.splitlines() if line.startswith("| ")][2:]
        found[part.splitlines()[0]] = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in rows]
    return found


ROWS = [row for name in ("Training", "ETL") for row in tables()[name]]


@cache
def soak_marks(path: str) -> dict[str, bool]:
    """The tests of a file, and whether each is marked soak, by itself or with its module."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    whole = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and "soak" in ast.unparse(node)
        for node in tree.body
    )
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {one.name: whole or any(ast.unparse(by) == "pytest.mark.soak" for by in one.decorator_list) for one in tests}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace(" ", "-"))
def test_the_test_of_a_row_is_there_and_runs_where_the_row_says(row: list[str]) -> None:
    assert len(row) == 6
    named = NAMED.findall(row[-1])
    assert named and not NAMED.sub("", row[-1]).strip(", "), row[-1]
    for path, test, soak in named:
        assert soak_marks(path).get(test) is bool(soak), f"{path}::{test}"


def test_rows_are_found_and_each_failure_has_one() -> None:
    for name, least in (("Training", 30), ("ETL", 10)):
        names = [row[0] for row in tables()[name]]
        assert len(names) == len(set(names)) >= least


@cache
def texts() -> list[str]:
    """Each text in the code, with `...` for what is put in."""
    found = []
    for room in ("lockstep", "etl", "training", "pyspark_tfrecord", "jobs"):
        for path in sorted(Path(ROOT, room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


@pytest.mark.parametrize("row", tables()["Errors by their text"], ids=lambda row: row[0][:40])
def test_an_error_that_is_explained_is_one_of_the_code(row: list[str]) -> None:
    assert len(row) == 2 and row[0][0] == row[0][-1] == "`"
    assert any(row[0].strip("`") in text for text in texts()), row[0]
