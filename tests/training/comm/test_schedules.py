"""Every algorithm, simulated without sockets: frames leave and arrive in many orders, values are expressions."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.comm.base import part_bounds, partners
from lockstep.training.comm.tcp import algorithms
from lockstep.training.comm.tcp import algorithms as double_tree
from lockstep.training.comm.tcp import algorithms as halving_doubling
from lockstep.training.comm.tcp import algorithms as spread
from lockstep.training.comm.tcp.schedule import Grid, Program, Send, even_grid, grid_of

REDUCE = {
    "ring": algorithms.ring_all_reduce,
    "halving-doubling": halving_doubling.halving_all_reduce,
    "short": halving_doubling.halving_all_reduce_short,
    "double-tree": double_tree.double_tree_all_reduce,
}
SCATTER = {"ring": algorithms.ring_reduce_scatter, "halving": halving_doubling.halving_reduce_scatter}
GATHER = {"ring": algorithms.ring_all_gather, "doubling": halving_doubling.halving_all_gather}
SPREAD = {"tree": spread.broadcast_tree, "chain": spread.broadcast_chain}
RANKS = range(1, 10)
SIZES = [0, 1, 2, 7, 23]
Values = list[Any]  # an element: a rank's name, or (first, second) of a sum


def grids(num_ranks: int, size: int) -> list[Grid]:
    """Many frames of one element, few of several, one of all."""
    return [even_grid(size, num_ranks, 4, chunk_bytes) for chunk_bytes in (4, 20, 1 << 20)]


def grids_of(algorithm: str, num_ranks: int, size: int) -> list[Grid]:
    return [even_grid(size, 1, 4)] if algorithm == "short" else grids(num_ranks, size)


def simulate(programs: list[Program], buffers: list[Values], seed: int) -> None:
    """Run the programs to their end in an order drawn by `seed`; AssertionError where they block or frames differ."""
    rng = random.Random(seed)
    done: list[set[int]] = [set() for _ in programs]
    out: dict[tuple[int, int], deque[Send]] = {}
    kept: dict[tuple[int, int], Values] = {}  # the frame at a queue's head, as it was when it became ready
    if any(program.keeps_sent for program in programs):
        assert all(len(program.sends) == len({send.peer for send in program.sends}) for program in programs)
    wire: dict[tuple[int, int], deque[Values]] = {}
    into = {}
    for rank, program in enumerate(programs):
        for peer in program.peers:
            out[rank, peer] = deque(send for send in program.sends if send.peer == peer)
            into[rank, peer] = deque(receive for receive in program.receives if receive.peer == peer)
    while True:
        for (rank, peer), queue in out.items():
            if queue and (rank, peer) not in kept and done[rank].issuperset(queue[0].after):
                kept[rank, peer] = buffers[rank][queue[0].start : queue[0].stop]
        moves: list[Callable[[], None]] = []
        for key in kept:

            def leave(key: tuple[int, int] = key) -> None:
                send, values = out[key].popleft(), kept.pop(key)
                if not programs[key[0]].keeps_sent:
                    assert values == buffers[key[0]][send.start : send.stop], "written while it was leaving"
                wire.setdefault(key, deque()).append(values)

            moves.append(leave)
        for (rank, peer), expected in into.items():
            if expected and wire.get((peer, rank)) and done[rank].issuperset(expected[0].after):

                def arrive(rank: int = rank, peer: int = peer) -> None:
                    receive, frame = into[rank, peer].popleft(), wire[peer, rank].popleft()
                    assert len(frame) == receive.stop - receive.start, "another frame"
                    own = buffers[rank][receive.start : receive.stop]
                    pairs = {
                        "copy": frame,
                        "own_first": list(zip(own, frame, strict=True)),
                        "own_last": list(zip(frame, own, strict=True)),
                    }
                    buffers[rank][receive.start : receive.stop] = pairs[receive.combine]
                    done[rank].add(receive.number)

                moves.append(arrive)
        if not moves:
            break
        rng.choice(moves)()
    assert not any(out.values()) and not any(into.values()), "the programs block each other"
    assert not any(wire.values()), "frames that nobody takes"


def names(num_ranks: int, size: int) -> list[Values]:
    return [[f"{rank}:{element}" for element in range(size)] for rank in range(num_ranks)]


def leaves(expression: Any) -> list[str]:
    if isinstance(expression, str):
        return [expression]
    return [leaf for part in expression for leaf in leaves(part)]


@pytest.mark.parametrize("algorithm", REDUCE)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_all_reduce(algorithm: str, num_ranks: int) -> None:
    for size in SIZES:
        for grid in grids_of(algorithm, num_ranks, size):
            results = []
            for seed in range(3):
                buffers = names(num_ranks, size)
                simulate([REDUCE[algorithm](rank, num_ranks, grid) for rank in range(num_ranks)], buffers, seed)
                results += buffers
            assert all(result == results[0] for result in results), "ranks or orders of arrival differ"
            for element, expression in enumerate(results[0]):
                assert sorted(leaves(expression)) == [f"{rank}:{element}" for rank in range(num_ranks)]


@pytest.mark.parametrize("algorithm", SCATTER)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_reduce_scatter(algorithm: str, num_ranks: int) -> None:
    for size in SIZES:
        for grid in grids(num_ranks, size):
            results = []
            for seed in range(3):
                buffers = names(num_ranks, size)
                simulate([SCATTER[algorithm](rank, num_ranks, grid) for rank in range(num_ranks)], buffers, seed)
                bounds = part_bounds(size, num_ranks)
                results.append([buffers[rank][start:stop] for rank, (start, stop) in enumerate(bounds)])
            assert all(result == results[0] for result in results)
            for element, expression in enumerate([one for part in results[0] for one in part]):
                assert sorted(leaves(expression)) == [f"{rank}:{element}" for rank in range(num_ranks)]


@pytest.mark.parametrize("algorithm", GATHER)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_all_gather(algorithm: str, num_ranks: int) -> None:
    uneven = [[3 * (rank % 3) for rank in range(num_ranks)], [0] * (num_ranks - 1) + [5]]
    bounds = [part_bounds(size, num_ranks) for size in SIZES]
    for sizes in uneven:
        starts = [sum(sizes[:rank]) for rank in range(num_ranks + 1)]
        bounds.append(list(itertools.pairwise(starts)))
    for parts in bounds:
        for chunk_bytes in (4, 20, 1 << 20):
            grid, size = grid_of(parts, 4, chunk_bytes), parts[-1][1]
            buffers = names(num_ranks, size)
            simulate([GATHER[algorithm](rank, num_ranks, grid) for rank in range(num_ranks)], buffers, 0)
            wanted = [f"{rank}:{i}" for rank, (start, stop) in enumerate(parts) for i in range(start, stop)]
            assert buffers == [wanted] * num_ranks


@pytest.mark.parametrize("algorithm", SPREAD)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_broadcast(algorithm: str, num_ranks: int) -> None:
    for root in range(num_ranks):
        for size in SIZES:
            grid = even_grid(size, 1, 4, 20)
            buffers = names(num_ranks, size)
            simulate([SPREAD[algorithm](rank, num_ranks, root, grid) for rank in range(num_ranks)], buffers, size)
            assert buffers == [[f"{root}:{element}" for element in range(size)]] * num_ranks


@pytest.mark.parametrize("num_ranks", range(2, 18))
def test_no_rank_is_an_inner_node_of_both_trees(num_ranks: int) -> None:
    for tree in range(2):
        nodes = [double_tree.node_of(rank, num_ranks, tree) for rank in range(num_ranks)]
        assert [node.parent for node in nodes].count(None) == 1
        assert all(nodes[child].parent == rank for rank, node in enumerate(nodes) for child in node.children)
    for rank in range(num_ranks):
        inner = [tree for tree in range(2) if double_tree.node_of(rank, num_ranks, tree).children]
        assert len(inner) <= 1


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_leaves_a_rank_is_the_least_possible(num_ranks: int) -> None:
    grid = even_grid(64, num_ranks, 4, 4)
    for algorithm in ("ring", "halving-doubling"):
        for rank in range(num_ranks):
            sends = REDUCE[algorithm](rank, num_ranks, grid).sends
            assert sum(send.stop - send.start for send in sends) == 2 * (num_ranks - 1) * 64 // num_ranks


@given(st.integers(0, 300), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.integers(1, 100))
def test_cells_cover_the_buffer(size: int, num_parts: int, itemsize: int, chunk_bytes: int) -> None:
    grid = even_grid(size, num_parts, itemsize, chunk_bytes)
    assert grid.edges[0] == 0 and grid.edges[-1] == size
    assert grid.parts[0] == 0 and grid.parts[-1] == len(grid.edges) - 1
    widths = [stop - start for start, stop in pairwise(grid.edges)]
    assert all(0 < width <= max(1, chunk_bytes // itemsize) for width in widths)
    assert grid.cells_per_frame * max(widths, default=0) * itemsize <= max(chunk_bytes, itemsize)
    bounds = [
        (grid.edges[first], grid.edges[last]) for first, last in zip(grid.parts[:-1], grid.parts[1:], strict=True)
    ]
    assert bounds == part_bounds(size, num_parts)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_pairwise_exchange(num_ranks: int) -> None:
    """Each element is sent once, to the rank that it is for."""
    for seed, chunk_bytes in ((1, 4), (2, 12), (3, 1 << 20)):
        sizes = [[(3 * source + 5 * to) % 7 for to in range(num_ranks)] for source in range(num_ranks)]
        programs: list[Program] = []
        buffers: list[Values] = []
        for rank in range(num_ranks):
            out, received = sizes[rank], [row[rank] for row in sizes]
            edges = [0, *itertools.accumulate([*out, *received])]
            grid = grid_of(list(pairwise(edges)), 4, chunk_bytes)
            programs.append(algorithms.pairwise_exchange(rank, num_ranks, grid))
            buffers.append(
                [f"{rank}>{to}" for to, size in enumerate(out) for _ in range(size)] + [None] * sum(received)
            )
            sent = sum(send.stop - send.start for send in programs[-1].sends)
            assert sent == sum(out) - out[rank]
        simulate(programs, buffers, seed)
        for rank, found in enumerate(buffers):
            mine: Values = []
            for source in range(num_ranks):
                mine += [None if source == rank else f"{source}>{rank}"] * sizes[source][rank]
            assert found[sum(sizes[rank]) :] == mine


@given(st.integers(1, 40))
def test_partners_meet_at_the_same_time(num_ranks: int) -> None:
    """A blocking exchange in this order ends: in every turn some pair is ready, and all pairs meet once."""
    left = [deque(partners(rank, num_ranks)) for rank in range(num_ranks)]
    for rank, peers in enumerate(left):
        assert sorted(peers) == [other for other in range(num_ranks) if other != rank]
    while any(left):
        ready = [(rank, peers[0]) for rank, peers in enumerate(left) if peers and left[peers[0]][0] == rank]
        assert ready, "all wait for each other"
        for rank, _ in ready:
            left[rank].popleft()
