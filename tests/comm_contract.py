"""What every communicator must do; each backend's test hands in a way to run a function on N ranks.

A backend's test is a subclass of `CommunicatorContract` with two fixtures (or a parametrization of the class):

    num_ranks   how many ranks
    run_ranks   (num_ranks, work) -> [work(communicator of rank r) for each r], ranks as threads or processes; it joins
                the ranks, closes each communicator after its work, and raises what a rank raised

Where the backend has several algorithms, `run_ranks` forces one and the class is parametrized over them. Joining is
what costs, so a test joins once and tries all sizes, dtypes and operations inside; the assertion names the combination.
What a backend cannot do stands in the class attributes `refused_calls` and `refused_dtypes`; it must say so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError, LockstepError
from lockstep.training.comm import Communicator
from lockstep.training.comm.base import BFLOAT16, DTYPES, FLOATS, OPS, UFUNCS, part_bounds

RunRanks = Callable[[int, Callable[[Communicator], Any]], list[Any]]
Array = NDArray[Any]


def values(rank: int, size: int, dtype: np.dtype[Any]) -> Array:
    """Of many magnitudes, so that another order of sums shows; integers near their end, so that they wrap."""
    return _values(rank, size, dtype).copy()


@cache
def _values(rank: int, size: int, dtype: np.dtype[Any]) -> Array:
    rng = np.random.default_rng(1000 * rank + size)
    if dtype in FLOATS:
        wide = dtype.itemsize > 2
        return np.asarray(
            rng.standard_normal(size) * 10.0 ** rng.integers(*((-6, 6) if wide else (-2, 2)), size), dtype
        )
    most = np.iinfo(dtype).max
    return rng.integers(most // 2, most, size, dtype=dtype, endpoint=True)


def check_reduced(what: str, result: Array, inputs: list[Array], op: str) -> None:
    """That `result` is the reduction, as near as its dtype can be."""
    dtype = inputs[0].dtype
    assert result.dtype == dtype, what
    if op in ("min", "max") or dtype not in FLOATS:
        expected = inputs[0].copy()
        for one in inputs[1:]:
            UFUNCS[op](expected, one, out=expected)  # wraps as the communicator must
        np.testing.assert_array_equal(result, expected, err_msg=what)
        return
    wide = np.array(inputs, np.float64)
    divisor = len(inputs) if op == "mean" else 1
    eps = 2.0**-7 if dtype == BFLOAT16 else float(np.finfo(dtype).eps)
    error = np.abs(result.astype(np.float64) - wide.sum(0) / divisor)
    assert np.all(error <= (len(inputs) + 1) * eps * np.abs(wide).sum(0) / divisor + 1e-7), what


class CommunicatorContract:
    """See the module's text."""

    refused_calls: ClassVar[frozenset[str]] = frozenset()
    """Methods that this backend has no way for, of: send, group."""
    refused_dtypes: ClassVar[frozenset[str]] = frozenset()
    sizes: ClassVar[tuple[int, ...]] = (0, 1, 2, 997)
    """Nothing to do, and nothing may hang; most parts are empty; uneven parts."""
    large: ClassVar[int] = 100_003
    """Elements: several frames a part, and uneven."""

    def dtypes(self) -> list[np.dtype[Any]]:
        return [dtype for dtype in DTYPES if dtype.name not in self.refused_dtypes]

    def cases(self) -> Iterator[tuple[int, np.dtype[Any], str]]:
        """(size, dtype, op)"""
        for size, dtype, op in product(self.sizes, self.dtypes(), OPS):
            if op != "mean" or dtype in FLOATS:
                yield size, dtype, op
        for dtype in self.dtypes():
            yield self.large, dtype, "sum"
        yield 4 * self.large, np.dtype(np.float32), "max"

    def test_all_reduce(self, run_ranks: RunRanks, num_ranks: int) -> None:
        cases = list(self.cases())

        def work(comm: Communicator) -> list[Array]:
            results = []
            for size, dtype, op in cases:
                buf = values(comm.rank, size, dtype)
                comm.all_reduce(buf, op)  # type: ignore[arg-type] # OPS holds its words
                results.append(buf)
            return results

        first, second = run_ranks(num_ranks, work), run_ranks(num_ranks, work)
        for number, (size, dtype, op) in enumerate(cases):
            what = f"{op} of {size} {dtype} over {num_ranks} ranks"
            same = {result[number].tobytes() for result in (*first, *second)}
            assert len(same) == 1, f"{what}: ranks or runs differ"
            inputs = [values(rank, size, dtype) for rank in range(num_ranks)]
            check_reduced(what, first[0][number], inputs, op)

    def test_several_buffers_under_way(self, run_ranks: RunRanks, num_ranks: int) -> None:
        """Ranks take the same buffers in other portions: one by one, all at once, or as another thread adds them."""
        sizes = (self.large, 1, 997, 4 * self.large, 0, 997, self.large)

        def work(comm: Communicator) -> list[bytes]:
            buffers = [values(comm.rank, size, np.dtype(np.float32)) for size in sizes]
            expected = [buf.copy() for buf in buffers]
            for buf in expected:
                comm.all_reduce(buf)
            ready = len(sizes) if comm.rank % 3 == 1 else 1
            taken = finished = 0

            def take() -> Array | None:
                nonlocal taken
                if taken == ready:
                    return None
                taken += 1
                return buffers[taken - 1]

            def done() -> None:
                nonlocal finished
                assert buffers[finished].tobytes() == expected[finished].tobytes(), finished
                finished += 1

            def add() -> None:
                nonlocal ready
                while ready < len(sizes):
                    time.sleep(0.001)
                    ready += 1
                    comm.look_again()

            adder = threading.Thread(target=add)
            if comm.rank % 3 == 2:
                adder.start()
            while finished < len(sizes):
                comm.all_reduce_each(take, done)
                assert finished == taken
                if comm.rank % 3 == 0:
                    ready += 1
            comm.barrier()
            return [buf.tobytes() for buf in buffers]

        first, *others = run_ranks(num_ranks, work)
        assert all(other == first for other in others)

    def test_numbers_that_are_none(self, run_ranks: RunRanks, num_ranks: int) -> None:
        special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0]

        def work(comm: Communicator) -> list[bytes]:
            mine = [special[(index * (comm.rank + 1) + comm.rank) % 7] for index in range(49)]
            results = []
            for dtype, op in product((dtype for dtype in self.dtypes() if dtype in FLOATS), OPS):
                buf = np.array(mine, dtype)
                comm.all_reduce(buf, op)
                results.append(buf.tobytes())
                largest = np.array([np.nan if comm.rank == num_ranks - 1 else 1.0], dtype)
                comm.all_reduce(largest, op)
                assert np.isnan(largest[0]), f"{op} of {dtype} loses a NaN"
            return results

        results = run_ranks(num_ranks, work)
        assert all(result == results[0] for result in results), "ranks differ"

    def test_reduce_scatter_and_its_inverse(self, run_ranks: RunRanks, num_ranks: int) -> None:
        """A part has the bits that `all_reduce` gives it: both add in the order of the same algorithm."""
        cases = list(self.cases())

        def work(comm: Communicator) -> list[tuple[Array, Array]]:
            results = []
            for size, dtype, op in cases:
                whole = values(comm.rank, size, dtype)
                comm.all_reduce(whole, op)  # type: ignore[arg-type] # OPS holds its words
                buf = values(comm.rank, size, dtype)
                part = comm.reduce_scatter(buf, op)  # type: ignore[arg-type] # OPS holds its words
                assert part.size == 0 or np.shares_memory(part, buf)
                same = part.tobytes() == comm.part_of(whole, comm.rank).tobytes()
                assert same, f"{op} of {size} {dtype} over {num_ranks} ranks: other bits than all_reduce"
                mine = part.copy()
                comm.all_gather_parts(buf)
                results.append((mine, buf))
            return results

        results = run_ranks(num_ranks, work)
        for number, (size, dtype, op) in enumerate(cases):
            what = f"{op} of {size} {dtype} over {num_ranks} ranks"
            whole = np.concatenate([result[number][0] for result in results])
            check_reduced(what, whole, [values(rank, size, dtype) for rank in range(num_ranks)], op)
            for rank, (start, stop) in enumerate(part_bounds(size, num_ranks)):
                assert results[rank][number][0].size == stop - start, what
                assert results[rank][number][1].tobytes() == whole.tobytes(), f"{what}: gathered again"

    def test_all_gather(self, run_ranks: RunRanks, num_ranks: int) -> None:
        cases = list(product((*self.sizes, self.large // num_ranks), self.dtypes()))
        ragged = [[3 * (rank % 3) for rank in range(num_ranks)], [0] * num_ranks, [0] * (num_ranks - 1) + [self.large]]

        def work(comm: Communicator) -> tuple[list[Array], list[list[Array]], list[bytes]]:
            equal = []
            for size, dtype in cases:
                mine = values(comm.rank, size, dtype)
                mine.flags.writeable = False  # nobody may need to write into it
                equal.append(comm.all_gather(mine))
            uneven = [
                comm.all_gather_ragged(values(comm.rank, sizes[comm.rank], dtype))
                for sizes, dtype in product(ragged, self.dtypes())
            ]
            return equal, uneven, comm.all_gather_bytes(b"x" * (7 * comm.rank))

        for equal, uneven, data in run_ranks(num_ranks, work):
            for (size, dtype), rows in zip(cases, equal, strict=True):
                assert (rows.dtype, rows.shape) == (dtype, (num_ranks, size))
                for rank, row in enumerate(rows):
                    assert row.tobytes() == values(rank, size, dtype).tobytes(), f"all_gather of {size} {dtype}"
            for (sizes, dtype), parts in zip(product(ragged, self.dtypes()), uneven, strict=True):
                for rank, (size, part) in enumerate(zip(sizes, parts, strict=True)):
                    assert part.dtype == dtype
                    assert part.tobytes() == values(rank, size, dtype).tobytes(), f"ragged {sizes} {dtype}"
            assert data == [b"x" * (7 * rank) for rank in range(num_ranks)]

    def test_all_to_all(self, run_ranks: RunRanks, num_ranks: int) -> None:
        """Uneven, empty, to one rank only, and large: part (s, r) has `size(s, r)` elements."""
        sizes: list[Callable[[int, int], int]] = [
            lambda source, to: 3 * source + to,
            lambda source, to: 0,
            lambda source, to: 5 if to == num_ranks - 1 else 0,
            lambda source, to: 997 if source == 0 else 1,
            lambda source, to: self.large // num_ranks + 7 * source - to,
        ]
        cases = list(product(range(len(sizes)), self.dtypes()))

        def part(number: int, source: int, to: int, dtype: np.dtype[Any]) -> Array:
            found = values(100 * source + to, sizes[number](source, to), dtype)
            found.flags.writeable = False  # nobody may need to write into it
            return found

        def work(comm: Communicator) -> list[list[Array]]:
            return [
                comm.all_to_all_ragged([part(number, comm.rank, to, dtype) for to in range(num_ranks)])
                for number, dtype in cases
            ]

        for rank, results in enumerate(run_ranks(num_ranks, work)):
            for (number, dtype), parts in zip(cases, results, strict=True):
                assert len(parts) == num_ranks
                for source, found in enumerate(parts):
                    assert found.dtype == dtype
                    assert found.flags.writeable
                    assert found.tobytes() == part(number, source, rank, dtype).tobytes(), f"{number} {dtype} {source}"

    def test_all_to_all_of_different_dtypes(self, run_ranks: RunRanks, num_ranks: int) -> None:
        def work(comm: Communicator) -> bool:
            dtype = np.float32 if comm.rank else np.int64
            with pytest.raises(CommunicationError):
                comm.all_to_all_ragged([np.zeros(0, dtype)] * num_ranks)
            return True

        assert num_ranks == 1 or all(run_ranks(num_ranks, work))

    def test_broadcast(self, run_ranks: RunRanks, num_ranks: int) -> None:
        cases = list(product(self.sizes, self.dtypes(), sorted({0, num_ranks - 1})))
        cases += [(size, np.dtype(np.float32), root) for size in (1, self.large) for root in range(num_ranks)]

        def work(comm: Communicator) -> list[bytes]:
            results = []
            for size, dtype, root in cases:
                buf = values(comm.rank, size, dtype)
                comm.broadcast(buf, root)
                results.append(buf.tobytes())
            return results

        for results in run_ranks(num_ranks, work):
            for (size, dtype, root), result in zip(cases, results, strict=True):
                assert result == values(root, size, dtype).tobytes(), f"{size} {dtype} from {root}"

    def test_send_and_recv(self, run_ranks: RunRanks, num_ranks: int) -> None:
        cases = list(product((*self.sizes, self.large), self.dtypes()))

        def work(comm: Communicator) -> list[bytes]:
            following, previous = (comm.rank + 1) % num_ranks, (comm.rank - 1) % num_ranks
            if "send" in self.refused_calls:
                for call in (comm.send, comm.recv):
                    with pytest.raises(LockstepError):
                        call(np.zeros(1, np.float32), following)
                return []
            results = []
            for size, dtype in cases:
                mine, theirs = values(comm.rank, size, dtype), np.zeros(size, dtype)
                mine.flags.writeable = False
                if comm.rank % 2:
                    comm.recv(theirs, previous)
                    comm.send(mine, following)
                else:
                    comm.send(mine, following)
                    comm.recv(theirs, previous)
                results.append(theirs.tobytes())
            return results

        if num_ranks == 1:
            return
        for rank, results in enumerate(run_ranks(num_ranks, work)):
            for (size, dtype), result in zip(cases, results, strict=False):
                assert result == values((rank - 1) % num_ranks, size, dtype).tobytes(), f"{size} {dtype}"

    def test_groups(self, run_ranks: RunRanks, num_ranks: int) -> None:
        def work(comm: Communicator) -> list[list[int]]:
            if "group" in self.refused_calls:
                with pytest.raises(LockstepError):
                    comm.group([comm.rank])
                return []
            everyone = list(range(num_ranks))
            like_me = [rank for rank in everyone if rank % 2 == comm.rank % 2]
            first = comm.group(like_me)
            backwards = comm.group(everyone[::-1])
            assert (first.rank, first.num_ranks) == (like_me.index(comm.rank), len(like_me))
            assert backwards.rank == num_ranks - 1 - comm.rank
            nested = backwards.group(everyone[: backwards.rank + 1][-1:])  # each alone
            again = comm.group(like_me)  # the same ranks, another sequence
            found = []
            for one in (comm, first, backwards, nested, again, comm):
                found.append(one.all_gather(np.array([comm.rank], np.int64))[:, 0].tolist())
                total = np.full(5, comm.rank, np.int32)
                one.all_reduce(total)
                assert total.tolist() == [sum(found[-1])] * 5
            return found

        for rank, found in enumerate(run_ranks(num_ranks, work)):
            if found:
                everyone = list(range(num_ranks))
                like_me = everyone[rank % 2 :: 2]
                assert found == [everyone, like_me, everyone[::-1], [rank], like_me, everyone]

    def test_a_group_in_another_thread(self, run_ranks: RunRanks, num_ranks: int) -> None:
        def work(comm: Communicator) -> bool:
            if "group" in self.refused_calls:
                return True
            group = comm.group(range(num_ranks))
            wrong: list[str] = []

            def reduce(one: Communicator, times: int, factor: int) -> None:
                try:
                    for number in range(times):
                        buf = np.full(3000 + number, factor * number, np.float64)
                        one.all_reduce(buf)
                        if not np.all(buf == factor * number * num_ranks):
                            wrong.append(f"{buf[0]} at {number}")
                except LockstepError as error:
                    wrong.append(str(error))

            thread = threading.Thread(target=reduce, args=(group, 20, 1))
            thread.start()
            reduce(comm, 15, 3)  # in any order against the thread's calls
            thread.join(400)
            assert not wrong, wrong
            return not thread.is_alive()

        assert all(run_ranks(num_ranks, work))

    def test_allocated_buffers(self, run_ranks: RunRanks, num_ranks: int) -> None:
        def work(comm: Communicator) -> bool:
            for size, dtype in product((*self.sizes, self.large), self.dtypes()):
                buf = comm.allocate(size, dtype)
                assert (buf.shape, buf.dtype) == ((size,), dtype)
                assert size == 0 or buf.ctypes.data % 64 == 0
                assert not buf.any()
                buf[:] = values(comm.rank, size, dtype)
                other = buf.copy()
                comm.all_reduce(buf)
                comm.all_reduce(other)
                assert buf.tobytes() == other.tobytes(), f"{size} {dtype}"
            return True

        assert all(run_ranks(num_ranks, work))

    def test_barrier_then_more(self, run_ranks: RunRanks, num_ranks: int) -> None:
        def work(comm: Communicator) -> float:
            comm.barrier()
            buf = np.full(3, comm.rank, np.float32)
            comm.all_reduce(buf)
            comm.barrier()
            return float(buf[0])

        assert run_ranks(num_ranks, work) == [sum(range(num_ranks))] * num_ranks

    def test_what_cannot_be_right_is_refused_here(self, run_ranks: RunRanks, num_ranks: int) -> None:
        read_only = np.frombuffer(b"12345678", np.uint8)

        def work(comm: Communicator) -> bool:
            ok = np.zeros(2, np.float32)
            wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
                (ValueError, lambda: comm.all_reduce(np.zeros((2, 2), np.float32))),  # not flat
                (ValueError, lambda: comm.all_reduce(np.zeros(8, np.float32)[::2])),  # a copy would be reduced instead
                (ValueError, lambda: comm.all_reduce(read_only)),
                (ValueError, lambda: comm.broadcast(read_only)),
                (TypeError, lambda: comm.all_reduce(np.zeros(2, np.complex64))),
                (TypeError, lambda: comm.all_reduce([1.0, 2.0])),  # type: ignore[arg-type]  # a wrong call
                (TypeError, lambda: comm.all_reduce(np.ma.zeros(2, np.float32))),  # the mask would stay here
                (TypeError, lambda: comm.all_reduce(np.zeros(2, ">f4"))),  # the other byte order
                (TypeError, lambda: comm.all_reduce(np.zeros(2, np.int64), "mean")),  # no integer holds a mean
                (TypeError, lambda: comm.reduce_scatter(np.zeros(2, np.uint8), "mean")),
                # an operation that is none is what is tried
                (ValueError, lambda: comm.all_reduce(ok, "product")),  # type: ignore[arg-type] # refused
                (TypeError, lambda: comm.all_gather(np.zeros(2, bool))),
                (ValueError, lambda: comm.all_to_all_ragged([ok] * (num_ranks + 1))),
                (ValueError, lambda: comm.all_to_all_ragged([np.zeros((2, 2), np.float32)] * num_ranks)),
                (TypeError, lambda: comm.all_to_all_ragged([np.zeros(2, bool)] * num_ranks)),
                (ValueError, lambda: comm.broadcast(ok, num_ranks)),
                (ValueError, lambda: comm.broadcast(ok, -1)),
            ]
            if "send" not in self.refused_calls:
                wrong += [
                    (ValueError, lambda: comm.send(ok, comm.rank)),
                    (ValueError, lambda: comm.recv(ok, num_ranks)),
                ]
            if "group" not in self.refused_calls:
                wrong += [
                    (ValueError, lambda: comm.group([])),
                    (ValueError, lambda: comm.group([comm.rank, comm.rank])),
                    (ValueError, lambda: comm.group([comm.rank, num_ranks])),
                    (TypeError, lambda: comm.group([comm.rank, 0.5])),  # type: ignore[list-item]  # a wrong call
                ]
            for number, (error, call) in enumerate(wrong):
                with pytest.raises(error):
                    call()
                    raise AssertionError(f"call {number} was taken")
            comm.barrier()  # a refused call leaves the communicator whole
            return True

        assert all(run_ranks(num_ranks, work))

    def test_after_close_and_abort(self, run_ranks: RunRanks, num_ranks: int) -> None:
        def work(comm: Communicator) -> bool:
            with suppress(CommunicationError):  # another rank may have left it and aborted already
                comm.barrier()
            comm.abort("the test says so")
            comm.close()
            comm.close()
            calls: list[Callable[[], Any]] = [
                lambda: comm.all_reduce(np.zeros(3, np.float32)),
                lambda: comm.all_reduce(np.zeros(0, np.float32)),  # nothing to do is no way round
                lambda: comm.broadcast(np.zeros(0, np.float32)),
                lambda: comm.all_gather(np.zeros(0, np.float32)),
                lambda: comm.all_to_all_ragged([np.zeros(0, np.float32)] * num_ranks),
                comm.barrier,
            ]
            for call in calls:
                with pytest.raises(CommunicationError, match="the test says so"):
                    call()
            return True

        assert all(run_ranks(num_ranks, work))
