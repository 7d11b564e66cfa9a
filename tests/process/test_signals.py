"""Signals that end a driver in order."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import weakref

import pytest

from lockstep.process import signals
from lockstep.process.signals import ended_in_order


@pytest.fixture(autouse=True)
def no_signal_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process the session of other tests may be open, in which two signals at once count as one."""
    monkeypatch.setattr(signals._Taken, "at", -math.inf)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_begun_is_ended(number: int) -> None:
    ended: list[str] = []
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with pytest.raises(SystemExit) as left, ended_in_order():
            try:
                os.kill(os.getpid(), number)
                signal.sigtimedwait([signal.SIGUSR1], 10)  # the handler runs before this returns
            finally:
                ended.append("in order")
        assert left.value.code == 128 + number and ended and signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_what_timeout_and_java_send_again_within_a_second_does_not_disturb_the_end() -> None:
    before, ended = signal.signal(signal.SIGTERM, signal.SIG_DFL), list[str]()
    try:
        with pytest.raises(SystemExit) as left, ended_in_order():
            try:
                with ended_in_order():
                    os.kill(os.getpid(), signal.SIGTERM)
                    signal.sigtimedwait([signal.SIGUSR1], 10)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.sigtimedwait([signal.SIGUSR1], 0.2)
                ended.append("in order")
        assert left.value.code == 128 + signal.SIGTERM and ended
    finally:
        signal.signal(signal.SIGTERM, before)


class Java:
    """Freed by a callback of a weak reference that takes time, as py4j frees an object of Java."""


def test_a_signal_in_the_callback_of_a_weak_reference_still_ends_the_process() -> None:
    def free(reference: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([signal.SIGUSR1], 10)

    hook, handler = sys.unraisablehook, signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as left, ended_in_order():
            freed = Java()
            reference = weakref.ref(freed, free)
            del freed  # Python ignores what the handler raises in `free`
            assert reference() is None
            time.sleep(30)
        assert left.value.code == 128 + signal.SIGTERM and sys.unraisablehook is hook
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_signal_in_such_a_callback_ends_a_process_whose_block_ends_at_once() -> None:
    class Freed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([signal.SIGUSR1], 10)

    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as left, ended_in_order():
            Freed()  # freed at once
        assert left.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with ended_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_takes_no_signals() -> None:
    found: list[object] = []

    def look() -> None:
        with ended_in_order():
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
