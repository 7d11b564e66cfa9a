"""What an outage puts into a log: one line that names who does not serve and why, however much is asked of it."""

from __future__ import annotations

import logging
import time

import pytest

from lockstep.storage.errors import StorageError
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
