"""Links lead to pages and headings that exist, and the code names only pages that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.steps import ROOT

PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "build.sbt.md"),
    "lockstep/storage/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.md")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
FOLDERS = [
    *("jobs", "etl", "training", "lockstep", "pyspark_tfrecord"),
    *("conf", "scripts", "notebooks", "benchmarks", "tests", "examples"),
]
TYPES = (".py", ".md", ".toml", ".sh", ".ipynb")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
NAMED = re.compile(r"\bdocs/[\w/-]+\.md")
FILE = re.compile(
    rf"(?<![\w/.$*{{}}<>-])((?:{'|'.join(FOLDERS)}|docs|data)/[\w./-]*\w\.(?:py|md|toml|sh|ipynb|java|sbt|txt))"
)
MODULE = re.compile(r"python -m ((?:jobs|benchmarks|training|tests|etl|lockstep)[\w.]*\w)")
OF_OTHERS = {  # of a reader, of Spark
    *("conf/my.toml", "benchmarks/NAME.py"),
    "examples/src/main/scripts/getGpusResources.sh",
}
BY_HAND = "*Measured by hand: no script repeats it.*"
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


RESULTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").rglob("*.md"))


def gone(text: str) -> list[str]:
    """The files and modules that a text names and that are not there."""
    modules = [f"{module.replace('.', '/')}.py" for module in MODULE.findall(text)]
    named = {name for name in (*FILE.findall(text), *modules) if name not in OF_OTHERS}
    return sorted(name for name in named if not ((ROOT / name).exists() or (ROOT / name).with_suffix("").is_dir()))


@pytest.mark.parametrize("page", [page for page in (*PAGES, *RESULTS) if page != "CHANGELOG.md"])
def test_files_and_modules_that_a_page_names_are_there(page: str) -> None:
    assert gone((ROOT / page).read_text(encoding="utf-8")) == []


def test_a_file_that_is_gone_is_found() -> None:
    text = "see `tests/test_gone.py`, [x](docs/README.md) and `python -m benchmarks.gone --help`, `conf/my.toml`"
    assert gone(text) == ["benchmarks/gone.py", "tests/test_gone.py"]


def test_each_section_of_results_names_its_script_or_says_that_there_is_none() -> None:
    """A figure that nobody can measure again is marked as one."""
    scripts = "|".join(path.stem for path in (ROOT / "benchmarks").rglob("*.py"))
    named = re.compile(rf"`[^`\n]*\b({scripts})\b[^`\n]*`|python -m |make \w|training/comm/cost|tests/\w")
    unmarked = []
    for page in (ROOT / "benchmarks" / "results").glob("*.md"):
        for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            if bool(named.search(section)) == (BY_HAND in section) and re.search(r"[0-9]", section):
                unmarked.append(f"{page.name}: {section.splitlines()[0]}")
    assert unmarked == []


def test_all_pages_are_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(page for page in pages if f"]({page}" not in index) == []
