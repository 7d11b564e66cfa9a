"""What stands in for records that cannot be decoded (--on-bad-record skip): the same on any rank, at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from typing import Any

import pyarrow as pa

BLOCKS_TRIED = 16  # of the same shard, and then one of each of so many others


def own_id(shard_sha256: str, record: int) -> int:
    """A sample id for a record whose own cannot be read: the same at each reading."""
    digest = sha256(f"bad record {shard_sha256} {record}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


@dataclass(frozen=True, slots=True)
class BadRecords:
    """Records of one shard that are skipped: one, or a whole block of a format that is read by blocks."""

    words: str
    """The error's words, which name file and record."""
    shard: str
    """The path of the shard in its dataset."""
    sha256: str
    """The shard's digest in the manifest."""
    first: int
    count: int = 1

    @property
    def ids(self) -> list[int]:
        """The ids that stand for theirs, in order."""
        return [own_id(self.sha256, record) for record in range(self.first, self.first + self.count)]

    def to_row(self) -> dict[str, Any]:
        """The fields of a row {kind: bad_record}; `of_row` is the inverse."""
        return {
            "what": self.words,
            "shard": self.shard,
            "shard_sha256": self.sha256,
            "record": self.first,
            "records": self.count,
        }

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> BadRecords | None:
        """Read the bad records back from a row; None for an image's row, whose sample keeps its id."""
        if "shard" not in row:
            return None
        return cls(row["what"], row["shard"], row["shard_sha256"], row["record"], row["records"])


class Skipped:
    """The records that one reader, or those of a training set together, have skipped; `report` is called once each."""

    def __init__(self, report: Callable[[BadRecords], None]) -> None:
        self._report = report
        self.words: dict[int, str] = {}
        """The error's words by the id that stands for the record's."""

    def add(self, bad: BadRecords) -> None:
        """Take some, the same ones any number of times."""
        ids = bad.ids
        if ids[0] not in self.words:
            self.words |= dict.fromkeys(ids, bad.words)
            self._report(bad)


def with_ids(row: pa.RecordBatch, id_name: str, ids: Sequence[int]) -> pa.RecordBatch:
    """A batch of one row, once for each id."""
    rows = row.take(pa.array([0] * len(ids), pa.int64()))
    column = rows.schema.get_field_index(id_name)
    return rows.set_column(column, rows.schema.field(column), pa.array(ids, pa.int64()))


def blocks_near(shard: int, block: int, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (shard, block) where a good record is looked for, the block itself first; `blocks[shard]` are the blocks of
    each shard.
    """
    mine = sorted(range(blocks[shard]), key=lambda other: (abs(other - block), other))
    others = ((other, 0) for other in range(len(blocks)) if other != shard and blocks[other])
    return chain(((shard, each) for each in mine[:BLOCKS_TRIED]), islice(others, BLOCKS_TRIED))
