"""A supervisor whose driver cannot be reached any more, or whose rank cannot be started or dies at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.training.control.client import SupervisorClient, open_channel
from lockstep.training.control.protocol import Role
from lockstep.training.control.server import ControlServer
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch import supervisor
from lockstep.training.launch.process import Order
from lockstep.training.launch.supervisor import Supervisor
from lockstep.training.world import World

KEY = bytes(range(32))
PATIENCE_S = 120.0  # only against a hang


@pytest.fixture
def server() -> Iterator[ControlServer]:
    found = ControlServer(KEY, 7, 1, Limits(grace_s=0.1), None, "127.0.0.1")
    yield found
    found._listener.close()


def order(server: ControlServer) -> Order:
    task = RankTask("module:function", stream=True)
    return Order(task, World.local(0, 1, 7), "here", ("127.0.0.1", server.port), KEY, Limits())


def test_output_that_cannot_be_sent_any_more_is_given_up(server: ControlServer) -> None:
    address = ("127.0.0.1", server.port)
    client = SupervisorClient(lambda: open_channel(address, KEY, 7, Role.SUPERVISOR, 0, PATIENCE_S), PATIENCE_S)
    found = Supervisor(order(server))
    assert found._stream is not None
    client.close()
    found._stream.put("a last line")
    found._stream.close()
    forwarder = threading.Thread(target=found._forward, args=(client,), daemon=True)
    forwarder.start()
    forwarder.join(5.0)
    assert not forwarder.is_alive()


def test_a_rank_that_cannot_be_started_leaves_no_files_open(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def start(order: Order, last_words: int, stacks: int) -> None:
        given.extend((last_words, stacks))
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(supervisor, "start_rank", start)
    with pytest.raises(BlockingIOError):
        Supervisor(order(server)).run()
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in given if os.path.exists(f"/proc/self/fd/{fd}")]
    assert not [name for name in names if "lockstep" in name]


class EndsAtOnce(subprocess.Popen[bytes]):
    """A process that has ended when its parent continues."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.wait(PATIENCE_S)


def test_a_rank_that_dies_before_it_gets_its_order_is_reported(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(subprocess, "Popen", EndsAtOnce)
    assert Supervisor(order(server)).run() == 1
    end = time.monotonic() + PATIENCE_S
    while not server.all_ended() and time.monotonic() < end:
        time.sleep(0.01)
    assert server._states[0].exit_code == 1
