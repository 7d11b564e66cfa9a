"""The check of lockstep doctor that concerns YARN, alone; exits with 1 on a FAIL."""

from collections.abc import Sequence

from lockstep.jobs._cli import run_job
from lockstep.jobs._spark_checks import check_yarn
from lockstep.jobs.doctor import passes


def main(argv: Sequence[str]) -> int:
    return 0 if passes("yarn", check_yarn) else 1


if __name__ == "__main__":
    run_job(main)
