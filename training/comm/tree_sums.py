"""Sums over ranks in the order of a binary tree over their numbers: ((0 + 1) + (2 + 3)) + ..., at any size of buffer.

The order of other algorithms depends on the number of ranks, so they cannot continue a tree that each rank has begun.
Here each rank forms a pair, at each level, with the rank whose number differs in one bit; of two ranks every algorithm
forms the same sum, since a + b = b + a. Pairs exchange halves, then quarters, as in recursive halving and doubling
(Thakur, Rabenseifner and Gropp, 2005), neighbours first. docs/decisions/079-comparing-ranks.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator, LinkUse, Op, check_buffer

PAIR_BYTES = 64 << 10  # up to here a pair sums whole buffers: half as many messages


class TreeSums(Communicator):
    """Wraps the communicator of all ranks: `sum` follows the tree, all other calls are passed on.

    Its first sum makes groups, which is a collective. Raises ConfigError unless the number of ranks is a power of two.
    """

    def __init__(self, communicator: Communicator) -> None:
        rank, ranks = communicator.rank, communicator.num_ranks
        if ranks & (ranks - 1) or communicator.on_host is not communicator:
            raise ConfigError(
                "these ranks cannot add in the order of a binary tree",
                got=f"{ranks} ranks over {type(communicator).__name__}",
                allowed="1, 2, 4, 8, ... ranks, over TCP or shared memory",
                next_step="Use another --num-ranks, and --backend auto.",
            )
        self._all = communicator
        super().__init__(rank, ranks, communicator.generation, communicator.deadline_s)
        self._pairs: list[Communicator] = []

    @property
    def deadline_s(self) -> float:
        """The deadline of the wrapped communicator, which holds for each step of a call."""
        return self._all.deadline_s

    @deadline_s.setter
    def deadline_s(self, seconds: float) -> None:
        self._all.deadline_s = seconds

    @property
    def sent_bytes(self) -> int:
        return self._all.sent_bytes

    def links(self) -> dict[int, LinkUse]:
        return self._all.links()

    def all_reduce(self, buf: NDArray[Any], op: Op = "sum") -> None:
        check_buffer(buf, op)
        if op != "sum":
            self._all.all_reduce(buf, op)
            return
        if not self._pairs:
            self._pairs = self._groups()
        for pair in self._pairs:
            pair.deadline_s = self._all.deadline_s
        self._sum(buf, 0)

    def _groups(self) -> list[Communicator]:
        """The groups of this rank's pairs, neighbours first."""
        if self.num_ranks <= 2:
            return [self._all]
        levels = range(self.num_ranks.bit_length() - 1)
        return [self._all.group(sorted((self.rank, self.rank ^ 1 << level))) for level in levels]

    def _sum(self, buf: NDArray[Any], level: int) -> None:
        if level == len(self._pairs):
            return
        pair = self._pairs[level]
        if buf.nbytes <= PAIR_BYTES or level + 1 == len(self._pairs):
            pair.all_reduce(buf)
            self._sum(buf, level + 1)
        else:
            self._sum(pair.reduce_scatter(buf), level + 1)
            pair.all_gather_parts(buf)

    def all_gather_parts(self, buf: NDArray[Any]) -> None:
        self._all.all_gather_parts(buf)

    def broadcast(self, buf: NDArray[Any], root: int = 0) -> None:
        self._all.broadcast(buf, root)

    def send(self, buf: NDArray[Any], to: int) -> None:
        self._all.send(buf, to)

    def recv(self, buf: NDArray[Any], source: int) -> None:
        self._all.recv(buf, source)

    def group(self, ranks: Sequence[int]) -> Communicator:
        return self._all.group(ranks)

    def allocate(self, size: int, dtype: Any) -> NDArray[Any]:
        return self._all.allocate(size, dtype)

    def abort(self, reason: str) -> None:
        self._all.abort(reason)

    def close(self) -> None:
        self._all.close()
