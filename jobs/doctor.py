"""`lockstep doctor`: can this machine, Spark, YARN and HDFS run Lockstep? One line a check: OK, WARN or FAIL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.jobs._checks import (
    CheckSkipped,
    CheckWarned,
    check_disk,
    check_gpus,
    check_java,
    check_packages,
    check_python,
    check_storage,
)
from lockstep.jobs._cli import JobParser, run_job
from lockstep.jobs._site_checks import site_checks
from lockstep.storage.errors import LockstepError


def passes(name: str, check: Callable[[], str]) -> bool:
    """Run one check and print its line; False if it failed."""
    try:
        found = check()
    except CheckSkipped as error:
        print(f"SKIP {name}: {error.what}", flush=True)
        return True
    except LockstepError as error:
        first = f"{error.what} ({error.got})" if error.got else error.what
        warned = isinstance(error, CheckWarned)
        print(f"{'WARN' if warned else 'FAIL'} {name}: {' '.join(first.split())}", flush=True)
        print(f"     next: {error.next_step or 'See the message.'}", flush=True)
        return warned
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
    from lockstep.jobs._spark_checks import SparkChecks, check_modules

    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", check_python),
        ("java", check_java),
        ("packages", check_packages),
        ("disk", check_disk),
        ("gpus", check_gpus),
        ("modules", check_modules),
    ]
    if options.hdfs:
        checks += site_checks(options.hdfs)
        checks.append(("hdfs", lambda: check_storage(options.hdfs)))
    with SparkChecks(options.master, options.hdfs) as spark:
        passed = [passes(name, check) for name, check in checks + spark.checks()]
    if all(passed):
        return 0
    print(f"{passed.count(False)} of {len(passed)} checks failed")
    return 1


if __name__ == "__main__":
    run_job(main)
