"""What stands in for records that cannot be decoded (--on-bad-record skip): the same on any rank, at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.errors import DataError
from lockstep.storage.files.interface import FileSystem
from lockstep.training.plan.order import Run
from lockstep.training.reading.files import ShardFiles
from lockstep.training.reading.shards import Shard

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


class StandIns:
    """Finds rows of one reader in place of those that cannot be decoded.

    The arguments are the reader's own: `shards` and `stored` may grow. Reads past the cache.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        files: ShardFiles,
        stored: Sequence[tuple[FileSystem, str, ShardInfo]],
        schema: Schema,
        block_records: int,
        skipped: Skipped,
    ) -> None:
        self._shards, self._files, self._stored = shards, files, stored
        self._id_name, self._block_records = schema.id_field.name, block_records
        self.skipped = skipped

    def rows(self, run: Run, error: DataError) -> pa.RecordBatch:
        """The records of a run that raised `error` or, in a format that is read by whole blocks, of its block: bad ones
        are replaced. Raises `error` if no good record is near.
        """
        shard, stored = self._shards[run.shard], self._stored[run.shard][2]
        if not shard.by_block:
            found: list[pa.RecordBatch] = []
            for record, one in list(self._one_by_one(run.shard, run.first_record, run.count)):
                if isinstance(one, DataError):
                    one = self._stand_in(BadRecords(str(one.what), stored.path, stored.sha256, record), run, error)
                found.append(one)
            return pa.concat_batches(found)
        first, count = shard.records_read(run.first_record, run.count)
        # Without the records of this run, which are others on another rank.
        words = str(error.__cause__.what if isinstance(error.__cause__, DataError) else error.what)
        words = f"records {first} to {first + count - 1} (block {first // self._block_records}): {words}"
        return self._stand_in(BadRecords(words, stored.path, stored.sha256, first, count), run, error)

    def _stand_in(self, bad: BadRecords, run: Run, error: DataError) -> pa.RecordBatch:
        sizes = [-(-info.records // self._block_records) for _, _, info in self._stored]
        for shard, near in blocks_near(run.shard, run.first_record // self._block_records, sizes):
            if (good := self._first_good(shard, near)) is not None:
                self.skipped.add(bad)
                return with_ids(good, self._id_name, bad.ids)
        raise error

    def _first_good(self, number: int, block: int) -> pa.RecordBatch | None:
        """The first record of a block that can be decoded, a batch of one."""
        shard = self._shards[number]
        first, count = shard.records_read(block * self._block_records, 1)
        try:
            if shard.by_block:
                start, stop = shard.extent(first, count)
                data = self._files.read(number, start, stop, fresh=True)
                return shard.decode(data, start, first, count).slice(0, 1)
            count = min(self._block_records, self._stored[number][2].records - first)
            ones = (one for _, one in self._one_by_one(number, first, count))
            return next((one for one in ones if not isinstance(one, DataError)), None)
        except DataError:
            return None

    def _one_by_one(self, number: int, first: int, count: int) -> Iterator[tuple[int, pa.RecordBatch | DataError]]:
        """Each record of a shard that is read by records, within one block, decoded by itself, or the error."""
        shard = self._shards[number]
        begin, end = shard.extent(first, count)
        data = memoryview(self._files.read(number, begin, end, fresh=True))
        for record in range(first, first + count):
            start, stop = shard.extent(record, 1)
            try:
                yield record, shard.decode(data[start - begin : stop - begin], start, record, 1)
            except DataError as error:
                yield record, error
