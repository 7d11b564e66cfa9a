"""Sums in fewer bytes over real sockets: equal on all ranks, nothing lost, and the bytes that were promised."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from lockstep.training.comm import Communicator, SoloCommunicator
from lockstep.training.compression.bucket_sum import BucketSum
from lockstep.training.compression.choose import bucket_sum, measure
from lockstep.training.compression.low_rank_sum import LowRankSum
from lockstep.training.compression.method import Compression
from lockstep.training.compression.sparse_sum import SparseSum, largest
from tests.training._ring import run_ring, run_solo

SHAPES = ((0, (40, 50)), (2000, (500,)), (2500, (30, 50)))
SIZE = 4000
TOLERANCE = {"bf16": 2**-8, "fp16": 2**-10, "int8": 0.02, "qsgd:64": 0.05}
KEEPS = ["1bit", "topk:1%", "dgc:0.1%", "powersgd:2"]


def gradient(rank: int, step: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng((rank, step)).standard_normal(size).astype(np.float32)


def steps(comm: Communicator, method: str, count: int, size: int = SIZE) -> tuple[list[np.ndarray], BucketSum]:
    one = bucket_sum(comm, Compression.parse(method, seed=3), 0, size, SHAPES)
    sums = []
    for step in range(1, count + 1):
        flat = gradient(comm.rank, step, size)
        one.reduce(flat, step)
        sums.append(flat)
    return sums, one


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("method", TOLERANCE)
def test_sums_are_near_and_equal_on_all_ranks(method: str, num_ranks: int) -> None:
    found = run_ring(num_ranks, lambda comm: steps(comm, method, 2)[0]) if num_ranks > 1 else []
    for step in range(2 if found else 0):
        exact = sum(gradient(rank, step + 1).astype(np.float64) for rank in range(num_ranks))
        assert all(sums[step].tobytes() == found[0][step].tobytes() for sums in found)
        assert np.abs(found[0][step] - exact).max() <= TOLERANCE[method] * np.abs(exact).max() * num_ranks
    again = run_ring(num_ranks, lambda comm: steps(comm, method, 2)[0]) if num_ranks > 1 else []
    assert all(a.tobytes() == b.tobytes() for x, y in zip(found, again, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("method", KEEPS)
def test_what_was_sent_and_what_is_kept_are_the_gradients(method: str, num_ranks: int) -> None:
    def work(comm: Communicator) -> Any:
        sums, one = steps(comm, method, 5)
        return sums, one.kept["residual"]

    found = run_ring(num_ranks, work)
    given = sum(gradient(r, s + 1).astype(np.float64) for r in range(num_ranks) for s in range(5))
    sent = np.sum(found[0][0], axis=0, dtype=np.float64)
    kept = np.sum([residual for _, residual in found], axis=0, dtype=np.float64)
    assert np.abs(kept).max() > 0.1
    np.testing.assert_allclose(sent + kept, given, atol=3e-5)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("method", "least"),
    [
        ("bf16", 1.98),
        ("fp16", 1.98),
        ("int8", 3.9),
        ("1bit", 30),
        ("qsgd:4", 7.5),
        ("dgc:0.1%", 200),
        ("powersgd:2", 180),
    ],
)
def test_bytes_on_the_wire(method: str, least: float, num_ranks: int) -> None:
    size = 1 << 20

    def work(comm: Communicator) -> list[int]:
        one = bucket_sum(comm, Compression.parse(method), 0, size, ((0, (1 << 10, 1 << 10)),))
        flat, sent = gradient(comm.rank, 1, size), []
        for compressed in (False, True):
            before = comm.sent_bytes
            one.reduce(flat, 1) if compressed else comm.all_reduce(flat)
            sent.append(comm.sent_bytes - before)
        return sent

    for whole, compressed in run_ring(num_ranks, work):
        assert whole / compressed >= least, (whole, compressed)


def test_state_over_another_number_of_ranks_keeps_its_sum() -> None:
    kept = run_ring(3, lambda comm: steps(comm, "1bit", 2)[1].kept)

    def continued(comm: Communicator) -> np.ndarray:
        one = bucket_sum(comm, Compression.parse("1bit"), 0, SIZE, SHAPES)
        one.restore(kept, {}, divide=True)
        return one.kept["residual"]

    total = np.sum([part["residual"] for part in kept], axis=0, dtype=np.float64)
    np.testing.assert_allclose(np.sum(run_ring(2, continued), axis=0), total, atol=1e-6)


@pytest.mark.parametrize("method", ["topk:1%", "dgc:0.1%"])
def test_a_chosen_element_is_sent_as_it_is(method: str) -> None:
    """Bit for bit: what was sent and what is kept."""

    def work(comm: Communicator) -> Any:
        sums, one = steps(comm, method, 1)
        return sums[0], one.kept["residual"]

    ((sent, kept),) = run_solo(1, work)
    assert (sent + kept).tobytes() == gradient(0, 1).tobytes()
    assert np.count_nonzero(sent) == (40 if method == "topk:1%" else 4)
    assert np.abs(sent[sent != 0]).min() >= np.abs(kept).max()


def test_deep_gradient_compression_masks_clips_and_warms_up() -> None:
    method = Compression("dgc", 0.001, momentum=0.5, clip_norm=3.0, warm_up_steps=4)
    one = SparseSum(SoloCommunicator(), method, 0, 1000, ((0, (100, 10)),))
    assert [round(one.share(step), 4) for step in (1, 3, 5, 6)] == [0.25, 0.0158, 0.001, 0.001]
    x = gradient(0, 1, 1000)
    flat = x.copy()
    one.reduce(flat, 1)
    clipped = x * np.float32(3.0 / np.linalg.norm(x.astype(np.float64)))
    assert np.count_nonzero(flat) == 250
    np.testing.assert_allclose(flat + one.kept["residual"], clipped, rtol=1e-6)
    assert np.array_equal(one.kept["momentum"] == 0, flat != 0), "what is sent loses its momentum"
    rest = one.kept["residual"].copy()
    flat = np.zeros(1000, np.float32)
    one.reduce(flat, 6)
    np.testing.assert_allclose(flat + one.kept["residual"], rest * 1.5, rtol=1e-6)


def test_a_matrix_of_low_rank_is_summed_exactly_after_a_few_steps() -> None:
    rng = np.random.default_rng(1)
    left, right = rng.standard_normal((40, 2)), rng.standard_normal((2, 50))
    matrix, vector = (left @ right).astype(np.float32).reshape(-1), rng.standard_normal(48).astype(np.float32)

    def work(comm: Communicator) -> np.ndarray:
        one = LowRankSum(comm, Compression("powersgd", 2, seed=5), 0, 2064, ((0, (40, 50)), (2016, (48,))))
        flat = np.empty(0, np.float32)
        for step in range(3):
            whole = np.concatenate([matrix, np.full(16, np.nan, np.float32), vector])
            flat = (whole / comm.num_ranks).astype(np.float32)
            one.kept["residual"][:] = 0
            one.reduce(flat, step + 1)
        return flat

    found = run_ring(2, work)
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0][:2000], matrix, atol=1e-4)
    assert np.array_equal(found[0][2016:], vector)


class Slow(SoloCommunicator):
    """Sums whole buckets at 10 MB/s."""

    def all_reduce(self, buf: np.ndarray, op: Any = "sum") -> None:
        time.sleep(buf.nbytes / 1e7)


@pytest.mark.parametrize(("communicator", "allowed"), [(SoloCommunicator(), ["none"]), (Slow(), ["bf16", "int8"])])
def test_auto_compresses_where_it_pays(communicator: Communicator, allowed: list[str]) -> None:
    measured = measure(communicator, 1 << 18)
    assert measured.name in allowed and "int8" in measured.text and "Gbit/s" in measured.text


@pytest.mark.parametrize("count", [1, 7, 500, 4000])
def test_the_largest_are_found(count: int) -> None:
    values = gradient(0, 1)
    values[::3] = np.round(values[::3])  # equal ones
    found = largest(values, count)
    assert found.dtype == np.int32 and np.array_equal(found, np.unique(found)) and found.size == count
    rest = np.delete(np.abs(values), found)
    assert np.abs(values[found]).min() >= rest.max(initial=0.0)
    values[5] = np.nan
    assert 5 in largest(values, count)
