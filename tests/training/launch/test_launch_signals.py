"""Signals that end a driver in order."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from training.launch.session import ended_in_order


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
