"""Strangers at the doors of real ranks, certificates that do not fit, and bits that change on the way."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm import Communicator, auth
from lockstep.training.comm.auth import MAX_CALLERS
from lockstep.training.comm.tcp.communicator import TcpCommunicator, connect_tcp
from lockstep.training.comm.tls import Credentials, Tls, issue
from lockstep.training.control.failures import RankFailedError
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.local import run_local
from tests.training._proxy import Proxy
from tests.training._ranks import rank_path
from tests.training._ring import KEY, PATIENCE_S, SLACK_S, Table

GENERATION = 7
Work = Callable[[Communicator], Any]


def run_ranks(
    num_ranks: int,
    work: Work,
    *,
    tls: Sequence[Credentials | None] | None = None,
    at_the_doors: Callable[[list[tuple[str, int]]], None] = lambda doors: None,
    via: Callable[[int, tuple[str, int]], tuple[str, int]] = lambda rank, address: address,
    deadline_s: float = PATIENCE_S,
) -> list[Any]:
    """What `work` returned or raised on each rank; ranks with TLS listen on addresses that look like other hosts'.

    `at_the_doors` is called when all ranks listen and none has joined; `via` may put something between.
    """
    table, doors = Table(num_ranks), threading.Barrier(num_ranks + 1)
    addresses: dict[int, tuple[str, int]] = {}

    def one(rank: int) -> Any:
        def rendezvous(host: str, port: int) -> list[tuple[str, int]]:
            addresses[rank] = (host, port)
            found = table.of(rank)(*via(rank, (host, port)))
            doors.wait(PATIENCE_S)
            doors.wait(PATIENCE_S)
            return found

        mine = tls[rank] if tls else None
        secure = Tls(mine, GENERATION) if mine else None
        host = f"127.0.0.{rank + 2}" if tls else "127.0.0.1"
        try:
            comm = connect_tcp(rank, num_ranks, GENERATION, rendezvous, KEY, deadline_s, host, deadline_s, secure)
        except CommunicationError as error:
            return error
        try:
            return work(comm)
        except CommunicationError as error:
            return error
        finally:
            comm.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(num_ranks)]
        doors.wait(PATIENCE_S)
        at_the_doors([addresses[rank] for rank in range(num_ranks)])
        doors.wait(PATIENCE_S)
        return [future.result(2 * PATIENCE_S) for future in futures]


def several(comm: Communicator) -> str:
    """Each kind of collective, and a group beside the whole; a digest of all results."""
    found = hashlib.sha256()
    for size in (0, 1, 997, 700_001):
        buf = np.random.default_rng(comm.rank).standard_normal(size).astype(np.float32)
        comm.all_reduce(buf)
        found.update(buf.tobytes())
        comm.broadcast(buf, comm.num_ranks - 1)
        found.update(comm.all_gather(buf[:100]).tobytes())
    for row in comm.all_gather_ragged(np.arange(comm.rank * 1000, dtype=np.int64)):
        found.update(row.tobytes())
    pair = comm.group([0, 1]) if comm.rank < 2 else None
    if pair is not None:
        two = np.full(100_000, comm.rank, np.float64)
        pair.all_reduce(two)
        assert np.all(two == 1)
        pair.close()
    comm.barrier()
    return found.hexdigest()


def test_tls_changes_no_bit() -> None:
    def work(comm: Communicator) -> tuple[str, bool]:
        digest = several(comm)
        assert isinstance(comm, TcpCommunicator)
        links = [link for link in comm._engine._links if link is not None]
        return digest, all(isinstance(link.sock, ssl.SSLSocket) for link in links)

    plain, secret = run_ranks(3, work), run_ranks(3, work, tls=issue(GENERATION, 3))
    assert {digest for digest, _ in plain} == {digest for digest, _ in secret}, (plain, secret)
    assert [wrapped for _, wrapped in plain] == [False] * 3
    assert [wrapped for _, wrapped in secret] == [True] * 3


@pytest.mark.parametrize(
    ("change", "case"),
    [
        (lambda good: [good[0], good[2], good[2]], "the certificate of another rank"),
        (lambda good: [good[0], issue(GENERATION, 3)[1], good[2]], "of another launch"),
        (lambda good: [good[0], issue(GENERATION - 1, 3)[1], good[2]], "of an older generation"),
        (lambda good: [good[0], None, good[2]], "none: it talks in the clear"),
    ],
)
def test_a_rank_without_its_certificate_joins_nobody(change: Callable[[Any], Any], case: str) -> None:
    found = run_ranks(3, several, tls=change(issue(GENERATION, 3)), deadline_s=1.5)
    assert all(isinstance(result, CommunicationError) for result in found), case
    assert any("join rank 1" in str(result) or "lost rank 1" in str(result) for result in (found[0], found[2])), case


def test_crowds_at_every_door_keep_no_rank_out() -> None:
    """Silent ones, liars who announce gigabytes, noise: the ranks join in time, and no memory is spent."""
    crowd: list[socket.socket] = []
    process = psutil.Process()
    resident: list[int] = []
    liar = b"LOCKSTP2" + b"\xff" * 60 + os.urandom(32)
    frame = (1 << 31).to_bytes(4, "little") * 9

    def at_the_doors(doors: list[tuple[str, int]]) -> None:
        resident.append(process.memory_info().rss)
        for door in doors:
            for number in range(150):
                crowd.append(socket.create_connection(door, timeout=PATIENCE_S))
                crowd[-1].send((b"", liar, frame, os.urandom(50))[number % 4])

    def work(comm: Communicator) -> str:
        digest = several(comm)
        resident.append(process.memory_info().rss)
        return digest

    try:
        found = run_ranks(3, work, at_the_doors=at_the_doors)
    finally:
        for sock in crowd:
            sock.close()
    assert len(set(found)) == 1 and isinstance(found[0], str), found
    assert max(resident) - resident[0] < 500 << 20, "what was announced is gigabytes"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_rank_that_is_driven_out_comes_again(tls: bool) -> None:
    with ExitStack() as stack:

        def via(rank: int, address: tuple[str, int]) -> tuple[str, int]:
            return stack.enter_context(Proxy(address, drop=3, listen_on=address[0])).address

        found = run_ranks(2, several, tls=issue(GENERATION, 2) if tls else None, via=via)
    assert isinstance(found[0], str) and found[0] == found[1]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_flipped_bit_is_noticed(tls: bool) -> None:
    """Rank 0 calls rank 1 through somebody who changes one bit of the 100,000th byte."""
    with ExitStack() as stack:

        def via(rank: int, address: tuple[str, int]) -> tuple[str, int]:
            if rank != 1:
                return address
            return stack.enter_context(Proxy(address, flip_at=100_000, listen_on=address[0])).address

        found = run_ranks(2, several, tls=issue(GENERATION, 2) if tls else None, via=via)
    assert all(isinstance(result, CommunicationError) for result in found), found
    words = str(found[1])
    assert (
        "rank 0" in words and ("checksum" in words) is not tls
    )  # under TLS the connection ends before a frame is seen


@pytest.mark.slow
@pytest.mark.parametrize("flip_at", [100_000, None])
def test_a_flipped_bit_between_processes_names_the_ranks(monkeypatch: pytest.MonkeyPatch, flip_at: int | None) -> None:
    """The whole launch; without a flip the same way is taken to the end."""
    rank_path(monkeypatch)
    with ExitStack() as stack:

        def handler(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
            proxy = stack.enter_context(Proxy((fields["host"], fields["port"]), flip_at=flip_at))
            return {"host": proxy.address[0], "port": proxy.address[1]}

        task = RankTask("_security_ranks:reduce_by_proxy")
        limits = Limits(grace_s=1.0)
        if flip_at is None:
            assert [r["total"] for r in run_local(task, 2, limits=limits, handler=Handler(handler))] == [3.0, 3.0]
            return
        with pytest.raises(RankFailedError, match="sent a wrong frame during all_reduce") as caught:
            run_local(task, 2, limits=limits, handler=Handler(handler))
    assert "rank 1: rank 0 sent" in str(caught.value)  # whichever of the two the driver heard first


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_killed_process_is_noticed_by_its_peers_within_a_second(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank_path(monkeypatch)
    monkeypatch.setattr(
        "lockstep.training.control.server.SETTLE_S", PATIENCE_S
    )  # or who notices late is ended before it tells
    payload = {"comm": {"options": {"backend": backend}}, "folder": str(tmp_path)}
    with pytest.raises(RankFailedError, match="SIGKILL") as caught:
        run_local(RankTask("_security_ranks:one_killed_in_a_collective", payload), 3, limits=Limits(grace_s=1.0))
    assert caught.value.rank == 1
    killed_at = float((tmp_path / "killed").read_text())
    for rank in (0, 2):
        noticed_at, _, told = (tmp_path / f"rank-{rank}").read_text().partition(" ")
        assert "rank 1" in told
        assert float(noticed_at) - killed_at < 1 + SLACK_S


def test_the_key_opens_the_shared_memory_door_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A stranger of the same user, and a handshake that was meant for TCP."""
    from lockstep.training.comm.shm import join

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        name = f"\0lockstep-test-{os.getpid()}-{time.monotonic_ns()}"
        listener.bind(name)
        listener.listen(4 * MAX_CALLERS)
        until = time.monotonic() + PATIENCE_S
        admitted = pool.submit(join._admit, listener, 2, GENERATION, KEY, until)
        for key, generation, channel in ((b"x" * 32, GENERATION, join.CHANNEL), (KEY, 6, join.CHANNEL)):
            with socket.socket(socket.AF_UNIX) as stranger, pytest.raises((auth.HandshakeError, OSError)):
                stranger.connect(name)
                auth.call(stranger, key, generation, 2, 1, 0, channel, until)
        with ExitStack() as stack:
            for _ in range(2 * MAX_CALLERS):  # they say nothing, and are in nobody's way
                stack.enter_context(socket.socket(socket.AF_UNIX)).connect(name)
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.connect(name)
            auth.call(other, KEY, GENERATION, 2, 1, 0, 0, until)  # a rank's call to a TCP door, passed on
            other.settimeout(PATIENCE_S)
            assert other.recv(1) == b""
            rank = join._knock(name, 1, 2, GENERATION, KEY, until)
            carriers = admitted.result(PATIENCE_S)
    assert carriers[0] is None and carriers[1] is not None
    for sock in (rank, carriers[1]):
        sock.close()
    assert "the shared memory's socket refused a caller from process" in caplog.text
