"""Make a release (wheel, sdist and notes in dist/, a commit, a tag), and upload nothing: `python -m scripts.release`.

The checkout must be clean. In a worktree the changelog's lines of *Unreleased* become the version's section, and the
version is set. The wheel of that commit is installed into an empty environment with the tested versions, where the
commands of README and tutorial run as a reader runs them; a command that shows another result ends the release.
Only then the branch takes the commit, and the tag is set: a release that ends before leaves the checkout as it was.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from lockstep.process.installed import VERSION
from lockstep.storage.errors import ConfigError
from tests.docs.steps import run_steps, steps_of

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/tutorial.md")
WITH_THE_SOURCE = ("data", "conf", "docs")  # what the pages read of a clone, besides the code
INSTALL_LIMIT_S = 1800
CHANGELOG, HOLDER = "CHANGELOG.md", "lockstep/process/installed.py"


def changelog_of(text: str, version: str, day: date) -> tuple[str, str]:
    """Return the changelog in which what was unreleased is the version's, and the version's section as release notes.

    Raises ConfigError where the version has neither a section nor a line under *Unreleased*.
    """
    head, *rest = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    sections = {part.split()[1]: part.partition("\n")[2].strip() for part in rest}
    body = "\n\n".join(filter(None, (sections.pop(version, ""), sections.pop("Unreleased", ""))))
    if not body:
        raise ConfigError(
            f"the changelog has nothing for {version}",
            got=f"sections {', '.join(part.split()[1] for part in rest) or 'none'}",
            allowed=f"a section `## {version}` or `## Unreleased` with a line for each change",
            next_step=f"Write what a user notices into {CHANGELOG}.",
        )
    others = "".join(part for part in rest if part.split()[1] in sections)
    title = f"{version} ({day.isoformat()})"
    return f"{head}## Unreleased\n\n## {title}\n\n{body}\n\n{others}".rstrip() + "\n", f"# Lockstep {title}\n\n{body}\n"


def release(root: Path, version: str, day: date, make: Callable[[Path, Path], None]) -> Path:
    """Commit and tag a version when `make(source, folder)`, which writes its files into the folder, has returned.

    Returns the folder of the files. Raises ConfigError for a version that is none, changes without a commit and a tag
    that exists; whatever `make` raises leaves branch and tags as they were.
    """
    tag = f"v{version}"
    check(root, version, tag)
    folder = root / "dist" / f"lockstep-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        source = Path(temporary) / "source"
        _git(root, "worktree", "add", "--quiet", "--detach", str(source))
        try:
            changelog, notes = changelog_of((source / CHANGELOG).read_text(encoding="utf-8"), version, day)
            (source / CHANGELOG).write_text(changelog, encoding="utf-8")
            code = (source / HOLDER).read_text(encoding="utf-8")
            (source / HOLDER).write_text(re.sub(r'^VERSION = ".*"', f'VERSION = "{version}"', code, flags=re.MULTILINE))
            _git(source, "commit", "--quiet", "--all", "--message", f"Release {version}")
            make(source, folder)
            (folder / "NOTES.md").write_text(notes, encoding="utf-8")
            commit = _git(source, "rev-parse", "HEAD")
        finally:
            _git(root, "worktree", "remove", "--force", str(source))
    _git(root, "merge", "--quiet", "--ff-only", commit)
    _git(root, "tag", "--annotate", tag, "--cleanup=verbatim", "--file", str(folder / "NOTES.md"))
    return folder


def check(root: Path, version: str, tag: str) -> None:
    """Raise ConfigError for a version that is none, for changes without a commit, and for a tag that exists."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ConfigError(
            "a release has a version", got=version, allowed="three numbers, as 0.2.0", next_step="Give one."
        )
    if changed := _git(root, "status", "--porcelain"):
        raise ConfigError(
            "a release is made of a commit",
            got=f"changes without one: {', '.join(line.split()[-1] for line in changed.splitlines())[:200]}",
            allowed="a clean checkout",
            next_step="Commit or stash them.",
        )
    if _git(root, "tag", "--list", tag):
        raise ConfigError(
            f"the tag {tag} exists",
            got=f"commit {_git(root, 'rev-list', '-n1', tag)}",
            allowed="a version without a tag",
            next_step="Give the next one: `make release VERSION=X.Y.Z`.",
        )


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def build_and_try(source: Path, folder: Path) -> None:
    """Build the wheel and the sdist of a checkout into a folder, and try the wheel."""
    wheel, sdist = build(source, folder)
    print(f"{wheel.name} and {sdist.name}: {len(modules_of(wheel))} modules each", flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        blocks = try_out(wheel, source, Path(temporary))
    print(f"{', '.join(PAGES)}: {blocks} blocks ran in an empty environment", flush=True)


def build(source: Path, folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist of a checkout; their modules must be the same. Returns both paths."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=INSTALL_LIMIT_S)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    if modules_of(wheel) != modules_of(sdist):
        raise ConfigError(
            "wheel and sdist differ",
            got=", ".join(sorted(modules_of(wheel) ^ modules_of(sdist)))[:300],
            allowed="the same modules in both",
            next_step="Compare [tool.setuptools] in pyproject.toml with the tree.",
        )
    return wheel, sdist


def modules_of(archive: Path) -> set[str]:
    """The Python modules of a wheel or sdist, by their import paths."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = wheel.namelist()
    else:
        with tarfile.open(archive) as sdist:
            names = [name.partition("/")[2] for name in sdist.getnames()]
    return {name for name in names if name.endswith(".py") and name.startswith(("lockstep/", "pyspark_tfrecord/"))}


def try_out(wheel: Path, source: Path, folder: Path) -> int:
    """Install a wheel into an empty environment in `folder`, and run the pages there; returns how many blocks ran."""
    venv.create(folder / ".venv", with_pip=True)
    pip = [str(folder / ".venv" / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(source / "constraints.txt"), str(wheel)], check=True, timeout=INSTALL_LIMIT_S)
    for name in WITH_THE_SOURCE:
        (folder / name).symlink_to(source / name)
    (folder / "Makefile").write_text("venv:\n")  # the environment is there
    steps = [step for page in PAGES for step in steps_of((source / page).read_text(encoding="utf-8")) if not step.by_ci]
    return len(run_steps(steps, folder))


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else VERSION
    try:
        made = release(ROOT, asked, datetime.now(UTC).date(), build_and_try)
    except ConfigError as error:
        sys.exit(str(error))
    print(f"{made}: wheel, sdist and notes. The branch has the release's commit and a tag; nothing was uploaded.")
