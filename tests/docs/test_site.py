"""The site: it builds, its links lead somewhere, its reference is the code's, its pictures show something."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from argparse import SUPPRESS
from pathlib import Path

import pytest

from scripts.site.commands import command_page
from scripts.site.doctests import fenced
from scripts.site.errors import QUESTIONS, Question, Raised, error_pages, question_page, raised
from scripts.site.pages import linked, staged, texts_for_assistants, title_and_purpose
from tests.docs.pictures import FOLDER, filled
from tests.docs.steps import ROOT
from tests.docs.test_flags import JOBS


def paths_in(nav: object) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [path for entry in (nav.values() if isinstance(nav, dict) else nav) for path in paths_in(entry)]  # type: ignore[attr-defined]  # of TOML


def test_each_page_is_once_in_the_navigation() -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    shown = [path for path in paths_in(config["project"]["nav"]) if not path.startswith("reference/")]
    assert len(shown) == len(set(shown)) and [path for path in shown if not (ROOT / path).exists()] == []
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    assert sorted(str(path.relative_to(ROOT)) for path in pages) == sorted(
        path for path in shown if path.startswith(("docs/", "examples/")) and not path.startswith("docs/decisions/")
    )


def test_a_reader_reaches_each_page_from_the_first_ones() -> None:
    found = {str(path) for path in linked(ROOT)}
    pages = {str(path.relative_to(ROOT)) for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")}
    assert pages - found == set()


def test_a_link_out_of_the_repository_and_a_dead_one_are_errors(tmp_path: Path) -> None:
    for page in ("docs/README.md", "examples/README.md"):
        (tmp_path / page).parent.mkdir()
        (tmp_path / page).write_text("# a\n")
    (tmp_path / "README.md").write_text("# a\n\n[b](../b.md)\n")
    with pytest.raises(ValueError, match="outside of the repository"):
        linked(tmp_path)
    (tmp_path / "README.md").write_text("# a\n\n[b](b.md)\n")
    with pytest.raises(FileNotFoundError, match=r"links to b\.md"):
        linked(tmp_path)


def test_a_folder_without_a_readme_becomes_a_list_of_its_pages() -> None:
    page = staged(ROOT)["benchmarks/results/README.md"]
    assert isinstance(page, str) and page.count("\n* [") == len(list((ROOT / "benchmarks" / "results").glob("*.md")))


@pytest.mark.parametrize("job", JOBS)
def test_a_command_s_page_has_each_flag_and_its_help(job: str) -> None:
    page = command_page(job)
    actions = importlib.import_module(f"lockstep.jobs.{job}").parser()._actions
    shown = [action.option_strings[0] for action in actions if action.option_strings and action.help != SUPPRESS]
    assert len(shown) >= 3 and [flag for flag in shown if f"<code>{flag}" not in page] == []
    assert "%(default)" not in page


def test_the_pages_of_errors_have_those_that_the_code_raises() -> None:
    pages = error_pages(ROOT)
    entries = sum(text.count("\n## ") for text in pages.values())
    assert entries > 500 and len(list(raised(ROOT))) >= entries
    page = pages["reference/errors/why-can-my-logs-tables-or-images-not-be-read.md"]
    assert "## the number of records read is not that of the files' headers\n\n`DataError`" in page


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("another driver is working on this run", "Why does my run not resume?"),
        ("a barrier stage cannot run under dynamic allocation", "Why do ranks not start?"),
        ("no dataset at...", "Why is a path not found, or already there?"),
        ("the disk is full: cannot...", "Why may I not write, or is there no room?"),
    ],
)
def test_an_error_stands_under_the_question_that_it_raises(text: str, title: str) -> None:
    under = [page for page in error_pages(ROOT).values() if f"\n## {text}" in page]
    assert under and all(page.startswith(f"# {title}\n") for page in under)


def test_each_question_has_errors_and_a_page_that_is_there() -> None:
    pages = error_pages(ROOT)
    assert len(pages) == len(QUESTIONS) + 1
    assert [question.title for question in QUESTIONS if not (ROOT / question.page.partition("#")[0]).is_file()] == []
    assert [page for page in pages.values() if page.count("\n## ") < 2 and not page.startswith("# Questions")] == []


def test_an_error_s_page_shows_its_text_to_the_letter() -> None:
    error = Raised("DataError", "a < b in [x]", {"got": "", "allowed": "*", "next_step": "Try `a|b`."})
    page = question_page(Question("Why?", "Since.", "docs/batches.md"), [error, error])
    assert page.count("## ") == 1
    assert "## a &lt; b in \\[x\\]\n\n`DataError`\n\n* allowed: \\*\n* next: Try `a\\|b`." in page


def test_examples_of_docstrings_are_fenced() -> None:
    assert fenced("A.\n\n>>> f(1)\n[2]\n\nB.") == "A.\n\n```pycon\n>>> f(1)\n[2]\n```\n\n\nB."


def test_texts_for_assistants_name_each_page_with_its_purpose() -> None:
    texts = texts_for_assistants(ROOT)
    pages = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    assert [page for page in pages if f"({page.relative_to(ROOT)}): " not in texts["llms.txt"]] == []
    assert all(title_and_purpose(page.read_text("utf-8"))[1] for page in pages)
    assert all(page.read_text("utf-8") in texts["llms-full.txt"] for page in pages)


def test_committed_pictures_show_something(tmp_path: Path) -> None:
    from PIL import Image

    pictures = sorted(FOLDER.glob("*.png"))
    assert pictures and all(filled(picture) > 0.02 for picture in pictures)
    Image.new("RGB", (100, 100), "white").save(tmp_path / "empty.png")
    assert filled(tmp_path / "empty.png") == 0


@pytest.mark.timeout(300)
def test_the_site_builds_without_a_dead_link() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.site"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    html = ROOT / ".site" / "html"
    page = (html / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert 'id="lockstep.train"' in page and 'id="lockstep.optimizers.LARS"' in page
    assert "docs/tutorial/" in (html / "search.json").read_text(encoding="utf-8")
