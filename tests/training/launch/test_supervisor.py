"""A supervisor whose driver cannot be reached any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from training.control.client import SupervisorClient, open_channel
from training.control.protocol import Role
from training.control.server import ControlServer
from training.control.task import Limits, RankTask
from training.launch.process import Order
from training.launch.supervisor import Supervisor
from training.world import World

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
