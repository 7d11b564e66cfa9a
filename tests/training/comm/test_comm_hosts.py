"""Several hosts laid out on one: which communicator the ranks get, two levels under the contract, frozen choices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training.comm import (
    CommOptions,
    Communicator,
    Joined,
    SoloCommunicator,
    TcpCommunicator,
    cost,
    hierarchical,
)
from lockstep.training.comm.backend import join_ranks
from lockstep.training.comm.hierarchical import HierarchicalCommunicator
from lockstep.training.comm.hosts import agree_on_layout
from lockstep.training.comm.shm.communicator import ShmCommunicator
from lockstep.training.comm.shm.join import close_all
from tests.comm_contract import CommunicatorContract, RunRanks
from tests.training._hosts import run_hosts
from tests.training._ring import PATIENCE_S, run_ring

LAYOUTS = {
    2: "ab",  # a leader each, nobody else
    3: "aab",
    4: "abab",  # neighbours in rank are on different hosts
    5: "aabcb",
    7: "abbbbba",
    8: "aaaabbcd",  # 4, 2, 1, 1
}
TWO_LEVELS = CommOptions(backend="hierarchical", algorithm="hierarchical")


class TestTwoLevels(CommunicatorContract):
    """Every method of the interface, on uneven hosts; the larger buffers go in pieces."""

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cost, "PIECE_BYTES", 150_000)

    @pytest.fixture(params=[3, 4, 5, 7, 8])
    def num_ranks(self, request: pytest.FixtureRequest) -> int:
        return int(request.param)

    @pytest.fixture
    def run_ranks(self) -> RunRanks:
        def run(num_ranks: int, work: Callable[[Communicator], Any]) -> list[Any]:
            through = threading.Barrier(num_ranks)

            def joined_by_all(joined: Joined) -> Any:
                # A rank that fails at once would end the joining of a slower one, or its barrier.
                joined.communicator.barrier()
                through.wait(PATIENCE_S)
                return work(joined.communicator)

            return run_hosts(LAYOUTS[num_ranks], joined_by_all, TWO_LEVELS)

        return run


def _kind(joined: Joined) -> tuple[str, str]:
    assert joined.plan is not None
    return joined.plan.backend, joined.plan.choose(1 << 20)


@pytest.mark.parametrize(
    ("hosts", "options", "backend"),
    [
        ("abc", CommOptions(), "tcp"),
        ("aaa", CommOptions(), "shm"),
        ("aab", CommOptions(), "hierarchical"),
        ("aaa", CommOptions(backend="tcp"), "tcp"),
        ("aab", CommOptions(backend="tcp"), "tcp"),
        ("aab", CommOptions(algorithm="ring"), "tcp"),  # an algorithm between connections
        ("aab", CommOptions(algorithm="hierarchical"), "hierarchical"),
    ],
)
def test_the_backend_follows_hosts_and_options(hosts: str, options: CommOptions, backend: str) -> None:
    found = run_hosts(hosts, _kind, options)
    assert len(set(found)) == 1
    assert found[0][0] == backend
    if options.algorithm != "auto":
        assert found[0][1] == options.algorithm


@pytest.mark.parametrize(
    ("hosts", "options", "named"),
    [
        ("ab", CommOptions(backend="shm"), "2 ranks on 2 hosts"),
        ("ab", CommOptions(backend="hierarchical"), "2 ranks on 2 hosts"),
        ("aa", CommOptions(algorithm="hierarchical"), "2 ranks on 1 host"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(hosts: str, options: CommOptions, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("(", "\\(")):
        run_hosts(hosts, _kind, options)


def _sums(joined: Joined) -> bytes:
    rng = np.random.default_rng(joined.communicator.rank)
    out = b""
    for size in (1, 100, 5000, 70_001):
        buf = rng.standard_normal(size).astype(np.float32)
        joined.communicator.all_reduce(buf, "mean")
        out += buf.tobytes()
    return out


def test_a_restart_adds_in_the_same_order() -> None:
    """The first start's plan, given to the second: no calibration, the same algorithm at every size, equal bits."""
    hosts = "abcde"
    first = run_hosts(hosts, lambda joined: (joined.plan, joined.calibrated, _sums(joined)))
    plan, calibrated, _ = first[0]
    assert calibrated and all(other[0] == plan for other in first)
    again = CommOptions(plans=(plan.to_json(),))
    second = run_hosts(hosts, lambda joined: (joined.plan, joined.calibrated, _sums(joined)), again)
    assert [row[0] for row in second] == [plan] * 5
    assert not any(row[1] for row in second)
    assert [row[2] for row in second] == [row[2] for row in first]


def test_a_frozen_plan_is_followed_even_where_it_is_slow() -> None:
    """Not what would be measured now decides, but what was frozen: here a choice that no calibration makes."""
    plan = run_hosts("abc", lambda joined: joined.plan)[0].to_json()
    plan["table"] = [[256, "ring"], [1024, "double-tree"], [1 << 30, "halving-doubling"]]
    options = CommOptions(plans=(plan,))

    def work(joined: Joined) -> list[str]:
        assert isinstance(joined.communicator, TcpCommunicator)
        return [joined.communicator.choose(nbytes) for nbytes in (4, 1024, 1025)]

    assert run_hosts("abc", work, options) == [["ring", "double-tree", "halving-doubling"]] * 3


def test_another_layout_of_as_many_ranks_is_calibrated_anew() -> None:
    plan = run_hosts("abc", lambda joined: joined.plan)[0]
    options = CommOptions(plans=(plan.to_json(),), algorithm="hierarchical")
    other = run_hosts("aab", lambda joined: joined.plan, options)[0]
    assert other.key != plan.key


def test_what_is_chosen_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    run_hosts("aab", lambda joined: None, TWO_LEVELS)
    told = [line for line in capfd.readouterr().err.splitlines() if "ranks talk by" in line]
    assert len(told) == 1
    assert "hierarchical" in told[0] and "3 ranks on 2 hosts (2, 1)" in told[0]


def test_groups_within_and_across_hosts() -> None:
    def work(joined: Joined) -> list[float]:
        comm = joined.communicator
        found = []
        for ranks in ((0, 1), (1, 2, 3)):  # one on a host, one across
            if comm.rank in ranks:
                group = comm.group(ranks)
                buf = np.full(5, 10.0**comm.rank)
                group.all_reduce(buf)
                found.append(float(buf[0]))
        comm.barrier()
        return found

    assert run_hosts("aabb", work, TWO_LEVELS) == [[11.0], [11.0, 1110.0], [1110.0], [1110.0]]


def test_a_rank_that_leaves_ends_the_wait_of_all() -> None:
    """A follower on one host dies: its leader, the other leader and that one's follower all hear of it."""
    met = threading.Barrier(4)

    def work(joined: Joined) -> str:
        comm = joined.communicator
        assert isinstance(comm, HierarchicalCommunicator)
        comm.barrier()
        met.wait(PATIENCE_S)
        if comm.rank == 1:
            comm.close()
            return "left"
        with pytest.raises(CommunicationError) as caught:
            comm.all_reduce(np.zeros(100_000, np.float32))
        return caught.value.what

    found = run_hosts("aabb", work, TWO_LEVELS)
    assert found[1] == "left"
    assert all("rank 1" in text for rank, text in enumerate(found) if rank != 1), found


def test_a_rank_lost_while_hosts_share_memory_leaves_none_open() -> None:
    shared: list[SoloCommunicator] = []
    both_share = threading.Barrier(3)

    def share(group: Communicator, mates: Sequence[int], within_s: float) -> Communicator:
        found = SoloCommunicator()
        shared.append(found)
        both_share.wait(PATIENCE_S)
        return found

    def work(flat: Communicator) -> str:
        assert isinstance(flat, TcpCommunicator)
        host = "aab"[flat.rank]
        if flat.rank == 2:
            agree_on_layout(flat, host)
            both_share.wait(PATIENCE_S)
            flat.abort("it was killed")
            return "it was killed"
        with pytest.raises(CommunicationError) as caught:
            join_ranks(flat, share, host, CommOptions(), time.monotonic() + PATIENCE_S)
        return str(caught.value)

    assert all("it was killed" in told for told in run_ring(3, work))
    assert len(shared) == 2 and all(one.has_ended for one in shared)


def test_deadlines_reach_both_levels() -> None:
    def work(joined: Joined) -> set[float]:
        comm = joined.communicator
        assert isinstance(comm, HierarchicalCommunicator)
        comm.deadline_s = 7.0
        return {comm.deadline_s, *(level.deadline_s for level in comm._levels())}

    assert run_hosts("aab", work, TWO_LEVELS) == [{7.0}] * 3


def test_an_exchange_between_hosts_leaves_the_deadlines_as_they_were() -> None:
    def work(joined: Joined) -> set[float]:
        comm = joined.communicator
        assert isinstance(comm, HierarchicalCommunicator)
        comm.deadline_s = 50.0
        for _ in range(2):
            comm.all_to_all_ragged([np.arange(2)] * 3)
        return {comm.deadline_s, *(level.deadline_s for level in comm._levels())}

    assert run_hosts("aab", work, TWO_LEVELS) == [{50.0}] * 3


@pytest.mark.parametrize("sizes", [(2, 1), (5, 4), (8, 7)])
def test_gathers_of_different_sizes_are_an_error_and_no_wrong_rows(sizes: tuple[int, int]) -> None:
    """Ranks of one host agree, so shared memory finds nothing; between the hosts only the sizes of parts tell."""

    def work(joined: Joined) -> str:
        comm = joined.communicator
        with pytest.raises(CommunicationError) as caught:
            comm.all_gather_parts(np.full(sizes[comm.rank // 2], float(comm.rank)))
            comm.barrier()
        return caught.value.what

    found = run_hosts("aabb", work, TWO_LEVELS)
    assert any("of a buffer of another size" in text for text in found), found


@pytest.mark.parametrize(("dead", "calls_before"), [(4, 1), (4, 0), (1, 0)])  # 0: the leaders have not yet met
def test_a_rank_that_dies_on_another_host_is_named_and_not_its_leader(dead: int, calls_before: int) -> None:
    """The leader of its host aborts and ends, as a rank's process does: before that it must have told the others."""
    met, over = threading.Barrier(5), threading.Barrier(5)

    def work(joined: Joined) -> str:
        comm = joined.communicator
        assert isinstance(comm, HierarchicalCommunicator)
        for _ in range(calls_before):
            comm.barrier()
        met.wait(PATIENCE_S)  # who is still in that barrier would hear of the end there
        found = f"rank {dead}"
        if comm.rank == dead:
            assert isinstance(comm._inner, ShmCommunicator)
            close_all(comm._inner._calls.links)
        else:
            with pytest.raises(CommunicationError) as caught:
                comm.all_reduce(np.zeros(1000, np.float32))
            found = caught.value.what
        over.wait(PATIENCE_S)  # nobody closes before all have heard
        return found

    found = run_hosts("aabbb", work, TWO_LEVELS)
    assert all(f"rank {dead}" in text for text in found), found


def test_both_levels_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leaders' first call ends after their hosts have summed the second piece: in turn it would wait in vain."""
    monkeypatch.setattr(cost, "PIECE_BYTES", 1 << 10)

    def work(joined: Joined) -> tuple[int, float]:
        comm = joined.communicator
        assert isinstance(comm, HierarchicalCommunicator)
        inner, outer, summed, calls = comm._inner, comm._outer, threading.Semaphore(0), 0

        if inner is not None and outer is not None:
            plain_inner, plain_outer = inner.all_reduce, outer.all_reduce

            def sum_within(*args: Any) -> None:
                plain_inner(*args)
                summed.release()

            def sum_between(*args: Any) -> None:
                nonlocal calls
                calls += 1
                for _ in range(2 if calls == 1 else calls < 4):
                    assert summed.acquire(timeout=PATIENCE_S)
                plain_outer(*args)

            monkeypatch.setattr(inner, "all_reduce", sum_within)
            monkeypatch.setattr(outer, "all_reduce", sum_between)
        buf = np.full(1000, comm.rank, np.float32)  # 4,000 bytes: four pieces
        comm.all_reduce(buf)
        return calls, float(buf.sum())

    assert run_hosts("aabb", work, TWO_LEVELS) == [(4, 6000.0), (0, 6000.0), (4, 6000.0), (0, 6000.0)]


@pytest.mark.parametrize(
    "what", ["an interrupt between the levels", "an interrupt in a later piece", "a message of another size"]
)
def test_whatever_breaks_a_call_ends_all_levels(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met, over = threading.Barrier(4), threading.Barrier(4)

    if "piece" in what:
        monkeypatch.setattr(cost, "PIECE_BYTES", 24)  # three

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def work(joined: Joined) -> str:
        comm = joined.communicator
        assert isinstance(comm, HierarchicalCommunicator)
        comm.barrier()
        met.wait(PATIENCE_S)
        with pytest.raises((CommunicationError, KeyboardInterrupt)) as caught:
            if what.startswith("a message"):
                if comm.rank == 3:
                    comm.send(np.ones(8), 0)
                if comm.rank == 0:
                    comm.recv(np.ones(9), 3)
            elif comm.rank == 0:
                assert comm._outer is not None
                later = iter([comm._outer.all_reduce]) if "piece" in what else iter(())
                monkeypatch.setattr(comm._outer, "all_reduce", lambda *args: next(later, interrupted)(*args))
            comm.all_reduce(np.ones(9))
        over.wait(PATIENCE_S)  # nobody closes before all have heard
        return str(caught.value)

    found = run_hosts("aabb", work, TWO_LEVELS)
    word = "KeyboardInterrupt" if what.startswith("an interrupt") else "sent a wrong frame"
    assert all(word in text for text in found[1:]), found


@pytest.mark.parametrize("frozen", [4, 0])  # of the host that comes later; a leader
def test_a_frozen_rank_is_named_and_nobody_who_waits_for_it(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "LATER_S", 2.0)
    met, over = threading.Barrier(5), threading.Barrier(5)

    def work(joined: Joined) -> str:
        comm = joined.communicator
        comm.barrier()
        met.wait(PATIENCE_S)
        found = f"for rank {frozen}"
        if comm.rank != frozen:
            comm.deadline_s = 0.5
            time.sleep(0.8 if comm.rank > 1 else 0.0)  # the other host comes later, so its deadlines pass later
            with pytest.raises(CommunicationError) as caught:
                comm.all_reduce(np.zeros(1000, np.float32))
            found = caught.value.what
        over.wait(PATIENCE_S)
        return found

    found = run_hosts("aabbb", work, TWO_LEVELS)
    assert all(f"for rank {frozen}" in text for text in found), found
