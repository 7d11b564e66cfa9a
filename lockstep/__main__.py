"""The command `lockstep`, also `python -m lockstep`: alone it lists the jobs, `lockstep JOB ...` runs one."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from lockstep.jobs._cli import run_job
from lockstep.process.installed import JOBS, VERSION
from lockstep.storage.errors import ConfigError, nearest

_CALL = re.compile(r":? ?`lockstep [^`]*`(: )?")


def job_names() -> list[str]:
    """The names of all jobs, sorted."""
    return sorted(each.name for each in pkgutil.iter_modules([str(JOBS)]) if each.name[0] != "_" and not each.ispkg)


def sentence(name: str) -> str:
    """The first line of a job's docstring, read without importing it."""
    source = pkgutil.get_data("lockstep.jobs", f"{name}.py") or b""  # by its loader: it may be in a zip
    text = ast.get_docstring(ast.parse(source)) or ""
    line = _CALL.sub("", text.partition("\n")[0])
    return line[:1].upper() + line[1:]


def list_jobs(_argv: Sequence[str]) -> int:
    """Print the table of jobs; returns the exit code."""
    names = job_names()
    width = max(map(len, names))
    print("usage: lockstep JOB ... | --version; lockstep JOB --help lists the flags of a job\n")
    print("\n".join(f"{name:{width}}  {sentence(name)}" for name in names))
    return 0


def print_version(_argv: Sequence[str]) -> int:
    """Print the version; returns the exit code."""
    print(f"lockstep {VERSION}")
    return 0


def refuse(argv: Sequence[str]) -> int:
    """Raise ConfigError for a job that does not exist."""
    raise ConfigError(
        f"there is no job `{argv[0]}`",
        got=argv[0] + nearest(argv[0], job_names()),
        allowed=", ".join(job_names()),
        next_step="Correct the name; `lockstep` lists the jobs.",
    )


def main() -> NoReturn:
    """Run the job that the command line names and end the process with its exit code."""
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        run_job(list_jobs, argv)
    if argv == ["--version"]:
        run_job(print_version, argv)
    if argv[0] not in job_names():
        run_job(refuse, argv)
    run_job(importlib.import_module(f"lockstep.jobs.{argv[0]}").main, argv[1:])


if __name__ == "__main__":
    main()
