"""Follow a run in a terminal until it ends: `lockstep watch RUN`, from any machine that reads the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.storage.errors import StorageError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import FINISHED, STOPPED, RunStatus, now_utc, words

CLEAR = "\x1b[H\x1b[J"  # the cursor to the first line, and nothing below it


def parser() -> JobParser:
    """The command line."""
    found = JobParser("watch", __doc__ or "", table="watch")
    found.add_argument("run", metavar="RUN", help="a local path or hdfs:// URL of a run, also of lockstep agent")
    found.add_argument("--every", dest="every_s", type=float, default=2.0, metavar="S", help="seconds between looks")
    found.add_argument(
        "--silent-limit",
        dest="silent_limit_s",
        type=float,
        default=600.0,
        metavar="S",
        help="end when no driver has written for so long (default 600)",
    )
    found.epilog = (
        "Redraws a terminal, and prints a line for each change elsewhere. The exit code is that of the run: 0 "
        "finished, 75 stopped, 1 or 2 failed; 1 also if it is silent for too long."
    )
    return found


def main(argv: Sequence[str]) -> int:
    """Show the run until it ends; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.actors.state import AgentStatus, agent_now
    from lockstep.training.driver.stop import EXIT_STOPPED
    from lockstep.training.results.state import status_now

    run = absolute(args.run)
    fs, paths = filesystem(run), RunPaths(run)
    status: RunStatus | AgentStatus
    shown = None
    while True:
        now = now_utc()
        try:
            status = agent_now(fs, paths, now) if fs.exists(paths.agent_json) else status_now(fs, paths, now)
        except StorageError as error:  # away for a while; a driver waits for it too
            print(f"the status cannot be read: {error.what}", file=sys.stderr, flush=True)
        else:
            text = words(status, run, now) if isinstance(status, RunStatus) else status.words(run)
            if status != shown:
                show(text, whole=shown is None or status.ended)
                shown = status
            if status.ended:
                code = {FINISHED: 0, STOPPED: EXIT_STOPPED}.get(status.state, 1)
                return code if status.exit_code is None else status.exit_code  # None: of an earlier release
            if (status.silent_s(now) or 0.0) > args.silent_limit_s:
                show(text, whole=True)  # which says since when no driver writes
                return 1
        time.sleep(args.every_s)


def show(text: str, *, whole: bool) -> None:
    """Redraw the terminal; elsewhere print the text, or its first line."""
    if sys.stdout.isatty():
        print(f"{CLEAR}{text}", flush=True)
    else:
        print(text if whole else text.partition("\n")[0], flush=True)


if __name__ == "__main__":
    run_job(main)
