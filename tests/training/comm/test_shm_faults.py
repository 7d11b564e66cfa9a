"""Shared memory when something is wrong: differing calls, dead, frozen and leaving ranks, strangers, refusals."""

from __future__ import annotations

import fcntl
import gc
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError
from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.training.comm import Communicator
from lockstep.training.comm.shm import atomics, join
from lockstep.training.comm.shm import segment as shm_segment
from lockstep.training.comm.shm.communicator import ShmCommunicator, connect_shm
from lockstep.training.comm.shm.join import SharedMemoryUnavailableError
from lockstep.training.comm.shm.segment import PAGE_BYTES, Layout, create_file
from tests.training._ring import KEY, PATIENCE_S, SLACK_S
from tests.training._shared import Bytes, run_shared

Work = Callable[[Communicator], Any]


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.all_reduce(np.zeros(100 + c.rank)), ("of 800 bytes", "of 808 bytes")),
        (lambda c: c.all_reduce(np.zeros(10_000 + c.rank)), ("of 80000 bytes", "of 80008 bytes")),
        (lambda c: c.all_reduce(np.zeros(4, np.float32 if c.rank else np.int32)), ("int32", "float32")),
        (lambda c: c.all_reduce(np.zeros(4), "max" if c.rank else "min"), ("all_reduce min", "all_reduce max")),
        (lambda c: c.barrier() if c.rank else c.all_reduce(np.zeros(4)), ("barrier", "all_reduce sum")),
        (lambda c: c.broadcast(np.zeros(9), c.rank), ("from rank 0 of 72 bytes", "from rank 1 of 72 bytes")),
        (lambda c: c.all_gather_ragged(np.zeros(4, np.uint8 if c.rank else np.int32)), ("int32", "uint8")),
        (lambda c: c.all_gather(np.zeros(4)) if c.rank else c.all_gather_parts(np.zeros(4)), ("all_gather_parts",)),
        # Rank 0's message is whole in the slots before rank 1 looks at it: it hears of it in its next call.
        (
            lambda c: (c.recv(np.zeros(5), 0) if c.rank else c.send(np.zeros(4), 1), c.barrier()),
            ("40 bytes", "32 bytes"),
        ),
    ],
)
def test_a_difference_is_an_error_that_names_both(call: Work, words: tuple[str, ...]) -> None:
    told = run_shared(2, lambda comm: (failure(lambda: call(comm)), failure(comm.barrier)))
    assert all("no error" not in text for pair in told for text in pair)
    assert any(
        "ranks 0 and 1 make different calls" in first or "ranks 1 and 0 make different calls" in first
        for first, _ in told
    )
    whole = " ".join(first for first, _ in told)
    assert all(word in whole for word in words), whole


def test_an_abort_wakes_the_ranks_that_wait() -> None:
    aborted: list[float] = []
    over = threading.Event()

    def work(comm: Communicator) -> tuple[str, float]:
        def abort() -> None:
            aborted.append(time.monotonic())
            comm.abort("the test says so")
            over.set()

        if comm.rank == 0:
            threading.Timer(0.2, abort).start()  # while it waits itself
        if comm.rank == 2:
            assert over.wait(PATIENCE_S)
        return failure(comm.barrier), time.monotonic()

    for told, when in run_shared(3, work):
        assert "the test says so" in told
        assert when - aborted[0] < 1 + SLACK_S


def test_an_abort_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a kernel's first call takes seconds, in which the others would not hear of a failure."""
    claim: Any = shm_segment._claim
    fresh: Any = kernels(shm_segment.__name__, memory, atomics)(claim.py_func)
    monkeypatch.setattr(shm_segment, "_claim", fresh)
    run_shared(2, lambda comm: comm.barrier())
    assert fresh.signatures


def test_leaving_is_no_failure_until_somebody_waits() -> None:
    def work(comm: Communicator) -> str:
        comm.all_reduce(np.ones(50_000))  # rank 2 may leave while others still look
        if comm.rank == 2:
            return ""
        return failure(comm.barrier)

    told = run_shared(3, work)
    assert any("waits for rank 2, which has closed its communicator" in text for text in told[:2])
    assert all("rank 2" in text for text in told[:2])


def test_a_late_rank_is_named_at_the_deadline_by_its_label_and_hears_of_it() -> None:
    over = threading.Event()

    def work(comm: Communicator) -> str:
        if comm.rank == 1:
            assert over.wait(PATIENCE_S)
        told = failure(comm.barrier)
        over.set()
        return told

    told = run_shared(2, work, deadline_s=0.3, labels=[4, 6])
    assert told[0].startswith("rank 4: barrier of 0 bytes waited 0.3 s for rank 6")
    assert "rank 4 has ended the communicator" in told[1]


def test_two_large_sends_to_each_other_are_named() -> None:
    def work(comm: Communicator) -> str:
        group = comm.group([1, 0])
        return failure(lambda: group.send(np.zeros(8_000_000, np.uint8), 1 - group.rank))

    told = run_shared(2, work, deadline_s=0.5)
    # The second hears of the first one's deadline, or names it at its own.
    assert any(f"waited 0.5 s for rank {1 - rank}" in told[rank] for rank in (0, 1)), told
    assert all("waited 0.5 s for rank" in text for text in told), told


def test_a_group_ends_with_the_whole() -> None:
    met = threading.Barrier(2)

    def work(comm: Communicator) -> str:
        group = comm.group([1, 0])
        group.barrier()
        comm.barrier()
        met.wait(PATIENCE_S)
        if comm.rank == 0:
            comm.abort("all of it")
        return failure(group.barrier)

    assert all("all of it" in told for told in run_shared(2, work))


def test_a_group_that_a_member_does_not_come_to() -> None:
    over = threading.Event()

    def work(comm: Communicator) -> str:
        if comm.rank == 0:
            assert over.wait(PATIENCE_S)
            return failure(comm.barrier)
        told = failure(lambda: comm.group([0, 1]).barrier())
        over.set()
        return told

    told = run_shared(2, work, deadline_s=0.3)
    assert "group (0, 1) waited 0.3 s for rank 0" in told[1]
    assert "rank 1 has ended the communicator" in told[0]


def test_groups_made_in_different_orders_are_not_mixed_up() -> None:
    """Both have three members and the same leader: what rank 0 hands out first is not what rank 1 asks for first."""
    orders = {0: [(0, 1, 2), (0, 1, 3)], 1: [(0, 1, 3), (0, 1, 2)], 2: [(0, 1, 2)], 3: [(0, 1, 3)]}

    def work(comm: ShmCommunicator) -> str:
        def sums() -> None:
            for group in [comm.group(ranks) for ranks in orders[comm.rank]]:
                group.barrier()

        return failure(sums)

    told = run_shared(4, work)
    assert "rank 0 sent 3 descriptors of another group, not 3 of ranks (0, 1, 3)" in told[1]
    assert "no error" not in told


@pytest.mark.parametrize("dead", [2, 1])  # who hands out, and who takes
def test_a_rank_that_dies_before_a_group_is_named(dead: int) -> None:
    met, named = threading.Barrier(3), threading.Barrier(3)

    def work(comm: ShmCommunicator) -> str:
        comm.barrier()
        met.wait(PATIENCE_S)
        if comm.rank == dead:
            join.close_all(comm._calls.links)
        met.wait(PATIENCE_S)
        if comm.rank == dead:
            named.wait(PATIENCE_S)
            return ""
        told = failure(lambda: comm.group([2, 0, 1]).barrier())
        named.wait(PATIENCE_S)
        return told

    told = run_shared(3, work)
    for rank in {0, 1, 2} - {dead}:
        assert f"lost rank {dead}" in told[rank] or f"rank {dead} takes nothing" in told[rank], told


def test_who_makes_groups_that_nobody_joins_does_not_wait_for_ever() -> None:
    over = threading.Event()

    def work(comm: ShmCommunicator) -> str:
        if comm.rank == 1:
            assert over.wait(PATIENCE_S)
            return ""

        def many() -> None:
            for _ in range(1000):
                comm.group([0, 1]).close()

        told = failure(many)
        over.set()
        return told

    assert "rank 1 takes nothing: timed out" in run_shared(2, work, deadline_s=0.3, arena_bytes=1 << 20)[0]


def test_a_child_that_closes_says_nothing_for_its_rank() -> None:
    seen = threading.Event()

    def work(comm: ShmCommunicator) -> str:
        comm.barrier()
        if comm.rank == 0:
            told = failure(comm.barrier)
            seen.set()
            return told
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                comm.close()
            os._exit(0)
        os.waitpid(child, 0)
        join.close_all(comm._calls.links)  # the rank itself dies
        assert seen.wait(PATIENCE_S)
        return ""

    assert "lost rank 1 during barrier" in run_shared(2, work)[0]


def test_a_call_that_is_interrupted_ends_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def work(comm: ShmCommunicator) -> str:
        if comm.rank == 1:
            assert over.wait(PATIENCE_S)
            return failure(comm.barrier)

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(comm._calls, "_look", interrupt)
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
        over.set()
        return failure(comm.barrier)  # the flags of the broken call must not be taken for another's

    assert all("barrier raised KeyboardInterrupt" in told for told in run_shared(2, work))


def test_groups_leave_nothing_behind() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:lockstep")
        return len(os.listdir("/proc/self/fd")), maps

    def work(comm: ShmCommunicator) -> None:
        for _ in range(30):
            group = comm.group([1, 0])
            group.all_reduce(group.allocate(100_000, np.float32))
            group.close()
        comm.barrier()

    run_shared(2, work)
    descriptors, maps = held()
    run_shared(2, work)
    end = time.monotonic() + SLACK_S
    while held()[0] > descriptors and time.monotonic() < end:
        time.sleep(0.01)  # what other threads of this process hold for a moment
    assert held()[0] <= descriptors and held()[1] == maps


def join_threads(num_ranks: int, keys: list[bytes], deadline_s: float = PATIENCE_S) -> list[BaseException | None]:
    table, found = Bytes(num_ranks), [None] * num_ranks

    def one(rank: int) -> None:
        try:
            connect_shm(rank, num_ranks, 1, keys[rank], table.of(rank), deadline_s, arena_bytes=1 << 20).close()
        except BaseException as error:
            found[rank] = error  # type: ignore[call-overload]  # the list of None is filled here

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found  # type: ignore[return-value]  # as above


def test_a_rank_lost_just_before_all_have_joined_leaves_no_segment_behind() -> None:
    """The others have theirs by then, and learn it when they exchange how it went."""

    def files() -> int:
        found = 0
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # that of this look
                found += "memfd:lockstep" in os.readlink(entry)
        return found

    def one(rank: int) -> str:
        ask, calls = table.of(rank), itertools.count()

        def exchange(data: bytes) -> list[bytes]:
            if next(calls):
                raise CommunicationError("lost rank 2")
            return ask(data)

        return failure(lambda: connect_shm(rank, 2, 1, KEY, exchange, PATIENCE_S, arena_bytes=1 << 20))

    table, before = Bytes(2), files()
    with ThreadPoolExecutor(2) as pool:
        assert all("lost rank 2" in told for told in pool.map(one, range(2)))
    assert files() == before


def test_a_rank_without_the_key_gets_nothing() -> None:
    found = join_threads(3, [KEY, KEY, b"x" * 32], 1.0)
    assert all(isinstance(error, SharedMemoryUnavailableError) for error in found)
    assert "rank 2 did not connect" in str(found[1])


def test_a_stranger_is_turned_away_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    real = join._knock

    def knock(name: str, rank: int, *rest: Any) -> socket.socket:
        if rank == 1:
            silent, loud = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
            for stranger in (silent, loud):
                stranger.connect(name)
            loud.sendall(b"let me in" * 99)
            strangers.extend([silent, loud])
        return real(name, rank, *rest)

    strangers: list[socket.socket] = []
    monkeypatch.setattr(join, "_knock", knock)
    assert join_threads(3, [KEY] * 3) == [None] * 3
    for stranger in strangers:
        stranger.settimeout(PATIENCE_S)
        with stranger, suppress(ConnectionResetError):  # it was closed with words of the stranger unread
            assert not stranger.recvmsg(100, 1000)[1], "a descriptor for a stranger"


def test_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    found = join_threads(2, [KEY] * 2, 1.0)
    assert all("process of user" in str(error) for error in found)


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("create_file", lambda size: (_ for _ in ()).throw(PermissionError(1, "memfd refused")), "memfd refused"),
        ("FUTEX_CALL", -1, "this processor"),
        ("MAX_RANKS", 1, "2 ranks on a host; at most 1"),
        ("host_identity", lambda: threading.current_thread().name, "rank 0 runs in"),  # as in other containers
        ("host_identity", lambda: "", "does not report"),
    ],
)
def test_what_cannot_be_shared_is_told_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, attribute: str, value: Any, words: str
) -> None:
    monkeypatch.setattr(join, attribute, value)
    found = join_threads(2, [KEY] * 2)
    assert all(isinstance(error, SharedMemoryUnavailableError) and words in str(error) for error in found), found


def test_nobody_can_resize_the_segment() -> None:
    fd = create_file(1 << 20)
    for size in (1 << 19, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, 1033, 0)  # nor take the seals back
    os.close(fd)


def rank_main(rank: int, num_ranks: int, pipe: Any) -> None:
    def exchange(data: bytes) -> list[bytes]:
        pipe.send(data)
        return list(pipe.recv())

    comm = connect_shm(rank, num_ranks, 1, KEY, exchange, PATIENCE_S, PATIENCE_S)
    buf = comm.allocate(1 << 20, np.float32)
    for number in range(1 << 30):
        if number == 20:
            if rank == 1 and os.fork() == 0:  # a child of the rank that outlives it must not hide its end
                time.sleep(2 * SLACK_S)
                os._exit(0)
            comm.deadline_s = 3.0
            pipe.send("in step")
        began = time.monotonic()
        buf[:] = 1
        if error := failure(lambda: comm.all_reduce(buf)).replace("no error", ""):
            pipe.send((error, time.monotonic() - began, time.monotonic()))
            return
        assert (buf == num_ranks).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "words"), [(signal.SIGKILL, "lost rank 1"), (signal.SIGSTOP, "waited 3 s for rank 1")]
)
def test_a_dead_process_is_named_at_once_and_a_frozen_one_at_the_deadline(sign: signal.Signals, words: str) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(3)]
    ranks = [context.Process(target=rank_main, args=(rank, 3, pipes[rank][1])) for rank in range(3)]
    try:
        for process in ranks:
            process.start()
        ours = [pipe for pipe, _ in pipes]
        for _ in range(2):
            data = [pipe.recv() for pipe in ours]
            for pipe in ours:
                pipe.send(data)
        assert [pipe.recv() for pipe in ours] == ["in step"] * 3
        pid = ranks[1].pid
        assert pid is not None
        os.kill(pid, sign)
        sent = time.monotonic()
        told = [ours[rank].recv() for rank in (0, 2)]
        assert any(words in error for error, _, _ in told)
        assert all("rank 1" in error for error, _, _ in told)
        for _, _, when in told:  # of this machine's one clock
            assert when - sent < (1 if sign == signal.SIGKILL else 3) + SLACK_S
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_many_ranks_of_a_host_need_few_descriptors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 is what a process may hold as a rule: 32 ranks have 496 pairs, of two ends each."""
    num_ranks, most, real = 32, [0], socket.socketpair
    before = len(os.listdir("/proc/self/fd"))

    def pair() -> tuple[socket.socket, socket.socket]:
        most.append(len(os.listdir("/proc/self/fd")) - before)
        return real()

    layout = Layout(num_ranks, PAGE_BYTES)
    carriers = [real() for _ in range(num_ranks)]
    monkeypatch.setattr(socket, "socketpair", pair)
    until = time.monotonic() + PATIENCE_S
    segment, links = join.deal(layout, [ours for ours, _ in carriers], range(num_ranks), until)
    assert max(most) < 512, "for both ends of the carriers, and those that have yet to be handed over"
    taken = join.take(layout, 7, carriers[7][1], range(num_ranks), until)
    assert [link is None for link in taken[1]] == [rank == 7 for rank in range(num_ranks)]
    other = taken[1][0]
    assert other is not None and links[7] is not None
    links[7].close()
    other.settimeout(PATIENCE_S)
    assert other.recv(1) == b"", "the two ends of one pair"
    for sockets in (links, taken[1], [end for ends in carriers for end in ends]):
        join.close_all(list(sockets))
    segment.close()
    taken[0].close()


def test_a_closed_segment_reserves_nothing_in_another_file(tmp_path: Path) -> None:
    """The number of its descriptor is given to the next file that is opened."""
    with ThreadPoolExecutor(1) as pool:

        def work(comm: ShmCommunicator) -> int:
            segment = comm._calls.segment
            comm.barrier()
            comm.close()
            with open(tmp_path / f"{comm.rank}", "wb") as file:
                assert pool.submit(segment.allocate, 1000, np.dtype(np.float32)).result(PATIENCE_S) is None
                return os.fstat(file.fileno()).st_size

        assert run_shared(2, work) == [0, 0]
