"""Ranges of shards' bytes that are on their way or there, within one budget."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

Buffer = bytes | memoryview


@dataclass(slots=True, eq=False)
class Range:
    """Bytes start..stop-1 of a shard; once it is `done`, its `data` or the `error` that reading them ended with."""

    shard: int
    start: int
    stop: int
    data: Buffer = b""
    error: BaseException | None = None
    done: bool = False
    forgotten: bool = False
    """Nobody will take it any more; on its way, it keeps its place in the budget until it has come."""
    used_bytes: int = 0

    @property
    def size(self) -> int:
        """How many bytes it has in the budget."""
        return self.stop - self.start


class HeldRanges:
    """Ranges of at most `budget_bytes` together, or a single larger one. Not safe for several threads at once."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        """Bytes that are on their way or there."""
        self.dropped = 0
        """Ranges that went before they were used up."""
        self._ranges: OrderedDict[int, Range] = OrderedDict()  # by id, oldest first
        self._of_shard: dict[int, list[Range]] = {}

    def __len__(self) -> int:
        return len(self._ranges)

    def room(self, size: int, *, urgent: bool) -> bool:
        """Whether so many bytes fit into the budget; where they are `urgent`, what lies there longest makes room."""
        while self.held_bytes and self.held_bytes + size > self.budget_bytes:
            oldest = next((found for found in self._ranges.values() if found.done), None) if urgent else None
            if oldest is None:
                return False
            self.dropped += 1
            self.remove(oldest)
        return True

    def begin(self, shard: int, start: int, stop: int) -> Range:
        """A range that will be read from now on."""
        found = Range(shard, start, stop)
        self._ranges[id(found)] = found
        self._of_shard.setdefault(shard, []).append(found)
        self.held_bytes += found.size
        return found

    def come(self, found: Range, data: Buffer, error: BaseException | None) -> None:
        """The end of a range's read."""
        found.done = True
        if found.forgotten:
            self.held_bytes -= found.size
        else:
            found.data, found.error = data, error

    def covering(self, shard: int, start: int, stop: int) -> Range | None:
        """The range that holds, or will hold, these bytes."""
        for found in self._of_shard.get(shard, ()):
            if found.start <= start and stop <= found.stop:
                return found
        return None

    def use(self, found: Range, start: int, stop: int) -> Buffer:
        """Bytes start..stop-1 of the shard, out of a range that has come; it goes once as many as it has were used."""
        found.used_bytes += stop - start
        if found.used_bytes >= found.size:
            self.remove(found)
        return memoryview(found.data)[start - found.start : stop - found.start]

    def remove(self, found: Range) -> None:
        """Let go of a range; nothing where that was done."""
        if self._ranges.pop(id(found), None) is None:
            return
        self._of_shard[found.shard].remove(found)
        found.forgotten = True
        if found.done:
            self.held_bytes -= found.size

    def clear(self) -> None:
        """Let go of all."""
        for found in list(self._ranges.values()):
            self.remove(found)
