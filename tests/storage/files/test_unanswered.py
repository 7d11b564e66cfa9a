"""Calls to a server that never answers: each ends at its deadline, and they do not pile up without end."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep.storage.errors import StorageTimeoutError
from lockstep.storage.files import deadlines
from lockstep.storage.files.deadlines import FREE, Unanswered


def give_up(calls: Unanswered, wake: threading.Event, seconds: float = 0.005) -> None:
    with pytest.raises(StorageTimeoutError, match="no answer from the server"):
        calls.call(lambda: wake.wait(600), seconds, what="cannot ask", whom="the server")


def test_calls_are_held_back_while_many_are_unanswered_and_go_on_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LATER_S", 600.0)  # longer than any of this takes on a loaded machine
    calls, wake = Unanswered(), threading.Event()
    try:
        for _ in range(FREE):
            give_up(calls, wake)
        assert calls.left == FREE
        threads = threading.active_count()
        for _ in range(5):  # the next one would be begun ten minutes after the last
            began = time.monotonic()
            give_up(calls, wake, 0.02)
            assert time.monotonic() - began >= 0.02
        assert calls.left == FREE and threading.active_count() <= threads  # those of other tests may end meanwhile
        with pytest.raises(StorageTimeoutError) as caught:
            calls.call(lambda: 1, 0.02, what="cannot ask", whom="the server")
        assert f"no answer to {FREE} calls before it" in caught.value.got
        woken = threading.Timer(0.1, wake.set)
        woken.start()
        # They ended: it was not held back to the end of its ten minutes.
        assert calls.call(lambda: 3, 120.0, what="cannot ask", whom="the server") == 3
    finally:
        wake.set()
    end = time.monotonic() + 60
    while calls.left and time.monotonic() < end:
        time.sleep(0.01)
    assert calls.left == 0


def test_calls_that_never_end_count_no_more_after_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, wake = Unanswered(), threading.Event()
    try:
        for _ in range(FREE):
            give_up(calls, wake)
        assert calls.call(lambda: 2, 120.0, what="cannot ask", whom="the server") == 2  # one now and then looks
        monkeypatch.setattr(deadlines, "LATER_S", 60.0)  # what is held back from here on is not answered in time
        give_up(calls, wake)  # begun at once
        assert calls.left == FREE + 1
    finally:
        wake.set()
    end = time.monotonic() + 60
    while calls.left and time.monotonic() < end:
        time.sleep(0.01)
    for _ in range(FREE - 1):  # those that ended late took nothing off what counts since
        give_up(calls, wake := threading.Event())
        wake.set()
    assert calls.call(lambda: 1, 50.0, what="cannot ask", whom="the server") == 1


def test_results_errors_and_what_is_given_up_from_outside() -> None:
    calls = Unanswered()
    assert calls.call(lambda: "x", 60.0, what="cannot ask", whom="the server") == "x"
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 / 0, 60.0, what="cannot ask", whom="the server")
    with pytest.raises(StorageTimeoutError, match="its own"):  # a call that ended with such an error left nothing
        calls.call(_fail, 60.0, what="cannot ask", whom="the server")
    assert calls.left == 0


def _fail() -> None:
    raise StorageTimeoutError("its own")
