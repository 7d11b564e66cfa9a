"""The algorithms over TCP, as programs: ring, halving and doubling, double tree, broadcast by tree or chain, send.

Ring (Patarasuk and Yuan, 2009): each rank sends to the next and receives from the previous. Each part goes round once,
every rank adding its own, and ends complete on the rank that it belongs to; then complete parts go round once more.
2 (N - 1) / N of the buffer leaves each rank, the least possible, in 2 (N - 1) steps.

Halving and doubling, and the double tree, are those of lockstep.training.comm.cost, with their sources.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm.tcp.schedule import Builder, Combine, Grid, Program, even_grid

SMALL_BYTES = 64 << 10  # up to here the number of steps decides, above it the bytes
WHOLE_BYTES = 32 << 10  # up to here halving-doubling exchanges whole buffers
TREE_CHUNK_BYTES = 128 << 10  # of the double tree, which takes the time of the buffer and of a few frames
MAX_KEPT_FRAMES = 1 << 16  # about 16 MB of frames
ALGORITHMS = ("ring", "halving-doubling", "double-tree")


def ring_all_reduce(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Sum up around a ring, so that every part is complete on every rank."""
    builder = Builder(grid)
    _scatter(builder, rank, num_ranks, grid)
    _gather(builder, rank, num_ranks, grid)
    return builder.program()


def ring_reduce_scatter(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Sum up around a ring, so that part r is complete on rank r."""
    builder = Builder(grid)
    _scatter(builder, rank, num_ranks, grid)
    return builder.program()


def ring_all_gather(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Send part r of rank r around a ring to every rank."""
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


def halving_all_reduce(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Sum up by halving and doubling, so that every part is complete on every rank."""
    builder = Builder(grid)
    core = _fold(builder, rank, num_ranks, grid)
    if core is not None:
        _halve(builder, core, num_ranks, grid)
        _double(builder, core, num_ranks, grid)
    _unfold(builder, rank, num_ranks, 0, len(grid.edges) - 1)
    return builder.program()


def halving_all_reduce_short(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Sum up as halving_all_reduce does, but with whole buffers at each step; the grid has one cell, so that each step
    is one frame.
    """
    builder = Builder(grid)
    cells = len(grid.edges) - 1
    if cells > 1:  # a second frame would be sent after the answer to the first has changed it
        raise CommunicationError(
            "an all-reduce in one exchange a step was planned in several frames",
            got=f"{cells} frames",
            allowed="1",
            next_step="Choose another algorithm.",
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


def halving_reduce_scatter(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Sum up by halving, so that part r is complete on rank r."""
    builder = Builder(grid)
    core = _fold(builder, rank, num_ranks, grid)
    if core is not None:
        _halve(builder, core, num_ranks, grid)
    odd = rank | 1
    if odd < 2 * _extra(num_ranks):
        _unfold(builder, rank, num_ranks, grid.parts[odd], grid.parts[odd + 1])
    return builder.program()


def halving_all_gather(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Send part r of rank r to every rank, by doubling."""
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
    """The extra ranks send their buffers; returns this rank's number among the cores, None for an extra one."""
    cells = len(grid.edges) - 1
    core = _core_of(rank, num_ranks)
    if core is None:
        builder.send(rank - 1, 0, cells)
    elif rank < 2 * _extra(num_ranks):
        builder.receive(rank + 1, 0, cells, "own_first")
    return core


def _unfold(builder: Builder, rank: int, num_ranks: int, first: int, last: int) -> None:
    """Send the extra ranks the cells from first to last."""
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
    """Both sides of a pair put the lower one's values first, so they compute the same expression."""
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


class Node(NamedTuple):
    """A rank's position in a tree."""

    parent: int | None
    children: tuple[int, ...]


def double_tree_all_reduce(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Every cell complete on every rank; the first half of the cells by the first tree."""
    cells = len(grid.edges) - 1
    middle = cells - cells // 2
    # Frames of both trees may share a connection. All ranks sort them by the same key, which puts every frame after
    # those that it waits for, so the queues cannot block each other. A cell starts down `depth` frames after it started
    # up, so that the next cells go up meanwhile.
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
    """The position of `rank` in tree 0 or 1; in the second, each rank has its predecessor's position in the first."""
    ranks = [(position + tree) % num_ranks for position in range(num_ranks)]
    mine = ranks.index(rank)
    parent = _parent(mine + 1, num_ranks)
    children = [position for position in range(num_ranks) if _parent(position + 1, num_ranks) == mine + 1]
    return Node(None if parent is None else ranks[parent - 1], tuple(ranks[child] for child in children))


def _parent(position: int, count: int) -> int | None:
    """The parent of position 1..count in the tree whose in-order numbering is 1..count: odd positions are leaves."""
    bit = position & -position
    while True:
        position, bit = (position & ~bit) | (bit << 1), bit << 1
        if position <= count:
            return position
        if position == bit:  # the next power of two: the root has no parent
            return None


def broadcast_tree(rank: int, num_ranks: int, root: int, grid: Grid) -> Program:
    """Binomial tree: in step s the first 2**s ranks, counted from the root, each send to one more."""
    builder = Builder(grid)
    cells, number = len(grid.edges) - 1, (rank - root) % num_ranks
    distance = 1
    if number:
        distance = 1 << (number.bit_length() - 1)
        builder.receive((rank - distance) % num_ranks, 0, cells, "copy")
        distance *= 2
    while number + distance < num_ranks:
        builder.send((rank + distance) % num_ranks, 0, cells)
        distance *= 2
    return builder.program()


def broadcast_chain(rank: int, num_ranks: int, root: int, grid: Grid) -> Program:
    """Each rank passes every cell on to the next."""
    builder = Builder(grid)
    cells, number = len(grid.edges) - 1, (rank - root) % num_ranks
    if number:
        builder.receive((rank - 1) % num_ranks, 0, cells, "copy")
    if number < num_ranks - 1:
        builder.send((rank + 1) % num_ranks, 0, cells)
    return builder.program()


def pairwise_exchange(rank: int, num_ranks: int, grid: Grid) -> Program:
    """Send part r to rank r, and receive part num_ranks + s from rank s: each byte is sent once, to the rank that it is
    for.

    Each rank begins with the one after it, so that no rank is sent to by all others at first (pairwise exchange:
    Thakur, Rabenseifner and Gropp, 2005). Frames are single cells, which both sides cut alike.
    """
    builder = Builder(grid._replace(cells_per_frame=1))
    for hop in range(1, num_ranks):
        to, source = (rank + hop) % num_ranks, (rank - hop) % num_ranks
        builder.send(to, grid.parts[to], grid.parts[to + 1])
        builder.receive(source, grid.parts[num_ranks + source], grid.parts[num_ranks + source + 1], "copy")
    return builder.program()


def send(peer: int, grid: Grid) -> Program:
    """Send the whole buffer to `peer`."""
    builder = Builder(grid)
    builder.send(peer, 0, len(grid.edges) - 1)
    return builder.program()


def receive(peer: int, grid: Grid) -> Program:
    """Receive the whole buffer from `peer`."""
    builder = Builder(grid)
    builder.receive(peer, 0, len(grid.edges) - 1, "copy")
    return builder.program()


_PROGRAMS = {
    ("all_reduce", "ring"): ring_all_reduce,
    ("all_reduce", "halving-doubling"): halving_all_reduce,
    ("reduce_scatter", "ring"): ring_reduce_scatter,
    ("reduce_scatter", "halving-doubling"): halving_reduce_scatter,
    ("all_gather_parts", "ring"): ring_all_gather,
    ("all_gather_parts", "halving-doubling"): halving_all_gather,
}


class ProgramKey(NamedTuple):
    """The arguments of a program, except the rank."""

    kind: str
    algorithm: str
    size: int
    itemsize: int
    peer: int = 0


class Programs:
    """The programs of one rank of a communicator."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._kept: dict[ProgramKey, Program] = {}
        self._frames = 0

    def of(self, key: ProgramKey) -> Program:
        """Return what `program_of` returns, from a cache: training repeats the same few calls."""
        program = self._kept.get(key)
        if program is None:
            program = program_of(key, self._rank, self._num_ranks)
            frames = 1 + len(program.sends) + len(program.receives)
            if self._frames + frames > MAX_KEPT_FRAMES:
                self._kept.clear()
                self._frames = 0
            self._kept[key] = program
            self._frames += frames
        return program


def default_choice(nbytes: int) -> str:
    """The algorithm for a buffer, without measurements."""
    return "halving-doubling" if nbytes <= SMALL_BYTES else "ring"


def program_of(key: ProgramKey, rank: int, n: int) -> Program:
    """The program of rank `rank` of `n` in this call."""
    nbytes = key.size * key.itemsize
    if key.kind in ("send", "recv"):
        step = send if key.kind == "send" else receive
        return step(key.peer, even_grid(key.size, 1, key.itemsize))
    if key.kind == "broadcast":
        spreading = broadcast_tree if key.algorithm == "tree" else broadcast_chain
        return spreading(rank, n, key.peer, even_grid(key.size, 1, key.itemsize))
    # To scatter, ring and halving leave the second half of an all-reduce out. The other two add whole buffers.
    reduces = key.kind in ("all_reduce", "reduce_scatter")
    if reduces and key.algorithm == "halving-doubling" and nbytes <= WHOLE_BYTES:
        return halving_all_reduce_short(rank, n, even_grid(key.size, 1, key.itemsize))
    if reduces and key.algorithm == "double-tree":
        return double_tree_all_reduce(rank, n, even_grid(key.size, 2, key.itemsize, TREE_CHUNK_BYTES))
    algorithm = _PROGRAMS.get((key.kind, key.algorithm))
    if algorithm is None:
        raise ValueError(f"{key.kind} got algorithm {key.algorithm!r}; allowed are {', '.join(ALGORITHMS)}")
    return algorithm(rank, n, even_grid(key.size, n, key.itemsize))
