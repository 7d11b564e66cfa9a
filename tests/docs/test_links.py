"""Links lead to pages and headings that exist, and the code names only pages that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.steps import ROOT

PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "build.sbt.md", "lockstep/storage/README.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
FOLDERS = [
    *("jobs", "etl", "training", "lockstep", "pyspark_tfrecord"),
    *("conf", "scripts", "notebooks", "benchmarks", "tests"),
]
TYPES = (".py", ".md", ".toml", ".sh", ".ipynb")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
NAMED = re.compile(r"\bdocs/[\w/-]+\.md")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """The name by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def slugs(page: Path) -> frozenset[str]:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    return frozenset(slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE))


def dead_links(page: Path) -> list[str]:
    """The links of a page without a target."""
    dead = []
    for target, heading in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        file = page.parent / target if target else page
        if not file.exists() or (heading and heading not in slugs(file)):
            dead.append(f"{target}#{heading}" if heading else target)
    return dead


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert dead_links(ROOT / page) == []


def test_a_dead_link_and_a_dead_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](gone.md) [b](#one-two) [c](page.md#three) [d](https://example.org/x.md)\n")
    assert dead_links(page) == ["gone.md", "page.md#three"]


def test_code_names_only_pages_that_exist() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in TYPES]
    named = {(page, str(path.relative_to(ROOT))) for path in files for page in NAMED.findall(path.read_text("utf-8"))}
    assert len(named) > 30
    assert sorted((page, path) for page, path in named if not (ROOT / page).exists()) == []


def test_all_pages_are_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(page for page in pages if f"]({page}" not in index) == []
