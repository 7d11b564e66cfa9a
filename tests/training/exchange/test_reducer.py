"""The thread behind the step's exchange: what it hands to the communicator, in which order, how an error comes out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm import SoloCommunicator
from lockstep.training.exchange.exchange import Reducer


class Recorder(SoloCommunicator):
    """Takes buffers ahead, as a backend may, and notes what begins and ends."""

    def __init__(self, deadline_s: float = 20.0) -> None:
        super().__init__(1, deadline_s)
        self.seen: list[str] = []
        self.gate = threading.Event()

    def all_reduce_each(self, take: Callable[[], Any], done: Callable[[], None]) -> None:
        self.gate.wait(20)
        self._check_open()
        taken = []
        while (buf := take()) is not None:
            taken.append(int(buf[0]))
        self.seen.append(f"sum {taken}")
        for _ in taken:
            done()


def test_buffers_go_together_and_whatever_else_between_them() -> None:
    comm = Recorder()
    reducer = Reducer(comm)

    def task(name: str, well: bool = True) -> Callable[[], bool]:
        def run() -> bool:
            comm.seen.append(name)
            return well

        return run

    def post(*numbers: int) -> None:
        for number in numbers:
            reducer.sum(np.full(2, number, np.float32))

    post(0, 1)
    reducer.run(task("first"))
    reducer.run(task("second", well=False))
    post(2)
    comm.gate.set()
    assert reducer.wait(4, "it") is False  # what the second gave
    assert reducer.wait(1, "it")
    assert comm.seen == ["sum [0, 1]", "first", "second", "sum [2]"]
    post(3)
    reducer.close()  # behind a buffer that may be taken together with what comes next
    assert comm.seen[-1] == "sum [3]"


def test_the_first_error_is_raised_and_nothing_stands_still_after_it() -> None:
    comm = Recorder()
    reducer = Reducer(comm)
    comm.abort("it is hot")
    comm.gate.set()
    for _ in range(2):
        reducer.sum(np.zeros(2, np.float32))
        with pytest.raises(CommunicationError, match="it is hot"):
            reducer.wait(1, "it")
    reducer.close()


def test_any_deadline_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Recorder(float("inf"))
    reducer = Reducer(comm)
    comm.gate.set()
    reducer.sum(np.zeros(2, np.float32))
    assert reducer.wait(1, "it")  # no overflow
    monkeypatch.setattr("lockstep.training.exchange.exchange.GRACE_S", -19.9)
    comm.deadline_s = 20.0
    with pytest.raises(CommunicationError, match="the exchange of step 7 did not end"):
        reducer.wait(1, "the exchange of step 7")
    reducer.close()
