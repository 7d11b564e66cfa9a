"""What the members of an archive mean together, as `tar xf` would leave them: of several with one name the last counts,
and a link is the file that it leads to.
"""

from __future__ import annotations

import posixpath
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from lockstep.etl.images.tar_format import HARD_LINK, Member

_KEY_BYTES = 16
_MAX_STEPS = 40  # from link to link, as Linux has it


@dataclass(frozen=True, slots=True)
class Settled:
    """`replaced` are the positions of members that a later one of their name replaces, rising. `links` are the others
    that are links to a file of the archive, as if they were that file; `broken` are those that lead elsewhere.
    """

    replaced: tuple[int, ...]
    links: tuple[Member, ...]
    broken: tuple[Member, ...]


class MemberNames:
    """The names of an archive's members in order; 40 bytes each, whatever the length of the names."""

    def __init__(self) -> None:
        self._keys, self._positions, self._offsets, self._sizes = bytearray(), array("q"), array("q"), array("q")
        self._links: dict[int, Member] = {}

    def add(self, member: Member) -> None:
        """Add the next member of the archive. A link must not be read before `settled` says what it is."""
        if member.link_kind is not None:
            self._links[member.position] = member
        self._keys += key_of(member.parts)
        self._positions.append(member.position)
        self._offsets.append(member.offset if member.is_file else -1)
        self._sizes.append(min(member.size, (1 << 63) - 1))

    def settled(self) -> Settled:
        """What the members added so far mean together."""
        halves = np.frombuffer(self._keys, dtype="<u8").reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: those of one name by their positions
        ordered = halves[order]
        same = (ordered[1:] == ordered[:-1]).all(axis=1)
        replaced = frozenset(self._positions[row] for row in order[:-1][same].tolist())
        links, broken = [], []
        for link in self._links.values():
            if link.position in replaced:
                continue
            row = self._followed(link, ordered, order)
            if row is None:
                broken.append(link)
            else:
                links.append(Member(link.position, link.name, True, self._offsets[row], self._sizes[row]))
        return Settled(tuple(sorted(replaced)), tuple(links), tuple(broken))

    def _followed(self, link: Member, ordered: NDArray[np.uint64], order: NDArray[np.intp]) -> int | None:
        """The row of the file that a link leads to; a hard one leads to what its target was when it was made."""
        place, found = link.name, link
        for _ in range(_MAX_STEPS):
            is_hard = found.link_kind == HARD_LINK
            path = posixpath.normpath(found.link if is_hard else posixpath.join(posixpath.dirname(place), found.link))
            if found.link.startswith("/") or path.startswith(("../", "/")) or path in ("..", "."):
                return None  # outside the archive
            rows = _rows_of(key_of(path.split("/")), ordered, order)
            if is_hard:
                rows = [row for row in rows if self._positions[row] < found.position]
            if not rows:
                return None
            following = self._links.get(self._positions[rows[-1]])
            if following is None:
                return rows[-1] if self._offsets[rows[-1]] >= 0 else None
            # A hard link to a symbolic one is that link in another place.
            place, found = place if is_hard else path, following
        return None


def _rows_of(key: bytes, ordered: NDArray[np.uint64], order: NDArray[np.intp]) -> list[int]:
    """The rows of a name in order, by the sorted halves of all keys."""
    high, low = np.frombuffer(key, dtype="<u8")
    first, last = np.searchsorted(ordered[:, 0], high, "left"), np.searchsorted(ordered[:, 0], high, "right")
    return [int(row) for row in order[first:last][ordered[first:last, 1] == low]]


def key_of(parts: Sequence[str]) -> bytes:
    """A name in 16 bytes."""
    return blake2b("/".join(parts).encode(errors="surrogatepass"), digest_size=_KEY_BYTES).digest()
