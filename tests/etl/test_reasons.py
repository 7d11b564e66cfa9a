"""The reasons for which a record is not written: one list, which all code uses and the site shows."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.etl import reasons
from lockstep.etl.logs.values import bad_value, missing_value
from scripts.site.reasons import reasons_page
from tests.etl.conftest import ROOT

NAMES = {*reasons.REJECTED, *reasons.DROPPED}
FILES = [path for path in sorted((ROOT / "etl").rglob("*.py")) if path.name != "reasons.py"]
DECODER = ROOT / "lockstep" / "features" / "images" / "decode.py"


def test_the_page_of_the_site_has_each_reason_with_its_sentence() -> None:
    (page,) = reasons_page().values()
    rejected, dropped = page.split("\n## Dropped\n")
    for text, every in ((rejected, reasons.REJECTED), (dropped, reasons.DROPPED)):
        lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
        rows = [tuple(cell.strip() for cell in cells) for cells in lines]
        assert rows == [(f"`{reason.name}{reason.detail}`", reason.sentence) for reason in every.values()]


def test_a_reason_with_a_detail_has_its_sentence() -> None:
    assert reasons.sentence_of(reasons.REJECTED, bad_value("x")) == reasons.REJECTED["bad_value"].sentence
    of_both = [reasons.sentence_of(kind, "no_label") for kind in (reasons.REJECTED, reasons.DROPPED)]
    assert of_both == ["The row of a Parquet file has no label.", "The `--label` of the record is NULL."]
    assert reasons.sentence_of(reasons.DROPPED, "other") == ""


def test_names_and_sentences() -> None:
    assert all(name == reason.name for name, reason in (reasons.REJECTED | reasons.DROPPED).items())
    assert all(reason.sentence.endswith(".") for reason in (reasons.REJECTED | reasons.DROPPED).values())
    assert bad_value("x").partition(":")[0] in NAMES and missing_value("x").partition(":")[0] in NAMES


def _given(tree: ast.Module) -> Iterator[ast.expr]:
    """The expressions that code gives as a reason."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        if called in ("Refusal", "ImageError") or called.endswith(("gather.bad", "gather.bad_part", "gather.drop")):
            yield call.args[0]
        elif called.endswith(".add") and len(call.args) > 1 and not isinstance(call.args[1], ast.Starred):
            yield call.args[1]


@pytest.mark.parametrize("path", [*FILES, DECODER], ids=lambda path: str(path.relative_to(ROOT)))
def test_code_gives_a_reason_by_its_name_in_the_list(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    written = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert path == DECODER or not NAMES & set(written)
    place = path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("lockstep/").replace("/", ".")
    module = vars(importlib.import_module(f"lockstep.{place}".removesuffix(".__init__")))
    for node in _given(tree):
        first = node.values[0] if isinstance(node, ast.JoinedStr) else node  # f"{NAME}:..."
        literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
        assert not literal, f"{ast.unparse(node)}: not in etl/reasons.py"
        for name in (part.id for part in ast.walk(node) if isinstance(part, ast.Name)):
            if isinstance(module.get(name), str):
                assert module[name] in NAMES, f"{name}: not in etl/reasons.py"


def test_each_reason_has_a_use() -> None:
    used = {
        name.id for path in FILES for name in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(name, ast.Name)
    }
    texts = DECODER.read_text("utf-8")
    idle = [
        name for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str) and name not in used
    ]
    assert all(f'= "{vars(reasons)[name]}"' in texts for name in idle), idle
