"""Send a run's metrics to TensorBoard's files or to MLflow: `lockstep track RUN --tensorboard LOGDIR`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.jobs._cli import JobParser, run_job
from lockstep.storage.errors import ConfigError, require
from lockstep.storage.urls import absolute
from lockstep.training.run.status import now_utc

if TYPE_CHECKING:
    from lockstep.training.results.track import Tracker


def parser() -> JobParser:
    """The command line."""
    found = JobParser("track", __doc__ or "", table="track")
    add = found.add_argument
    add("run", metavar="RUN", help="a local path or hdfs:// URL of a run, finished or not")
    add("--tensorboard", metavar="LOGDIR", help="write event files to LOGDIR/RUN, local or on HDFS")
    add("--mlflow", metavar="URI", help="send to this server, http://HOST:5000, or to sqlite:///FILE")
    add("--experiment", default="lockstep", metavar="NAME", help="MLflow's experiment (default lockstep)")
    add("--follow", action="store_true", help="continue until the run has ended")
    add("--every", dest="every_s", type=float, default=30.0, metavar="S", help="seconds between looks (default 30)")
    text = "with --follow, end when no driver has written for so long (default 600)"
    add("--silent-limit", dest="silent_limit_s", type=float, default=600.0, metavar="S", help=text)
    found.epilog = (
        "Sends what was not sent by an earlier call, and never changes the run. Needs the packages of "
        "requirements-tracking.txt. A password belongs in MLFLOW_TRACKING_PASSWORD, not in URI."
    )
    return found


def main(argv: Sequence[str]) -> int:
    """Send; returns the exit code: 1 if a followed run's driver is silent for too long."""
    args = parser().parse(argv)
    from lockstep.training.results.track import MLflow, TensorBoard, track

    run = absolute(args.run)
    require(args.every_s > 0, "--every", f"{args.every_s:g}", "a number of seconds above 0")
    trackers: list[Tracker] = []
    if args.tensorboard is not None:
        trackers.append(TensorBoard(run, args.tensorboard))
    if args.mlflow is not None:
        trackers.append(MLflow(run, args.mlflow, args.experiment))
    if not trackers:
        raise ConfigError(
            "nowhere to send the metrics to",
            got="neither --tensorboard nor --mlflow",
            allowed="one of them, or both",
            next_step="Give --tensorboard LOGDIR, or --mlflow URI.",
        )
    while True:
        tracked = [track(run, tracker) for tracker in trackers]
        status, sent = tracked[0][0], sum(count for _, count in tracked)
        print(f"{run}: {status.state}, step {status.step} of {status.steps}, {sent} numbers sent", flush=True)
        if status.ended or not args.follow:
            return 0
        if (status.silent_s(now_utc()) or 0.0) > args.silent_limit_s:
            print(f"no driver has written for {args.silent_limit_s:g} s", file=sys.stderr)
            return 1
        time.sleep(args.every_s)


if __name__ == "__main__":
    run_job(main)
