"""Opens what a run trains on: one split, or one of each dataset of a mixture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lockstep.features.encode.encoder import Encoder
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.training.batches.audit_log import AuditLog
from lockstep.training.batches.feed import MixedFeed, RankFeed
from lockstep.training.plan.datasets import groups_of, open_mixture, tasks_of
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.make_plan import plan_from
from lockstep.training.plan.mixture import MixedPlan, Plan
from lockstep.training.plan.order import Run
from lockstep.training.plan.selection import Selection
from lockstep.training.reading.bad_records import BadRecords, Skipped
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import ReadOptions, SplitReader
from lockstep.training.world import World


def left_over(plan: EpochPlan, reader: SplitReader, epochs: int) -> list[tuple[int, int]]:
    """Return (epoch, sample id) of the samples of `epochs` epochs that no step uses."""
    left = plan.leftover(epochs)
    records_left = [(epoch, run) for epoch, position in left for run in plan.runs(epoch, position, position + 1)]
    # By block, so that each block is read once: there may be nearly G records.
    records: dict[tuple[int, int], list[int]] = defaultdict(list)
    for _, run in records_left:
        records[run.shard, run.first_record // plan.block_records].append(run.first_record)
    ids: dict[tuple[int, int], int] = {}
    for (shard, _), wanted in records.items():
        first = min(wanted)
        found = sample_ids(reader, Run(shard, first, max(wanted) - first + 1))
        ids |= {(shard, record): int(found[record - first]) for record in wanted}
    return [(epoch, ids[run.shard, run.first_record]) for epoch, run in records_left]


def sample_ids(reader: SplitReader, run: Run) -> npt.NDArray[np.int64]:
    """The sample ids of the records of a run, (n,)."""
    return np.asarray(reader.read(run).column(reader.schema.id_field.name), dtype=np.int64)


Feed = RankFeed | MixedFeed


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Open splits, their common manifest, and the encoder that they share."""

    manifest: DatasetManifest
    splits: tuple[OpenSplit, ...]

    @classmethod
    def at(
        cls,
        datasets: Sequence[str],
        split: str,
        mix: Sequence[int] | None,
        options: ReadOptions | None = None,
        selection: Selection | None = None,
        also: Collection[str] = (),
        *,
        tasks: bool = False,
    ) -> Self:
        """Open datasets end to end or, with `mix`, as a mixture of their groups, with `tasks` one whose datasets have
        labels of their own; makes all checks that are made at the start. Columns that no model is fed are only read if
        they are in `also`.
        """
        if mix is None:
            opened = OpenSplit.at(datasets, split, training=True, options=options, selection=selection, also=also)
            return cls(opened.manifest, (opened,))
        manifest = open_mixture(datasets, split, selection, mix, tasks=tasks)[1]
        each = None if options is None else options.shared_by(len(mix))
        schema = None if tasks else manifest.schema
        opened_each = [
            OpenSplit.at(group, split, training=True, options=each, selection=selection, schema=schema, also=also)
            for group in groups_of(datasets, mix)
        ]
        if tasks:
            opened_each = [one.of_task(task) for one, task in zip(opened_each, tasks_of(manifest.mixed), strict=True)]
        return cls(manifest, tuple(opened_each))

    def skipping_bad_images(self) -> Self:
        """Return this set, but broken images get weight 0. Raises ConfigError if no images are decoded."""
        return self._encoding(lambda encoder: encoder.skipping_bad_images())

    def skipping_bad_records(self, report: Callable[[BadRecords], None]) -> Self:
        """Return this set, but records that cannot be decoded, and images, get weight 0; `report` is called once for
        each record or block. Raises ConfigError if samples have no weight.
        """
        skipped = Skipped(report)
        for reader in self.readers:
            reader.skip_bad_records(skipped)
        return self._encoding(lambda encoder: encoder.skipping_bad_records(skipped.words))

    def _encoding(self, change: Callable[[Encoder], Encoder]) -> Self:
        return replace(self, splits=tuple(replace(split, encoder=change(split.encoder)) for split in self.splits))

    @property
    def encoder(self) -> Encoder:
        """The encoder of all samples, but for the tasks' numbers."""
        return self.splits[0].encoder

    @property
    def readers(self) -> tuple[SplitReader, ...]:
        """One, or one for each dataset of a mixture."""
        return tuple(split.reader for split in self.splits)

    def plan(self, identity: Mapping[str, Any], where: str = "a stored plan") -> Plan:
        """The plan that `identity`, read from the file `where`, describes. Raises as plan_from does."""
        return plan_from(identity, self.manifest, where)

    def feed(
        self,
        plan: Plan,
        world: World,
        *,
        groups: int | None = None,
        shares: Sequence[int] | None = None,
        task: int | None = None,
    ) -> Feed:
        """A rank's batches; `shares` are the lanes of each rank (None: even). With `task`, the ranks of `world` have
        the rows of this dataset of a mixture alone.
        """
        if isinstance(plan, MixedPlan) and task is not None:
            split = self.splits[task]
            return RankFeed(plan.parts[task], split.reader, split.encoder, world, groups=groups, shares=shares)
        if isinstance(plan, MixedPlan):
            encoders = [split.encoder for split in self.splits]
            return MixedFeed(plan, self.readers, encoders, world, groups=groups, shares=shares)
        return RankFeed(plan, self.readers[0], self.encoder, world, groups=groups, shares=shares)

    def audit_log(self, plan: Plan, rows: int) -> AuditLog:
        """The audit of the batches of a rank of `rows` rows."""
        return AuditLog(plan.row_datasets(rows) if isinstance(plan, MixedPlan) else None)

    def left_over(self, plan: Plan, epochs: int) -> list[tuple[int, int]]:
        """Return (epoch, sample id) of the samples that whole epochs do not use; of a mixture, those of its first
        dataset.
        """
        return left_over(plan.parts[0] if isinstance(plan, MixedPlan) else plan, self.readers[0], epochs)
