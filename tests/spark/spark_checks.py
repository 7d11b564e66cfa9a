"""The checks of lockstep doctor that concern Spark, without the others: `spark_checks.py [MASTER [SECONDS]]`."""

from collections.abc import Sequence

from lockstep.jobs import _spark_checks
from lockstep.jobs._cli import run_job
from lockstep.jobs.doctor import passes


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        _spark_checks.LIMIT_S = float(argv[1])
    with _spark_checks.SparkChecks(argv[0] if argv else None, None) as spark:
        passed = [passes(name, check) for name, check in spark.checks()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    run_job(main)
