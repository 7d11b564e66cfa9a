"""Python that README and pages show compiles, and every name it imports from this project exists.

`make test` runs the README's commands; `make soak` runs those of the pages.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re

import pytest

from tests.docs.steps import ROOT
from tests.docs.test_flags import PAGES

SNIPPET = re.compile(r"^python - .*<<'EOF'\n(.*?)^EOF$|^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ROOMS = {"lockstep", "etl", "training", "pyspark_tfrecord", "jobs"}
PUBLIC = re.compile(r"pyspark_tfrecord|lockstep(\.(data|embeddings|horovod|on_ranks|optimizers|petastorm)(\..*)?)?")
NEEDS_PYTORCH = (
    "lockstep.training.batches.torch_data",
    "lockstep.horovod.torch",
)  # which the tests' environment has not


def snippets(page: str) -> list[str]:
    """The Python of a page, from shell blocks and from blocks of its own."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [shell or block for shell, block in SNIPPET.findall(text)]


def imported(code: str) -> list[tuple[str, str]]:
    """Module and name of each import from this project; the name is empty where the module itself is imported."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] in ROOMS]


def absent(module: str, name: str) -> bool:
    """Whether `from module import name` fails; raises ImportError where there is no such module."""
    if module in NEEDS_PYTORCH:
        return importlib.util.find_spec(module) is None
    found = importlib.import_module(module)
    if not name or hasattr(found, name):
        return False
    return importlib.util.find_spec(f"{module}.{name}") is None


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_python_of_a_page_compiles_and_imports_what_there_is(page: str) -> None:
    names = [pair for code in snippets(page) for pair in imported(code)]
    assert [pair for pair in names if absent(*pair)] == []
    assert [module for module, _ in names if PUBLIC.fullmatch(module) is None] == []


def test_snippets_are_found() -> None:
    assert len([pair for page in PAGES for code in snippets(page) for pair in imported(code)]) >= 8
    assert absent("lockstep", "trian") and not absent("lockstep.training", "batches")
