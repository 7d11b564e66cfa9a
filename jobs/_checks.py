"""The checks of lockstep doctor: each returns what it found, or raises CheckFailed with the next step."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path

from lockstep.process.installed import ROOT
from lockstep.storage.errors import LockstepError
from lockstep.training.devices import host_gpus

LISTS = zipfile.Path(ROOT, "") if ROOT.is_file() else ROOT  # a driver of YARN's cluster mode runs from our zip
MINIMUM_PYTHON = (3, 11)
JAVA_MAJORS = ("17", "21")
FREE_DISK_GIB = 5  # for Spark's shuffle files and a local run
JAVA_LIMIT_S = 30.0
CUDA_PACKAGE = "nvidia-cudnn-cu12"  # one of the packages in requirements-gpu.txt
IMPORT_LIMIT_S = 300.0  # TensorFlow from a cold disk
OF_TRAINING = ("tensorflow", "keras", "optuna", "matplotlib")  # left out of the archive for ETL jobs
NOT_BY_ITSELF = ("petastorm",)  # importable only through lockstep.etl.petastorm
IMPORT_NAME = {"pillow": "PIL"}  # of others: the package's, with `_` for `-`
# Each is imported separately, so that all failures are named; a crash ends this process, not the doctor.
_IMPORT_ALL = """
import importlib, json, sys
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
print(json.dumps(failed))
"""


class CheckFailed(LockstepError):
    """One check of lockstep doctor did not pass."""


class CheckWarned(LockstepError):
    """One check found what may do harm later, or to some jobs only; it counts as passed."""


class CheckSkipped(LockstepError):
    """One check could not look, since an earlier one failed."""


def check_python() -> str:
    """Check that Python is 3.11 or later."""
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
        printed = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=JAVA_LIMIT_S).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckFailed(
            f"the Java of {where} does not start ({type(error).__name__})", next_step=next_step
        ) from error
    version = re.search(r'version "((\d+)[^"]*)"', printed)
    if version is None or version.group(2) not in JAVA_MAJORS:
        named = version.group(1) if version else "of an unknown version"
        raise CheckFailed(f"the Java of {where} is {named}; Spark needs 17 or 21", next_step=next_step)
    return f"Java {version.group(1)} from {where}"


def requirements(path: Path | zipfile.Path = LISTS / "requirements.txt") -> dict[str, str]:
    """Return the versions of each package that requirements.txt allows, such as `>=2.1.0,<2.5`."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
    else:  # an installation
        lines = [] if path.name != "requirements.txt" else importlib.metadata.requires("lockstep") or []
    found = (re.match(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?((?:[=<>]=?[\w.]+,?)*)$", line.strip()) for line in lines)
    return {match.group(1): match.group(2) for match in found if match}


def allows(ranges: str, version: str) -> bool:
    """Whether `ranges` as in requirements.txt hold `version`."""
    own = _numbers(version)
    for part in filter(None, ranges.split(",")):
        sign, limit = part[:2].rstrip("0123456789"), _numbers(part.lstrip("=<>"))
        if not {"==": own == limit, ">=": own >= limit, "<": own < limit}[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return 2.1.0 as (2, 1), so that it equals 2.1; parts from the first that is not a number are ignored."""
    found = [int(part) for part in re.findall(r"\d+", re.split(r"[a-z+-]", version)[0])]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def check_packages() -> str:
    """Every package of requirements.txt can be imported; untested versions are named."""
    wanted, wrong, untried, left_out = requirements(), [], [], []
    for package, ranges in wanted.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if ROOT.is_file() and package in ("pyspark", *OF_TRAINING):  # Spark brings its own, without a version
                left_out += [package] if package in OF_TRAINING else []
                continue
            wrong.append(f"{package} is missing")
            continue
        if not allows(ranges, found):
            untried.append(f"{package} {found} (tried: {ranges})")
    alone = [package for package in wanted if package not in (*NOT_BY_ITSELF, *left_out)]
    names = [IMPORT_NAME.get(package, package.replace("-", "_")) for package in alone]
    if not wrong:
        wrong = [f"{name} cannot be imported: {why}" for name, why in _failed_imports(names).items()]
    if wrong:
        raise CheckFailed(
            "; ".join(wrong), next_step="Run `make venv`, or pip install -r requirements.txt -c constraints.txt."
        )
    if left_out:
        raise CheckWarned(
            f"without {', '.join(left_out)}: an archive for ETL jobs, which trains nothing",
            next_step="For training give --archives $LOCKSTEP_TRAINING#python (docs/cluster.md).",
        )
    return f"{len(wanted)} packages can be imported" + (f"; never tried: {', '.join(untried)}" if untried else "")


def _failed_imports(names: Sequence[str]) -> dict[str, str]:
    command = [sys.executable, "-c", _IMPORT_ALL, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"one of them": f"not within {IMPORT_LIMIT_S:.0f} s"}
    if done.returncode:
        return {"one of them": f"Python ended with {done.returncode}: {done.stderr.strip()[-200:]}"}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_disk(folder: str | None = None) -> str:
    """Free space for Spark's spilled data and the ranks' temporary files."""
    path = folder or os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    free_gib = shutil.disk_usage(path).free / 2**30
    if free_gib < FREE_DISK_GIB:
        raise CheckFailed(
            f"{free_gib:.1f} GiB free under {path}; at least {FREE_DISK_GIB} are needed",
            next_step="Free some space, or point TMPDIR and SPARK_LOCAL_DIRS at a larger disk.",
        )
    return f"{free_gib:.0f} GiB free under {path}"


def check_gpus() -> str:
    """The GPUs of this host, and whether CUDA's libraries are installed; no GPU passes too."""
    found = host_gpus()
    if not found:
        return "no GPU on this host: ranks here compute on the CPU"
    names = ", ".join(f"{gpu.index} {gpu.name}" for gpu in found)
    try:
        importlib.metadata.version(CUDA_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{names}; not used without CUDA's libraries: pip install -r requirements-gpu.txt"
    return f"{names}; CUDA's libraries are installed"


def check_storage(url: str) -> str:
    """Write, sync, rename, read back and delete one small file under `url`, through the storage room."""
    from lockstep.storage.fs import filesystem
    from lockstep.storage.urls import join

    fs = filesystem(url)
    folder = join(url, f"_doctor-{uuid.uuid4().hex}")
    data = os.urandom(1 << 16)
    try:
        with fs.create(join(folder, "staged")) as writer:
            writer.write(data)
            writer.sync()
        fs.rename_new(join(folder, "staged"), join(folder, "published"))
        if fs.read_bytes(join(folder, "published")) != data:
            raise CheckFailed(f"{url} returned other bytes than were written", next_step="Check that file system.")
    finally:
        fs.discard(folder)
    if fs.exists(folder):
        raise CheckFailed(f"{folder} could not be deleted", next_step="Check the permissions of that folder.")
    return f"{url}: write, sync, rename, read back and delete work"
