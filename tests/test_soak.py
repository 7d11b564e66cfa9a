"""Tests marked soak run in `make soak` and only there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.soak import NOT_RUN, PARTS
from tests.soak.audit import WEAK as WEAK_PIN
from tests.soak.audit import verdict

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


WEAK = {"dependencies": [{"name": "jinja2", "version": "3.1.2", "vulns": [{"id": "A", "fix_versions": ["3.1.3"]}]}]}
SKIPPED = {"dependencies": [{"name": "jinja2", "skip_reason": "not found"}]}


@pytest.mark.parametrize(
    ("weak", "report", "code", "words"),
    [
        (WEAK, {"dependencies": [{"name": "one", "version": "1", "vulns": []}]}, 0, "audited: 1 packages, 0 known"),
        (WEAK, WEAK, 1, "FAILED jinja2 3.1.2: A, mended in ['3.1.3']"),
        (WEAK, SKIPPED, NOT_RUN, "NOT AUDITED: 1 packages could not be looked up: not found"),
        (SKIPPED, SKIPPED, NOT_RUN, "NOT AUDITED: 2 packages"),
        (SKIPPED, WEAK, 1, "FAILED jinja2"),
        (
            {"dependencies": [{"name": "jinja2", "version": "3.1.2", "vulns": []}]},
            {"dependencies": []},
            NOT_RUN,
            WEAK_PIN,
        ),
    ],
)
def test_an_audit_that_looked_up_nothing_is_none(
    weak: dict[str, Any], report: dict[str, Any], code: int, words: str
) -> None:
    found, lines = verdict(weak, report)
    assert found == code and words in "\n".join(lines)
