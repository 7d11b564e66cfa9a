"""Which rank is named when one dies, freezes or gives up, by every algorithm and also where it is no neighbour."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm import Communicator, TcpCommunicator
from lockstep.training.comm.frames import STALLED, pack_word
from tests.training._ring import PATIENCE_S, SLACK_S, run_ring
from tests.waiting import until

ALGORITHMS = ["ring", "halving-doubling", "double-tree"]


def tcp(comm: Communicator) -> TcpCommunicator:
    assert isinstance(comm, TcpCommunicator)
    return comm


def tell_of_deadline(comm: Communicator, to: int, text: str) -> None:
    """Send rank `to` the word of a rank whose deadline has passed."""
    link = tcp(comm)._engine._links[to]
    assert link is not None
    link.sock.sendall(pack_word(STALLED, 1, link.sent, text))


def die(comm: Communicator) -> None:
    """What the kernel does for a killed process: every socket closed, nothing said."""
    tcp(comm)._engine.drop()
    tcp(comm)._mesh.close()


def told(call: Callable[[], Any]) -> tuple[str, float]:
    """(what the error says, when it came)"""
    try:
        call()
    except CommunicationError as error:
        return error.what, time.monotonic()
    return "no error", time.monotonic()


@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_dead_rank_is_named_by_all_within_a_second(algorithm: str, num_ranks: int) -> None:
    for dead, size in product(range(num_ranks), (10, 3_000_000)):  # waiting; in the middle of sending

        def work(comm: Communicator, dead: int = dead, size: int = size) -> tuple[str, float]:
            tcp(comm).choose = lambda nbytes: algorithm
            buf = np.zeros(size, np.float32)
            if comm.rank == dead:
                comm.all_reduce(buf)
                time.sleep(0.05)
                die(comm)
                return f"lost rank {dead}", time.monotonic()

            def twice() -> None:  # the second time all connections are there
                comm.all_reduce(buf)
                comm.all_reduce(buf)

            return told(twice)

        results = run_ring(num_ranks, work)
        for rank, (what, at) in enumerate(results):
            assert f"lost rank {dead}" in what, f"rank {rank}, {size} elements: {what}"
            assert at - results[dead][1] < 1 + SLACK_S, f"rank {rank}"


@pytest.mark.parametrize("dead", range(5))
def test_a_rank_that_dies_before_it_was_needed_is_named(dead: int) -> None:
    def work(comm: Communicator) -> tuple[str, float]:
        tcp(comm).choose = lambda nbytes: "double-tree"  # other connections than those of joining
        if comm.rank == dead:
            comm.barrier()
            die(comm)
            return f"lost rank {dead} during", time.monotonic()

        def both() -> None:
            comm.barrier()
            comm.all_reduce(np.zeros(100_000, np.float32))

        return told(both)

    results = run_ring(5, work)
    for rank, (what, at) in enumerate(results):
        named = f"lost rank {dead} during" in what or f"could not join rank {dead} " in what
        assert named, f"rank {rank}: {what}"
        assert at - results[dead][1] < 1 + SLACK_S, f"rank {rank}"


@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_frozen_rank_is_named_by_all_at_the_deadline(algorithm: str, num_ranks: int) -> None:
    for frozen in sorted({0, num_ranks // 2 + 1} - {num_ranks}):
        joined, thaw = threading.Barrier(num_ranks), threading.Barrier(num_ranks)

        def work(comm: Communicator, frozen: int = frozen, joined: Any = joined, thaw: Any = thaw) -> tuple[str, float]:
            tcp(comm).choose = lambda nbytes: algorithm
            comm.all_reduce(np.zeros(1000, np.float32))
            comm.deadline_s = 0.4
            joined.wait(PATIENCE_S)  # or who is late in that call would be named
            began = time.monotonic()
            if comm.rank == frozen:
                found = f"for rank {frozen}", began
            else:
                found = told(lambda: comm.all_reduce(np.zeros(1000, np.float32)))
            thaw.wait(PATIENCE_S)
            return found[0], found[1] - began

        for rank, (what, seconds) in enumerate(run_ring(num_ranks, work)):
            assert f"for rank {frozen}" in what, f"rank {rank}: {what}"
            assert seconds < 0.4 + 2.5 + SLACK_S, f"rank {rank}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_right_rank_is_named_where_several_calls_are_under_way(algorithm: str) -> None:
    ends = {"dead": (die, "lost rank 2 during"), "frozen": (lambda comm: None, "for rank 2")}
    for (how, (end, words)), here in product(ends.items(), (0, 2)):
        met, over = threading.Barrier(4), threading.Barrier(4)

        def work(comm: Communicator, here: int = here, end: Any = end, met: Any = met, over: Any = over) -> str:
            tcp(comm).choose = lambda nbytes: algorithm
            met.wait(PATIENCE_S)  # all have joined: who still does is told of the rank that heard first
            buffers = [np.zeros(size, np.float32) for size in (10, 600_000, 10, 10, 600_000, 10)]
            left = buffers[:here] if comm.rank == 2 else buffers
            found = told(lambda: comm.all_reduce_each(lambda: left.pop(0) if left else None, lambda: None))[0]
            if comm.rank == 2:
                time.sleep(0.02)
                end(comm)
            over.wait(PATIENCE_S)
            return found

        for rank, what in enumerate(run_ring(4, work, deadline_s=0.4 if how == "frozen" else PATIENCE_S)):
            assert rank == 2 or words in what, f"{how} after {here}, rank {rank}: {what}"


def test_a_rank_that_never_calls_is_named_by_those_that_wait_for_its_call() -> None:
    thaw = threading.Barrier(3)

    def work(comm: Communicator) -> str:
        group = comm.group([0, 1, 2])
        group.deadline_s = 0.4
        found = "could not join rank 0" if comm.rank == 0 else told(group.barrier)[0]
        thaw.wait(PATIENCE_S)
        return found

    for rank, what in enumerate(run_ring(3, work)):
        assert "could not join rank 0" in what, f"rank {rank}: {what}"  # its door answers, but it makes no call


def test_a_child_of_a_rank_does_not_hide_its_end() -> None:
    children: list[int] = []
    meshes: dict[int, Any] = {}
    before = set(threading.enumerate())

    def no_socket_is_being_made() -> bool:
        """Both ranks are threads of this process: a socket that is unfinished at the fork stays open in the child."""
        names = [thread.name for thread in set(threading.enumerate()) - before]
        lifelines = sum(len(mesh._lifelines) for mesh in meshes.values())
        return not {"mesh-call", "handshake"} & {*names} and lifelines == 2 * names.count("mesh-lifeline")

    def work(comm: Communicator) -> tuple[str, float]:
        meshes[comm.rank] = tcp(comm)._mesh
        comm.barrier()
        if comm.rank == 0:
            return told(comm.barrier)
        until(no_socket_is_being_made)
        child = os.fork()
        if child == 0:  # it outlives the rank
            time.sleep(2 * SLACK_S)
            os._exit(0)
        children.append(child)
        die(comm)
        return "", time.monotonic()

    (what, at), (_, died) = run_ring(2, work)
    os.kill(children[0], signal.SIGKILL)
    os.waitpid(children[0], 0)
    assert "lost rank 1" in what
    assert at - died < 1 + SLACK_S


def test_a_lifeline_that_comes_too_late_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its thread would wait for the other rank's end, however long that rank lives on."""
    before = set(threading.enumerate())

    def work(comm: Communicator) -> bool:
        comm.barrier()
        mesh = tcp(comm)._mesh
        if comm.rank == 1:
            connect = mesh._connect

            def late(*arguments: Any) -> Any:
                sock = connect(*arguments)
                mesh.close()
                return sock

            monkeypatch.setattr(mesh, "_connect", late)
            mesh.watch(0)
            end = time.monotonic() + SLACK_S
            while any(thread.name == "mesh-lifeline" for thread in set(threading.enumerate()) - before):
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
        over.wait(PATIENCE_S)
        return True

    over = threading.Barrier(2)
    assert run_ring(2, work) == [True, True]


def test_the_reason_of_an_abort_reaches_all() -> None:
    def work(comm: Communicator) -> str:
        if comm.rank == 2:
            comm.barrier()
            comm.abort("its disk is full")
            return told(comm.barrier)[0]

        def both() -> None:
            comm.barrier()
            comm.all_reduce(np.zeros(2_000_000, np.float32))

        return told(both)[0]

    for what in run_ring(5, work):
        assert "its disk is full" in what


def test_an_abort_between_two_calls_is_heard_at_once() -> None:
    """The rank that aborts makes no call and closes nothing; the others wait for it, in the whole and in a group."""
    heard = threading.Barrier(3)

    def work(comm: Communicator) -> str:
        group = comm.group(range(3))
        comm.barrier()
        group.barrier()
        found = ""
        if comm.rank == 1:
            comm.abort("its disk is full")
        else:
            found = told((comm if comm.rank else group).barrier)[0]
        heard.wait(PATIENCE_S)
        return found

    found = run_ring(3, work)
    assert all("its disk is full" in what for what in found[::2]), found


def test_many_groups_say_farewell_together() -> None:
    """Where the others do not read, a last word waits a quarter of a second; not once for each group."""
    gone = threading.Event()

    def work(comm: Communicator) -> float:
        for group in [comm.group(range(2)) for _ in range(20)]:
            group.barrier()
        if comm.rank:
            assert gone.wait(PATIENCE_S)
            return 0.0
        began = time.monotonic()
        comm.abort("it has had enough")
        comm.close()
        gone.set()
        return time.monotonic() - began

    assert run_ring(2, work)[0] < 5  # 21 times a quarter is more


def test_a_deadline_may_be_longer_than_the_system_can_wait() -> None:
    for deadline_s in (1e8, float("inf")):  # three years

        def work(comm: Communicator) -> float:
            buf = np.ones(3)
            comm.all_reduce(buf)
            return float(buf[0])

        assert run_ring(2, work, deadline_s=deadline_s) == [2.0, 2.0]


def test_a_parent_that_ends_ends_its_groups() -> None:
    met = threading.Barrier(3)

    def work(comm: Communicator) -> str:
        group = comm.group(range(3))
        group.barrier()
        met.wait(PATIENCE_S)  # or who is still in that barrier hears of another's end
        comm.abort("the run was stopped")
        return told(group.barrier)[0]

    assert all("the run was stopped" in what for what in run_ring(3, work))


def test_a_rank_that_has_closed_its_part_of_a_group_is_named() -> None:
    def work(comm: Communicator) -> tuple[str, float]:
        group = comm.group(range(3))
        if comm.rank == 2:  # which the others call
            group.close()
        comm.barrier()
        began = time.monotonic()
        found = told(group.barrier)[0]
        comm.barrier()
        return found, time.monotonic() - began

    for rank, (what, seconds) in enumerate(run_ring(3, work)):
        assert ("rank 2" in what) and seconds < 1 + SLACK_S, f"rank {rank}: {what}"


@pytest.mark.parametrize("call", ["send", "recv"])
def test_ranks_that_wait_for_each_other_are_named(call: str) -> None:
    def work(comm: Communicator) -> str:
        buf = np.zeros(8_000_000, np.float32)  # more than the sockets of a connection hold
        return told(lambda: getattr(comm, call)(buf, 1 - comm.rank))[0]

    for rank, what in enumerate(run_ring(2, work, deadline_s=0.5)):
        assert f"for rank {1 - rank}" in what or f"for rank {rank}" in what  # its own word, or the other one's


def test_a_call_that_is_done_is_not_spoilt_by_a_word_that_comes_with_its_last_frame() -> None:
    """Both are there at one look: there is nobody left to wait for, and nobody to name."""
    both = threading.Barrier(3)

    def work(comm: Communicator) -> float:
        buf = np.full(3, comm.rank, np.float32)
        comm.barrier()
        if comm.rank == 1:
            tell_of_deadline(comm, 0, "rank 1 waits for rank 2")
        elif comm.rank == 2:
            comm.send(buf, 0)
        both.wait(PATIENCE_S)
        if comm.rank == 0:
            time.sleep(0.1)
            comm.recv(buf, 2)
        return float(buf[0])

    assert run_ring(3, work)[0] == 2.0


def test_a_rank_that_looks_between_its_calls_hears_of_an_end() -> None:
    ends = {"lost rank 1 during its work": die, "rank 1: it is hot": lambda comm: comm.abort("it is hot")}
    for words, end in ends.items():
        over = threading.Barrier(3)

        def work(comm: Communicator, end: Any = end, over: threading.Barrier = over) -> str | None:
            comm.barrier()
            found = tcp(comm).look("its work")
            assert found is None
            over.wait(PATIENCE_S)  # a barrier of theirs could still be under way somewhere when it ends
            if comm.rank == 1:
                end(comm)
            until = time.monotonic() + SLACK_S
            while comm.rank != 1 and found is None and time.monotonic() < until:
                found = tcp(comm).look("its work")
            over.wait(PATIENCE_S)
            return found

        told_of = run_ring(3, work)
        assert words in told_of[0] and words in told_of[2], told_of


def test_a_look_disturbs_nothing() -> None:
    """A frame of the next call may be here already, another rank's deadline may have passed, another may have left."""

    def work(comm: Communicator) -> list[Any]:
        buf = np.full(2_000_000, comm.rank, np.float32)
        found: list[Any] = []
        comm.barrier()
        if comm.rank == 0:
            comm.send(buf, 1)
        elif comm.rank == 1:
            time.sleep(0.1)
            found.append(tcp(comm).look("its work"))
            comm.recv(buf, 0)
            found.append(float(buf.max()))
        group = comm.group([0, 1, 2])
        group.barrier()
        if comm.rank == 0:
            group.close()
        elif comm.rank == 1:
            time.sleep(0.1)
            found.append(tcp(group).look("its work"))  # rank 0 has left, which is no failure
        comm.barrier()
        if comm.rank == 0:
            tell_of_deadline(comm, 1, "rank 0 waits for rank 1")
        elif comm.rank == 1:
            time.sleep(0.1)
            found.append(tcp(comm).look("its work"))
        return found

    assert run_ring(3, work)[1] == [None, 0.0, None, None]
