"""Strangers, wrong frames, lost and silent ranks: each one a named error, never a wrong sum and never a hang."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm import Communicator, auth
from lockstep.training.comm.frames import ENDED, Expected, pack_header, pack_word, tag_of
from lockstep.training.comm.tcp.communicator import TcpCommunicator, connect_tcp
from tests.training._ring import KEY, PATIENCE_S, SLACK_S, Table, run_ring

PAYLOAD = np.ones(4, np.float32)
TAG = tag_of("broadcast", "", PAYLOAD.dtype, 1)


@contextmanager
def fake_rank_1(
    work: Callable[[Communicator], Any], *, deadline_s: float = PATIENCE_S
) -> Iterator[tuple[socket.socket, Future[Any]]]:
    """A real rank 0 of 2 runs `work`; the test plays rank 1: (its end of their connection, rank 0's result)."""
    table = Table(2)

    def rank_0() -> Any:
        comm = connect_tcp(0, 2, 7, table.of(0), KEY, PATIENCE_S, "127.0.0.1", deadline_s)
        try:
            return work(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as listener:
        future = pool.submit(rank_0)
        table.of(1)("127.0.0.1", listener.getsockname()[1])
        sock, _ = listener.accept()
        with sock:
            assert auth.answer(sock, KEY, 7, 2, 1, (0,), time.monotonic() + PATIENCE_S) == (0, 0)
            yield sock, future


def frame(payload: np.ndarray = PAYLOAD, **changes: int) -> bytes:
    fields = {"length": payload.nbytes, "tag": TAG, "generation": 7, "sequence": 0, "total": PAYLOAD.nbytes}
    return pack_header(Expected(**(fields | changes)).pack(), payload.view(np.uint8)) + payload.tobytes()


def receive_broadcast(comm: Communicator) -> list[float]:
    buf = np.zeros(4, np.float32)
    comm.broadcast(buf, root=1)
    return buf.tolist()


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_right_frame_is_taken() -> None:
    with fake_rank_1(receive_broadcast) as (sock, future):
        sock.sendall(frame())
        assert future.result(PATIENCE_S) == [1.0] * 4


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(length=1 << 31), "length 2147483648"),  # nothing is allocated by it
        (frame(generation=6), "generation 6 instead of 7"),  # a rank of an older attempt
        (frame(sequence=1), "sequence 1 instead of 0"),  # a frame was lost, or comes again
        (frame(tag=tag_of("all_reduce", "sum", PAYLOAD.dtype)), "all_reduce sum float32 instead of broadcast float32"),
        (frame(tag=tag_of("broadcast", "", np.dtype("int64"), 1)), "tag broadcast int64"),
        (frame(tag=tag_of("broadcast", "", PAYLOAD.dtype)), "from rank 0 instead of broadcast float32 from rank 1"),
        (frame(call=3), "call 3 instead of 0"),  # of another call of the same kind
        (frame(total=20), "total 20 instead of 16"),  # ranks disagree on the buffer's size
        (flipped(frame(), 40), "checksum"),  # first byte of the payload
        (flipped(frame(), 55), "checksum"),  # last byte
        (flipped(frame(), 37), "checksum"),  # the checksum itself
    ],
)
def test_wrong_frames_are_refused(data: bytes, words: str) -> None:
    with fake_rank_1(receive_broadcast) as (sock, future):
        sock.sendall(data)
        with pytest.raises(CommunicationError, match=words) as caught:
            future.result(PATIENCE_S)
        assert "rank 1 sent a wrong frame" in str(caught.value)


def test_a_flipped_bit_is_noticed_wherever_it_is() -> None:
    for position in range(len(frame())):
        with fake_rank_1(receive_broadcast) as (sock, future):
            sock.sendall(flipped(frame(), position))
            sock.shutdown(socket.SHUT_WR)
            with pytest.raises(CommunicationError, match="rank 1 sent a wrong frame"):
                future.result(PATIENCE_S)


def test_a_damaged_word_is_refused() -> None:
    word = pack_word(ENDED, 7, 0, "rank 3: lost rank 2")
    for position in (8, 37, 44, len(word) - 1):  # the generation, the checksum, the text, what fills it up
        with fake_rank_1(receive_broadcast) as (sock, future):
            sock.sendall(flipped(word, position))
            with pytest.raises(CommunicationError, match="rank 1 sent a wrong frame"):
                future.result(PATIENCE_S)


def test_a_word_tells_who_failed_first() -> None:
    with fake_rank_1(receive_broadcast) as (sock, future):
        sock.sendall(pack_word(ENDED, 7, 0, "rank 3: lost rank 2 during all_reduce of 8 bytes"))
        with pytest.raises(CommunicationError, match="ended by rank 1, which says: rank 3: lost rank 2"):
            future.result(PATIENCE_S)


def test_replayed_frame_is_refused() -> None:
    def twice(comm: Communicator) -> None:
        receive_broadcast(comm)
        receive_broadcast(comm)

    with fake_rank_1(twice) as (sock, future):
        sock.sendall(frame() + frame(call=1))
        with pytest.raises(CommunicationError, match="sequence 0 instead of 1"):
            future.result(PATIENCE_S)


def test_deadline_names_the_silent_rank() -> None:
    started = time.monotonic()
    with fake_rank_1(receive_broadcast, deadline_s=0.6) as (sock, future):
        sock.sendall(frame()[:-1])  # all but one byte
        with pytest.raises(CommunicationError, match=r"waited 1 s for rank 1"):
            future.result(PATIENCE_S)
    assert time.monotonic() - started < 0.6 + SLACK_S


def test_a_rank_that_only_trickles_does_not_put_the_deadline_off() -> None:
    with fake_rank_1(receive_broadcast, deadline_s=0.4) as (sock, future):
        for byte in frame():
            if future.done():
                break
            sock.send(bytes([byte]))
            time.sleep(0.05)  # 2.8 s for all
        with pytest.raises(CommunicationError, match="for rank 1"):
            future.result(PATIENCE_S)


@pytest.mark.parametrize("nbytes", [8, 32 << 20])  # waiting to receive; in the middle of sending
def test_lost_rank_is_noticed_at_once(nbytes: int) -> None:
    buf = np.zeros(nbytes, np.uint8)
    with fake_rank_1(lambda comm: comm.all_reduce(buf)) as (sock, future):
        time.sleep(0.1)
        started = time.monotonic()
        sock.close()
        with pytest.raises(CommunicationError, match="lost rank 1"):
            future.result(PATIENCE_S)
        assert time.monotonic() - started < 1 + SLACK_S


def test_abort_wakes_a_blocked_call() -> None:
    seen: list[Communicator] = []

    def blocked(comm: Communicator) -> None:
        seen.append(comm)
        receive_broadcast(comm)

    with fake_rank_1(blocked) as (_, future):
        while not seen:
            time.sleep(0.01)
        time.sleep(0.1)
        seen[0].abort("the run was stopped")
        with pytest.raises(CommunicationError, match="the run was stopped"):
            future.result(1 + SLACK_S)


def test_an_abort_at_the_very_end_of_another_thread_s_call_reaches_the_other_ranks() -> None:
    ended, told = threading.Barrier(2), threading.Event()

    class AbortsLast:
        """The communicator's lock: the thread that is about to release it has looked for an abort for the last time."""

        def __init__(self, comm: TcpCommunicator) -> None:
            self._comm, self._lock = comm, threading.Lock()

        def acquire(self, blocking: bool = True) -> bool:
            return self._lock.acquire(blocking)

        def release(self) -> None:
            self._lock.release()

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            if not self._comm.has_ended:
                other = threading.Thread(target=self._comm.abort, args=("the run was stopped",))
                other.start()
                other.join()
            self._lock.release()

    def work(comm: Communicator) -> str:
        assert isinstance(comm, TcpCommunicator)
        comm.barrier()
        if comm.rank == 0:
            comm._lock = AbortsLast(comm)  # type: ignore[assignment]  # it has all that is used of one
        ended.wait(PATIENCE_S)
        what = ""
        try:
            comm.barrier()
            if comm.rank == 1:
                comm.barrier()
        except CommunicationError as error:
            what = error.what
        finally:
            if comm.rank == 1:
                told.set()
        if comm.rank == 0:
            told.wait(PATIENCE_S)  # it makes no other call, and has not closed
        return what

    assert "the run was stopped" in run_ring(2, work, deadline_s=30.0)[1]


def test_one_failed_rank_ends_all_of_them() -> None:
    def work(comm: Communicator) -> str:
        if comm.rank == 1:
            comm.barrier()
            return "left"
        try:
            comm.barrier()  # a rank that is slow to leave it may hear of the end here already
            comm.all_reduce(np.zeros(1 << 20, np.float32))
        except CommunicationError as error:
            return error.what
        return "no error"

    started = time.monotonic()
    results = run_ring(4, work)
    assert results[1] == "left"
    assert all("lost rank" in result for rank, result in enumerate(results) if rank != 1), results
    assert time.monotonic() - started < 1 + SLACK_S


def test_different_sizes_are_an_error_everywhere() -> None:
    joined = threading.Barrier(3)

    def work(comm: Communicator) -> str:
        comm.barrier()
        joined.wait(PATIENCE_S)  # or one may hear of the end before its barrier is over
        try:
            comm.all_reduce(np.zeros(1000 + comm.rank, np.float32))
        except CommunicationError as error:
            return error.what
        return "no error"

    assert all("wrong frame" in what or "lost rank" in what for what in run_ring(3, work))


def test_another_root_on_one_rank_is_an_error() -> None:
    joined = threading.Barrier(4)

    def work(comm: Communicator) -> str:
        comm.barrier()
        joined.wait(PATIENCE_S)
        try:
            comm.broadcast(np.zeros(100, np.float32), 1 if comm.rank == 3 else 0)
            comm.barrier()  # the root itself may be the last to hear
        except CommunicationError as error:
            return str(error)
        return "no error"

    told = run_ring(4, work)
    assert "no error" not in told
    assert any("broadcast float32 from rank 1" in what for what in told), told


def test_groups_that_were_closed_leave_nothing_behind() -> None:
    def sockets() -> int:
        return len(os.listdir("/proc/self/fd"))

    def work(comm: Communicator) -> tuple[int, int]:
        counts: list[int] = []
        for _ in range(10):
            group = comm.group(range(3))
            group.barrier()
            group.close()
            comm.barrier()
            comm.barrier()  # the others have closed theirs too
            end = time.monotonic() + SLACK_S
            while counts and sockets() > counts[0] and time.monotonic() < end:
                time.sleep(0.01)  # handshakes that are just over
            counts.append(sockets())
            comm.barrier()
        return counts[0], counts[-1]

    for first, last in run_ring(3, work):
        assert last <= first + 2


def test_two_roots_are_an_error_and_no_stale_values() -> None:
    """Both send and none receives, so the first call cannot notice; the next one must not take what lies there."""

    def work(comm: Communicator) -> str:
        buf = np.full(4, comm.rank, np.float32)
        try:
            comm.broadcast(buf, root=comm.rank)
            comm.broadcast(buf, root=1 - comm.rank)
        except CommunicationError as error:
            return str(error)
        return "no error"

    assert any("call 0 instead of 1" in what for what in run_ring(2, work))


@pytest.mark.parametrize(
    ("key", "generation", "num_ranks", "rank"),
    [
        (b"x" * 32, 7, 2, 0),  # no key
        (KEY, 6, 2, 0),  # an older attempt
        (KEY, 7, 3, 0),  # another world
        (KEY, 7, 2, 1),  # it says that it is the listener
    ],
)
def test_a_stranger_is_turned_away_and_the_real_rank_joins(
    key: bytes, generation: int, num_ranks: int, rank: int
) -> None:
    table = Table(2)
    ports: list[int] = []

    def rank_1() -> list[float]:
        def rendezvous(host: str, port: int) -> list[tuple[str, int]]:
            ports.append(port)
            return table.of(1)(host, port)

        comm = connect_tcp(1, 2, 7, rendezvous, KEY, PATIENCE_S, "127.0.0.1", PATIENCE_S)
        buf = np.zeros(4, np.float32)
        comm.broadcast(buf)
        return list(buf.tolist())

    def rank_0() -> None:
        comm = connect_tcp(0, 2, 7, table.of(0), KEY, PATIENCE_S, "127.0.0.1", PATIENCE_S)
        comm.broadcast(np.ones(4, np.float32))

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rank_1)
        while not ports:
            time.sleep(0.01)
        door = ("127.0.0.1", ports[0])
        with socket.create_connection(door), socket.create_connection(door) as sock:
            with pytest.raises((auth.HandshakeError, OSError)):  # the first connection stays silent on purpose
                auth.call(sock, key, generation, num_ranks, rank, 1, 0, time.monotonic() + PATIENCE_S)
            pool.submit(rank_0).result(PATIENCE_S)
            assert first.result(PATIENCE_S) == [1.0] * 4


def test_a_recorded_handshake_is_worthless() -> None:
    def talk(client: Callable[[socket.socket], None]) -> bool:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            thread = threading.Thread(target=client, args=(theirs,))
            thread.start()
            try:
                auth.answer(ours, KEY, 7, 2, 0, (1,), time.monotonic() + PATIENCE_S)
            except (auth.HandshakeError, OSError):
                return False
            finally:
                thread.join(PATIENCE_S)
            return True

    recorded: list[bytes] = []

    class Recorder:
        """A socket that keeps what it sends."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock
            self.settimeout, self.recv = sock.settimeout, sock.recv

        def sendall(self, data: bytes) -> None:
            recorded.append(data)
            self._sock.sendall(data)

    def honest(sock: socket.socket) -> None:
        noted: Any = Recorder(sock)
        auth.call(noted, KEY, 7, 2, 1, 0, 0, time.monotonic() + PATIENCE_S)

    def replay(sock: socket.socket) -> None:
        sock.sendall(b"".join(recorded))
        sock.shutdown(socket.SHUT_WR)

    assert talk(honest)
    assert not talk(replay)


def test_an_absent_rank_is_named() -> None:
    table = Table(2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=table.of(1), args=("127.0.0.1", listener.getsockname()[1]), daemon=True).start()
        with pytest.raises(CommunicationError, match="rank 0 could not join rank 1"):
            connect_tcp(0, 2, 7, table.of(0), KEY, 0.5, "127.0.0.1", 5)


def _process(rank: int, pipe: Any) -> None:
    def rendezvous(host: str, port: int) -> list[tuple[str, int]]:
        pipe.send((host, port))
        table: list[tuple[str, int]] = pipe.recv()
        return table

    comm = connect_tcp(rank, 3, 1, rendezvous, KEY, PATIENCE_S, "127.0.0.1", PATIENCE_S)
    buf = np.full(1_000_003, rank + 1, np.float64)
    comm.all_reduce(buf)
    pipe.send((float(buf.min()), float(buf.max())))
    comm.barrier()
    if rank == 1:
        os._exit(9)  # no goodbye: the kernel closes its sockets
    try:
        comm.barrier()
        pipe.send("no error")
    except CommunicationError as error:
        pipe.send(error.what)


@pytest.mark.slow
def test_ranks_as_processes_one_of_which_dies() -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(3)]
    processes = [context.Process(target=_process, args=(rank, pipes[rank][1])) for rank in range(3)]
    for process in processes:
        process.start()
    table = [pipe.recv() for pipe, _ in pipes]
    for pipe, _ in pipes:
        pipe.send(table)
    assert [pipe.recv() for pipe, _ in pipes] == [(6.0, 6.0)] * 3
    for rank in (0, 2):
        assert pipes[rank][0].poll(PATIENCE_S)
        assert "lost rank" in pipes[rank][0].recv()
    for process in processes:
        process.join(PATIENCE_S)
