"""The cost model and the simulation of steps: pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling import work
from benchmarks.shared.comm_simulation import Cluster, Layer, Workload, ethernet, simulate
from lockstep.training.comm.cost import (
    COUNTS,
    EVEN,
    LARGEST_BYTES,
    Counts,
    LinkCosts,
    double_tree,
    fastest,
    halving_doubling,
    hierarchical_s,
    look_up,
    predict_s,
    ring,
    table_of,
)

LINK = LinkCosts(alpha_s=1e-4, beta_s_per_byte=1e-9, gamma_s_per_byte=1e-10)


@pytest.mark.parametrize(
    ("count", "num_ranks", "nbytes", "expected"),
    [
        (ring, 2, 800, (2, 800, 400)),
        (ring, 8, 800, (14, 1400, 700)),  # 2(N-1)/N of the buffer: the least there can be
        (halving_doubling, 8, 800_000, (6, 1_400_000, 700_000)),  # as few bytes in log N messages
        (halving_doubling, 7, 800_000, (6, 2_000_000, 1_400_000)),  # three ranks fold theirs in and get it back whole
        (halving_doubling, 8, 800, (3, 2400, 2400)),  # short: whole buffers, half the messages
        (halving_doubling, 7, 800, (4, 3200, 2400)),
        (double_tree, 2, 800, (4, 800, 800)),  # a half up in one tree, a half down in the other
        (double_tree, 3, 800, (8, 1200, 800)),
        (double_tree, 8, 800, (12, 1600, 800)),
    ],
)
def test_counts(count, num_ranks: int, nbytes: int, expected: tuple[float, float, float]) -> None:
    assert count(num_ranks, nbytes) == Counts(*expected)


@given(st.integers(2, 300), st.integers(0, 1 << 28))
def test_no_algorithm_moves_fewer_bytes_than_the_ring(num_ranks: int, nbytes: int) -> None:
    least = ring(num_ranks, nbytes)
    for count in COUNTS.values():
        found = count(num_ranks, nbytes)
        assert found.bytes >= least.bytes * (1 - 1e-12)
        assert found.reduced_bytes >= least.reduced_bytes * (1 - 1e-12)


def test_costs_are_added_up() -> None:
    assert LINK.seconds(Counts(3, 1000, 500)) == pytest.approx(3e-4 + 1e-6 + 5e-8)
    assert predict_s("ring", 1, 1 << 20, LINK) == 0


@pytest.mark.parametrize(
    ("num_ranks", "nbytes", "expected"),
    [
        (64, 8, "halving-doubling"),  # messages count: 12 where the ring has 126
        (64, 1 << 30, "ring"),  # equal bytes, and a few messages more are nothing: the first of equals, nearly
        (3, 1 << 28, "ring"),  # three ranks fold: halving-doubling moves more
        (2, 1 << 20, "ring"),  # all the same at two ranks: the first
        (2, 8, "halving-doubling"),  # one message each way where the ring has two
    ],
)
def test_the_fastest(num_ranks: int, nbytes: int, expected: str) -> None:
    names = [name for name in COUNTS if name != "halving-doubling"] if nbytes == 1 << 30 else list(COUNTS)
    assert fastest(num_ranks, nbytes, LINK, names) == expected


@given(st.integers(2, 64), st.integers(1, LARGEST_BYTES))
def test_the_table_says_what_is_as_good_as_the_best_at_the_next_power_of_two(num_ranks: int, nbytes: int) -> None:
    table = table_of(lambda name, size: predict_s(name, num_ranks, size, LINK), list(COUNTS))
    power = max(64, 1 << (nbytes - 1).bit_length())
    best = predict_s(fastest(num_ranks, power, LINK), num_ranks, power, LINK)
    assert predict_s(look_up(table, nbytes), num_ranks, power, LINK) <= best * EVEN
    sizes = [most for most, _ in table]
    assert sizes == sorted(set(sizes))
    assert look_up(table, LARGEST_BYTES * 3) == table[-1][1]


def test_two_levels_save_messages_between_hosts() -> None:
    """Of large buffers a ring through every rank carries as much over each host's cable: there it is about even."""
    inner = LinkCosts(alpha_s=1e-5, beta_s_per_byte=2e-10, gamma_s_per_byte=1e-10)
    hosts = [4] * 8
    for nbytes in (8, 1 << 16):
        assert hierarchical_s(hosts, nbytes, inner, LINK) < predict_s("ring", 32, nbytes, LINK)
    between = predict_s(fastest(2, 1000, LINK), 2, 1000, LINK)
    assert hierarchical_s([1, 1], 1000, inner, LINK) == between  # nothing within a host
    assert hierarchical_s([3], 1000, inner, LINK) < 1e-4  # nothing between hosts
    # Eight pieces, of which the first's way in and the last one's way back are not hidden by the slower network.
    whole, piece = (hierarchical_s([2, 2], nbytes, inner, LINK) for nbytes in (64 << 20, 8 << 20))
    between = predict_s(fastest(2, 8 << 20, LINK), 2, 8 << 20, LINK)
    assert whole == pytest.approx(piece + 7 * between)


# The simulation


def _workload(*layers: tuple[int, float], compute_s: float = 0.3) -> Workload:
    return Workload(
        name="w",
        layers=tuple(Layer(name=str(i), gradient_bytes=size, work=work) for i, (size, work) in enumerate(layers)),
        compute_s=compute_s,
    )


def _cluster(num_ranks: int, *, alpha_s: float = 0.0, beta: float = 1e-9, per_host: int = 1) -> Cluster:
    link = LinkCosts(alpha_s=alpha_s, beta_s_per_byte=beta, gamma_s_per_byte=0.0)
    return Cluster(num_ranks=num_ranks, ranks_per_host=per_host, outer=link, inner=link)


def test_one_rank_exchanges_nothing() -> None:
    step = simulate(_workload((1 << 26, 1)), _cluster(1))
    assert (step.exchange_s, step.exposed_s, step.efficiency) == (0, 0, 1)


def test_what_comes_last_cannot_be_hidden() -> None:
    """One bucket, whole at the end of the backward pass: all of its exchange is waited for."""
    step = simulate(_workload((4_000_000, 1)), _cluster(2))
    assert step.exposed_s == pytest.approx(4_000_000 * 1e-9)
    assert step.efficiency == pytest.approx(0.3 / 0.304)


def test_what_comes_first_is_hidden() -> None:
    """The last layer's gradient (first to come) leaves while the first layer still computes."""
    step = simulate(_workload((1, 0.5), (4 << 20, 0.5)), _cluster(2))
    assert step.exchange_s > 0.004
    assert step.exposed_s < 1e-8


def test_a_slow_network_is_the_bound() -> None:
    """Where the exchange is longer than all computing, a step takes the first bucket's wait and the exchange."""
    workload = _workload((64 << 20, 1), compute_s=0.3)
    step = simulate(workload, _cluster(2, beta=1e-7))
    first = 0.1 + 0.2 / 16  # the forward pass and a sixteenth of the backward pass
    assert step.compute_s + step.exposed_s == pytest.approx(first + (64 << 20) * 1e-7)


@given(st.integers(1, 3000), st.floats(1, 400))
def test_more_speed_is_never_slower(num_ranks: int, gbit: float) -> None:
    workload = _workload((5 << 20, 1), (300 << 20, 2), (1000, 1))

    def at(speed: float) -> float:
        link = ethernet(speed, alpha_s=2e-5, gamma_s_per_byte=1e-10)
        inner = LinkCosts(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=1e-10)
        return simulate(workload, Cluster(num_ranks=num_ranks, ranks_per_host=4, outer=link, inner=inner)).efficiency

    assert 0 < at(gbit) <= at(2 * gbit) <= 1


def test_gbit_are_bits() -> None:
    assert ethernet(8, alpha_s=0, gamma_s_per_byte=0).beta_s_per_byte == 1e-9


@pytest.mark.parametrize("name", list(COUNTS))
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_counted_work_is_that_of_the_formulas(name: str, num_ranks: int) -> None:
    """Over all ranks: bytes reduced are always (N - 1) buffers; bytes sent those of the formula, or fewer."""
    nbytes = 8 * 3 * 1000 * 4
    counted = work((num_ranks, name, nbytes))
    assert counted.reduced_bytes == (num_ranks - 1) * nbytes
    assert counted.bytes == 2 * (num_ranks - 1) * nbytes
    assert counted.messages <= num_ranks * COUNTS[name](num_ranks, nbytes).messages
