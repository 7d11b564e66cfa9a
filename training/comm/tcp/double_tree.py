"""Double binary tree (Sanders, Speck and Traeff, 2009): each of two trees reduces and broadcasts half of the buffer.

In a binary tree half of the ranks are leaves, which only send up and receive down; the second tree is the first one
turned by one rank, so that a leaf of the one is an inner node of the other and every rank's connection is in use
both ways. Cells follow each other through the trees, so the time is that of the buffer plus 2 log2 N cells.
The paper colours the edges of both trees so that a rank sends one frame at a time; here one poll loop serves all.
"""

from __future__ import annotations

from typing import NamedTuple

from training.comm.tcp.schedule import Builder, Grid, Program


class Node(NamedTuple):
    """A rank's place in a tree."""

    parent: int | None
    children: tuple[int, ...]


def all_reduce(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Every cell complete on every rank; the first half of the cells by the first tree."""
    cells = len(grid.edges) - 1
    middle = cells - cells // 2
    # Frames of both trees may share a connection. All ranks order them by the same key, in which every frame comes
    # after those that it waits for, so the queues cannot block each other. A cell's way down begins `depth` frames
    # after its way up, so that the next cells go up meanwhile.
    depth = num_ranks.bit_length() + 1
    steps = []
    for tree, (first, last) in enumerate(((0, middle), (middle, cells))):
        for index, start in enumerate(range(first, last, grid.cells_per_frame)):
            frame = (start, min(start + grid.cells_per_frame, last))
            steps += [(index, 0, tree, frame), (index + depth, 1, tree, frame)]
    builder = Builder(grid)
    nodes = [node_of(rank, num_ranks, tree) for tree in range(2)]
    for _, down, tree, (start, stop) in sorted(steps):
        node = nodes[tree]
        if not down:
            for child in node.children:
                builder.receive(child, start, stop, "own_first")
            if node.parent is not None:
                builder.send(node.parent, start, stop)
        else:
            if node.parent is not None:
                builder.receive(node.parent, start, stop, "copy")
            for child in node.children:
                builder.send(child, start, stop)
    return builder.program()


def node_of(rank: int, num_ranks: int, tree: int) -> Node:
    """The place of `rank` in tree 0 or 1; in the second each rank stands where its predecessor does in the first."""
    places = [(place + tree) % num_ranks for place in range(num_ranks)]  # place 0.. of a tree -> rank
    mine = places.index(rank)
    parent = _parent(mine + 1, num_ranks)
    children = [place for place in range(num_ranks) if _parent(place + 1, num_ranks) == mine + 1]
    return Node(None if parent is None else places[parent - 1], tuple(places[child] for child in children))


def _parent(place: int, count: int) -> int | None:
    """The parent of place 1..count in the tree whose inner order is 1..count: odd places are leaves."""
    bit = place & -place
    while True:
        place, bit = (place & ~bit) | (bit << 1), bit << 1
        if place <= count:
            return place
        if place == bit:  # the next power of two: nobody stands above
            return None
