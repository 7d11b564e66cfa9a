"""What the DAG's tasks call in place of spark-submit: `_spark_submit.py [OPTION VALUE ...] JOB.py [ARGUMENT ...]`.

Upload is a copy, ETL runs by the real spark-submit, verification by this Python; of the other jobs only the arguments
are parsed, and the dataset must exist. With LOCKSTEP_ALL the real one runs all but upload. Each call is appended to
$LOCKSTEP_CALLS.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int:
    """Run or check one call; returns its exit code."""
    place = next(number for number, word in enumerate(argv) if word.endswith(".py"))
    job, arguments = Path(argv[place]).stem, argv[place + 1 :]
    with open(os.environ["LOCKSTEP_CALLS"], "a", encoding="utf-8") as file:
        file.write(json.dumps([job, argv[:place], arguments]) + "\n")
    if job == "upload":  # its target is HDFS alone
        flags = dict(argument.split("=", 1) for argument in arguments)
        shutil.copytree(flags["--input"], flags["--output"], dirs_exist_ok=True)
        return 0
    if job == "etl_logs" or "LOCKSTEP_ALL" in os.environ:
        os.execv(Path(sys.executable).with_name("spark-submit"), ["spark-submit", *argv])
    if job == "verify":
        os.execv(sys.executable, [sys.executable, *argv[place:]])
    sys.path.insert(0, str(ROOT))
    args = importlib.import_module(f"lockstep.jobs.{job}").parser().parse(arguments)
    (dataset,) = args.datasets if job == "train" else [args.dataset]
    return 0 if Path(dataset, "_manifest.json").is_file() else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
