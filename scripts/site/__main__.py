"""Build the site: `python -m scripts.site` writes .site/html; a link or a heading that is not there ends it with 1."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from scripts.site.commands import command_pages
from scripts.site.errors import error_pages
from scripts.site.pages import FILES_FOR_READERS, staged, texts_for_assistants
from scripts.site.reasons import reasons_page

ROOT = Path(__file__).parents[2]
PAGES = Path(".site") / "pages"
HTML = Path(".site") / "html"
PYTHON_PAGE = """# Python

Each public name, from its docstring. [Lockstep from Python](../docs/python.md) shows them at work.

::: lockstep
    options:
      show_root_toc_entry: false
"""
MODULES = ("on_ranks", "data", "optimizers", "embeddings", "horovod", "petastorm")


def stage(folder: Path) -> None:
    """Write the sources of the site into a new folder: linked files under their own paths, and the reference."""
    shutil.rmtree(folder, ignore_errors=True)
    modules = "".join(f"\n::: lockstep.{name}\n" for name in MODULES)
    reference = {"reference/python.md": PYTHON_PAGE + modules, **command_pages(), **error_pages(ROOT), **reasons_page()}
    for name, source in {**staged(ROOT), **reference}.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, Path):
            shutil.copyfile(ROOT / source, target)
        else:
            target.write_text(source, encoding="utf-8")


def main() -> int:
    """Stage and build; returns the exit code."""
    stage(ROOT / PAGES)
    shutil.rmtree(ROOT / HTML, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        return 1
    for name, text in texts_for_assistants(ROOT).items():
        (ROOT / HTML / name).write_text(text, encoding="utf-8")
    for name in FILES_FOR_READERS:
        shutil.copyfile(ROOT / name, ROOT / HTML / name)
    print(f"{HTML}: {len(list((ROOT / HTML).rglob('index.html')))} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
