"""Make a release, and upload nothing: `python -m scripts.release` writes wheel, sdist and notes into dist/, and a tag.

The commit must be clean. The wheel is installed into an empty environment with the tested versions, where the commands
of README and tutorial run as a reader runs them; a command that shows another result ends the release.
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
from pathlib import Path

from lockstep.process.installed import VERSION
from lockstep.storage.errors import ConfigError
from tests.docs.steps import run_steps, steps_of

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist" / f"lockstep-{VERSION}"
TAG = f"v{VERSION}"
PAGES = ("README.md", "docs/tutorial.md")
WITH_THE_SOURCE = ("data", "conf", "docs")  # what the pages read of a clone, besides the code
INSTALL_LIMIT_S = 1800


def release_notes(changelog: str, version: str) -> str:
    """The section of a version, and what is unreleased. Raises ConfigError where there is neither."""
    found = re.findall(r"^## (\S+)[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    sections = {head: body.strip() for head, body in found}
    if parts := [sections[head] for head in (version, "Unreleased") if sections.get(head)]:
        return f"# Lockstep {version}\n\n" + "\n\n".join(parts) + "\n"
    raise ConfigError(
        f"the changelog has nothing for {version}",
        got=f"sections {', '.join(sections) or 'none'}",
        allowed=f"a section `## {version}` or `## Unreleased` with a line for each change",
        next_step="Write what a user notices into CHANGELOG.md.",
    )


def check_commit(root: Path, tag: str) -> None:
    """Raise ConfigError for changes without a commit, and for a tag that is at another commit."""
    if changed := _git(root, "status", "--porcelain"):
        raise ConfigError(
            "a release is made of a commit",
            got=f"changes without one: {', '.join(line[3:] for line in changed.splitlines())[:200]}",
            allowed="a clean checkout",
            next_step="Commit or stash them.",
        )
    if _git(root, "tag", "--list", tag) and _git(root, "rev-list", "-n1", tag) != _git(root, "rev-parse", "HEAD"):
        raise ConfigError(
            f"the tag {tag} is at another commit",
            got=_git(root, "rev-list", "-n1", tag),
            allowed=f"no tag {tag}, or one at this commit",
            next_step="Raise VERSION in lockstep/process/installed.py.",
        )


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def build(folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist of this checkout; their modules must be the same. Returns both paths."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
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


def try_out(wheel: Path, folder: Path) -> int:
    """Install a wheel into an empty environment in `folder`, and run the pages there; returns how many blocks ran."""
    venv.create(folder / ".venv", with_pip=True)
    pip = [str(folder / ".venv" / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True, timeout=INSTALL_LIMIT_S)
    for name in WITH_THE_SOURCE:
        (folder / name).symlink_to(ROOT / name)
    (folder / "Makefile").write_text("venv:\n")  # the environment is there
    steps = [step for page in PAGES for step in steps_of((ROOT / page).read_text(encoding="utf-8")) if not step.by_ci]
    return run_steps(steps, folder)


def main() -> int:
    """Run the steps; returns the exit code."""
    notes = release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), VERSION)
    check_commit(ROOT, TAG)
    wheel, sdist = build(DIST)
    print(f"{wheel.name} and {sdist.name}: {len(modules_of(wheel))} modules each", flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        print(f"{', '.join(PAGES)}: {try_out(wheel, Path(temporary))} blocks ran in an empty environment", flush=True)
    (DIST / "NOTES.md").write_text(notes, encoding="utf-8")
    if not _git(ROOT, "tag", "--list", TAG):
        subprocess.run(["git", "tag", "-a", TAG, "-F", str(DIST / "NOTES.md")], cwd=ROOT, check=True)
    print(f"{DIST}: wheel, sdist, NOTES.md; tag {TAG}. Nothing was uploaded.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
