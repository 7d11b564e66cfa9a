"""The fuzz targets in short: their seeds, what fuzzing once found, and the same few inputs near to these each time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from lockstep.features.images.decode import read_header
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.formats.tfrecord import frame, parse_records
from tests.fuzz import __main__ as fuzzing
from tests.fuzz.mutate import mutated
from tests.fuzz.target import Target, assert_told
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
NEAR = 25
LONGEST_S = 60.0  # only against a hang: on a loaded machine a compiled kernel takes seconds to come


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_no_input_crashes_hangs_or_is_read_in_two_ways(target: Target) -> None:
    seeds = target.seeds()
    found = [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))]
    for data in [b"", *seeds, *found, *mutated([*seeds, *found], NEAR, target.max_bytes)]:
        begin = time.monotonic()
        target.run(data)
        assert time.monotonic() - begin < LONGEST_S, data[:200]


def test_what_was_found_belongs_to_a_target() -> None:
    assert {path.parent.name for path in CORPUS.glob("*/*")} <= set(TARGETS)


def test_seeds_are_as_they_should_be() -> None:
    """Else fuzzing would begin outside the door."""
    assert all(len(seed) <= target.max_bytes for target in TARGETS.values() for seed in target.seeds())
    assert all(read_header(seed) is not None for seed in TARGETS["images"].seeds())


def test_a_target_notices_readers_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fuzz import record_targets

    def last_lost(body: bytes, **place: str) -> list[memoryview]:
        return parse_records(body, **place)[:-1]  # type: ignore[arg-type] # places of any kind

    monkeypatch.setattr(record_targets, "parse_records", last_lost)
    with pytest.raises(AssertionError):
        record_targets.tfrecord_files(b"\xff" + frame(b"x"))
    with pytest.raises(CorruptionError):
        parse_records(frame(b"x")[:-1], file="f")


def test_without_atheris_nothing_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "tars"])
    monkeypatch.setattr(fuzzing, "find_spec", lambda name: None)
    assert fuzzing.main() == 2 and "atheris is missing" in capsys.readouterr().err


def test_a_target_that_never_ends_is_a_find() -> None:
    code, out, err = fuzzing._run(["sh", "-c", "echo in; exec sleep 60"], 2)
    assert code == 1 and out == "in\n" and "not done after 2 s" in err


def test_each_part_of_an_error_is_asked_for() -> None:
    told = {"got": "x", "allowed": "y", "next_step": "z"}
    assert_told(DataError("w", **told))
    for part in told:
        with pytest.raises(AssertionError, match=f"says nothing of {part}"):
            assert_told(DataError("w", **{**told, part: ""}))
