"""The oldest Spark that everything runs on, in a folder of its own which goes in front of the environment's packages.

`python -m tests.spark.oldest` installs it where it is not there yet. (Spark 3.5, without data sources in Python, is a
part of `make soak`.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = "4.0.0"


def packages() -> Path:
    """The folder that has pyspark and py4j, installed once."""
    target = ROOT / ".cache" / f"spark-{VERSION}"
    if target.is_dir():
        return target
    print(f"Installing Spark {VERSION} for the tests (a minute, once) ...", flush=True)
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, "packages")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(made)]
        # Captured, since pip complains that the environment's own Spark is another one.
        done = subprocess.run([*pip, f"pyspark=={VERSION}"], capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        os.rename(made, target)
    return target


if __name__ == "__main__":
    packages()
