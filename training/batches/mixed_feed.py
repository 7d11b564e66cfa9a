"""A rank's part of every global batch of a mixture: the parts of each dataset's feed, put together lane by lane."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.features.encode.encoder import Encoder
from training.batches.feed import DEADLINE_S, READ_AHEAD_BYTES, Batch, RankFeed
from training.plan.mixture import MixedPlan
from training.reading.reader import SplitReader
from training.world import World


class MixedFeed:
    """Same use as a RankFeed, which it has one of for each dataset; `read_ahead_bytes` are shared as the batch is.

    `epochs` of a batch are those of each row's own dataset.
    """

    def __init__(
        self,
        plan: MixedPlan,
        readers: Sequence[SplitReader],
        encoder: Encoder,
        world: World,
        start_step: int = 0,
        *,
        groups: int | None = None,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.plan, self.encoder, self.start_step = plan, encoder, start_step
        self.lanes = plan.rank_lanes(world.rank, world.num_ranks, groups)
        self.rows = plan.rows(world.rank, world.num_ranks, groups)
        self._feeds = [
            RankFeed(
                part,
                reader,
                encoder,
                world,
                start_step,
                groups=groups,
                read_ahead_bytes=read_ahead_bytes * part.global_batch // plan.global_batch,
                deadline_s=deadline_s,
            )
            for part, reader in zip(plan.parts, readers, strict=True)
        ]
        # Of a lane's rows in a batch, which are each dataset's.
        ends = np.cumsum([part.global_batch // plan.lanes for part in plan.parts]).tolist()
        self._columns = [slice(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]

    @property
    def chunk_steps(self) -> int:
        """Batches that are encoded in one call, of the dataset of which they are most."""
        return max(feed.chunk_steps for feed in self._feeds)

    def batch(self, step: int) -> Batch:
        """This rank's rows of one global batch."""
        return self._join([feed.batch(step) for feed in self._feeds])

    def batches(self, first_step: int, last_step: int) -> Generator[Batch, None, None]:
        """Batches first_step..last_step-1, each dataset's read ahead by a thread that ends with the iterator."""
        with ExitStack() as stack:
            streams = [stack.enter_context(closing(feed.batches(first_step, last_step))) for feed in self._feeds]
            for parts in zip(*streams, strict=True):
                yield self._join(parts)

    def __iter__(self) -> Iterator[Batch]:
        """Batches from `start_step` on, without end."""
        return self.batches(self.start_step, sys.maxsize)

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
        """Rows of each dataset, lane after lane, to the rows of the batch, lane after lane."""
        shape = arrays[0].shape[1:]
        rows = np.empty((len(self.lanes), self.rows // len(self.lanes), *shape), arrays[0].dtype)
        for columns, array in zip(self._columns, arrays, strict=True):
            rows[:, columns] = array.reshape(len(self.lanes), -1, *shape)  # (lanes * each, ...) -> (lanes, each, ...)
        return rows.reshape(self.rows, *shape)
