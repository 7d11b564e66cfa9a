"""docs/architecture.md: the files that a batch and a log line pass exist, are counted, and stay few."""

from __future__ import annotations

import re

import pytest

from tests.docs.steps import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILE = re.compile(r"`([a-z_]+(?:/[a-z_]+)+\.py)`")
TRIPS = {"## The trip of a batch": 48, "## The trip of a log line": 27}  # the most files of each


def files_of(trip: str) -> set[str]:
    section = TEXT.partition(trip)[2].partition("\n## ")[0]
    tops = tuple(f"{folder}/" for folder in ("jobs", "etl", "lockstep"))
    return {file if file.startswith(tops) else f"training/{file}" for file in FILE.findall(section)}


@pytest.mark.parametrize("trip", TRIPS)
def test_the_files_of_a_trip_exist_and_are_counted(trip: str) -> None:
    files = files_of(trip)
    assert sorted(file for file in files if not (ROOT / file).is_file()) == []
    assert f": {len(files)} files." in TEXT.partition(trip)[2].partition("\n## ")[0]
    assert len(files) <= TRIPS[trip]
