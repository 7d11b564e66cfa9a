"""A release is a commit, a tag and files, or nothing at all."""

from __future__ import annotations

import subprocess
import zipfile
from datetime import date
from pathlib import Path

import pytest

from lockstep.storage.errors import ConfigError
from scripts.release import CHANGELOG, HOLDER, changelog_of, modules_of, release

DAY = date(2026, 11, 30)
LOG = "# Changelog\n\nNewest first.\n\n## Unreleased\n\n- new\n\n## 0.2.0\n\n- a\n\n## 0.1.0\n\n- b\n"


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / HOLDER).parent.mkdir(parents=True)
    (root / HOLDER).write_text('"""Text."""\nVERSION = "0.2.0"\n')
    (root / CHANGELOG).write_text(LOG)
    (root / ".gitignore").write_text("dist/\n")
    git(tmp_path, "init", "--quiet", str(root))
    git(root, "config", "user.name", "a")
    git(root, "config", "user.email", "a@b.example")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "first")
    return root


def write_version(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "built").write_text((source / HOLDER).read_text() + git(source, "log", "-1", "--format=%s"))


def test_what_was_unreleased_becomes_the_version_s_section() -> None:
    text, notes = changelog_of(LOG, "0.3.0", DAY)
    rest = "## 0.2.0\n\n- a\n\n## 0.1.0\n\n- b\n"
    assert text == f"# Changelog\n\nNewest first.\n\n## Unreleased\n\n## 0.3.0 (2026-11-30)\n\n- new\n\n{rest}"
    assert notes == "# Lockstep 0.3.0 (2026-11-30)\n\n- new\n"
    assert changelog_of(LOG, "0.2.0", DAY)[1] == "# Lockstep 0.2.0 (2026-11-30)\n\n- a\n\n- new\n"
    with pytest.raises(ConfigError, match=r"nothing for 0\.4\.0"):
        changelog_of(text, "0.4.0", DAY)


def test_a_release_sets_the_version_and_tags_what_was_built(checkout: Path) -> None:
    folder = release(checkout, "0.3.0", DAY, write_version)
    assert (folder / "built").read_text() == '"""Text."""\nVERSION = "0.3.0"\nRelease 0.3.0'
    assert git(checkout, "rev-list", "-n1", "v0.3.0") == git(checkout, "rev-parse", "HEAD")
    assert git(checkout, "tag", "--list", "--format=%(contents)", "v0.3.0") == (folder / "NOTES.md").read_text().strip()
    assert git(checkout, "status", "--porcelain") == "" and 'VERSION = "0.3.0"' in (checkout / HOLDER).read_text()
    with pytest.raises(ConfigError, match=r"tag v0\.3\.0 exists"):
        release(checkout, "0.3.0", DAY, write_version)


def test_a_release_whose_trial_fails_leaves_the_checkout_as_it_was(checkout: Path) -> None:
    def fail(source: Path, folder: Path) -> None:
        raise AssertionError("another result")

    before = git(checkout, "rev-parse", "HEAD")
    with pytest.raises(AssertionError, match="another result"):
        release(checkout, "0.3.0", DAY, fail)
    assert git(checkout, "rev-parse", "HEAD") == before and git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "tag") == "" and len(git(checkout, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(("version", "match"), [("v1", "a release has a version"), ("0.3.0", "made of a commit")])
def test_a_wrong_version_and_changes_are_refused(checkout: Path, version: str, match: str) -> None:
    (checkout / CHANGELOG).write_text(LOG + "more\n")
    with pytest.raises(ConfigError, match=match):
        release(checkout, version, DAY, write_version)


def test_modules_of_an_archive_leave_other_files_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name in ("lockstep/a.py", "lockstep/py.typed", "other/b.py", "pyspark_tfrecord/c.py"):
            wheel.writestr(name, "")
    assert modules_of(tmp_path / "a.whl") == {"lockstep/a.py", "pyspark_tfrecord/c.py"}
