"""What every communicator must do; each backend's test hands in a way to run a function on N ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from storage.errors import CommunicationError
from training.comm import Communicator

RunRanks = Callable[[int, Callable[[Communicator], Any]], list[Any]]
DTYPES = ["float32", "float64", "int64", "uint8"]
SIZES = [
    0,  # nothing to do, and nothing may hang
    1,  # most segments are empty
    2,
    997,  # uneven segments
    400_003,  # several chunks a segment, uneven
]


def values(rank: int, size: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(1000 * rank + size)
    if dtype.startswith("float"):
        return (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6, size)).astype(dtype)
    return rng.integers(0, 100, size).astype(dtype)


class CommunicatorContract:
    """Subclass with a fixture `run_ranks` and the class attribute `rank_counts`."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", SIZES)
    def test_all_reduce(self, run_ranks: RunRanks, num_ranks: int, dtype: str, size: int) -> None:
        def work(comm: Communicator) -> tuple[bytes, bytes]:
            total, largest = (values(comm.rank, size, dtype) for _ in range(2))
            comm.all_reduce(total)
            comm.all_reduce(largest, "max")
            return total.tobytes(), largest.tobytes()

        first, second = run_ranks(num_ranks, work), run_ranks(num_ranks, work)
        assert first == second, "two runs differ"
        assert len(set(first)) == 1, "ranks differ"
        inputs = [values(rank, size, dtype) for rank in range(num_ranks)]
        total = np.frombuffer(first[0][0], dtype)
        if dtype.startswith("float"):
            exact = np.sum(np.array(inputs, np.float64), axis=0)
            scale = np.sum(np.abs(np.array(inputs, np.float64)), axis=0)
            assert np.all(np.abs(total - exact) <= 8 * np.finfo(dtype).eps * scale)
        else:
            np.testing.assert_array_equal(total, np.sum(inputs, axis=0, dtype=dtype))
        np.testing.assert_array_equal(np.frombuffer(first[0][1], dtype), np.max(inputs, axis=0))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", SIZES)
    def test_broadcast_and_all_gather(self, run_ranks: RunRanks, num_ranks: int, dtype: str, size: int) -> None:
        root = num_ranks - 1

        def work(comm: Communicator) -> tuple[bytes, np.ndarray]:
            buf = values(comm.rank, size, dtype)
            gathered = comm.all_gather(buf)
            comm.broadcast(buf, root)
            return buf.tobytes(), gathered

        inputs = [values(rank, size, dtype) for rank in range(num_ranks)]
        for buf, gathered in run_ranks(num_ranks, work):
            assert buf == inputs[root].tobytes()
            assert gathered.dtype == dtype
            np.testing.assert_array_equal(gathered, np.array(inputs, dtype).reshape(num_ranks, size))

    def test_bytes_of_several_lengths(self, run_ranks: RunRanks, num_ranks: int) -> None:
        sent = [b"x" * (7 * rank) for rank in range(num_ranks)]  # rank 0 sends none
        for got in run_ranks(num_ranks, lambda comm: comm.all_gather_bytes(sent[comm.rank])):
            assert got == sent

    def test_barrier_then_more(self, run_ranks: RunRanks, num_ranks: int) -> None:
        def work(comm: Communicator) -> float:
            comm.barrier()
            buf = np.full(3, comm.rank, np.float32)
            comm.all_reduce(buf)
            comm.barrier()
            return float(buf[0])

        assert run_ranks(num_ranks, work) == [sum(range(num_ranks))] * num_ranks

    @pytest.mark.parametrize(
        ("buf", "op", "error"),
        [
            (np.zeros((2, 2), np.float32), "sum", ValueError),  # not flat
            (np.zeros(8, np.float32)[::2], "sum", ValueError),  # a copy would be reduced in its place
            (np.frombuffer(b"12345678", np.uint8), "sum", ValueError),  # read-only
            (np.zeros(2, np.complex64), "sum", TypeError),
            (np.zeros(2, ">f4"), "sum", TypeError),  # the other byte order
            (np.zeros(2, np.int64), "mean", TypeError),  # no integer holds a mean
            (np.zeros(2, np.float32), "product", ValueError),
        ],
    )
    def test_refused_buffers(
        self, run_ranks: RunRanks, num_ranks: int, buf: np.ndarray, op: str, error: type[Exception]
    ) -> None:
        def work(comm: Communicator) -> bool:
            with pytest.raises(error):
                # an operation that is none is what is tried
                comm.all_reduce(buf, op)  # type: ignore[arg-type]
            comm.barrier()  # a refused call leaves the communicator whole
            return True

        assert all(run_ranks(num_ranks, work))

    def test_after_close_and_abort(self, run_ranks: RunRanks, num_ranks: int) -> None:
        def work(comm: Communicator) -> str:
            with suppress(CommunicationError):  # another rank may have left it and aborted already
                comm.barrier()
            comm.abort("the test says so")
            comm.close()
            comm.close()
            with pytest.raises(CommunicationError, match="the test says so") as caught:
                comm.barrier()
            return str(caught.value)

        assert len(run_ranks(num_ranks, work)) == num_ranks
