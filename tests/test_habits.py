"""What a contributor's machine and public CI run is what `make` runs, and each example is run by a test."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
ENTRIES = re.findall(r"entry: (.*)", HOOKS)


def test_hooks_are_the_checks_of_make_lint() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    assert re.findall(r"\.venv/bin/[^@\n>]*?(?= 2>|\n|$)", recipe) == [one for one in ENTRIES if ".venv" in one]
    assert len(ENTRIES) == 5


@pytest.mark.parametrize(("length", "code"), [(72, 0), (73, 1)])
def test_a_long_subject_is_refused(tmp_path: Path, length: int, code: int) -> None:
    (tmp_path / "message").write_text("x" * length + "\n\n" + "the text may be longer " * 9)
    done = subprocess.run(["bash", "-c", f"{ENTRIES[-1]} {tmp_path / 'message'}"], check=False)
    assert done.returncode == code


def test_public_ci_runs_our_own_script_on_pushes_and_requests() -> None:
    flow = (ROOT / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8")
    assert "on: [push, pull_request]" in flow and "- run: .ci/run" in flow
    assert 'python-version: "3.11"' in flow and 'java-version: "17"' in flow


def test_each_script_of_the_examples_is_named_by_its_page_and_by_a_test() -> None:
    """Tests that run a README's commands name the folder; tests/examples/test_gallery.py sees that each does."""
    seeds = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
    scripts = sorted((ROOT / "examples").glob("*/*.py"))
    pages = {path: path.with_name("README.md") for path in scripts}
    unnamed = [
        path for path in scripts if path.name not in (pages[path].read_text() if pages[path].exists() else seeds)
    ]
    assert len(scripts) >= 17 and unnamed == []
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [path for path in scripts if f'"{path.name}"' not in tests and f'"{path.parent.name}"' not in tests] == []
