"""What an outage puts into a log and into errors: who does not serve and why, and for how long."""

from __future__ import annotations

import logging
import time
from typing import NoReturn

import pytest

from lockstep.storage.errors import NotFoundError, RetryableStorageError, StorageAwayError, StorageError
from lockstep.storage.files import deadlines


def test_an_outage_is_named_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(deadlines, "_named_at", {})
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    error = StorageError("cannot list it", got="Connection refused")
    with caplog.at_level(logging.WARNING):
        for what, whom in (("`list a`", "A"), ("`find b`", "A"), ("`list a`", "B")):
            deadlines.Backoff(60.0).wait_or_raise(error, what=what, whom=whom)
        now += deadlines.NAMED_EVERY_S + 1
        deadlines.Backoff(60.0).wait_or_raise(error, what="`find b`", whom="A")
    assert [record.getMessage() for record in caplog.records] == [
        "A does not serve `list a`: cannot list it (Connection refused); trying again for 60 s",
        "B does not serve `list a`: cannot list it (Connection refused); trying again for 60 s",
        "A does not serve `find b`: cannot list it (Connection refused); trying again for 60 s",
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its one item; a wait lets 10 s pass."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 10.0))
    for name in ("_named_at", "_served_at", "_failing_since"):
        monkeypatch.setattr(deadlines, name, {}, raising=False)
    monkeypatch.setattr(deadlines, "_given_up", set())
    return now


def refused(left_s: float) -> NoReturn:
    raise RetryableStorageError("cannot list it", got="Connection refused")


def missing(left_s: float) -> NoReturn:
    raise NotFoundError("not there")


def away() -> StorageAwayError:
    with pytest.raises(StorageAwayError) as caught:
        deadlines.with_retries(refused, what="`list a`", whom="A", give_up_s=60.0)
    return caught.value


def test_how_long_a_storage_is_away_counts_from_its_last_answer(clock: list[float]) -> None:
    first = away()
    assert (first.whom, first.away_s) == ("A", 60.0) and deadlines.given_up("A")
    clock[0] += 100.0
    assert away().away_s == 220.0  # both calls, and the time between
    with pytest.raises(NotFoundError):
        deadlines.with_retries(missing, what="`find b`", whom="A")
    assert not deadlines.given_up("A")
    clock[0] += 100.0
    assert away().away_s == 60.0


def test_a_storage_that_serves_others_meanwhile_is_not_away(clock: list[float]) -> None:
    attempts = 0

    def refused_while_another_is_served(left_s: float) -> NoReturn:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            deadlines.with_retries(lambda left_s: None, what="`find b`", whom="A")
        refused(left_s)

    with pytest.raises(StorageAwayError, match=r"did not serve `list a` within 60 s") as caught:
        deadlines.with_retries(refused_while_another_is_served, what="`list a`", whom="A", give_up_s=60.0)
    assert caught.value.away_s == 0.0 and not deadlines.given_up("A")
    assert away().away_s == 100.0  # since that answer
