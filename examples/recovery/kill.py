"""Kill a training's driver, or one of its ranks, as soon as it has a checkpoint of a later step than the given one."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import psutil

LIMIT_S = 300.0

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("pid", type=int, help="the process of `lockstep train`")
parser.add_argument("--run", required=True)
parser.add_argument("--after", type=int, required=True, metavar="STEP")
parser.add_argument("--signal", choices=("TERM", "KILL"), required=True)
parser.add_argument("--rank", action="store_true", help="of this process's ranks, kill one")
args = parser.parse_args()


def newest() -> int:
    """The step of the newest checkpoint, 0 without one; a name is `step-0000000100.g0001`."""
    names = [path.name for path in Path(args.run, "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-").split(".")[0]) for name in names), default=0)


until = time.monotonic() + LIMIT_S
while newest() <= args.after:
    if time.monotonic() > until or not psutil.pid_exists(args.pid):
        sys.exit(f"{args.run}: no checkpoint after step {args.after} while process {args.pid} lived")
    time.sleep(0.02)
victim = args.pid
if args.rank:
    below = {one.pid: one.cmdline() for one in psutil.Process(args.pid).children(recursive=True)}
    spare = [pid for pid, line in below.items() if "lockstep.training.rank.zygote" in line]  # it forks ranks
    started = [pid for pid, line in below.items() if "lockstep.training.rank" in line]
    victim = [*started, *(pid for pid in below if psutil.Process(pid).ppid() in spare)][-1]
os.kill(victim, getattr(signal, f"SIG{args.signal}"))
print(f"SIG{args.signal} to {'a rank' if args.rank else 'the driver'} after step {args.after}")
