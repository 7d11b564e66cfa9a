"""The README's commands are run, each under a check of what it says one should see; its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.steps import ACTIVATE, ROOT, Step, not_seen, project_in, run_steps, steps_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
CLUSTER = "## On a cluster"


def told() -> list[Step]:
    """What the README tells a reader to run, but for the two commands that CI runs."""
    return [step for step in steps_of(README) if not step.by_ci]


def test_every_command_is_followed_by_what_one_should_see() -> None:
    assert len(told()) >= 8
    assert all(step.seen for step in told()), [step.commands for step in told() if not step.seen]
    assert sum(step.section.startswith(CLUSTER) for step in told()) >= 3


def test_the_two_commands_are_what_ci_runs() -> None:
    assert [step.commands.strip() for step in steps_of(README) if step.by_ci] == ["make demo", "make test"]
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make ")] == ["make demo", "make test"]


@pytest.mark.parametrize(
    "path",
    ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))],
)
def test_links_lead_somewhere(path: str) -> None:
    for target in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        assert (ROOT / path).parent.joinpath(target).exists(), f"{path}: {target}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("on_cluster", [False, True], ids=["here", "cluster"])
def test_the_commands_do_what_the_readme_says(tmp_path: Path, on_cluster: bool) -> None:
    """The section on a cluster needs nothing of what comes before but the environment, and goes to another worker."""
    before = [Step(ACTIVATE, False, [], "")] if on_cluster else []
    wanted = [step for step in told() if step.section.startswith(CLUSTER) == on_cluster]
    with project_in(tmp_path) as folder:
        assert run_steps([*before, *wanted], folder) == len(before) + len(wanted) >= 3


@pytest.mark.soak  # `make test` checks their flags and imports: test_flags.py, test_snippets.py
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "pages",
    [["data", "batches", "exactly-once", "profile", "python"], ["keras", "launch"]],
    ids=["on_data", "on_scripts"],
)
def test_the_commands_do_what_the_pages_say(tmp_path: Path, pages: list[str]) -> None:
    page = [step for name in pages for step in steps_of((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))]
    assert len(page) >= 4 and all(step.seen for step in page)
    with project_in(tmp_path) as folder:
        assert run_steps([Step(ACTIVATE, False, [], ""), *page], folder) == 1 + len(page)


def test_not_seen_notices_a_missing_line_and_a_wrong_order() -> None:
    assert not_seen(["a ... c", "d"], ["x", "a  b c", "d"]) is None
    assert not_seen(["a ... c", "d"], ["d", "a b c"]) == "d"
    assert not_seen(["e"], ["d"]) == "e"
