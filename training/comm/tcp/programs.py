"""Which program a call runs: by its kind, the algorithm and the size, made once and kept."""

from __future__ import annotations

from typing import NamedTuple

from training.comm.tcp import algorithms, double_tree, halving_doubling, spread
from training.comm.tcp.schedule import Program, even_grid

SMALL_BYTES = 64 << 10  # up to here what counts is the number of steps, beyond it the bytes
WHOLE_BYTES = 32 << 10  # up to here halving-doubling exchanges whole buffers
TREE_CHUNK_BYTES = 128 << 10  # of the double tree, whose time is that of the buffer and of a few frames
MAX_KEPT_FRAMES = 1 << 16  # about 16 MB of frames
ALGORITHMS = ("ring", "halving-doubling", "double-tree")
_PROGRAMS = {
    ("all_reduce", "ring"): algorithms.all_reduce,
    ("all_reduce", "halving-doubling"): halving_doubling.all_reduce,
    ("reduce_scatter", "ring"): algorithms.reduce_scatter,
    ("reduce_scatter", "halving-doubling"): halving_doubling.reduce_scatter,
    ("all_gather_parts", "ring"): algorithms.all_gather,
    ("all_gather_parts", "halving-doubling"): halving_doubling.all_gather,
}


class ProgramKey(NamedTuple):
    """What a program depends on, but for the rank."""

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
        """As `program_of`; training asks for the same few again and again."""
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
    """The algorithm where nobody has measured."""
    return "halving-doubling" if nbytes <= SMALL_BYTES else "ring"


def program_of(key: ProgramKey, rank: int, n: int) -> Program:
    """What rank `rank` of `n` sends and receives in this call."""
    nbytes = key.size * key.itemsize
    if key.kind in ("send", "recv"):
        step = spread.send if key.kind == "send" else spread.receive
        return step(key.peer, even_grid(key.size, 1, key.itemsize))
    if key.kind == "broadcast":
        spreading = spread.tree if key.algorithm == "tree" else spread.chain
        return spreading(rank, n, key.peer, even_grid(key.size, 1, key.itemsize))
    if key.kind == "all_reduce" and key.algorithm == "halving-doubling" and nbytes <= WHOLE_BYTES:
        return halving_doubling.all_reduce_short(rank, n, even_grid(key.size, 1, key.itemsize))
    if key.kind == "all_reduce" and key.algorithm == "double-tree":
        return double_tree.all_reduce(rank, n, even_grid(key.size, 2, key.itemsize, TREE_CHUNK_BYTES))
    algorithm = _PROGRAMS.get((key.kind, key.algorithm))
    if algorithm is None:
        raise ValueError(f"{key.kind} got algorithm {key.algorithm!r}; allowed are {', '.join(ALGORITHMS)}")
    return algorithm(rank, n, even_grid(key.size, n, key.itemsize))
