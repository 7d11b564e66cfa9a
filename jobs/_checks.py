"""The checks of jobs.doctor: each returns what it found, or raises CheckFailed with the next step."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from storage.errors import LockstepError
from training.devices import host_gpus

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 11)
JAVA_MAJORS = ("17", "21")
FREE_DISK_GIB = 5  # Spark's shuffle files and a local run; the environments are there already
JAVA_LIMIT_S = 30.0
CUDA_PACKAGE = "nvidia-cudnn-cu12"  # one of those that requirements-gpu.txt brings
IMPORT_NAME = {"google-crc32c": "google_crc32c", "hdfs-native": "hdfs_native", "pillow": "PIL"}


class CheckFailed(LockstepError):
    """One check of jobs.doctor did not pass."""


def check_python() -> str:
    """Python 3.11 or later."""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MINIMUM_PYTHON:
        raise CheckFailed(f"Python {found}", next_step="Make the environment with Python 3.11 or later.")
    return f"Python {found}"


def check_java() -> str:
    """The Java that Spark would start: JAVA_HOME's, else the PATH's."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    where = "JAVA_HOME" if home else "the PATH"
    next_step = "Install a JDK 17 or 21 (Debian: openjdk-17-jdk-headless), or point JAVA_HOME at one."
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=JAVA_LIMIT_S).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckFailed(
            f"the Java of {where} does not start ({type(error).__name__})", next_step=next_step
        ) from error
    version = re.search(r'version "((\d+)[^"]*)"', told)
    if version is None or version.group(2) not in JAVA_MAJORS:
        named = version.group(1) if version else "of an unknown version"
        raise CheckFailed(f"the Java of {where} is {named}; Spark needs 17 or 21", next_step=next_step)
    return f"Java {version.group(1)} from {where}"


def pins(path: Path = ROOT / "requirements.txt") -> dict[str, str]:
    """Package -> version, as requirements.txt pins them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==(\S+)", line) for line in lines)
    return {match.group(1): match.group(2) for match in found if match}


def check_pins() -> str:
    """Every pinned package is there, in its pinned version, and its module can be found."""
    if not (ROOT / "requirements.txt").is_file():
        raise CheckFailed("requirements.txt is not beside jobs/", next_step="Run from a checkout of the repository.")
    wrong = []
    pinned = pins()
    for package, version in pinned.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{package}=={version} is missing")
            continue
        if found != version:
            wrong.append(f"{package} is {found}, pinned {version}")
        elif importlib.util.find_spec(IMPORT_NAME.get(package, package)) is None:
            wrong.append(f"{package} is installed but cannot be imported")
    if wrong:
        raise CheckFailed("; ".join(wrong), next_step="Run `make venv`, or pip install -r requirements.txt.")
    return f"{len(pinned)} pinned packages are there"


def check_disk(folder: str | None = None) -> str:
    """Room where Spark spills and ranks keep their scratch files."""
    place = folder or os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    free_gib = shutil.disk_usage(place).free / 2**30
    if free_gib < FREE_DISK_GIB:
        raise CheckFailed(
            f"{free_gib:.1f} GiB free under {place}; {FREE_DISK_GIB} are wanted",
            next_step="Free some, or point TMPDIR and SPARK_LOCAL_DIRS at a larger disk.",
        )
    return f"{free_gib:.0f} GiB free under {place}"


def check_gpus() -> str:
    """The GPUs of this host, and whether CUDA's libraries are there for them; none is right too."""
    found = host_gpus()
    if not found:
        return "no GPU on this host: ranks here compute on the CPU"
    names = ", ".join(f"{gpu.index} {gpu.name}" for gpu in found)
    try:
        importlib.metadata.version(CUDA_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{names}; not used without CUDA's libraries: pip install -r requirements-gpu.txt"
    return f"{names}; CUDA's libraries are installed"


def _rank_probe(_: object) -> list[tuple[int, str, list[str]]]:
    """Runs in each task of the barrier stage: meet the other, tell the Python version and the GPUs given to it."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    context.barrier()
    gpu = context.resources().get("gpu")
    return [(context.partitionId(), ".".join(map(str, sys.version_info[:2])), gpu.addresses if gpu else [])]


def check_spark(master: str | None) -> str:
    """Spark starts, two tasks meet in a barrier stage, and the executors' Python is the driver's."""
    from jobs._session import spark_session

    with spark_session("doctor", master) as spark:
        context = spark.sparkContext
        cluster = str(context.master)
        where = f"Spark {spark.version} on {cluster}"
        if cluster.startswith("local") and context.defaultParallelism < 2:
            raise CheckFailed(
                f"{where} has one task slot; a barrier stage of 2 ranks needs two", next_step="Use --master 'local[2]'."
            )
        told = context.parallelize(range(2), 2).barrier().mapPartitions(_rank_probe).collect()
    ours = ".".join(map(str, sys.version_info[:2]))
    others = sorted({version for _, version, _ in told} - {ours})
    if others:
        raise CheckFailed(
            f"the executors run Python {', '.join(others)}, the driver {ours}",
            next_step="Set PYSPARK_PYTHON (spark.pyspark.python) to the same minor version on every node.",
        )
    gpus = "; GPUs by task: " + " | ".join(",".join(each) for *_, each in told) if any(told[0][2]) else ""
    return f"{where}: a barrier stage of 2 tasks met, Python {ours} everywhere{gpus}"


def check_storage(url: str) -> str:
    """Write, sync, rename, read back and delete one small file under `url`, through the storage room."""
    from storage.fs import filesystem, join

    fs = filesystem(url)
    folder = join(url, f"_doctor-{uuid.uuid4().hex}")
    data = os.urandom(1 << 16)
    try:
        with fs.create(join(folder, "staged")) as writer:
            writer.write(data)
            writer.sync()
        fs.rename_new(join(folder, "staged"), join(folder, "published"))
        if fs.read_bytes(join(folder, "published")) != data:
            raise CheckFailed(f"{url} gave back other bytes than were written", next_step="Check that file system.")
    finally:
        fs.discard(folder)
    if fs.exists(folder):
        raise CheckFailed(f"{folder} could not be deleted", next_step="Check the permissions of that folder.")
    return f"{url}: write, sync, rename, read back and delete work"
