"""`python -m lockstep` lists the jobs, `python -m lockstep JOB ...` runs one as `python -m jobs.JOB ...` does."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = str(Path(__file__).resolve().parents[1])
if sys.path[0] != ROOT:  # the current folder, which may have a package `jobs` of its own
    sys.path[:1] = [ROOT]

from jobs._cli import run_job  # noqa: E402 - after the path is set
from lockstep.storage.errors import ConfigError, nearest  # noqa: E402

JOBS = Path(ROOT) / "jobs"
_CALL = re.compile(r":? ?`python -m jobs\.[^`]*`(: )?")


def job_names() -> list[str]:
    """The names of all jobs, sorted."""
    return sorted(path.stem for path in JOBS.glob("[a-z]*.py"))


def sentence(name: str) -> str:
    """The first line of a job's docstring, read without importing it."""
    text = ast.get_docstring(ast.parse((JOBS / f"{name}.py").read_text(encoding="utf-8"))) or ""
    line = _CALL.sub("", text.partition("\n")[0])
    return line[:1].upper() + line[1:]


def list_jobs(_argv: Sequence[str]) -> int:
    """Print the table of jobs; returns the exit code."""
    names = job_names()
    width = max(map(len, names))
    print("usage: lockstep JOB ... (or python -m lockstep JOB ...); lockstep JOB --help lists the flags of a job\n")
    print("\n".join(f"{name:{width}}  {sentence(name)}" for name in names))
    return 0


def refuse(argv: Sequence[str]) -> int:
    """Raise ConfigError for a job that does not exist."""
    raise ConfigError(
        f"there is no job `{argv[0]}`",
        got=argv[0] + nearest(argv[0], job_names()),
        allowed=", ".join(job_names()),
        next_step="Correct the name; `python -m lockstep` lists the jobs.",
    )


def main() -> NoReturn:
    """Run the job that the command line names and end the process with its exit code."""
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        run_job(list_jobs, argv)
    if argv[0] not in job_names():
        run_job(refuse, argv)
    run_job(importlib.import_module(f"jobs.{argv[0]}").main, argv[1:])


if __name__ == "__main__":
    main()
