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

from etl.images.tar_format import HARD_LINK, Member

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
        positions = np.frombuffer(self._positions, dtype=np.int64)
        order = np.lexsort((positions, halves[:, 1], halves[:, 0]))
        same = (halves[order][1:] == halves[order][:-1]).all(axis=1)
        replaced = frozenset(positions[order[:-1][same]].tolist())
        versions = self._versions(halves)
        links, broken = [], []
        for link in self._links.values():
            if link.position in replaced:
                continue
            row = self._followed(link, versions)
            if row is None:
                broken.append(link)
            else:
                links.append(Member(link.position, link.name, True, self._offsets[row], self._sizes[row]))
        return Settled(tuple(sorted(replaced)), tuple(links), tuple(broken))

    def _versions(self, halves: NDArray[np.uint64]) -> dict[bytes, list[int]]:
        """The rows, in order, of each name that a link leads to."""
        wanted = {key for link in self._links.values() if (key := _target(link)) is not None}
        first = np.frombuffer(b"".join(wanted), dtype="<u8").reshape(-1, 2)[:, 0]
        found: dict[bytes, list[int]] = {}
        for row in np.flatnonzero(np.isin(halves[:, 0], first)).tolist():
            found.setdefault(bytes(self._keys[row * _KEY_BYTES : (row + 1) * _KEY_BYTES]), []).append(row)
        return found

    def _followed(self, link: Member, versions: dict[bytes, list[int]]) -> int | None:
        """The row of the file that a link leads to; a hard one leads to what its target was when it was made."""
        for _ in range(_MAX_STEPS):
            rows = versions.get(_target(link) or b"", [])
            if link.link_kind == HARD_LINK:
                rows = [row for row in rows if self._positions[row] < link.position]
            if not rows:
                return None
            row = rows[-1]
            following = self._links.get(self._positions[row])
            if following is None:
                return row if self._offsets[row] >= 0 else None
            link = following
        return None


def key_of(parts: Sequence[str]) -> bytes:
    """A name in 16 bytes."""
    return blake2b("/".join(parts).encode(errors="surrogatepass"), digest_size=_KEY_BYTES).digest()


def _target(link: Member) -> bytes | None:
    """The key of the name that a link leads to; None for one outside the archive."""
    path = link.link if link.link_kind == HARD_LINK else posixpath.join(posixpath.dirname(link.name), link.link)
    path = posixpath.normpath(path)
    outside = link.link.startswith("/") or path.startswith(("../", "/")) or path in ("..", ".")
    return None if outside else key_of(path.split("/"))
