"""Read and write MB/s on a real HDFS: hdfs-native, WebHDFS, and libhdfs if pyarrow finds it.

    python -m benchmarks.storage_throughput [--sizes MB...] [--repeats N]

Starts a NameNode and two DataNodes (replication 2, all on this machine). Every way writes and reads the same random
bytes, in pieces of 4 MiB, through the interface that the jobs use; the two libraries also without it. In turns, the
first round dropped; compare the ratio. Then the further costs of an upload: comparing a file by HDFS's checksum or by
reading it back, and small files one or several at a time. 1 MB is 10^6 bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import hdfs_native
import numpy as np
from hdfs import InsecureClient

from lockstep.storage.fs import filesystem
from lockstep.storage.publish import file_digest
from lockstep.storage.settings import hadoop_user
from lockstep.storage.upload import find_files, same_as, upload
from lockstep.storage.urls import join
from tests.cluster.daemons import Cluster
from tests.cluster.jars import hadoop_jars, hadoop_version, java_home

PIECE_BYTES = 4 << 20
SMALL_FILES, SMALL_BYTES = 32, 1_000_000
Way = tuple[Callable[[str, bytes], None], Callable[[str], int]]


def ours(base: str) -> Way:
    """Write and read by lockstep.storage.fs below the URL `base`."""
    fs = filesystem(base)

    def write(name: str, data: bytes) -> None:
        with fs.create(join(base, name), exclusive=False) as writer:
            for start in range(0, len(data), PIECE_BYTES):
                writer.write(data[start : start + PIECE_BYTES])

    def read(name: str) -> int:
        with fs.open_read(join(base, name)) as file:
            return sum(map(len, iter(lambda: file.read(PIECE_BYTES), b"")))

    return write, read


def hdfs_alone(address: str) -> Way:
    """The `hdfs` package by itself, as its documentation shows it."""
    client = InsecureClient(f"http://{address}", user=hadoop_user())

    def write(name: str, data: bytes) -> None:
        with client.write(f"/alone/{name}", overwrite=True) as writer:
            for start in range(0, len(data), PIECE_BYTES):
                writer.write(data[start : start + PIECE_BYTES])

    def read(name: str) -> int:
        with client.read(f"/alone/{name}", chunk_size=PIECE_BYTES) as pieces:
            return sum(map(len, pieces))

    return write, read


def hdfs_native_alone(url: str) -> Way:
    """hdfs-native by itself."""
    client = hdfs_native.Client(url)

    def write(name: str, data: bytes) -> None:
        with client.create(f"/native-alone/{name}", hdfs_native.WriteOptions(overwrite=True)) as writer:
            for start in range(0, len(data), PIECE_BYTES):
                writer.write(data[start : start + PIECE_BYTES])

    def read(name: str) -> int:
        reader = client.read(f"/native-alone/{name}")
        return sum(map(len, iter(lambda: reader.read(PIECE_BYTES), b"")))

    return write, read


def libhdfs(cluster: Cluster) -> Way | str:
    """Return pyarrow on libhdfs, where ARROW_LIBHDFS_DIR names its folder, or why it is not there."""
    import pyarrow.fs

    os.environ.setdefault("JAVA_HOME", str(java_home()))
    # libhdfs looks for this one under its own name, and the daemons' jars have it under another.
    spark = importlib.util.find_spec("pyspark")
    assert spark is not None and spark.origin is not None
    lang = Path(spark.origin).parent.glob("jars/commons-lang3-*.jar")
    os.environ["CLASSPATH"] = os.pathsep.join([cluster.conf_dir, *map(str, [*hadoop_jars(), *lang])])
    try:
        hdfs = pyarrow.fs.HadoopFileSystem("127.0.0.1", cluster.ports["namenode"], replication=2)
    except OSError as error:
        return " ".join(str(error).split())

    def write(name: str, data: bytes) -> None:
        with hdfs.open_output_stream(f"/libhdfs/{name}") as stream:
            for start in range(0, len(data), PIECE_BYTES):
                stream.write(data[start : start + PIECE_BYTES])

    def read(name: str) -> int:
        with hdfs.open_input_stream(f"/libhdfs/{name}") as stream:
            return sum(map(len, iter(lambda: stream.read(PIECE_BYTES), b"")))

    return write, read


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def summary(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):8.1f} ({min(values):.1f} - {max(values):.1f})"


def compare(ways: dict[str, Way], data: bytes, repeats: int) -> None:
    """Print MB/s of each way for a file of this content, and the ratio to the first way, round by round."""
    rates: dict[tuple[str, str], list[float]] = {}
    size = len(data) / 1e6
    for _ in range(repeats + 1):
        for name, (write, read) in ways.items():
            rates.setdefault(("write", name), []).append(size / seconds(partial(write, "f", data)))
            rates.setdefault(("read", name), []).append(size / seconds(partial(read, "f")))
    first = next(iter(ways))
    for (verb, name), values in rates.items():
        base = rates[verb, first][1:]
        ratios = [value / other for value, other in zip(values[1:], base, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        print(f"{size:6.0f} MB  {verb:5}  {name:18} {summary(values[1:]):28} MB/s   ratio {spread}", flush=True)


def comparing(base: str, path: Path, repeats: int) -> None:
    """Print what it takes to find a file on HDFS equal to a local one, by either way."""
    fs, size = filesystem(base), path.stat().st_size / 1e6

    def by_checksum() -> None:
        stored = fs.stored_checksum(join(base, "f"))
        assert stored is not None
        with path.open("rb") as file:
            assert same_as(stored, file)

    def by_reading() -> None:
        assert file_digest(fs, join(base, "f")) == file_digest(filesystem(str(path)), str(path))

    ways = {"HDFS's checksum": by_checksum, "reading back": by_reading}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, work in ways.items():
            spent[name].append(1000 * seconds(work))
    for name, values in spent.items():
        print(f"{size:6.0f} MB  equal  {name:16} {summary(values[1:]):28} ms", flush=True)


def small_files(bases: dict[str, str], folder: Path, repeats: int) -> None:
    """Print the files/s of uploads of small files, by way and number at a time."""
    for number in range(SMALL_FILES):
        (folder / f"{number:03d}").write_bytes(os.urandom(SMALL_BYTES))
    rates: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats + 1):
        for name, base in bases.items():
            for parallel in (1, 2, 4, 8):
                target = join(base, f"small-{repeat}-{parallel}")
                items = find_files([str(folder)], target)
                spent = seconds(lambda: upload(items, target, parallel=parallel))  # noqa: B023  # called at once
                rates.setdefault((name, parallel), []).append(SMALL_FILES / spent)
    for (name, parallel), values in rates.items():
        print(f"     1 MB  upload {name:12} {parallel} at a time {summary(values[1:]):28} files/s", flush=True)


def main(argv: list[str]) -> int:
    """Print the tables; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 64, 512], metavar="MB")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after a dropped one")
    args = parser.parse_args(argv)
    names = ("hdfs", "hdfs-native", "requests", "urllib3", "pyarrow")
    print(f"python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in names)}")
    print(
        f"Hadoop {hadoop_version()}, replication 2, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f} at the start,"
        f" {args.repeats} rounds after a dropped one"
    )
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder) / "hadoop").start_hdfs()
        try:
            measure(cluster, Path(folder), args.sizes, args.repeats)
        finally:
            cluster.stop()
    return 0


def measure(cluster: Cluster, folder: Path, sizes_mb: list[int], repeats: int) -> None:
    """All tables, on a cluster that runs."""
    web = f"webhdfs://127.0.0.1:{cluster.ports['namenode-http']}/web"
    bases = {"hdfs-native": join(cluster.hdfs_url, "native"), "WebHDFS": web}
    ways = {name: ours(base) for name, base in bases.items()}
    ways["hdfs-native alone"] = hdfs_native_alone(cluster.hdfs_url)
    ways["hdfs package alone"] = hdfs_alone(f"127.0.0.1:{cluster.ports['namenode-http']}")
    third = libhdfs(cluster)
    if isinstance(third, str):
        print(f"libhdfs: {third}")
    else:
        ways["libhdfs"] = third
    random = np.random.default_rng(0)
    for size_mb in sizes_mb:
        compare(ways, random.bytes(size_mb * 1_000_000), repeats)
    for size_mb in sizes_mb:
        local = folder / "f"
        local.write_bytes(random.bytes(size_mb * 1_000_000))
        ways["WebHDFS"][0]("f", local.read_bytes())
        comparing(web, local, repeats)
    (folder / "small").mkdir()
    small_files(bases, folder / "small", min(repeats, 3))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
