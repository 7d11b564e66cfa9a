"""Broadcast: a binomial tree for short buffers, a pipelined chain for long ones.

The tree takes log2 N steps of the whole buffer; in the chain cells follow each other from rank to rank, so each rank
receives and sends the buffer once, whatever N.
"""

from __future__ import annotations

from training.comm.tcp.schedule import Builder, Grid, Program


def tree(rank: int, num_ranks: int, root: int, grid: Grid) -> Program:
    """Binomial tree: in step s the first 2**s ranks, counted from the root, each send to one more."""
    builder = Builder(grid)
    cells, place = len(grid.edges) - 1, (rank - root) % num_ranks
    distance = 1
    if place:
        distance = 1 << (place.bit_length() - 1)
        builder.receive((rank - distance) % num_ranks, 0, cells, "copy")
        distance *= 2
    while place + distance < num_ranks:
        builder.send((rank + distance) % num_ranks, 0, cells)
        distance *= 2
    return builder.program()


def chain(rank: int, num_ranks: int, root: int, grid: Grid) -> Program:
    """Each rank hands every cell on to the next."""
    builder = Builder(grid)
    cells, place = len(grid.edges) - 1, (rank - root) % num_ranks
    if place:
        builder.receive((rank - 1) % num_ranks, 0, cells, "copy")
    if place < num_ranks - 1:
        builder.send((rank + 1) % num_ranks, 0, cells)
    return builder.program()


def send(peer: int, grid: Grid) -> Program:
    """All to `peer`."""
    builder = Builder(grid)
    builder.send(peer, 0, len(grid.edges) - 1)
    return builder.program()


def receive(peer: int, grid: Grid) -> Program:
    """All from `peer`."""
    builder = Builder(grid)
    builder.receive(peer, 0, len(grid.edges) - 1, "copy")
    return builder.program()
