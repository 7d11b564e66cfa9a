"""An archive of the classes that Spark loads, which the tests' sessions start from.

Much of what a short session computes is loading some ten thousand classes. Java keeps them, parsed and verified, in a
file (class data sharing); with it `lockstep etl_logs` on 2000 rows takes 17 s of processor time in place of 26 (medians
of three, in turns, on a loaded machine). `python -m tests.spark.archive` makes the file where there is none. It is of
one Java and one Spark; any other leaves it unused.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, MutableMapping
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_JAVA = "spark.driver.extraJavaOptions"
_END_LIMIT_S = 900.0


def settings() -> Iterator[tuple[str, str]]:
    """Name and value of each line of the tests' spark-defaults.conf."""
    for line in (HERE / "spark-defaults.conf").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(" ")
        if name and not name.startswith("#"):
            yield name, value.strip()


def archive_path(environment: MutableMapping[str, str]) -> Path:
    """Where the archive of this Java and this Spark lies or is to lie: in the environment, whose jars it names."""
    release = Path(environment.get("JAVA_HOME", ""), "release")
    java = f"{release}\n{release.read_text(encoding='utf-8') if release.is_file() else ''}"
    key = hashlib.sha256(f"{java}\n{version('pyspark')}".encode()).hexdigest()[:16]
    return Path(sys.prefix) / f"spark-{key}.jsa"


def use_settings(environment: MutableMapping[str, str], java_option: str | None = None) -> None:
    """Have Sparks that start with this environment take the tests' settings, and `java_option` beside them.

    Without it: the archive, where there is one. Spark puts its folder of settings among the classes' places, and Java
    keeps no classes where one of these is a folder with files: so settings are properties of the Java process, and the
    folder is none that exists.
    """
    archive = archive_path(environment)
    if java_option is None and archive.is_file():
        java_option = f"-XX:SharedArchiveFile={archive}"
    if java_option is None:
        environment["SPARK_CONF_DIR"] = str(HERE)
        return
    told = dict(settings())
    # Java tells on its output why an archive is not used, where a test looks for what a job tells.
    options = [*told.pop(_JAVA).split(), "-Xlog:disable", "-Xlog:all=error:stderr", java_option]
    options += [f"-D{name}={value}" for name, value in told.items()]
    environment["SPARK_CONF_DIR"] = str(HERE / "no_settings")
    environment["SPARK_SUBMIT_OPTS"] = shlex.join(options)


def main() -> None:
    """Make the archive where there is none, by a session that does a little of what the tests' sessions do."""
    target = archive_path(os.environ)
    if target.is_file():
        return
    print("Keeping Spark's classes for the tests (half a minute, once) ...", flush=True)
    with tempfile.TemporaryDirectory(prefix=".spark-", dir=target.parent) as folder:
        made = Path(folder, "classes.jsa")
        use_settings(os.environ, f"-XX:ArchiveClassesAtExit={made}")
        ended = _load_classes(folder)
        if ended == 0 and made.is_file():
            made.replace(target)
        else:  # the tests take longer, no more
            print(f"Java kept none: exit code {ended}; the tests start without", flush=True)


def _load_classes(folder: str) -> int:
    """Returns the Java process' exit code."""
    from pyspark import SparkContext

    from lockstep import write_dataset
    from lockstep.spark.session import spark_session

    with spark_session("archive", "local[2]") as spark:
        rows = spark.range(50).selectExpr("id AS visit", "id % 24 AS hour", "id % 3 = 0 AS bought", "id * 3600 AS at")
        write_dataset(rows, f"{folder}/visits", id_columns=["visit"], label="bought", split="time:at:80/20")
        spark.read.format("tfrecord").option("split", "test").load(f"{folder}/visits").toPandas()
        rows.write.parquet(f"{folder}/rows")
        spark.read.parquet(f"{folder}/rows").groupBy("hour").count().collect()
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # at whose end the Java process ends, and writes
    return int(gateway.proc.wait(timeout=_END_LIMIT_S))


if __name__ == "__main__":
    main()
