"""Work that steps back behind the training."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from lockstep.training.rank.saver import NICE, at_low_priority


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of single threads")
def test_the_work_alone_steps_back() -> None:
    before = nice()
    assert at_low_priority(nice) == min(19, before + NICE)
    assert nice() == before


def test_results_and_errors_are_those_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", refused)  # a sandbox
    assert at_low_priority(lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)
