"""The control port against strangers, replays, old generations, changed and oversized frames."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.storage.errors import CommunicationError, ConfigError, LockstepError, StorageError
from lockstep.training.control.client import ControlClient, RosterClient, SupervisorClient, open_channel
from lockstep.training.control.failures import Failure, RankFailedError, RankState, Weight, all_alike, failure_of
from lockstep.training.control.protocol import (
    HEADER,
    HELLO,
    MAGIC,
    MAX_BODY_BYTES,
    OPENING,
    SESSION,
    STARTING,
    Channel,
    Role,
    Tag,
    error_from_json,
    error_to_json,
    present,
    try_send,
)
from lockstep.training.control.roster import Roster, open_order, seal_order
from lockstep.training.control.server import ControlServer, Handler, Rendezvous
from lockstep.training.control.task import Limits
from lockstep.training.world import World

KEY = bytes(range(32))
PATIENCE_S = 120.0  # only against a hang


@pytest.fixture
def server() -> Iterator[ControlServer]:
    handler = Handler(lambda rank, kind, fields: {"kind": kind})
    found = ControlServer(KEY, 7, 2, Limits(grace_s=0.1), handler, "127.0.0.1")
    yield found
    found._listener.close()


def dial(server: ControlServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def ended(sock: socket.socket) -> bool:
    """True when the driver has closed the connection."""
    sock.settimeout(PATIENCE_S)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def client(server: ControlServer, rank: int = 0) -> ControlClient:
    return ControlClient(open_channel(("127.0.0.1", server.port), KEY, 7, Role.RANK, rank, PATIENCE_S), "here")


def test_right_key_is_served(server: ControlServer) -> None:
    assert client(server).request("anything", PATIENCE_S) == {"kind": "anything"}


@pytest.mark.parametrize(
    ("key", "generation", "rank", "told"),
    [
        (bytes(32), 7, 0, "no proof"),  # a stranger
        (KEY, 6, 0, "generation 6"),  # a rank of an older generation
        (KEY, 7, 2, "rank 2"),  # a rank that is not there
    ],
)
def test_strangers_are_refused_and_logged(
    server: ControlServer, caplog: pytest.LogCaptureFixture, key: bytes, generation: int, rank: int, told: str
) -> None:
    with dial(server) as sock, caplog.at_level(logging.WARNING):
        with pytest.raises(CommunicationError):
            present(sock, key, generation, Role.RANK, rank, "the driver")
        deadline = time.monotonic() + PATIENCE_S
        while told not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert told in caplog.text
    assert server._ranks == {}


def test_a_false_driver_is_refused_by_the_rank() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(MAGIC + bytes(32))
            sock.recv(HELLO.size)
            sock.sendall(bytes(32))

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(CommunicationError, match="does not belong to this generation"):
        open_channel(listener.getsockname(), KEY, 7, Role.RANK, 0, 5.0)
    listener.close()


def test_replayed_hello_is_refused(server: ControlServer) -> None:
    """What a listener on the network recorded is worth nothing: each greeting has a nonce of its own."""

    class Tap:
        def __init__(self, sock: socket.socket) -> None:
            self.sock, self.sent = sock, b""

        def sendall(self, data: bytes) -> None:
            self.sent += data
            self.sock.sendall(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

    tap = Tap(dial(server))
    channel = present(tap, KEY, 7, Role.RANK, 0, "the driver")  # type: ignore[arg-type] # a stand-in
    channel.send(Tag.RESULT, {"step": 0, "phase": "", "part": "{}", "more": False})
    channel.close()
    with dial(server) as sock:
        sock.sendall(tap.sent)
        assert ended(sock)


def test_replayed_frame_is_refused(server: ControlServer) -> None:
    sock = dial(server)
    sent: list[bytes] = []
    channel = present(sock, KEY, 7, Role.RANK, 0, "the driver")
    original = channel._sock.sendall

    class Recording:
        def sendall(self, data: bytes) -> None:
            sent.append(data)
            original(data)

    channel._sock = Recording()  # type: ignore[assignment] # a stand-in
    channel.send(Tag.BEAT, {"step": 1, "phase": "train"})
    original(sent[0])
    assert ended(sock)


def test_changed_frame_is_refused(server: ControlServer) -> None:
    sock = dial(server)
    channel = present(sock, KEY, 7, Role.RANK, 0, "the driver")
    body = b'{"step":9,"phase":"x"}'
    sock.sendall(HEADER.pack(len(body), Tag.BEAT, 0) + body + bytes(32))
    assert ended(sock)
    assert server._states[0].step == 0
    channel.close()


@pytest.mark.parametrize("length", [MAX_BODY_BYTES + 1, 2**32 - 1])
def test_oversized_frame_is_refused_unread(server: ControlServer, length: int) -> None:
    sock = dial(server)
    present(sock, KEY, 7, Role.RANK, 0, "the driver")
    sock.sendall(HEADER.pack(length, Tag.BEAT, 0))  # and nothing more: who waited for the body would hang here
    assert ended(sock)


def test_noise_is_refused_without_allocating(server: ControlServer) -> None:
    import tracemalloc

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(5):
        with dial(server) as sock:
            sock.sendall(struct.pack(">I", 2**31) + b"GET / HTTP/1.1\r\n" * 10)
            assert ended(sock)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - before < 64 << 20, "2 GiB were announced; other threads may take something too"


def test_many_silent_strangers_are_limited_and_a_rank_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.comm.auth.MAX_CALLERS", 4)
    monkeypatch.setattr("lockstep.training.control.protocol.HELLO_DEADLINE_S", PATIENCE_S)
    server = ControlServer(KEY, 7, 2, Limits(), Handler(lambda rank, kind, fields: {"kind": kind}), "127.0.0.1")
    strangers = [dial(server) for _ in range(6)]
    # Though none of them leaves by itself.
    assert client(server).request("anything", PATIENCE_S) == {"kind": "anything"}
    assert [ended_now(sock) for sock in strangers] == [True, True, True, False, False, False]
    server._listener.close()
    for sock in strangers:
        sock.close()


def ended_now(sock: socket.socket) -> bool:
    sock.settimeout(0.5)
    try:
        while sock.recv(100):  # the greeting
            continue
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_second_connection_of_a_rank_is_refused(server: ControlServer) -> None:
    first = client(server)
    assert first.request("anything", PATIENCE_S) == {"kind": "anything"}, "the server has taken it in"
    second = client(server)
    assert second.lost.wait(PATIENCE_S)
    assert first.request("anything", PATIENCE_S) == {"kind": "anything"}


def test_a_roster_lets_in_the_session_s_supervisors_alone_and_each_once() -> None:
    lost: list[int] = []
    roster = Roster(KEY, 2, "127.0.0.1", lost.append)
    address = ("127.0.0.1", roster.port)
    orders: list[dict[str, object]] = [{"key": "a"}, {"key": "b"}]

    def line(rank: int) -> RosterClient:
        return RosterClient(address, KEY, rank, deadline_s=PATIENCE_S, lost_s=PATIENCE_S)

    for key, generation in ((bytes(32), SESSION), (KEY, 7)):  # a generation's key; a hello to a generation's server
        with pytest.raises(CommunicationError, match="cannot be reached"):
            open_channel(address, key, generation, Role.SUPERVISOR, 0, 0.5)
    with pytest.raises(CommunicationError):
        open_channel(address, KEY, SESSION, Role.RANK, 0, PATIENCE_S).receive()
    roster.give(orders)
    first = line(0)
    assert first.next_order() == {"key": "a"} and not roster.whole(0.0)
    assert line(0).next_order() is None, "a second line of one supervisor"
    second = line(1)  # it comes after the orders were given
    assert second.next_order() == {"key": "b"}
    first.say_idle()
    second.say_idle()
    assert roster.whole(PATIENCE_S) and lost == []
    first.close()
    end = time.monotonic() + PATIENCE_S
    while not lost and time.monotonic() < end:
        time.sleep(0.01)
    assert lost == [0] and not roster.whole(PATIENCE_S)
    roster.close()
    assert second.next_order() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # its trace is what a user reads
def test_a_supervisor_whose_order_cannot_be_sealed_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise ModuleNotFoundError("No module named 'cryptography'")

    monkeypatch.setattr("lockstep.training.control.roster.seal_order", broken)
    lost = threading.Event()
    roster = Roster(KEY, 1, "127.0.0.1", lambda rank: lost.set())
    roster.give([{"key": "a"}])
    late = RosterClient(("127.0.0.1", roster.port), KEY, 0, deadline_s=PATIENCE_S, lost_s=PATIENCE_S)
    try:
        assert lost.wait(PATIENCE_S) and late.next_order() is None
    finally:
        late.close()
        roster.close()


def test_an_order_is_for_one_supervisor_of_one_session() -> None:
    order = {"key": "\udcff and \x01", "tls": None, "generation": 3}
    sealed = seal_order(KEY, 1, order)
    assert open_order(KEY, 1, sealed) == order
    assert "key" not in sealed and sealed != seal_order(KEY, 1, order)
    for secret, rank in ((KEY, 0), (bytes(32), 1)):
        with pytest.raises(ValueError, match="not for the supervisor"):
            open_order(secret, rank, sealed)


def test_a_supervisor_that_ends_while_it_reconnects_leaves_no_connection(server: ControlServer) -> None:
    calls: list[Channel] = []
    closed, again = threading.Event(), threading.Event()

    def connect() -> Channel:
        found = open_channel(("127.0.0.1", server.port), KEY, 7, Role.SUPERVISOR, 0, PATIENCE_S)
        calls.append(found)
        if len(calls) > 1:  # connected, but `close` comes first
            again.set()
            closed.wait(PATIENCE_S)
        return found

    supervisor = SupervisorClient(connect, PATIENCE_S)
    calls[0].close()
    assert again.wait(PATIENCE_S)
    supervisor.close()
    closed.set()
    supervisor._thread.join(PATIENCE_S)
    assert calls[1]._sock.fileno() < 0, "closed"


def test_a_rank_that_stops_while_its_supervisor_reconnects_is_reported(server: ControlServer) -> None:
    calls: list[Channel] = []
    lost, back = threading.Event(), threading.Event()

    def connect() -> Channel:
        if calls:
            lost.set()
            back.wait(PATIENCE_S)
        calls.append(open_channel(("127.0.0.1", server.port), KEY, 7, Role.SUPERVISOR, 0, PATIENCE_S))
        return calls[-1]

    supervisor = SupervisorClient(connect, PATIENCE_S)
    assert supervisor.report(Tag.STARTED, {"host": "here", "pid": 1})
    calls[0].close()
    assert lost.wait(PATIENCE_S)
    assert not supervisor.report(Tag.STOPPED, {"stopped": True})
    back.set()
    end = time.monotonic() + 15.0
    while server._states[0].stopped_at is None and time.monotonic() < end:
        time.sleep(0.01)
    assert server._states[0].stopped_at is not None
    supervisor.close()


def test_lost_driver_is_told_to_waiting_requests() -> None:
    gate, asked = threading.Event(), threading.Event()

    def handler(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        return {"done": gate.wait(PATIENCE_S)}

    server = ControlServer(KEY, 7, 1, Limits(), Handler(handler), "127.0.0.1")

    def lose() -> None:
        asked.wait(PATIENCE_S)
        server._ranks[0].close()

    rank = client(server)
    threading.Thread(target=lose, daemon=True).start()
    with pytest.raises(CommunicationError, match="before `slow` was answered"):
        rank.request("slow", PATIENCE_S)
    gate.set()
    server._listener.close()


def test_request_has_a_deadline(server: ControlServer) -> None:
    server._answers._handler = Handler(lambda rank, kind, fields: {"done": threading.Event().wait(2)})
    with pytest.raises(CommunicationError, match=r"did not answer the request `slow`"):
        client(server).request("slow", 0.3)


def test_rendezvous_names_who_is_missing() -> None:
    meeting = Rendezvous(3)
    with pytest.raises(CommunicationError, match="rank 1 waited in vain for rank 0, 2"):
        meeting.meet(1, "host", 1, 0.1)


def test_rendezvous_rounds_do_not_mix() -> None:
    meeting = Rendezvous(2)
    tables: dict[tuple[int, int], list[tuple[str, int]]] = {}

    def go(rank: int) -> None:
        for round_ in range(3):
            tables[rank, round_] = meeting.meet(rank, "h", 10 * round_ + rank, PATIENCE_S)

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tables[key] == [("h", 10 * key[1]), ("h", 10 * key[1] + 1)] for key in tables)
    assert len(tables) == 6


def test_unreachable_driver_is_told_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(CommunicationError, match=f"127.0.0.1:{port} cannot be reached"):
        open_channel(("127.0.0.1", port), KEY, 7, Role.RANK, 0, 0.5)


def test_errors_travel() -> None:
    error = ConfigError("what", got="g", allowed="a", next_step="n")
    there = error_from_json(error_to_json(error))
    assert (type(there), str(there)) == (ConfigError, str(error))

    class Special(StorageError):
        pass

    assert type(error_from_json(error_to_json(Special("x")))) is StorageError
    assert "ZeroDivisionError" in str(error_from_json(error_to_json(ZeroDivisionError("by zero"))))
    assert type(error_from_json({"class": "os.system", "parts": ["x", "", "", ""]})) is LockstepError


def test_world_from_hosts() -> None:
    assert World.from_hosts(2, ["a", "b", "a", "b", "a"], 3) == World(2, 5, 1, 3, 3)
    with pytest.raises(ConfigError):
        World(2, 2, 0, 1, 1)


@pytest.mark.parametrize(
    ("phase", "now", "found"),
    [
        ("train", 14.0, None),
        ("train", 16.0, "no heartbeat for 10 s"),
        (STARTING, 16.0, None),  # it imports TensorFlow
        (STARTING, 299.0, None),
        (OPENING, 299.0, None),  # it loads kernels
        (OPENING, 306.0, "no heartbeat for 10 s"),
        (STARTING, 306.0, "no heartbeat for 10 s"),
    ],
)
def test_silence_counts_once_a_rank_has_started(phase: str, now: float, found: str | None) -> None:
    state = RankState(0, phase=phase, joined_at=5.0, beat_at=5.0, moved_at=5.0)
    failure = failure_of(state, now, 0.0, Limits(start_s=300.0, silent_s=10.0))
    assert (failure and failure.reason) == found


def test_a_start_that_is_slow_but_moves_is_not_ended() -> None:
    """A rank whose task came late, after 290 s, imports for a minute without a heartbeat, then reads for an hour."""
    limits = Limits(start_s=300.0, silent_s=10.0, stall_s=600.0)
    state = RankState(0)
    assert failure_of(state, 290.0, 0.0, limits) is None
    state.joined_at = state.beat_at = state.moved_at = 290.0
    state.phase = STARTING
    assert failure_of(state, 350.0, 0.0, limits) is None, "silent for a minute, of which the limit is over for 50 s"
    for second in range(350, 4000, 50):
        state.moves_to(0, OPENING if second == 350 else f"verify shard {second}", float(second))
        state.beat_at = float(second)
        assert failure_of(state, second + 9.0, 0.0, limits) is None
    failure = failure_of(state, 3950.0 + 11.0, 0.0, limits)
    assert failure is not None and failure.reason == "no heartbeat for 10 s"


def test_a_rank_that_joins_after_ranks_were_asked_to_leave_is_asked_too(server: ControlServer) -> None:
    """As when a cluster manager ends a supervisor's task while its rank still imports TensorFlow."""
    supervisor = open_channel(("127.0.0.1", server.port), KEY, 7, Role.SUPERVISOR, 0, PATIENCE_S)
    supervisor.send(Tag.LEAVE, {})
    supervisor.send(Tag.STARTED, {"host": "here", "pid": 1})
    while not server.started(0):
        time.sleep(0.01)
    assert client(server).leaving.wait(15.0)
    supervisor.close()


def test_rank_that_is_stopped_before_it_has_joined_is_not_waited_for_to_the_start_limit() -> None:
    limits = Limits(start_s=300.0, stopped_s=5.0)
    failure = failure_of(RankState(0, stopped_at=3.0), 9.0, 0.0, limits)
    assert failure is not None and "stopped by a signal" in failure.reason
    assert failure_of(RankState(0, stopped_at=3.0), 7.0, 0.0, limits) is None


def test_rank_that_is_heard_again_before_anything_was_done_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.control.server.SETTLE_S", PATIENCE_S)
    server = ControlServer(KEY, 7, 1, Limits(silent_s=0.5, grace_s=0.1), None, "127.0.0.1")
    rank = ControlClient(open_channel(("127.0.0.1", server.port), KEY, 7, Role.RANK, 0, PATIENCE_S), "here", beat_s=1.5)
    rank.beat(0, "train")  # told by the beat after 1.5 s; silence counts from there, and is over after 3 s
    threading.Timer(3.2, lambda: rank.give_result({"done": 1})).start()
    threading.Timer(3.2, lambda: setattr(server._states[0], "exit_code", 0)).start()
    assert server.wait() == [{"done": 1}]
    server._listener.close()


def test_what_ends_the_launch_in_any_case_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pruned trial's: no rank's report can explain it."""
    monkeypatch.setattr("lockstep.training.control.server.SETTLE_S", 20.0)
    server = ControlServer(KEY, 7, 1, Limits(grace_s=0.1), None, "127.0.0.1")
    server.fail(LockstepError("the caller ended it"))
    began = time.monotonic()
    with pytest.raises(LockstepError, match="the caller ended it"):
        server.wait()
    assert time.monotonic() - began < 15.0
    server._listener.close()


def test_result_of_a_rank_whose_end_nobody_tells_is_not_waited_for_without_end() -> None:
    """Its supervisor's connection broke in the moment in which the rank ended, or the rank was stopped there."""
    server = ControlServer(KEY, 7, 1, Limits(lost_s=0.5, grace_s=0.1), None, "127.0.0.1")
    rank = ControlClient(open_channel(("127.0.0.1", server.port), KEY, 7, Role.RANK, 0, PATIENCE_S), "here")
    rank.give_result({"done": 1})
    rank.close()
    late = threading.Timer(PATIENCE_S, lambda: server.fail(LockstepError("waited without end")))
    late.start()
    assert server.wait() == [{"done": 1}]
    late.cancel()
    server._listener.close()


@pytest.mark.parametrize(
    ("stays", "told"),
    [
        (True, "killed by SIGKILL"),  # the supervisor is there, and tells it late: it reads the last lines before
        (False, "control connection broke"),  # it went with its rank, as on a lost executor
    ],
)
def test_how_a_lost_rank_ended_is_waited_for_while_somebody_is_there_to_tell(
    monkeypatch: pytest.MonkeyPatch, stays: bool, told: str
) -> None:
    monkeypatch.setattr("lockstep.training.control.server.SETTLE_S", 0.05)
    server = ControlServer(KEY, 7, 2, Limits(grace_s=0.1), None, "127.0.0.1")
    address = ("127.0.0.1", server.port)
    ranks = [client(server, rank) for rank in range(2)]
    supervisor = open_channel(address, KEY, 7, Role.SUPERVISOR, 0, PATIENCE_S)
    supervisor.send(Tag.STARTED, {"host": "here", "pid": 1})
    while not (server.started(0) and len(server._ranks) == 2):
        time.sleep(0.01)
    if not stays:
        supervisor.close()
        while server._supervisors:
            time.sleep(0.01)
    timer = threading.Timer(0.5, lambda: try_send(supervisor, Tag.EXIT, {"code": -9, "tail": []}))
    timer.start()
    ranks[0].close()
    with pytest.raises(RankFailedError, match=told):
        server.wait()
    timer.cancel()
    server._listener.close()
    ranks[1].close()


@pytest.mark.parametrize(("tail", "told"), [([], "overloaded or gone"), (["a line"], "log lines below")])
def test_a_rank_that_has_told_nothing_is_not_to_be_read_of(tail: list[str], told: str) -> None:
    error = RankFailedError(Failure(RankState(0, tail=tail), "no heartbeat for 10 s", Weight.SILENT), 1)
    assert told in error.next_step


def test_ranks_are_alike_only_in_an_error_of_their_own_before_a_step() -> None:
    def states(*errors: LockstepError | None) -> list[RankState]:
        return [RankState(rank, error=error) for rank, error in enumerate(errors)]

    own, other = LockstepError("ValueError: no shape"), LockstepError("ValueError: no shape on rank 1")
    assert all_alike(states(own, LockstepError("ValueError: no shape")))
    assert not all_alike(states(own, other)) and not all_alike(states(own, None)) and not all_alike(states(None, None))
    for passing in (StorageError("no NameNode answers"), CommunicationError("rank 1 did not come")):
        assert not all_alike(states(passing, passing))
    stepped = states(own, own)
    stepped[1].moves_to(0, "train", 1.0)
    stepped[1].moves_to(1, "train", 2.0)
    assert not all_alike(stepped)
