"""Ring: each rank sends to the next and receives from the previous (Patarasuk and Yuan, 2009).

Each part travels once round, every rank adding its own, and ends complete on the rank that it belongs to; complete
parts travel round once more. 2 (N - 1) / N of the buffer leaves each rank, the least possible, in 2 (N - 1) steps.
"""

from __future__ import annotations

from training.comm.tcp.schedule import Builder, Grid, Program


def all_reduce(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Every part complete on every rank."""
    builder = Builder(grid)
    _scatter(builder, rank, num_ranks, grid)
    _gather(builder, rank, num_ranks, grid)
    return builder.program()


def reduce_scatter(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Part r complete on rank r."""
    builder = Builder(grid)
    _scatter(builder, rank, num_ranks, grid)
    return builder.program()


def all_gather(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Part r of rank r to every rank."""
    builder = Builder(grid)
    _gather(builder, rank, num_ranks, grid)
    return builder.program()


def _scatter(builder: Builder, rank: int, num_ranks: int, grid: Grid) -> None:
    following, previous = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for hop in range(1, num_ranks):
        out, into = (rank - hop) % num_ranks, (rank - hop - 1) % num_ranks
        builder.send(following, grid.parts[out], grid.parts[out + 1])
        builder.receive(previous, grid.parts[into], grid.parts[into + 1], "own_last")


def _gather(builder: Builder, rank: int, num_ranks: int, grid: Grid) -> None:
    following, previous = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for hop in range(num_ranks - 1):
        out, into = (rank - hop) % num_ranks, (rank - hop - 1) % num_ranks
        builder.send(following, grid.parts[out], grid.parts[out + 1])
        builder.receive(previous, grid.parts[into], grid.parts[into + 1], "copy")
