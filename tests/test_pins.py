"""One version a part: constraints, environment, the wheel's jars, build.sbt.md and the cluster's pom agree."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

from lockstep.jobs._checks import allows, requirements
from tests.builders.pins import pins
from tests.cluster.jars import hadoop_version

ROOT = Path(__file__).resolve().parents[1]
SBT = (ROOT / "build.sbt.md").read_text(encoding="utf-8")
COORDINATE = re.compile(
    r'^\s*"(?P<group>[\w.]+)"\s+%%?\s+"(?P<name>[\w.-]+)"\s+%\s+"(?P<version>[\d.]+)"', re.MULTILINE
)


def bundled_jars() -> set[str]:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None and spec.origin is not None
    return {path.name for path in (Path(spec.origin).parent / "jars").glob("*.jar")}


def scala_version() -> str:
    found = re.search(r'scalaVersion := "([\d.]+)"', SBT)
    assert found is not None
    return found.group(1)


def test_scala_is_the_one_in_the_wheel() -> None:
    assert f"scala-library-{scala_version()}.jar" in bundled_jars()


@pytest.mark.parametrize("match", [pytest.param(m, id=m["name"]) for m in COORDINATE.finditer(SBT)])
def test_each_coordinate_is_a_jar_of_the_wheel_or_of_the_cluster(match: re.Match[str]) -> None:
    name, version = match["name"], match["version"]
    if name == "hadoop-client-minicluster":
        assert version == hadoop_version()
        return
    suffix = "_" + scala_version().rpartition(".")[0] if match["group"] == "org.apache.spark" else ""
    assert f"{name}{suffix}-{version}.jar" in bundled_jars()


def test_all_coordinates_were_found() -> None:
    assert len(list(COORDINATE.finditer(SBT))) == 7


def test_spark_and_hadoop_have_one_version_each() -> None:
    spark = pins()["pyspark"]
    assert {m["version"] for m in COORDINATE.finditer(SBT) if m["group"] == "org.apache.spark"} == {spark}
    assert f"| Spark | {spark} |" in SBT and f"| Hadoop client | {hadoop_version()} |" in SBT
    assert f"hadoop-client-api-{hadoop_version()}.jar" in bundled_jars()


@pytest.mark.parametrize("file", ["constraints.txt", "requirements-dev.txt"])
def test_the_environment_has_what_is_pinned(file: str) -> None:
    for package, version in pins(ROOT / file).items():
        assert importlib.metadata.version(package) == version, f"{package}: run `make venv`"


def lines_of(file: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("-r ")]


@pytest.mark.parametrize("file", ["constraints.txt", *sorted(path.name for path in ROOT.glob("requirements-*.txt"))])
def test_what_is_installed_for_tests_is_pinned_exactly(file: str) -> None:
    for line in lines_of(file):
        assert line == "tensorflow[and-cuda]" or re.fullmatch(r"[A-Za-z0-9_.-]+==[\w.]+", line), f"{file}: {line}"


def test_each_requirement_has_a_lowest_version_an_end_and_a_pin_between() -> None:
    assert list(requirements()) == list(pins()) and len(requirements()) == len(lines_of("requirements.txt"))
    for package, ranges in requirements().items():
        assert re.fullmatch(r">=[\d.]+,<[\d.]+|==[\d.]+", ranges), package
        assert allows(ranges, pins()[package]), package
