"""Tests marked soak run in `make soak` and only there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.soak import PARTS

ROOT = Path(__file__).resolve().parents[1]


def item(name: str, *markers: str) -> Any:
    """A collected test as far as the hook looks at one."""
    return SimpleNamespace(
        name=name, path=ROOT / "tests" / "some" / "test_some.py", get_closest_marker=lambda marker: marker in markers
    )


@pytest.mark.parametrize(("soak", "run", "left_out"), [(False, ["short"], ["long"]), (True, ["long"], ["short"])])
def test_each_test_runs_in_one_of_the_two(soak: bool, run: list[str], left_out: list[str]) -> None:
    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(getoption={"soak": soak}.__getitem__, hook=hook)
    items = [item("short", "slow"), item("long", "slow", "soak")]
    pytest_collection_modifyitems(config, items)
    assert [one.name for one in items] == run
    assert [one.name for one in deselected] == left_out


def test_make_soak_runs_the_marked_tests() -> None:
    assert PARTS[0] == "tests.soak.marked"
    assert '"--soak"' in (ROOT / "tests" / "soak" / "marked.py").read_text(encoding="utf-8")
    assert "-m tests.soak\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
