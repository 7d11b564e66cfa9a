"""Shared memory: the contract, and sums in rank order to the last bit whatever way a buffer goes."""

from __future__ import annotations

import itertools
import struct
import threading
from typing import Any

import numpy as np
import pytest

from lockstep.training.comm import Communicator
from lockstep.training.comm.base import BFLOAT16, DTYPES, FLOATS, OPS, part_bounds
from lockstep.training.comm.shm import kernels as rounds
from lockstep.training.comm.shm.communicator import ShmCommunicator
from lockstep.training.comm.shm.reduce import OP_CODES, reducer
from lockstep.training.comm.shm.segment import FLAG, INLINE_BYTES, PAGE_BYTES, SLOT_BYTES, Layout
from tests.comm_contract import CommunicatorContract, RunRanks
from tests.training._shared import ARENA_BYTES, run_shared


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
class TestShared(CommunicatorContract):
    @pytest.fixture
    def run_ranks(self) -> RunRanks:
        return run_shared


def values(rank: int, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    rng = np.random.default_rng(1000 * rank + size)
    if dtype in FLOATS:
        return (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3, size)).astype(dtype)
    return rng.integers(0, 100, size).astype(dtype)


def expected(inputs: list[np.ndarray], op: str) -> np.ndarray:
    """By NumPy, in rank order; the narrow floats in float32, rounded once."""
    dtype = inputs[0].dtype
    wide = [x.astype(np.float32) if dtype.itemsize == 2 else x for x in inputs]
    combine = {"min": np.minimum, "max": np.maximum}.get(op, np.add)
    total = wide[0]
    for more in wide[1:]:
        total = combine(total, more)
    return (total / total.dtype.type(len(inputs)) if op == "mean" else total).astype(dtype)


def buffer(comm: Communicator, kind: str, content: np.ndarray) -> np.ndarray:
    """A buffer in the segment or not; `mixed`: on some ranks; `odd`: in the segment, not at its beginning."""
    if kind == "private" or (kind == "mixed" and comm.rank % 2):
        return content.copy()
    found = comm.allocate(content.size + 3, content.dtype)
    assert not found.any(), "a place that is used again must be zeroed"
    assert found.ctypes.data % 64 == 0 if content.dtype != BFLOAT16 else True
    found = found[3:] if kind == "odd" else found[: content.size]
    found[:] = content
    return found


KINDS = ["private", "shared", "mixed", "odd"]


@pytest.mark.parametrize(
    ("dtype", "num_ranks"),
    [*itertools.product(DTYPES, [2, 3]), (np.dtype("float32"), 8), (BFLOAT16, 8)],  # 8: more than there are cores
    ids=str,
)
def test_every_way_gives_the_sums_in_rank_order(dtype: np.dtype[Any], num_ranks: int) -> None:
    edge = INLINE_BYTES // dtype.itemsize
    chunk = Layout(num_ranks, ARENA_BYTES).chunk_bytes // dtype.itemsize
    ops = [op for op in OPS if op != "mean" or dtype in FLOATS]
    cases = []
    for number, size in enumerate(
        [
            1,  # most parts are empty
            edge,  # beside the announcement
            edge + 1,  # the first that is not
            num_ranks * chunk - 1,  # one chunk, the last part's shorter
            num_ranks * 2 * chunk + 1,  # one part has a chunk more than the others
        ]
    ):
        inputs = [values(rank, size, dtype) for rank in range(num_ranks)]
        cases += [(inputs, kind, "sum", expected(inputs, "sum").tobytes()) for kind in KINDS]
        kind = KINDS[number % len(KINDS)]
        cases += [(inputs, kind, op, expected(inputs, op).tobytes()) for op in ops[1:]]

    def work(comm: Communicator) -> None:
        for inputs, kind, op, right in cases:
            mine = inputs[comm.rank]
            buf = buffer(comm, kind, mine)
            comm.all_reduce(buf, op)  # type: ignore[arg-type]  # mypy takes it for any text
            assert buf.tobytes() == right, (mine.size, kind, op)
            buf[:] = mine
            part = comm.reduce_scatter(buf, op)  # type: ignore[arg-type]  # the same
            start, stop = part_bounds(mine.nbytes // dtype.itemsize, num_ranks)[comm.rank]
            assert part.tobytes() == right[start * dtype.itemsize : stop * dtype.itemsize], (mine.size, kind, op)
            comm.all_gather_parts(buf)
            assert buf.tobytes() == right, (mine.size, kind, op)

    run_shared(num_ranks, work)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_every_way_of_copying(num_ranks: int) -> None:
    half = Layout(num_ranks, ARENA_BYTES).half_bytes

    def work(comm: Communicator) -> None:
        for size, kind in itertools.product([0, 1, INLINE_BYTES, INLINE_BYTES + 1, 2 * half + 1], ["private", "mixed"]):
            inputs = [values(rank, size, np.dtype("uint8")) for rank in range(num_ranks)]
            mine = inputs[comm.rank]
            assert comm.all_gather(buffer(comm, kind, mine)).tobytes() == b"".join(x.tobytes() for x in inputs)
            uneven = [x[: size * rank // num_ranks] for rank, x in enumerate(inputs)]  # rank 0 gives none
            rows = comm.all_gather_ragged(buffer(comm, kind, uneven[comm.rank]))
            assert [row.tobytes() for row in rows] == [x.tobytes() for x in uneven]
            for root in (0, num_ranks - 1):
                buf = buffer(comm, kind, mine)
                comm.broadcast(buf, root)
                assert buf.tobytes() == inputs[root].tobytes()
            comm.barrier()

    run_shared(num_ranks, work)


def test_a_buffer_may_be_changed_as_soon_as_a_call_has_returned() -> None:
    def work(comm: Communicator) -> None:
        buf = comm.allocate(1 << 20, np.float32)
        for number in range(1, 20):
            buf[:] = number if comm.rank == 0 else 0
            comm.broadcast(buf)
            right = bool((buf == number).all())
            buf[:] = -1  # others may still be reading
            assert right, number
            comm.part_of(buf, comm.rank)[:] = number
            comm.all_gather_parts(buf)
            right = bool((buf == number).all())
            buf[:] = -1
            assert right, number

    run_shared(3, work)


def test_messages_keep_their_order_and_wait_for_room() -> None:
    sizes = [0, 1, SLOT_BYTES, 9 * SLOT_BYTES + 1, 5]

    def work(comm: Communicator) -> None:
        following, previous = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        for size in sizes:
            mine, got = values(comm.rank, size, np.dtype("uint8")), np.empty(size, np.uint8)
            if comm.rank == 0:
                comm.send(mine, following)
                comm.recv(got, previous)
            else:
                comm.recv(got, previous)
                comm.send(mine, following)
            assert got.tobytes() == values(previous, size, np.dtype("uint8")).tobytes()

    run_shared(3, work)


def test_groups_beside_each_other() -> None:
    def work(comm: ShmCommunicator) -> list[float]:
        found = []
        if comm.rank != 1:
            group = comm.group([3, 0, 2])  # numbered by their place here
            total = group.allocate(20_000, np.float64)
            total[:] = 10 * comm.rank + group.rank
            group.all_reduce(total)
            found.append(float(total[-1]))
            if group.rank < 2:
                found.append(float(group.group([0, 1]).all_gather(np.array([comm.rank])).sum()))
        if comm.rank in (1, 2):
            pair = comm.group([1, 2])
            found.append(float(pair.all_gather(np.array([comm.rank])).sum()))
        comm.barrier()
        return found

    assert run_shared(4, work) == [[53, 3], [3], [53, 3], [53, 3]]


def test_counters_may_wrap_round() -> None:
    together = threading.Barrier(2)
    near = (1 << 31) - 7

    def work(comm: ShmCommunicator) -> None:
        calls = comm._calls
        calls.ctx[rounds.STEP] = near
        flag = calls.segment.layout.control + comm.rank * PAGE_BYTES + FLAG
        calls.segment._map[flag : flag + 4] = struct.pack("<i", near)
        together.wait(120)
        for number in range(20):
            for size in (3, 30_000):
                buf = np.full(size, number, np.int64)
                comm.all_reduce(buf)
                assert (buf == 2 * number).all()

    run_shared(2, work)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_a_nan_of_any_rank_stays(op: Any) -> None:
    def work(comm: Communicator) -> None:
        for dtype in FLOATS:
            buf = np.ones(4, dtype)
            buf[comm.rank] = np.nan
            comm.all_reduce(buf, op)
            assert np.isnan(buf.astype(np.float32)).tolist() == [True, True, True, False], (dtype, buf)

    run_shared(3, work)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_floats_round_as_numpy_does(name: str) -> None:
    dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    address, _ = reducer(name)
    for other in (every, every[::-1].copy(), np.roll(every, 12345), np.roll(every, 1)):
        got = reduced(address, [every, other], "sum")
        with np.errstate(all="ignore"):
            right = (every.astype(np.float32) + other.astype(np.float32)).astype(dtype)
        numbers = ~np.isnan(right.astype(np.float32))
        np.testing.assert_array_equal(got.view(np.uint16)[numbers], right.view(np.uint16)[numbers])
        assert np.isnan(got.astype(np.float32)[~numbers]).all()


def reduced(address: int, inputs: list[np.ndarray], op: str) -> np.ndarray:
    import ctypes

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 6)(address)
    out = np.empty_like(inputs[0])
    table = np.array([x.view(np.uint8).ctypes.data for x in (*inputs, out)], np.int64)
    end = table.ctypes.data + 8 * len(inputs)
    function(None, OP_CODES[op], len(inputs), table.ctypes.data, 1, end, out.size)
    return out


def test_allocated_memory_is_used_again_and_outlives_the_communicator() -> None:
    kept = {}

    def work(comm: ShmCommunicator) -> int:
        half = ARENA_BYTES // 2
        for _ in range(20):  # ten times what there is
            first = comm.allocate(half, np.uint8)
            first[:] = 1
            second = comm.allocate(half - 64, np.uint8)[5:]
            assert not second.any()
            outside = comm.allocate(half, np.uint8)  # no room: an array of the process's own
            outside[:] = 2
            comm.all_reduce(outside)
            assert (outside == 4).all()
            del first, outside
            comm.all_reduce(second)
            del second
        kept[comm.rank] = comm.allocate(1000, np.float32)
        return 1

    run_shared(2, work)
    kept[0][:] = 7
    assert (kept[0] == 7).all() and not kept[1].any()


def test_all_to_all_without_room_in_the_segment() -> None:
    """The parts of one rank do not fit: all send from rank to rank, and later calls use the segment again."""

    def work(comm: ShmCommunicator) -> bool:
        for size in (10, 1000, 10):
            each = size * 1000 if comm.rank == 1 else size
            parts = [np.full(each, 10 * comm.rank + to, np.float64) for to in range(3)]
            for source, part in enumerate(comm.all_to_all_ragged(parts)):
                np.testing.assert_array_equal(
                    part, np.full(size * 1000 if source == 1 else size, 10 * source + comm.rank)
                )
        return True

    assert all(run_shared(3, work, arena_bytes=1 << 20))
