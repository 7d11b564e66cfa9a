"""Images of plain archives to shards in one Spark job: the driver plans each shard from names and headers alone.

Ids, splits, order and sizes follow from a file's name and from the size of the pixels, so that no row has to pass
through Spark: a task for each shard reads what the shard holds. The bytes are those of the general way
(etl.images.job.run), which takes over where this one does not fit, and for all that ends in an error of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etl.images.config import ImagesConfig
from etl.images.image_rows import ID_COLUMNS
from etl.images.pieces import ImagePlan
from etl.images.planned_rows import QUARANTINE, NotPlannable, ShardPlans, known_of, refuse, refuse_bad
from etl.images.planned_task import MAX_RAW_BYTES, MakeShards, PlannedShard, ShardMade, SourceFile
from etl.input.files import infos_of
from etl.input.ranges import DEFAULT_SPLIT_BYTES
from etl.spark.session import described
from etl.spark.tasks import slices
from etl.split.leakage import CONTENT, Leakage, Values, checks_of, told
from etl.write.beside import Origin
from etl.write.dataset import Done, Job, compression_of, published
from etl.write.late import WriteLate
from etl.write.output import check_schema
from etl.write.place import placed
from etl.write.shards import WriteShards
from etl.write.staging import Staging
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import DataError
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import absolute

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class _FoundEarly(Exception):
    """Images that the general way rejects before it settles shards: what was planned with them has to be done again."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(f"{len(rows)} images")
        self.rows = rows


def run(
    spark: SparkSession, config: ImagesConfig, plan: ImagePlan, schema_of: Callable[[int], Schema]
) -> DatasetManifest:
    """Plan, write and publish. `schema_of` gives the schema for a number of classes.

    Raises NotPlannable, with nothing published, and the errors of etl.images.job.run.
    """
    early: list[dict[str, Any]] = []
    while True:
        known = known_of(plan, early)
        refuse(config, known)
        schema, _ = check_schema(config, schema_of(len(known.classes)))
        try:
            return _Planned(spark, ShardPlans(config, plan, known, schema)).published()
        except _FoundEarly as found:
            if early:
                raise DataError(
                    "images that decoded were rejected when they were read again",
                    got=f"{len(found.rows)} after {len(early)} the first time",
                    allowed="input that stays the same",
                    next_step="Run again when nothing writes to the input.",
                ) from None
            early = found.rows


@dataclass(frozen=True)
class _Planned:
    """One attempt."""

    spark: SparkSession
    plans: ShardPlans

    def published(self) -> DatasetManifest:
        """Write and publish. Raises NotPlannable and _FoundEarly."""
        config, known, schema = self.plans.config, self.plans.known, self.plans.schema
        origin = Origin(quarantine=self._frame(known.bad), created_config=config.told(known.classes))
        config = replace(config, output=absolute(config.output))
        job = Job(config, schema, ID_COLUMNS, config.split_spec, origin, None, None)
        shards = self.plans.shards()
        return published(job, lambda staging, _: self._done(staging, job, shards))

    def _done(self, staging: Staging, job: Job, shards: list[PlannedShard]) -> Done:
        plans, config, sources = self.plans, job.config, self.plans.plan.sources
        known, table = plans.known, plans.table
        urls = tuple(source.url for source in sources)
        settings, compression = hadoop_settings(), compression_of(config)
        write = WriteShards(job.schema, config.fmt, table, staging.attempts, urls, settings, compression)
        make = MakeShards(WriteLate(write, plans.late), tuple(map(absolute, urls)))
        files = [SourceFile(number, absolute(s.url), s.size_bytes) for number, s in enumerate(sources)]
        context = self.spark.sparkContext
        runs = slices([file.size_bytes for file in files], DEFAULT_SPLIT_BYTES, context.defaultParallelism)
        # The longest of all may be the digest of an archive.
        items: list[tuple[SourceFile | PlannedShard, ...]] = [tuple(files[run.start : run.stop]) for run in runs]
        items += [(shard,) for shard in shards]
        with described(self.spark, "make the images and write the shards"):
            found = context.parallelize(items, len(items)).mapPartitions(make).collect()
        digests = [item for item in found if isinstance(item, dict)]
        made = [item for item in found if isinstance(item, ShardMade)]
        if len(made) < table.total or sum(shard.row["rejected_bytes"] for shard in made) > MAX_RAW_BYTES:
            raise NotPlannable("much that is rejected")
        broken = [row for shard in made for row in shard.bad]
        early = {place for shard in made for place in shard.early}
        bad = [*known.bad, *broken]
        refuse_bad(plans.config, known.read, len(bad))
        if early:
            raise _FoundEarly([row for row in broken if (row["source"], row["position"]) in early])
        paths = DatasetPaths(staging.root)
        splits, indexes = placed(staging.fs, paths, [shard.row for shard in made], table, config.fmt)
        if not all(any(shard.records for shard in split.shards) for split in splits.values()):
            raise NotPlannable("a split with broken images alone")
        origin = replace(
            job.origin,
            sources=infos_of(sources, digests),
            read=known.read,
            quarantined=len(bad),
            quarantined_raw_bytes=sum(len(row["raw"]) for row in bad),
            quarantine=self._frame(bad),
        )
        return Done(
            schema=job.schema,
            splits=splits,
            files=indexes,
            origin=origin,
            dropped=known.dropped,
            leakage=self._leakage(job, made, {name: split.records for name, split in splits.items()}),
            fitted={},
            classes=plans.classes,
        )

    def _leakage(self, job: Job, made: Sequence[ShardMade], records: Mapping[str, int]) -> Leakage:
        """Records whose pixels are those of a record of another split; no id is there twice."""
        keys = [np.frombuffer(shard.leaks, dtype=np.int64) for shard in made]
        splits = [number for number, (_, count, _) in enumerate(self.plans.table.splits) for _ in range(count)]
        sides = np.repeat(splits, [len(shard) for shard in keys])
        values = on_two_sides(np.concatenate(keys), sides)
        checks = checks_of(job.split, job.schema)
        found = {check: values.shared if check == CONTENT else 0 for check in checks}
        return told(job.split, found, {CONTENT: values} if CONTENT in checks else {}, records)

    def _frame(self, bad: list[dict[str, Any]]) -> DataFrame:
        return self.spark.createDataFrame(pa.Table.from_pylist(bad, QUARANTINE))


def on_two_sides(keys: NDArray[np.int64], sides: NDArray[np.int64]) -> Values:
    """The records' keys and the side that each is on: (n,) each."""
    if not len(keys):
        return Values(0, {}, 0)
    order = np.lexsort((sides, keys))
    keys, sides = keys[order], sides[order]
    first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    ends = np.r_[first[1:], len(keys)]
    counts, shared = ends - first, sides[first] != sides[ends - 1]
    sizes, of_size = np.unique(counts, return_counts=True)
    by_size = dict(zip(sizes.tolist(), of_size.tolist(), strict=True))
    return Values(int(counts[shared].sum()), by_size, int(keys[first[counts.argmax()]]))
