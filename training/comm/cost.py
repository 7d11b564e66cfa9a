"""The cost of an all_reduce: T = alpha * messages + beta * bytes + gamma * reduced bytes, on the slowest rank's path.

The counts are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005), for ring and halving-doubling, and of Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan" (2009). Pure functions; `lockstep.training.comm.calibrate` measures the three costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from lockstep.training.comm.tcp.algorithms import WHOLE_BYTES

PIECE_BYTES = 8 << 20  # of a buffer in two levels; docs/decisions/043-cost-model.md
EVEN = 1.05  # times closer than this count as equal: the model is not more precise
SMALLEST_BYTES, LARGEST_BYTES = 64, 1 << 30  # of the sizes for which an algorithm is chosen; powers of two


class Counts(NamedTuple):
    """Work on the slowest rank's path of one all_reduce."""

    messages: float
    bytes: float
    reduced_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCosts:
    """The three costs of one kind of link, measured or assumed."""

    alpha_s: float
    """Seconds per message, independent of its size."""
    beta_s_per_byte: float
    """Seconds per byte sent from rank to rank."""
    gamma_s_per_byte: float
    """Seconds per byte added to another."""

    def of(self, algorithm: str) -> LinkCosts:
        """Return these costs, which hold for every algorithm."""
        return self

    def seconds(self, counts: Counts) -> float:
        """The time of this work on this link."""
        return (
            self.alpha_s * counts.messages
            + self.beta_s_per_byte * counts.bytes
            + self.gamma_s_per_byte * counts.reduced_bytes
        )

    def to_json(self) -> dict[str, float]:
        """The fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AlgorithmCosts:
    """The costs of one kind of link for each algorithm, since ranks wait for each other differently in each."""

    costs: Mapping[str, LinkCosts]

    def of(self, algorithm: str) -> LinkCosts:
        """Return the costs of one algorithm."""
        return self.costs[algorithm]

    def to_json(self) -> dict[str, dict[str, float]]:
        """Algorithm -> costs, as a JSON object."""
        return {name: costs.to_json() for name, costs in self.costs.items()}


Links = LinkCosts | AlgorithmCosts


def ring(num_ranks: int, nbytes: int) -> Counts:
    """Reduce-scatter and all-gather on a ring: the fewest bytes, the most messages."""
    hops = num_ranks - 1
    share = nbytes / num_ranks
    return Counts(2 * hops, 2 * hops * share, hops * share)


def halving_doubling(num_ranks: int, nbytes: int) -> Counts:
    """Recursive halving, then doubling, on the largest power of two; the other ranks are folded in.

    Pairs exchange short buffers whole at each step: half as many messages.
    """
    power = 1 << (num_ranks.bit_length() - 1)
    rounds, share = power.bit_length() - 1, nbytes / power
    counts = Counts(2 * rounds, 2 * (power - 1) * share, (power - 1) * share)
    if nbytes <= WHOLE_BYTES:
        counts = Counts(rounds, rounds * nbytes, rounds * nbytes)
    if power == num_ranks:
        return counts
    # Folding in a long buffer overlaps with halving its first cells; the result is sent back whole.
    folded = 2 * nbytes if nbytes <= WHOLE_BYTES else nbytes
    return Counts(counts.messages + 2, counts.bytes + folded, counts.reduced_bytes + nbytes)


def double_tree(num_ranks: int, nbytes: int) -> Counts:
    """Each half of the buffer goes up and down its own binary tree; an inner node of one tree is a leaf of the other.

    The busiest rank sends its half up in both trees and down to two children in one: two buffers. Chunks are
    pipelined, so the depth of the tree costs messages only. Two ranks have one child at most, three no inner node with
    a parent.
    """
    depth = (num_ranks - 1).bit_length()
    return Counts(4 * depth, nbytes * min(num_ranks, 4) / 2, nbytes)


COUNTS: dict[str, Callable[[int, int], Counts]] = {
    "ring": ring,
    "halving-doubling": halving_doubling,
    "double-tree": double_tree,
}


def predict_s(algorithm: str, num_ranks: int, nbytes: int, link: Links) -> float:
    """Seconds that an all_reduce of `nbytes` takes between `num_ranks` ranks on equal links."""
    return link.of(algorithm).seconds(COUNTS[algorithm](num_ranks, nbytes)) if num_ranks > 1 else 0.0


def fastest(num_ranks: int, nbytes: int, link: Links, names: Sequence[str] = tuple(COUNTS)) -> str:
    """The algorithm with the shortest predicted time; of equal ones the first of `names`."""
    return min(names, key=lambda name: predict_s(name, num_ranks, nbytes, link))


def pieces_of(nbytes: int) -> int:
    """The number of pieces in which a buffer goes through two levels, each at most PIECE_BYTES."""
    return max(1, -(-nbytes // PIECE_BYTES))


def hierarchical_s(hosts: Sequence[int], nbytes: int, inner: LinkCosts, outer: Links) -> float:
    """Seconds of an all_reduce within hosts of these numbers of ranks, between their leaders, and back.

    The host with the most ranks is the slowest: each of its ranks reads and adds one part, as in a ring. While one
    piece of a large buffer is between the leaders, the hosts work on the pieces before and after it.
    """
    widest, pieces = max(hosts), pieces_of(nbytes)
    piece = -(-nbytes // pieces)
    within = inner.seconds(ring(widest, piece)) if widest > 1 else 0.0
    back = inner.seconds(Counts(1, piece, 0)) if widest > 1 else 0.0
    between = predict_s(fastest(len(hosts), piece, outer), len(hosts), piece, outer) if len(hosts) > 1 else 0.0
    return within + between + back + (pieces - 1) * max(between, within + back)


Table = tuple[tuple[int, str], ...]
"""(largest bytes, algorithm) in rising order; the last algorithm also takes all larger sizes."""


def table_of(seconds: Callable[[str, int], float], names: Sequence[str]) -> Table:
    """The fastest of `names` for each size, by `seconds(name, nbytes)`, at powers of two.

    Of those within EVEN of the fastest, the first of `names`.
    """
    rows: list[tuple[int, str]] = []
    nbytes = SMALLEST_BYTES
    while nbytes <= LARGEST_BYTES:
        times = {name: seconds(name, nbytes) for name in names}
        least = min(times.values())
        best = next(name for name in names if times[name] <= least * EVEN)
        if rows and rows[-1][1] == best:
            rows.pop()
        rows.append((nbytes, best))
        nbytes *= 2
    return tuple(rows)


def look_up(table: Table, nbytes: int) -> str:
    """The algorithm of `table` for a buffer of `nbytes`."""
    return next((name for most, name in table if nbytes <= most), table[-1][1])
