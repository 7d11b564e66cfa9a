"""The task that makes a whole shard from its plan: it reads the shard's images from their archives and writes them.

The rows of a plan are in the order of the shard. The files are read in the order of the archives, all of a shard before
it is written, so a task holds the encoded bytes of a shard in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from lockstep.etl import columns as c
from lockstep.etl.columns import LENGTH, PACKED, PLACE
from lockstep.etl.images.source import OFFSET
from lockstep.etl.images.tar_format import cut_error
from lockstep.etl.input.files import digest_of
from lockstep.etl.spark.errors import in_task
from lockstep.etl.write.late import WriteLate
from lockstep.features.images.decode import ImageError
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import set_hadoop_settings

# Files with a smaller gap are read together: a seek in a remote file takes about as long as reading this much.
GAP_BYTES = 256 << 10
READ_BYTES = 8 << 20
BATCH_ROWS = 1024
MAX_RAW_BYTES = 16 << 20  # of rejected content that a task sends to the driver


@dataclass(frozen=True)
class PlannedShard:
    """`plan` is one Arrow stream: KEY, SOURCE, POSITION, SAMPLE_ID, OFFSET, LENGTH and all fields but the image."""

    shard: int
    plan: bytes


@dataclass(frozen=True)
class SourceFile:
    """An input file to be hashed, with the size found before."""

    number: int
    url: str
    size_bytes: int


@dataclass(frozen=True)
class ShardMade:
    """The shard's row (lockstep.etl.write.shards.RESULT), the leak keys of its records (int64, concatenated), and its
    broken images: rows of lockstep.etl.columns.REJECTED. The (source, position) in `early` are of those that would have
    been found before the shards were planned, had their images been read before.
    """

    row: Mapping[str, Any]
    leaks: bytes
    bad: tuple[dict[str, Any], ...]
    early: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MakeShards:
    """The function for mapPartitions over groups of items. PlannedShard in: ShardMade out, or None if too much content
    is rejected to send it to the driver. SourceFile in: its row of lockstep.etl.input.files.DIGEST out. `urls` are
    those of the archives.
    """

    write: WriteLate
    urls: tuple[str, ...]
    settings: dict[str, str]

    @in_task
    def __call__(
        self, groups: Iterable[tuple[PlannedShard | SourceFile, ...]]
    ) -> Iterator[ShardMade | dict[str, object] | None]:
        """Raises what WriteLate raises, and DataError for an archive that became shorter."""
        set_hadoop_settings(self.settings)
        for item in itertools.chain.from_iterable(groups):
            if isinstance(item, SourceFile):
                yield digest_of(item.number, item.url, item.size_bytes)
            else:
                yield self.made(item)

    def made(self, item: PlannedShard) -> ShardMade | None:
        """Write one shard; None if too much content is rejected to send it to the driver."""
        with pa.ipc.open_stream(item.plan) as stream:
            plan = stream.read_all().combine_chunks()
        files = read_files(self.urls, plan)
        written = self.write.rows(item.shard, self._batches(item.shard, plan, files))
        row = next(written).column("shard")[0].as_py()
        if row["rejected_bytes"] > MAX_RAW_BYTES:
            return None
        leaks, bad = [], []
        for batch in written:
            if batch.column(SAMPLE_ID).null_count:
                bad += batch.select(c.REJECTED.names).to_pylist()
            else:
                leaks.append(np.asarray(batch.column(c.LEAK)).tobytes())
        early = self._early(plan, files, {(row[c.SOURCE], row[c.POSITION]) for row in bad}) if bad else ()
        return ShardMade(row, b"".join(leaks), tuple(bad), early)

    def _batches(self, shard: int, plan: pa.Table, files: list[bytes]) -> Iterator[pa.RecordBatch]:
        """Rows as of lockstep.etl.write.late.AssignLate, in the plan's order."""
        image = self.write.late.field.name
        for start in range(0, plan.num_rows, BATCH_ROWS):
            part = plan.slice(start, BATCH_ROWS).drop_columns([OFFSET, LENGTH])
            (batch,) = part.to_batches()
            count = batch.num_rows
            more = {
                c.SHARD: pa.repeat(pa.scalar(shard, pa.int32()), count),
                c.LEAK: pa.nulls(count, pa.int64()),
                image: pa.array(files[start : start + count], pa.binary()),
                PACKED: pa.repeat(True, count),
                PLACE: pa.nulls(count, pa.string()),
            }
            for name, column in more.items():
                batch = batch.append_column(name, column)
            yield batch

    def _early(self, plan: pa.Table, files: list[bytes], bad: set[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The broken images that the general way rejects when it reads headers and resizes large images."""
        early = []
        places = zip(plan.column(c.SOURCE).to_pylist(), plan.column(c.POSITION).to_pylist(), strict=True)
        for place, data in zip(places, files, strict=True):
            if place in bad:
                try:
                    self.write.late.intake.hand_on(data)
                except ImageError:
                    early.append(place)
        return tuple(early)


def read_files(urls: Sequence[str], plan: pa.Table) -> list[bytes]:
    """The content of each file of a plan, in its order. Raises DataError for an archive that is too short."""
    found = [b""] * plan.num_rows
    sources, positions, offsets, lengths = (
        np.asarray(plan.column(name)) for name in (c.SOURCE, c.POSITION, OFFSET, LENGTH)
    )
    order = np.lexsort((offsets, sources))
    borders = np.flatnonzero(np.diff(sources[order])) + 1
    for rows in np.split(order, borders) if len(order) else ():
        url = urls[sources[rows[0]]]
        with filesystem(url).open_read(url) as file:
            for first, last in _joined(offsets[rows], lengths[rows]):
                near = rows[first:last]
                begin = int(offsets[near[0]])
                file.seek(begin)
                data = file.read(int(offsets[near[-1]] + lengths[near[-1]]) - begin)
                for row, at, length in zip(
                    near.tolist(), (offsets[near] - begin).tolist(), lengths[near].tolist(), strict=True
                ):
                    found[row] = data[at : at + length]
                    if len(found[row]) < length:
                        raise cut_error(url, int(positions[row]), length)
    return found


def _joined(offsets: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of files that are read together, by rising `offsets`: with small gaps, READ_BYTES or one
    file.
    """
    ends = offsets + lengths
    far = np.flatnonzero(offsets[1:] - ends[:-1] > GAP_BYTES) + 1
    for first, last in itertools.pairwise([0, *far.tolist(), len(offsets)]):
        while first < last:
            fits = int(np.searchsorted(ends[first:last], offsets[first] + READ_BYTES, side="right"))
            until = first + max(1, fits)
            yield first, until
            first = until
