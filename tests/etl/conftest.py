"""What the tests of ETL share: small logs and image sets, and a look at what was published."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
NASA = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
ELASTIC = ROOT / "data" / "weblogs" / "elastic_apache_combined_8001-9500.log.gz"
OPEN_BANDIT = ROOT / "data" / "open-bandit" / "bts_men_first2000.csv.gz"


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a process of its own, with these variables of the environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def large_offsets(spark: SparkSession) -> Iterator[None]:
    """Have Spark send strings and bytes to Python tasks with 64-bit offsets."""
    key = "spark.sql.execution.arrow.useLargeVarTypes"
    spark.conf.set(key, "true")
    try:
        yield
    finally:
        spark.conf.unset(key)


def nasa_lines(count: int) -> bytes:
    """The first lines of the NASA day, as bytes."""
    with gzip.open(NASA) as file:
        return b"".join(line for line, _ in zip(file, range(count), strict=False))


@pytest.fixture(scope="module")
def few_partitions(spark: SparkSession) -> Iterator[None]:
    """Shuffles of small data in few tasks."""
    before = str(spark.conf.get("spark.sql.shuffle.partitions"))
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield
    spark.conf.set("spark.sql.shuffle.partitions", before)


@pytest.fixture(scope="session")
def small_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 lines of the NASA day, four of them made unreadable."""
    lines = nasa_lines(4000).split(b"\n")
    for number in (100, 1500, 1501, 3999):
        lines[number] = b"\xff" + lines[number]
    path = tmp_path_factory.mktemp("log") / "access.log"
    path.write_bytes(b"\n".join(lines))
    return path


def write_images(
    folder: Path, stem: str, count: int, *, packed: bool = False, bad_labels: tuple[int, ...] = ()
) -> None:
    """A pair of IDX files: 6 x 4 images whose pixels follow from their number, labels number % 3 (9 where bad)."""
    pixels = (np.arange(count * 24) % 251).astype(np.uint8).tobytes()
    labels = np.arange(count, dtype=np.uint8) % 3
    labels[list(bad_labels)] = 9
    images = struct.pack(">4I", 0x803, count, 6, 4) + pixels
    classes = struct.pack(">2I", 0x801, count) + labels.tobytes()
    for kind, content in (("images-idx3", images), ("labels-idx1", classes)):
        path = folder / f"{stem}-{kind}-ubyte"
        if packed:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
        else:
            path.write_bytes(content)
