"""Hints of what will be read: records in the order in which they are wanted, put together to ranges of bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from training.reading.held_ranges import HeldRanges, Range

Key = tuple[int, int]
"""Shard and first record."""


@dataclass(slots=True, eq=False)
class Hint:
    """Records that will be read, and first and last byte of them (and one more) once that is known."""

    shard: int
    first: int
    count: int
    extent: tuple[int, int] | None = None
    asked: bool = False
    """Somebody looks for its extent."""

    @property
    def key(self) -> Key:
        """What it is found by."""
        return self.shard, self.first


class ReadHints:
    """A queue of hints; a reader that waits for one moves it to the front. Not safe for several threads at once."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Key, Hint] = OrderedDict()
        self._urgent: Key | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, shard: int, first: int, count: int) -> bool:
        """Put records behind all others; False where those that begin there are in the queue."""
        if (shard, first) in self._queue:
            return False
        self._queue[shard, first] = Hint(shard, first, count)
        return True

    def urge(self, key: Key) -> bool:
        """Put a hint before all others, since a reader waits for it; False where there is none."""
        if key not in self._queue:
            return False
        self._queue.move_to_end(key, last=False)
        self._urgent = key
        return True

    def to_place(self, among: int) -> Hint | None:
        """The first of the next `among` hints whose extent nobody knows or looks for."""
        return next((hint for hint in islice(self._queue.values(), among) if not hint.asked), None)

    def after(self, hint: Hint) -> Hint | None:
        """The hint of the records that go on from another's, if nobody has looked for its extent."""
        found = self._queue.get((hint.shard, hint.first + hint.count))
        return found if found is not None and not found.asked else None

    def drop(self, hint: Hint) -> None:
        """Take a hint out; nothing where that was done."""
        if self._queue.get(hint.key) is hint:
            self.discard(hint.key)

    def discard(self, key: Key) -> None:
        """Take out the hint of a key; nothing where there is none."""
        self._queue.pop(key, None)
        if self._urgent == key:
            self._urgent = None

    def clear(self) -> None:
        """Take all out."""
        self._queue.clear()
        self._urgent = None

    def next_range(self, ranges: HeldRanges, range_bytes: int) -> Range | None:
        """The next bytes to read, with their place among `ranges`: those of the first hint, and of its neighbours up to
        `range_bytes`. None where there are none, or no place.
        """
        head = next(iter(self._queue.values()), None)
        if head is None or head.extent is None:
            return None
        start, stop = head.extent
        if not ranges.room(stop - start, urgent=self._urgent == head.key):
            return None
        self.drop(head)
        after = head.first + head.count
        while (hint := self._queue.get((head.shard, after))) is not None and hint.extent is not None:
            longer = hint.extent[1] - start
            if hint.extent[0] != stop or longer > range_bytes or not ranges.room(longer, urgent=False):
                break
            self.drop(hint)
            stop, after = hint.extent[1], hint.first + hint.count
        return ranges.begin(head.shard, start, stop)
