"""`python -m jobs.doctor`: check whether this machine, Spark and HDFS can run Lockstep; one OK or FAIL line a check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from jobs._checks import check_disk, check_gpus, check_java, check_packages, check_python, check_spark, check_storage
from jobs._cli import JobParser, run_job
from jobs._site_checks import site_checks
from lockstep.storage.errors import LockstepError


def passes(name: str, check: Callable[[], str]) -> bool:
    """Run one check and print its line; True if it passed."""
    try:
        found = check()
    except LockstepError as error:
        first = f"{error.what} ({error.got})" if error.got else error.what
        print(f"FAIL {name}: {' '.join(first.split())}\n     next: {error.next_step or 'See the message.'}", flush=True)
        return False
    except Exception as error:  # a check that breaks has failed; the next ones still run
        print(f"FAIL {name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", flush=True)
        print("     next: Read the message, and correct what it names.", flush=True)
        return False
    print(f"OK   {name}: {found}", flush=True)
    return True


def main(argv: Sequence[str]) -> int:
    parser = JobParser("doctor", __doc__, "doctor")
    parser.add_argument(
        "--master", help="Spark master, for example local[2] or yarn; by default spark-submit's, else local[*]"
    )
    parser.add_argument(
        "--hdfs",
        metavar="URL",
        help="also write, sync, rename, read back and delete a small file and a dataset here: hdfs:// or webhdfs://",
    )
    options = parser.parse(argv)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", check_python),
        ("java", check_java),
        ("packages", check_packages),
        ("disk", check_disk),
        ("gpus", check_gpus),
        ("spark", lambda: check_spark(options.master, options.hdfs)),
    ]
    if options.hdfs:
        checks += site_checks(options.hdfs)
        checks.append(("hdfs", lambda: check_storage(options.hdfs)))
    passed = [passes(name, check) for name, check in checks]
    if all(passed):
        return 0
    print(f"{passed.count(False)} of {len(passed)} checks failed")
    return 1


if __name__ == "__main__":
    run_job(main)
