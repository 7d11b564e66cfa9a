"""The epoch plan: which samples are in which global batch, at any number of ranks. Decision 020.

It counts in positions of an epoch; which record is at a position says lockstep.training.plan.order.

Pure functions of the dataset's digest and shard table, seed, global batch G, lanes L and window W: no state, no I/O,
memory O(shards). Only `rank_lanes` and `rows` depend on the number of ranks: they say which rank reads what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError, require
from lockstep.training.plan.datasets import split_of
from lockstep.training.plan.lane_count import check_lanes, check_shares, default_lanes, largest_divisor
from lockstep.training.plan.order import (
    BlockTable,
    CacheGroups,
    EveryOrder,
    InterleavedLanes,
    Orders,
    Run,
    check_cache_groups,
)
from lockstep.training.plan.permutation import derive_key, shuffled, shuffled_each

PLAN_VERSION = 1
MOST = 1 << 63  # run.json and checkpoints can store numbers below it
DEFAULT_WINDOW_BYTES = 8 << 20
OPTIONAL = ("cache_groups", "interleave")  # absent from `identity` where they are None


def check_plan(plan: EpochPlan) -> None:
    """Raise ConfigError for invalid numbers in a plan, DataError for a split without records."""
    _check(plan, "version", plan.version == PLAN_VERSION, f"{PLAN_VERSION}, the only plan of this version")
    for name in ("block_records", "global_batch", "lanes", "window_records"):
        _check(plan, name, 1 <= getattr(plan, name) < MOST, "an integer from 1 to 2^63 - 1")
    if plan.total == 0:
        raise DataError(
            f"split `{plan.split}` has no records",
            got="0 records",
            allowed="at least one",
            next_step="Train on another split, or build the dataset with other --split shares.",
        )
    check_lanes(plan.global_batch, plan.lanes)
    if plan.total < plan.lanes:
        raise ConfigError(
            f"{plan.lanes} lanes are more than the samples of split `{plan.split}`",
            got=f"{plan.total} samples",
            allowed="at least one sample a lane",
            next_step=f"Use --lanes {largest_divisor(plan.global_batch, plan.total)} or more data.",
        )
    right = plan.interleave is None or 2 <= plan.interleave < MOST
    _check(plan, "interleave", right, "an integer from 2 up, below 2^63, or none")
    check_cache_groups(plan.global_batch, plan.lanes, plan.cache_groups)


def _check(plan: EpochPlan, name: str, right: bool, allowed: str) -> None:
    require(right, f"the epoch plan's {name}", f"{name} = {getattr(plan, name)!r}", allowed, f"Correct {name}.")


__all__ = ["EpochPlan", "Run", "default_lanes"]


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """Everything that decides the order of samples. Raises ConfigError for numbers that do not fit together."""

    dataset_digest: str
    """sha256 of the dataset, 64 hex digits."""
    split: str
    """The split that is trained on."""
    shard_records: tuple[int, ...]
    """Records in each shard of the split, in order."""
    block_records: int
    """Records in a full block."""
    seed: int
    """Selects the order; any integer."""
    global_batch: int
    """G: samples of one optimizer step over all ranks."""
    lanes: int
    """L: streams of samples; a divisor of G."""
    window_records: int
    """W: the samples of the window in which a lane shuffles."""
    cache_groups: int | None = None
    """C: blocks stay in C groups, each read by L / C neighbouring lanes (lockstep.training.plan.order); None is no
    groups.
    """
    interleave: int | None = None
    """B, from 2 up: a lane reads B parts of its span in turns (lockstep.training.plan.order); None reads it in order.
    """
    where: str | None = None
    """The condition that the records of the plan meet; None is all records."""
    kept: tuple[int, ...] | None = None
    """With `where`, how many records of each block meet it, in file order."""
    version: int = PLAN_VERSION
    """Version of the rules below; another version makes other batches."""
    total: int = field(init=False, compare=False)
    """T: samples in an epoch."""
    _table: BlockTable = field(init=False, repr=False, compare=False)
    _root: bytes = field(init=False, repr=False, compare=False)
    _orders: EveryOrder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table = BlockTable(self.shard_records, max(1, self.block_records), self.kept)
        object.__setattr__(self, "total", table.records)
        check_plan(self)
        root = derive_key(self.dataset_digest.encode(), f"plan {self.version} {self.split}", self.seed)
        orders: EveryOrder = Orders(table, root)
        if self.cache_groups is not None:
            orders = CacheGroups(table, root, self.group_starts)
        if self.interleave is not None:
            piece = max(1, self.window_records // self.interleave)
            orders = InterleavedLanes(orders, self.lane_span, self.lanes, self.interleave, piece)
        object.__setattr__(self, "_table", table)
        object.__setattr__(self, "_root", root)
        object.__setattr__(self, "_orders", orders)

    @classmethod
    def for_dataset(
        cls,
        manifest: DatasetManifest,
        split: str,
        *,
        seed: int,
        global_batch: int,
        lanes: int | None = None,
        groups: int | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        cache_groups: int | None = None,
        interleave: int | None = None,
    ) -> Self:
        """The plan for a split. `lanes` None means `default_lanes`; `groups` are the lane groups of ghost BatchNorm.

        `window_bytes` is shared by all lanes: W = window_bytes / (L * mean record size on disk), at least 1. Records of
        gzip shards count with their unpacked size.
        """
        info = split_of(manifest, split)
        if lanes is None:
            lanes = default_lanes(global_batch, groups, max(info.records, 1), cache_groups)
        check_lanes(global_batch, lanes, groups)
        disk_bytes = max(sum(shard.unpacked_bytes for shard in info.shards), 1)
        return cls(
            dataset_digest=manifest.digest,
            split=split,
            shard_records=tuple(shard.records for shard in info.shards),
            block_records=info.block_records,
            seed=seed,
            global_batch=global_batch,
            lanes=lanes,
            window_records=max(1, window_bytes * info.stored_records // (lanes * disk_bytes)),
            where=info.where,
            kept=info.kept,
            cache_groups=cache_groups,
            interleave=interleave,
        )

    @property
    def table(self) -> BlockTable:
        """The blocks of the split in file order."""
        return self._table

    def identity(self) -> dict[str, Any]:
        """JSON that is equal exactly if all batches are equal; kept in run.json and in every checkpoint."""
        chosen = {name: getattr(self, name) for name in (*OPTIONAL, "where")}
        return {
            "version": self.version,
            "dataset_digest": self.dataset_digest,
            "split": self.split,
            "records": self.total,
            "block_records": self.block_records,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "lanes": self.lanes,
            "window_records": self.window_records,
            **{name: value for name, value in chosen.items() if value is not None},
        }

    # Steps and epochs

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch: floor(epoch * T / G)."""
        return epoch * self.total // self.global_batch

    def steps(self, epochs: int) -> int:
        """Steps of a run of `epochs` epochs. Raises ConfigError if they do not fill one global batch."""
        steps = self.first_step(epochs)
        if steps < 1:
            most = max(epochs * self.total // self.lanes, 1) * self.lanes
            raise ConfigError(
                "the whole run has not one full global batch",
                got=f"{epochs} epochs of {self.total} samples, global batch {self.global_batch}",
                allowed="epochs * samples >= global batch",
                next_step=f"Use --global-batch {most} or less, or more epochs.",
            )
        return steps

    def epoch_of_step(self, step: int) -> int:
        """The epoch, as Keras counts, of step `step`: the last one with first_step(epoch) <= step."""
        return ((step + 1) * self.global_batch - 1) // self.total

    # Lanes

    def received(self, lane: int, epochs: int) -> int:
        """Samples that a lane gets in the first `epochs` epochs; lanes never differ by more than one."""
        given = epochs * self.total
        return given * (lane + 1) // self.lanes - given * lane // self.lanes

    def lane_span(self, epoch: int, lane: int) -> tuple[int, int]:
        """This lane's positions start..stop-1 in the epoch's order. The spans of all lanes tile 0..T-1."""
        before, after = epoch * self.total, (epoch + 1) * self.total
        start = after * lane // self.lanes - before * lane // self.lanes
        return start, start + self.received(lane, epoch + 1) - self.received(lane, epoch)

    def lane_at(self, lane: int, n: int) -> tuple[int, int]:
        """Sample n of a lane's endless stream: (epoch, offset within the lane's span of that epoch)."""
        epoch = max(0, n * self.lanes // self.total - 1)
        while self.received(lane, epoch + 1) <= n:
            epoch += 1
        return epoch, n - self.received(lane, epoch)

    def group_starts(self, epoch: int) -> list[int]:
        """The first position of each cache group (L / C lanes) in an epoch, and T."""
        assert self.cache_groups is not None
        width = self.lanes // self.cache_groups
        return [self.lane_span(epoch, lane)[0] for lane in range(0, self.lanes, width)] + [self.total]

    def runs(self, epoch: int, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1 of an epoch; one run a block, or a piece if lanes interleave."""
        return self._orders.runs(epoch, start, stop)

    def window_order(self, epoch: int, lane: int, window: int) -> npt.NDArray[np.int64]:
        """Order of a window's samples: (n,) int64, n <= W; sample i is record order[i] of the window."""
        start, stop = self.lane_span(epoch, lane)
        count = max(0, min(self.window_records, stop - start - window * self.window_records))
        return shuffled(derive_key(self._root, "window", epoch, lane, window), count)

    def window_orders(self, windows: Sequence[tuple[int, int, int]], count: int) -> npt.NDArray[np.int64]:
        """Compute `window_order` of several windows (epoch, lane, window), all of `count` samples: (n, count) int64."""
        return shuffled_each([derive_key(self._root, "window", *window) for window in windows], count)

    def lane_positions(self, lane: int, start: int, stop: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Samples start..stop-1 of a lane's stream, window by window: (epoch, positions (n,) int64 in that epoch)."""
        while start < stop:
            epoch, offset = self.lane_at(lane, start)
            window, within = divmod(offset, self.window_records)
            order = self.window_order(epoch, lane, window)[within : within + stop - start]
            yield epoch, self.lane_span(epoch, lane)[0] + window * self.window_records + order
            start += len(order)

    def leftover(self, epochs: int, steps: int | None = None) -> list[tuple[int, int]]:
        """Return (epoch, position) of the samples of `epochs` epochs that `steps` steps (default: all) leave."""
        used = (self.first_step(epochs) if steps is None else steps) * (self.global_batch // self.lanes)
        return sorted(
            (epoch, int(position))
            for lane in range(self.lanes)
            for epoch, positions in self.lane_positions(lane, used, self.received(lane, epochs))
            for position in positions
        )

    # Ranks

    def rank_lanes(
        self, rank: int, num_ranks: int, groups: int | None = None, shares: Sequence[int] | None = None
    ) -> range:
        """The contiguous lanes of one rank; ranks may have different numbers. With `groups`, ranks own whole lane
        groups. `shares` are the lanes of each rank (None: as even as possible).
        """
        check_lanes(self.global_batch, self.lanes, groups, num_ranks)
        if shares is not None:
            check_shares(shares, self.lanes, groups, num_ranks)
            return range(sum(shares[:rank]), sum(shares[: rank + 1]))
        shared = groups or self.lanes
        width = self.lanes // shared
        return range(rank * shared // num_ranks * width, (rank + 1) * shared // num_ranks * width)

    def rows(self, rank: int, num_ranks: int, groups: int | None = None, shares: Sequence[int] | None = None) -> int:
        """Return n_r: samples of each global batch that are this rank's."""
        return len(self.rank_lanes(rank, num_ranks, groups, shares)) * (self.global_batch // self.lanes)
