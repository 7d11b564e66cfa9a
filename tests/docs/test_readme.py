"""README and pages: their commands are run, each under a check of the lines that a reader should see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.steps import ACTIVATE, ROOT, Step, not_seen, project_in, run_steps, steps_of

# Pages whose commands build on each other run in one folder. Each story has a worker of its own.
STORIES = {
    "first": ["README.md"],
    "tutorial": ["README.md", "docs/tutorial.md"],
    "data": [
        "docs/formats.md",
        "docs/schema.md",
        "docs/reading-elsewhere.md",
        "docs/batches.md",
        "docs/guarantees.md",
        "docs/strategies.md",
        "docs/which-mode.md",
        "docs/compression.md",
        "docs/evaluate.md",
        "docs/performance.md",
        "docs/python.md",
        "docs/validation.md",
        "docs/prediction.md",
        "docs/seeing.md",
    ],
    "models": ["docs/ready-models.md", "docs/logged-decisions.md", "docs/tasks.md"],
    "agents and days": ["docs/agents.md", "docs/days.md", "examples/agent/README.md"],
    "scripts": ["docs/models.md", "examples/README.md"],
    "pytorch": ["docs/pytorch.md"],
    "seeds": ["docs/seeds.md"],
    "cluster": ["docs/cluster.md"],
    "airflow": ["docs/airflow.md"],
    "kubernetes": ["docs/kubernetes.md"],
    "object stores": ["docs/object-stores.md"],
}
WITH_COMMANDS = list(dict.fromkeys(page for pages in STORIES.values() for page in pages))
# `make test` only checks the flags and imports of the others: test_flags.py, test_snippets.py
LONG = tuple(story for story in STORIES if story not in ("first", "cluster"))
MOST_README_LINES = 130


def steps(page: str) -> list[Step]:
    """A page's blocks of commands, without the two that CI runs itself."""
    return [step for step in steps_of((ROOT / page).read_text(encoding="utf-8")) if not step.by_ci]


def test_each_page_with_commands_is_in_one_story() -> None:
    pages = [
        "README.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("README.md")),
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ]
    assert sorted(page for page in pages if steps(page)) == sorted(WITH_COMMANDS)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_is_followed_by_what_one_should_see(page: str) -> None:
    assert [step.commands for step in steps(page) if not step.seen] == []


def test_the_readme_is_short_and_its_two_commands_are_what_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= MOST_README_LINES
    assert [step.commands.strip() for step in steps_of(readme) if step.by_ci] == ["make demo", "make test"]
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make ")] == ["make demo", "make test"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "story", [pytest.param(story, marks=[pytest.mark.soak] if story in LONG else []) for story in STORIES]
)
def test_the_commands_do_what_the_pages_say(tmp_path: Path, story: str) -> None:
    """Only the README activates the environment itself."""
    before = [] if "README.md" in STORIES[story] else [Step(ACTIVATE, False, [], "")]
    wanted = [*before, *(step for page in STORIES[story] for step in steps(page))]
    with project_in(tmp_path) as folder:
        assert run_steps(wanted, folder) == len(wanted) >= 2


def test_not_seen_notices_a_missing_line_and_a_wrong_order() -> None:
    assert not_seen(["a ... c", "d"], ["x", "a  b c", "d"]) is None
    assert not_seen(["a ... c", "d"], ["d", "a b c"]) == "d"
    assert not_seen(["e"], ["d"]) == "e"
