"""Decoding speed of the whole image job: JPEGs of a tar to published shards, against a loop that decodes them.

    python -m benchmarks.decode_jpeg TAR... [--limit N] [--upscale N] [--repeats N] [--cores N] [--format FORMAT]
        [--all]

TAR are archives of class folders, such as CIFAR-10's JPEGs; they are first unpacked to one plain archive. Three rounds,
interleaved, the first dropped:
  loop   processes, one for each core, that hold their share of the files in memory and decode it with Pillow in the
         common way: Image.open(...).convert("RGB") and numpy.asarray, with nothing kept
  ours   the same with lockstep.features.images.decode, which the job uses
  job    lockstep.etl.images.job.run in a warm session: scan, decode, split, sort, encode, checksums, manifest
  rows   the same, with all rows through Spark, as for sources that lockstep.etl.images.planned refuses (with --all)
  early  the same, with images as pixels from the first task on (with --all)
The figure to compare is the loop's share of a job: of its wall time, and of CPU time, which other work on the machine
changes less. The jobs must write the same manifest. With --upscale N the JPEGs are N times as tall and wide, and the
job resizes them to 32x32.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import platform
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import PropertyMock, patch

import numpy as np
import PIL
import psutil
import pyarrow as pa
import pyspark
from PIL import Image
from pyspark.sql import SparkSession

from lockstep.etl.images import job as image_sets
from lockstep.etl.images.config import ImagesConfig
from lockstep.features.images.decode import Limits, decode
from lockstep.spark.session import spark_session
from lockstep.storage.documents import sha256_hex

SIDE = 32


def upscaled(data: bytes, times: int) -> bytes:
    """The JPEG, `times` as tall and wide."""
    with Image.open(io.BytesIO(data)) as image:
        file = io.BytesIO()
        image.resize((image.width * times, image.height * times)).save(file, "JPEG", quality=75)
    return file.getvalue()


def plain_archive(sources: list[str], target: str, limit: int, upscale: int) -> list[bytes]:
    """One plain archive of the first `limit` files of each source, made larger; returns the files."""
    files = []
    with tarfile.open(target, "w") as out:
        for source in sources:
            with tarfile.open(source) as tar:
                members = (member for member in tar if member.isfile())
                for member, _ in zip(members, range(limit), strict=False):
                    file = tar.extractfile(member)
                    assert file is not None
                    data = file.read()
                    files.append(data if upscale == 1 else upscaled(data, upscale))
                    member.size = len(files[-1])
                    out.addfile(member, io.BytesIO(files[-1]))
    return files


def as_people_do(data: bytes) -> np.ndarray:
    """One JPEG as RGB pixels."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def as_we_do(data: bytes) -> np.ndarray:
    """Decode by the job's own decoder."""
    return decode(data, 3, Limits())


def serve(files: list[bytes], pipe: Connection) -> None:
    """Decode all files each time the name of a way to do it comes; answer when done."""
    ways = {"loop": as_people_do, "ours": as_we_do}
    for name in iter(pipe.recv, ""):
        way = ways[name]
        for data in files:
            way(data)
        pipe.send(len(files))


class Decoders:
    """Processes that wait with their share of the files, so that neither start nor transfer is timed."""

    def __init__(self, files: list[bytes], cores: int) -> None:
        context = get_context("spawn")
        self._pipes, self._processes = [], []
        for core in range(cores):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(files[core::cores], theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, way: str) -> None:
        """Decode all files; returns when all are done."""
        for pipe in self._pipes:
            pipe.send(way)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send("")
            process.join()


def cpu_seconds() -> tuple[float, float]:
    """Processor time of Python (this process, decoders, Spark's workers) and of Java."""
    found = [0.0, 0.0]
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        found[process.name() == "java"] += sum(process.cpu_times()[:2])
    return found[0], found[1]


def timed(work: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of `work`: wall, all processors, those of them that were Java's."""
    start, (python, java) = time.perf_counter(), cpu_seconds()
    work()
    ended, (python_now, java_now) = time.perf_counter(), cpu_seconds()
    return ended - start, python_now - python + java_now - java, java_now - java


def summary(times: list[tuple[float, float, float]], count: int) -> str:
    """Median, spread and rate in words."""
    wall, used, java = (statistics.median(column) for column in zip(*times, strict=True))
    walls, all_used = ([row[n] for row in times] for n in (0, 1))
    spread = f"{wall:6.2f} s ({min(walls):.2f} - {max(walls):.2f}) {count / wall:8.0f} images/s"
    return f"{spread}, processors {used:6.2f} s ({min(all_used):.2f} - {max(all_used):.2f}), Java {java:.2f} s of it"


JOBS: dict[str, dict[str, bool]] = {"job": {}, "rows": {"may_be_planned": False}}
JOBS["early"] = {**JOBS["rows"], "late": False}


def job(spark: SparkSession, config: ImagesConfig, way: str, count: int, digests: set[str]) -> None:
    """The whole job, every image of which must be written."""
    with ExitStack() as stack:
        for name, value in JOBS[way].items():
            stack.enter_context(patch.object(ImagesConfig, name, PropertyMock(return_value=value)))
        manifest = image_sets.run(spark, config)
    assert manifest.counts.written == count
    digests.add(sha256_hex(manifest.to_bytes()))
    assert len(digests) == 1, "each way gives the same dataset"


def main(argv: list[str]) -> int:
    """Print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", metavar="TAR")
    parser.add_argument("--limit", type=int, default=1 << 30, help="files of each archive")
    parser.add_argument("--upscale", type=int, default=1, metavar="N", help="enlarge the JPEGs N times (default 1)")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds, after a dropped one")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--format", default="tfrecord", dest="fmt")
    parser.add_argument("--all", action="store_true", help="also measure the other ways of the job")
    args = parser.parse_args(argv)
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", "--driver-memory 2g pyspark-shell")
    print(f"python {platform.python_version()}, pillow {PIL.__version__}, pyspark {pyspark.__version__},", end=" ")
    print(f"pyarrow {pa.__version__}, {args.cores} cores, load {os.getloadavg()[0]:.1f} at the start")
    with tempfile.TemporaryDirectory() as folder, spark_session("decode_jpeg", f"local[{args.cores}]") as spark:
        archive = str(Path(folder) / "all.tar")
        files = plain_archive(args.archives, archive, args.limit, args.upscale)
        mean = sum(map(len, files)) / len(files)
        print(f"{len(files)} JPEGs of {mean:.0f} bytes on average, {os.path.getsize(archive) / 1e6:.0f} MB of archive")
        decoders = Decoders(files, args.cores)
        jobs = list(JOBS) if args.all else ["job"]
        times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ("loop", "ours", *jobs)}
        digests: set[str] = set()
        for number in range(args.repeats + 1):
            for way in ("loop", "ours"):
                times[way].append(timed(partial(decoders.run, way)))
            for way in jobs:
                output = str(Path(folder) / f"{way}{number}")
                config = ImagesConfig(
                    source="tar", inputs=(archive,), output=output, image_size=(SIDE, SIDE), fmt=args.fmt, split="80/20"
                )
                times[way].append(timed(partial(job, spark, config, way, len(files), digests)))
            walls = ", ".join(f"{way} {rows[-1][0]:.1f} s" for way, rows in times.items())
            print(f"round {number}: {walls}", flush=True)
        decoders.close()
    counted = {way: rows[1:] for way, rows in times.items()}
    for way, rows in counted.items():
        print(f"{way:5s} {summary(rows, len(files))}")
    for way, whole in itertools.product(("loop", "ours"), jobs):
        shares = [
            [mine[n] / all_of[n] for mine, all_of in zip(counted[way], counted[whole], strict=True)] for n in (0, 1)
        ]
        wall, used = (f"{statistics.median(share):.2f} ({min(share):.2f} - {max(share):.2f})" for share in shares)
        print(f"`{way}` takes {wall} of the wall time of `{whole}`, {used} of its processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
