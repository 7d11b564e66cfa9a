"""Runs and ETL jobs among random faults for a while: the short form of the campaign `benchmarks.random_kills`.

`python -m tests.soak.kills [--minutes 20] [--seed N]` begins no run after that time. Without a seed it is the day's
number times 1,000, so that the seeds of each day are new ones; a row that failed names its own, which repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks import random_kills

MINUTES = 20.0
RUNS = 1000  # more than there is time for


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--seed", type=int, default=int(time.time() // 86_400) * RUNS)
    args = parser.parse_args(argv)
    return random_kills.main(["--runs", str(RUNS), "--minutes", str(args.minutes), "--seed", str(args.seed)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
