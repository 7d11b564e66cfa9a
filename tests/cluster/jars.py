"""The daemons' jars from Maven Central, fetched once into a user cache, and the Java that runs them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from lockstep.storage.errors import ConfigError

POM = Path(__file__).with_name("pom.xml")
GATEWAYS = POM.with_name("gateways.xml")
JAVA_VERSIONS = (17, 21)
FETCH_LIMIT_S = 600.0


def hadoop_version(pom: Path = POM) -> str:
    """The Hadoop version that the pom names."""
    found = re.search(r"<hadoop\.version>([^<]+)</hadoop\.version>", pom.read_text(encoding="utf-8"))
    assert found is not None, f"{pom} names no hadoop.version"
    return found.group(1)


def java_home() -> Path:
    """A JDK 17 or 21: JAVA_HOME, the PATH, then /usr/lib/jvm. Raises ConfigError where there is none."""
    on_path = shutil.which("java")
    places = [
        Path(os.environ["JAVA_HOME"]) if os.environ.get("JAVA_HOME") else None,
        Path(on_path).resolve().parent.parent if on_path else None,
        *sorted(Path("/usr/lib/jvm").glob("*")),
    ]
    for place in places:
        if place is not None and java_major(place) in JAVA_VERSIONS:
            return place
    raise ConfigError(
        "no Java that Hadoop and Spark start on",
        got=f"JAVA_HOME={os.environ.get('JAVA_HOME', '')!r}, java on the PATH: {on_path or 'none'}",
        allowed="a JDK 17 or 21",
        next_step="Run `make venv` (it installs one as root with apt), or install openjdk-17-jdk-headless.",
    )


def java_major(home: Path) -> int | None:
    """The major version of the Java under `home`, None where none starts."""
    try:
        told = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=30, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(\d+)', told)
    return int(found.group(1)) if found else None


def cache_folder(pom: Path = POM) -> Path:
    """Where the jars lie: a folder of its own for each content of the pom."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(pom.read_bytes()).hexdigest()[:8]
    return base / "lockstep" / f"hadoop-{hadoop_version(pom)}-{digest}"


def hadoop_jars(pom: Path = POM) -> list[Path]:
    """The jars of the daemons' class path, fetched at the first call; with GATEWAYS those of KMS and HttpFS.

    Raises ConfigError where Maven cannot.
    """
    folder = cache_folder(pom)
    if not folder.is_dir():
        _fetch(folder, pom)
    return sorted(folder.glob("*.jar"))


def _fetch(folder: Path, pom: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="_fetch-") as temporary:
        staging = Path(temporary) / "jars"
        command = [
            _maven(), "--quiet", "--batch-mode", "-Dstyle.color=never", f"--file={pom}", f"-DoutputDirectory={staging}",
            "-DincludeScope=runtime", "dependency:copy-dependencies",
        ]  # fmt: skip
        environment = {**os.environ, "JAVA_HOME": str(java_home())}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FETCH_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise _not_fetched(f"no answer within {FETCH_LIMIT_S:.0f} s") from None
        if done.returncode != 0 or not any(staging.glob("hadoop-*.jar")):
            raise _not_fetched("\n".join((done.stdout + done.stderr).strip().splitlines()[:5]))
        try:
            staging.rename(folder)  # one rename: another process sees all jars or none
        except OSError:
            if not folder.is_dir():  # else that other process was first, with the same jars
                raise


def _maven() -> str:
    found = shutil.which("mvn")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (["update"], ["install", "--yes", "--no-install-recommends", "maven"]):
            subprocess.run(["apt-get", "-qq", *arguments], env=environment, timeout=FETCH_LIMIT_S, capture_output=True)
        found = shutil.which("mvn")
    if found is None:
        raise ConfigError(
            "Maven is missing; it fetches the jars of the test cluster",
            got="no mvn on the PATH, and apt could not install it",
            allowed="Maven 3.6 or later",
            next_step="Install Maven (Debian: apt-get install maven) and run the command again.",
        )
    return found


def _not_fetched(told: str) -> ConfigError:
    return ConfigError(
        "Maven could not fetch the jars of the test cluster",
        got=told,
        allowed="Maven Central, or a mirror that ~/.m2/settings.xml names",
        next_step=f"Try `mvn --file={POM} dependency:copy-dependencies` by hand.",
    )
