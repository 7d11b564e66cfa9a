"""Recursive halving and doubling, and recursive doubling for short buffers (Thakur, Rabenseifner and Gropp, 2005).

Ranks are paired at distance P/2, P/4, ..., 1 and each pair shares out what both still hold, so that after log2 P steps
each of the P ranks has one block complete; blocks are gathered on the way back. P is the largest power of two up to N:
of the first 2 (N - P) ranks every odd one folds its buffer into the rank before it and gets the result at the end. A
rank and the one folded into it stand next to each other, so a block of ranks is a block of the buffer.

A short buffer is rather exchanged whole at each step: half as many steps, and every rank adds the same pairs in the
same order.
"""

from __future__ import annotations

from lockstep.storage.errors import CommunicationError
from training.comm.tcp.schedule import Builder, Combine, Grid, Program


def all_reduce(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Every part complete on every rank, by halving and doubling."""
    builder = Builder(grid)
    core = _fold(builder, rank, num_ranks, grid)
    if core is not None:
        _halve(builder, core, num_ranks, grid)
        _double(builder, core, num_ranks, grid)
    _unfold(builder, rank, num_ranks, 0, len(grid.edges) - 1)
    return builder.program()


def all_reduce_short(rank: int, num_ranks: int, grid: Grid) -> Program:
    """The same by exchanging all at each step; the grid has one cell, so that each step is one frame."""
    builder = Builder(grid)
    cells = len(grid.edges) - 1
    if cells > 1:  # a second frame would leave after the first one's answer has changed it
        raise CommunicationError(
            "an all-reduce in one exchange a step was planned in several frames",
            got=f"{cells} frames",
            allowed="1",
            next_step="Choose another --algorithm.",
        )
    core = _fold(builder, rank, num_ranks, grid)
    if core is not None:
        distance = 1
        while distance < _cores(num_ranks):
            peer = _rank_of(core ^ distance, num_ranks)
            builder.send(peer, 0, cells)
            builder.receive(peer, 0, cells, _lower_first(core, core ^ distance))
            distance *= 2
    _unfold(builder, rank, num_ranks, 0, cells)
    return builder.program(keeps_sent=True)


def reduce_scatter(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Part r complete on rank r, by halving."""
    builder = Builder(grid)
    core = _fold(builder, rank, num_ranks, grid)
    if core is not None:
        _halve(builder, core, num_ranks, grid)
    odd = rank | 1
    if odd < 2 * _extra(num_ranks):
        _unfold(builder, rank, num_ranks, grid.parts[odd], grid.parts[odd + 1])
    return builder.program()


def all_gather(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Part r of rank r to every rank, by doubling."""
    builder = Builder(grid)
    core, odd = _core_of(rank, num_ranks), rank | 1
    if core is None:
        builder.send(rank - 1, grid.parts[rank], grid.parts[rank + 1])
    else:
        if odd < 2 * _extra(num_ranks):
            builder.receive(odd, grid.parts[odd], grid.parts[odd + 1], "copy")
        _double(builder, core, num_ranks, grid)
    _unfold(builder, rank, num_ranks, 0, len(grid.edges) - 1)
    return builder.program()


def _halve(builder: Builder, core: int, num_ranks: int, grid: Grid) -> None:
    distance = _cores(num_ranks) // 2
    while distance:
        other = core ^ distance
        peer = _rank_of(other, num_ranks)
        builder.send(peer, *_block(other, distance, num_ranks, grid))
        builder.receive(peer, *_block(core, distance, num_ranks, grid), _lower_first(core, other))
        distance //= 2


def _double(builder: Builder, core: int, num_ranks: int, grid: Grid) -> None:
    distance = 1
    while distance < _cores(num_ranks):
        other = core ^ distance
        peer = _rank_of(other, num_ranks)
        builder.send(peer, *_block(core, distance, num_ranks, grid))
        builder.receive(peer, *_block(other, distance, num_ranks, grid), "copy")
        distance *= 2


def _fold(builder: Builder, rank: int, num_ranks: int, grid: Grid) -> int | None:
    """The extra ranks hand their buffers in; this rank's number among the cores, None for an extra one."""
    cells = len(grid.edges) - 1
    core = _core_of(rank, num_ranks)
    if core is None:
        builder.send(rank - 1, 0, cells)
    elif rank < 2 * _extra(num_ranks):
        builder.receive(rank + 1, 0, cells, "own_first")
    return core


def _unfold(builder: Builder, rank: int, num_ranks: int, first: int, last: int) -> None:
    """The extra ranks get the cells from first to last."""
    if rank >= 2 * _extra(num_ranks):
        return
    if rank % 2:
        builder.receive(rank - 1, first, last, "copy")
    else:
        builder.send(rank + 1, first, last)


def _block(core: int, width: int, num_ranks: int, grid: Grid) -> tuple[int, int]:
    """First and last cell of the aligned block of `width` cores in which `core` is."""
    first = core // width * width
    stop = first + width
    return grid.parts[_rank_of(first, num_ranks)], grid.parts[_rank_of(stop, num_ranks)]


def _lower_first(core: int, other: int) -> Combine:
    """Both sides of a pair put the lower one's values first: they form the same expression."""
    return "own_first" if core < other else "own_last"


def _cores(num_ranks: int) -> int:
    return 1 << (num_ranks.bit_length() - 1)


def _extra(num_ranks: int) -> int:
    return num_ranks - _cores(num_ranks)


def _core_of(rank: int, num_ranks: int) -> int | None:
    extra = _extra(num_ranks)
    if rank >= 2 * extra:
        return rank - extra
    return None if rank % 2 else rank // 2


def _rank_of(core: int, num_ranks: int) -> int:
    """The rank of a core; for the number after the last core, num_ranks."""
    extra = _extra(num_ranks)
    return core + extra if core >= extra else 2 * core
