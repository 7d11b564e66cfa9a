"""The ranks of one host join a shared segment: an abstract Unix socket, proof of the key, then descriptors.

The lowest rank listens. A caller must be of the same user (SO_PEERCRED) and prove the generation's key; then it gets
the sealed file and one end of a socket to each other rank. These sockets stay open and silent: when one closes, that
rank has ended. A group's segment and sockets are sent in the same way over the sockets of the whole communicator.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm import auth
from lockstep.training.comm.auth import BACKLOG, Reception, peer_of
from lockstep.training.comm.hosts import host_identity
from lockstep.training.comm.shm.atomics import FUTEX_CALL
from lockstep.training.comm.shm.segment import MAX_RANKS, Layout, Segment, create_file

JOIN_S = 20.0  # the ranks of one host have all met when they begin
_HAND = struct.Struct("<8sQII16s")
_MAGIC = b"LOCKSHM2"
CHANNEL = 0x73686D  # none of TCP's: a handshake for one kind of socket is invalid on the other

Links = list[socket.socket | None]  # to each rank, None for this one
Exchange = Callable[[bytes], list[bytes]]


class SharedMemoryUnavailableError(CommunicationError):
    """Ranks cannot share memory; raised on all of them, so that they can fall back to TCP."""


def join(
    rank: int,
    num_ranks: int,
    generation: int,
    key: bytes,
    exchange: Exchange,
    arena_bytes: int,
    deadline_s: float,
) -> tuple[Segment, Links]:
    """Share a segment; see `lockstep.training.comm.shm.communicator.connect_shm`. Calls `exchange` twice on every rank,
    also if one of them fails.
    """
    found: tuple[Segment, Links] | None = None
    problem = ""
    carriers: Links = []
    with socket.socket(socket.AF_UNIX) as listener:
        table = [json.loads(data) for data in exchange(_introduction(rank, num_ranks, arena_bytes, listener))]
        _check_table(table)
        until = time.monotonic() + min(deadline_s, JOIN_S)  # counted from when all have met
        layout = Layout(num_ranks, table[0]["arena"])
        try:
            if rank == 0:
                carriers = _admit(listener, num_ranks, generation, key, until)
                found = deal(layout, carriers, range(num_ranks), until)
            else:
                carrier = _knock("\0" + table[0]["name"], rank, num_ranks, generation, key, until)
                carriers = [carrier]
                found = take(layout, rank, carrier, range(num_ranks), until)
        except (OSError, auth.HandshakeError, CommunicationError) as error:
            problem = (error.what if isinstance(error, CommunicationError) else str(error)) or type(error).__name__
        finally:
            close_all(carriers)
    try:
        outcomes = [data.decode() for data in exchange(problem.encode())]
        wrong = [f"rank {r}: {text}" for r, text in enumerate(outcomes) if text]
        if wrong or found is None:
            raise _unavailable("; ".join(wrong))
    except BaseException:
        if found is not None:
            found[0].close()
            close_all(found[1])
        raise
    return found


def close_all(links: Links) -> None:
    """Close the sockets of a rank."""
    for link in links:
        if link is not None:
            link.close()


def deal(layout: Layout, carriers: Links, names: Sequence[int], until: float) -> tuple[Segment, Links]:
    """Rank 0's part: make the file and a socket for each pair of ranks, and send them over `carriers`.

    `names` are the ranks' numbers in messages; ranks that `take` must give the same. Raises OSError or HandshakeError.
    """
    ranks = range(layout.num_ranks)
    fd = create_file(layout.size)
    try:
        segment = Segment(fd, layout, 0)
    except BaseException:
        os.close(fd)
        raise
    ends: list[Links] = [[None] * layout.num_ranks for _ in ranks]
    try:
        for rank in ranks:
            for later in ranks[rank + 1 :]:
                ends[rank][later], ends[later][rank] = socket.socketpair()
            if rank == 0:
                continue
            carrier = carriers[rank]
            assert carrier is not None
            carrier.settimeout(max(0.01, until - time.monotonic()))
            head, mine = _head(layout, rank, names), [end.fileno() for end in ends[rank] if end is not None]
            try:
                socket.send_fds(carrier, [head], [fd, *mine])
            except OSError as error:  # it has ended, or never took what it was sent before
                raise auth.HandshakeError(f"rank {names[rank]} takes nothing: {error}") from error
            close_all(ends[rank])  # now: all of them together may exceed a process's descriptors
        return segment, ends.pop(0)
    except BaseException as error:
        segment.end(f"rank {names[0]}: {error}")  # for ranks that have got theirs already
        segment.close()
        raise
    finally:
        for links in ends:  # after success without those of rank 0
            close_all(links)


def take(
    layout: Layout, rank: int, carrier: socket.socket, names: Sequence[int], until: float
) -> tuple[Segment, Links]:
    """Receive what `deal`, at the other end of `carrier`, sends to `rank`. Raises OSError or HandshakeError."""
    count = layout.num_ranks  # the file, and a socket to each other rank
    carrier.settimeout(max(0.01, until - time.monotonic()))
    head, fds, flags, _ = _receive_fds(carrier, count)
    links: Links = []
    try:
        if head != _head(layout, rank, names) or len(fds) != count or flags & socket.MSG_CTRUNC:
            what = f"{len(fds)} descriptors of another group" if head else "nothing"
            raise auth.HandshakeError(f"rank {names[0]} sent {what}, not {count} of ranks {tuple(names)}")
        while len(fds) > 1:
            links.append(socket.socket(fileno=fds.pop(1)))
        links.insert(rank, None)
        return Segment(fds[0], layout, rank), links
    except BaseException:
        close_all(links)
        for fd in fds:
            os.close(fd)
        raise


def _head(layout: Layout, rank: int, names: Sequence[int]) -> bytes:
    """The message before the descriptors: it reveals if members make groups in different orders."""
    group = hashlib.sha256(repr(tuple(names)).encode()).digest()[:16]
    return _HAND.pack(_MAGIC, layout.arena_bytes, layout.num_ranks, rank, group)


def _receive_fds(carrier: socket.socket, count: int) -> tuple[bytes, list[int], int, Any]:
    # The flag keeps a child that is started at this moment from inheriting them.
    return socket.recv_fds(carrier, _HAND.size, count, socket.MSG_CMSG_CLOEXEC)


def _introduction(rank: int, num_ranks: int, arena_bytes: int, listener: socket.socket) -> bytes:
    """This rank's entry for the others: its host, why it cannot share if so; for rank 0 also its socket's name."""
    mine: dict[str, Any] = {"host": "", "problem": "", "arena": arena_bytes}
    try:
        mine["host"] = host_identity()
        if not mine["host"]:
            raise OSError("this system does not report the network namespace of a process")
        if FUTEX_CALL < 0:
            raise OSError("the futex call of this processor is not known")
        if num_ranks > MAX_RANKS:
            raise OSError(f"{num_ranks} ranks on a host; at most {MAX_RANKS} can share memory")
        os.close(create_file(Layout(num_ranks, arena_bytes).size))
        if rank == 0:
            mine["name"] = f"lockstep-{secrets.token_hex(16)}"
            listener.bind("\0" + mine["name"])
            listener.listen(BACKLOG)
    except OSError as error:
        mine["problem"] = str(error)
    return json.dumps(mine).encode()


def _check_table(table: Sequence[dict[str, Any]]) -> None:
    for rank, row in enumerate(table):
        if row["problem"]:
            raise _unavailable(f"rank {rank}: {row['problem']}")
        if row["host"] != table[0]["host"]:
            raise _unavailable(f"rank 0 runs in {table[0]['host']}, rank {rank} in {row['host']}")


def _unavailable(reason: str) -> SharedMemoryUnavailableError:
    return SharedMemoryUnavailableError(
        "these ranks cannot share memory",
        got=reason,
        allowed="processes of one user on one host, in one network namespace, where memfd_create is allowed",
        next_step="Let the communicator use TCP (backend auto or tcp), or put the ranks into one container.",
    )


def _admit(listener: socket.socket, num_ranks: int, generation: int, key: bytes, until: float) -> Links:
    """Sockets to the ranks, each authenticated; other callers are refused until the listener is closed."""
    carriers: Links = [None] * num_ranks
    proved: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()

    def examine(sock: socket.socket, patience: float, known: Callable[[], None]) -> None:
        _check_user(sock)
        rank, channel = auth.answer(sock, key, generation, num_ranks, 0, range(1, num_ranks), patience)
        if channel != CHANNEL:
            raise auth.HandshakeError(f"rank {rank} requests channel {channel}: a handshake for another socket")
        known()
        proved.put((rank, sock))

    reception = Reception("the shared memory's socket", examine, until)
    threading.Thread(target=reception.serve, args=(listener,), name="shm-door", daemon=True).start()
    try:
        while None in carriers[1:]:
            try:
                rank, sock = proved.get(timeout=max(0.001, until - time.monotonic()))
            except queue.Empty:
                seen = f"; refused: {reception.last}" if reception.last else ""
                missing = carriers.index(None, 1)
                raise auth.HandshakeError(f"rank {missing} did not connect within {JOIN_S:g} s{seen}") from None
            if carriers[rank] is None:
                carriers[rank] = sock
            else:
                sock.close()
    except BaseException:
        close_all(carriers)
        raise
    finally:
        reception.close()
    return carriers


def _knock(name: str, rank: int, num_ranks: int, generation: int, key: bytes, until: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(max(0.01, until - time.monotonic()))
        sock.connect(name)
        _check_user(sock)
        auth.call(sock, key, generation, num_ranks, rank, 0, CHANNEL, until)
        return sock
    except BaseException:
        sock.close()
        raise


def _check_user(sock: socket.socket) -> None:
    _, user = peer_of(sock)
    if user != os.geteuid():
        raise auth.HandshakeError(f"it is a process of user {user}, not of {os.geteuid()}")
