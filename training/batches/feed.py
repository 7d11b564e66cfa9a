"""A rank's part of every global batch, and its share of a split for evaluation."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.features.encode.encoder import Encoded, Encoder
from lockstep.features.encode.transforms import refused_row
from lockstep.features.images.decode_many import BadImageError
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.batches.assembly import Assembly
from lockstep.training.batches.decode import batch_row_location, located, ordered_row_location
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.mixture import MixedPlan
from lockstep.training.reading.background import ReadAhead
from lockstep.training.reading.reader import SplitReader
from lockstep.training.world import World

ENCODED_AHEAD_BYTES = 48 << 20
DEADLINE_S = 300.0  # below the driver's stall limit of 600 s, so that the rank itself reports what it waits for
# Encoded in one call: enough rows to make the call cheap, at most a few times what the caches hold
# (decision 074).
_CHUNK_ROWS = 4096
_CHUNK_BYTES = 8 << 20
_CHUNKS_IN_MEMORY = 3  # one being made, one finished, one in use


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's rows of global batch `step` (the batches are counted from 0), lanes in order.

    `x` by feature name, arrays of n_r rows; `y` (n_r,) or None; `sample_ids` and `epochs` (n_r,) int64; `weight` (n_r,)
    float32 or None.
    """

    step: int
    x: dict[str, npt.NDArray[Any]]
    y: npt.NDArray[Any] | None
    sample_ids: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32] | None = None


class RankFeed:
    """The batches of one rank, from any step on; earlier ones are not read.

    `groups` are the lane groups of ghost BatchNorm; each is owned by one rank. `shares`: the lanes of each rank
    (None: even). Raises ConfigError for more ranks than lanes or groups. Memory: that of
    lockstep.training.batches.assembly, and three chunks of encoded batches: together at most `encoded_ahead_bytes`, and
    at most 24 MiB unless three batches are larger.
    """

    def __init__(
        self,
        plan: EpochPlan,
        reader: SplitReader,
        encoder: Encoder,
        world: World,
        start_step: int = 0,
        *,
        groups: int | None = None,
        shares: Sequence[int] | None = None,
        encoded_ahead_bytes: int = ENCODED_AHEAD_BYTES,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if reader.split != plan.split or tuple(reader.table.shard_records.tolist()) != plan.shard_records:
            raise ConfigError(
                "the reader and the plan are of different splits",
                got=f"split `{reader.split}`",
                allowed=f"split `{plan.split}`",
                next_step="Open the reader on the plan's split.",
            )
        self.plan, self.encoder, self.start_step = plan, encoder, start_step
        self.lanes = plan.rank_lanes(world.rank, world.num_ranks, groups, shares)
        self.rows = plan.rows(world.rank, world.num_ranks, groups, shares)
        chunk_bytes = min(_CHUNK_BYTES, encoded_ahead_bytes // _CHUNKS_IN_MEMORY)
        chunk_rows = min(_CHUNK_ROWS, chunk_bytes // _row_bytes(encoder))
        self._chunk_steps = max(1, chunk_rows // self.rows)
        self._assembly = Assembly(plan, reader, encoder, self.lanes, self._chunk_steps)
        self._reader = reader
        self._reported: set[int | None] = set()  # sample ids of bad images
        self._bad: Callable[[str], None] = lambda words: print(f"weight 0: {words}", flush=True)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()  # one assembly: batch() may be called while a thread reads ahead

    def watch(self, reads: Callable[[str | range], None], bad: Callable[[str], None]) -> None:
        """Call `reads` with what is read or decoded next, and with "" after it; it must be quick. Call `bad` once with
        the words for each image that is skipped.
        """
        self._assembly.reads, self._bad = reads, bad

    @property
    def chunk_steps(self) -> int:
        """Batches that are encoded in one call."""
        return self._chunk_steps

    def batch(self, step: int) -> Batch:
        """This rank's rows of one global batch."""
        with self._lock:
            return self._next(step, step + 1)[0]

    def batches(self, first_step: int, last_step: int) -> Generator[Batch, None, None]:
        """Batches first_step..last_step-1, read ahead by a thread that ends with the iterator (exhausted or closed)."""

        def chunks() -> Iterator[list[Batch]]:
            step = first_step
            while step < last_step:
                with self._lock:
                    chunk = self._next(step, last_step)
                step += len(chunk)
                yield chunk
                with self._lock:
                    if self._assembly.step == step:  # unless batch() was called meanwhile
                        self._assembly.load_ahead(last_step)

        with ReadAhead(chunks(), lambda: self._assembly.at, self._deadline_s) as ahead:
            for chunk in ahead:
                yield from chunk

    def __iter__(self) -> Iterator[Batch]:
        """Batches from `start_step` on, endlessly."""
        return self.batches(self.start_step, sys.maxsize)

    def _next(self, step: int, last_step: int) -> list[Batch]:
        """Batch `step` and those that are encoded in the same call."""
        self._assembly.seek(step)
        try:
            steps, encoded, epochs = self._assembly.take(last_step)
        except BadImageError as error:
            raise error.at(self._location(step, error)) from None
        for bad in encoded.bad:
            if bad.sample_id not in self._reported:
                self._reported.add(bad.sample_id)
                self._bad(f"{bad.at(self._location(step, bad)).what} ({bad.detail})")

        def cut(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            # (steps * n_r, ...) -> (steps, n_r, ...): iterating over it takes half the time of slicing
            return array.reshape(steps, self.rows, *array.shape[1:])

        names = tuple(encoded.x)
        nothing = [None] * steps
        rest = zip(
            nothing if encoded.y is None else cut(encoded.y),
            cut(encoded.sample_id),
            cut(epochs),
            nothing if encoded.weight is None else cut(encoded.weight),
            strict=True,
        )
        rows = zip(*map(cut, encoded.x.values()), strict=True)
        return [
            Batch(number, dict(zip(names, x, strict=True)), *others)
            for number, x, others in zip(range(step, step + steps), rows, rest, strict=True)
        ]

    def _location(self, step: int, error: BadImageError) -> str:
        return batch_row_location(self.plan, self._reader, self.lanes, step, error.row)


def eval_batches(
    reader: SplitReader, encoder: Encoder, rank: int, num_ranks: int, batch_size: int
) -> Iterator[Encoded]:
    """A rank's share of the batches of a split, each `batch_size` rows in file order.

    The batches, and what a model computes from them, are the same at any number of ranks. The split's last batch may be
    shorter: nothing is padded. A rank may have no batch, so call no collective until all ranks are done. All ranks
    together yield each sample once, but for bad images that `encoder` leaves out; `bad` names their places.
    """
    start, stop = eval_rows(reader, rank, num_ranks, batch_size)
    pending: list[pa.RecordBatch] = []
    done = start

    def encoded(rows: pa.RecordBatch) -> Encoded:
        nonlocal done
        done += len(rows)

        def located_image(bad: BadImageError) -> BadImageError:
            return bad.at(ordered_row_location(reader, done - len(rows) + bad.row))

        try:
            found = encoder.encode(rows)
            return replace(found, bad=tuple(map(located_image, found.bad))) if found.bad else found
        except BadImageError as error:
            raise located_image(error) from None
        except DataError:
            row, wrong = refused_row(lambda start, stop: encoder.encode(rows.slice(start, stop - start)), len(rows))
            raise located(wrong, ordered_row_location(reader, done - len(rows) + row)) from None

    for found in reader.sequence(reader.table.rows(start, stop)):  # fetches the next blocks meanwhile
        pending.append(found)
        if sum(map(len, pending)) >= batch_size:
            rows = pa.concat_batches(pending)
            full = len(rows) // batch_size * batch_size
            for start in range(0, full, batch_size):
                yield encoded(rows.slice(start, batch_size))
            pending = [rows.slice(full)] if full < len(rows) else []
    if pending:
        yield encoded(pa.concat_batches(pending))


def eval_rows(reader: SplitReader, rank: int, num_ranks: int, batch_size: int) -> tuple[int, int]:
    """The rows start..stop-1 of the split, in file order, that `eval_batches` gives a rank."""
    rows = reader.table.records
    batches = -(-rows // batch_size)
    start, stop = (min(rows, number * batches // num_ranks * batch_size) for number in (rank, rank + 1))
    return start, stop


def _row_bytes(encoder: Encoder) -> int:
    """Bytes of one encoded row: its arrays, and at most 28 for label, sample id, epoch and weight."""
    specs = encoder.signature.features.values()
    return 28 + sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs)


class MixedFeed:
    """Used like a RankFeed; has one for each dataset, which share ENCODED_AHEAD_BYTES in the ratio of the mixture.

    `epochs` of a batch are those of each row's own dataset.
    """

    def __init__(
        self,
        plan: MixedPlan,
        readers: Sequence[SplitReader],
        encoders: Sequence[Encoder],
        world: World,
        *,
        groups: int | None = None,
        shares: Sequence[int] | None = None,
    ) -> None:
        self.plan, self.encoder = plan, encoders[0]
        self.lanes = plan.rank_lanes(world.rank, world.num_ranks, groups, shares)
        self.rows = plan.rows(world.rank, world.num_ranks, groups, shares)
        self._feeds = [
            RankFeed(
                part,
                reader,
                encoder,
                world,
                groups=groups,
                shares=shares,
                encoded_ahead_bytes=ENCODED_AHEAD_BYTES * part.global_batch // plan.global_batch,
            )
            for part, reader, encoder in zip(plan.parts, readers, encoders, strict=True)
        ]
        # Each dataset's rows among a lane's rows in a batch.
        ends = np.cumsum([part.global_batch // plan.lanes for part in plan.parts]).tolist()
        self._columns = [slice(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]

    def watch(self, reads: Callable[[str | range], None], bad: Callable[[str], None]) -> None:
        """Report what is read as RankFeed.watch does. The datasets are read at the same time: the last call counts."""
        for feed in self._feeds:
            feed.watch(reads, bad)

    @property
    def chunk_steps(self) -> int:
        """The most batches that one dataset encodes in one call."""
        return max(feed.chunk_steps for feed in self._feeds)

    def batch(self, step: int) -> Batch:
        """This rank's rows of one global batch."""
        return self._join([feed.batch(step) for feed in self._feeds])

    def batches(self, first_step: int, last_step: int) -> Generator[Batch, None, None]:
        """Batches first_step..last_step-1; a thread a dataset reads ahead, and ends with the iterator."""
        with ExitStack() as stack:
            streams = [stack.enter_context(closing(feed.batches(first_step, last_step))) for feed in self._feeds]
            for parts in zip(*streams, strict=True):
                yield self._join(parts)

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the first on, endlessly."""
        return self.batches(0, sys.maxsize)

    def _join(self, parts: Sequence[Batch]) -> Batch:
        first = parts[0]
        return Batch(
            step=first.step,
            x={name: self._rows([part.x[name] for part in parts]) for name in first.x},
            y=None if first.y is None else self._rows([part.y for part in parts]),
            sample_ids=self._rows([part.sample_ids for part in parts]),
            epochs=self._rows([part.epochs for part in parts]),
            weight=None if first.weight is None else self._rows([part.weight for part in parts]),
        )

    def _rows(self, arrays: Sequence[Any]) -> npt.NDArray[Any]:
        """Interleave the rows of each dataset, lane after lane, to the rows of the batch."""
        shape = arrays[0].shape[1:]
        rows = np.empty((len(self.lanes), self.rows // len(self.lanes), *shape), arrays[0].dtype)
        for columns, array in zip(self._columns, arrays, strict=True):
            rows[:, columns] = array.reshape(len(self.lanes), -1, *shape)  # (lanes * each, ...) -> (lanes, each, ...)
        return rows.reshape(self.rows, *shape)
