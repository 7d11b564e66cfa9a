"""Print what a run or a search is doing now: `lockstep status RUN`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from lockstep.jobs._cli import JobParser, run_job
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import now_utc, words


def parser() -> JobParser:
    """The command line."""
    found = JobParser("status", __doc__ or "", table="status")
    found.add_argument(
        "run", metavar="RUN", help="a local path or hdfs:// URL of a run, also of lockstep agent, or of lockstep tune"
    )
    found.add_argument("--json", action="store_true", help="print it as JSON: of a run as RUN/status.json has it")
    found.epilog = "Reads a small file that the run's driver replaces every 5 s, or a search's journal. Exit code 0 in"
    found.epilog += " any state."
    return found


def main(argv: Sequence[str]) -> int:
    """Print the status; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.actors.state import agent_now
    from lockstep.training.results.state import status_now
    from lockstep.training.search.search_status import is_search, read_search

    run, now = absolute(args.run), now_utc()
    fs, paths = filesystem(run), RunPaths(run)
    if is_search(fs, run):
        search = read_search(fs, run, now)
        print(json.dumps(asdict(search), sort_keys=True) if args.json else search.words())
        return 0
    if fs.exists(paths.agent_json):
        agent = agent_now(fs, paths, now)
        print(json.dumps(agent.to_json(), sort_keys=True) if args.json else agent.words(run))
        return 0
    status = status_now(fs, paths, now)
    print(status.to_bytes().decode() if args.json else words(status, run, now))
    return 0


if __name__ == "__main__":
    run_job(main)
