"""Planned shards: images of plain tar archives become shards in one Spark job (docs/decisions/064-image-sources.md).

Ids, splits, order and sizes depend only on a file's name and the size of the pixels. So the driver plans each shard
from the archives' headers, and no row passes through Spark: a task for each shard reads the shard's files. The bytes
are those of the general way (lockstep.etl.write.job.Input.write), which takes over for other inputs and for any error
of the input.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl import columns as c
from lockstep.etl.columns import LENGTH
from lockstep.etl.images.config import MAX_CLASSES, ImagesConfig
from lockstep.etl.images.layout import ClassFolder, log_names, refuse_layout
from lockstep.etl.images.planned_task import MAX_RAW_BYTES, MakeShards, PlannedShard, ShardMade, SourceFile
from lockstep.etl.images.source import BAD, DROPPED, ID_COLUMNS, OFFSET, OUTPUT, ImagePlan
from lockstep.etl.input.files import DEFAULT_SPLIT_BYTES, infos_of
from lockstep.etl.spark.session import job_description
from lockstep.etl.spark.tasks import slices
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.leakage import CONTENT, Leakage, Values, checks_of, logged
from lockstep.etl.split.splits import TRAIN
from lockstep.etl.write.checks import Target, check_schema
from lockstep.etl.write.late import AssignLate, LateImages, WriteLate
from lockstep.etl.write.publication import Done, Job, building, compression_of, publish
from lockstep.etl.write.quarantine import Origin
from lockstep.etl.write.shards import ShardTable, WriteShards, placed, plan_shards
from lockstep.etl.write.staging import Staging
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import DataError
from lockstep.storage.settings import settings_for_tasks
from lockstep.storage.urls import absolute

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Each task may have to read all archives if its files are spread over them.
MAX_READS = 4
FREE_READ_BYTES = 8 << 30
MAX_HELD_BYTES = 256 << 20  # the encoded files of a shard, which its task holds in memory
MAX_PLAN_BYTES = 64 << 20  # Spark allows 128 MiB for the message that starts a task, by default
_PACKED = pa.ipc.IpcWriteOptions(compression="zstd")  # paths repeat
MAX_OPENED = 10_000  # archives times tasks that open them
_SIGN = np.uint64(1 << 63)
_LOW = np.uint64((1 << 32) - 1)
_HALF = np.uint64(32)


class NotPlannable(Exception):
    """This input, or this output, needs the general way."""


@dataclass(frozen=True)
class Known:
    """What is known from headers: `files` that should be images (rows of lockstep.etl.images.source.FILES), and what is
    already rejected (rows of lockstep.etl.columns.REJECTED) or dropped.
    """

    files: pa.Table
    bad: list[dict[str, Any]]
    dropped: Mapping[str, int]

    @property
    def read(self) -> int:
        """The number of records."""
        return self.judged + sum(self.dropped.values())

    @property
    def judged(self) -> int:
        """The number of records without those that are left out, of which --max-bad is a share."""
        return len(self.files) + len(self.bad)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels in order."""
        return tuple(sorted(self.files.column("class").unique().to_pylist()))

    @property
    def folders(self) -> tuple[ClassFolder, ...]:
        """Where the images of each class are."""
        train = pc.fill_null(pc.equal(self.files.column(c.SPLIT), TRAIN), False)
        names = self.files.column("name")
        table = self.files.select(["class", "name"]).append_column("train", train.cast(pa.int64()))
        table = table.append_column("elsewhere", pc.if_else(train, None, names))
        sums: list[Any] = [("train", "sum"), ("name", "count"), ("name", "min"), ("elsewhere", "min")]
        found = table.group_by("class").aggregate(sums).sort_by("class").to_pylist()
        return tuple(
            ClassFolder(
                label=row["class"],
                in_train=row["train_sum"],
                elsewhere=row["name_count"] - row["train_sum"],
                first=row["name_min"],
                first_elsewhere=row["elsewhere_min"],
            )
            for row in found
        )


def known_of(plan: ImagePlan, early: list[dict[str, Any]]) -> Known:
    """What is known of a plan, without the files that were rejected `early`."""
    assert plan.files is not None
    files = plan.files.files
    if early:
        out = _numbers(np.array([row[c.SOURCE] for row in early]), np.array([row[c.POSITION] for row in early]))
        every = _numbers(np.asarray(files.column(c.SOURCE)), np.asarray(files.column(c.POSITION)))
        files = files.filter(pa.array(~np.isin(every, out)))
    other = pa.Table.from_batches(plan.files.other, OUTPUT)
    bad = other.filter(pc.equal(other.column("kind"), BAD)).select(c.REJECTED.names).to_pylist()
    reasons = other.filter(pc.equal(other.column("kind"), DROPPED)).column(c.REASON).to_pylist()
    return Known(files, [*bad, *early], Counter(reasons))


def _numbers(sources: NDArray[np.integer], positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """One number for each position in the archives, none of which has 2^48 bytes."""
    return (sources.astype(np.int64) << 48) | positions.astype(np.int64)


def refuse(config: ImagesConfig, known: Known) -> None:
    """Raise NotPlannable for input that fails, which the general way reports, or that is written differently."""
    names = known.files.column("name")
    if not 2 <= len(known.classes) <= (config.num_classes or MAX_CLASSES):
        raise NotPlannable(f"{len(known.classes)} classes")
    if pc.count_distinct(names).as_py() < len(names):
        raise NotPlannable("a name comes twice")
    if config.split_spec.given and known.files.column(c.SPLIT).null_count:
        raise NotPlannable("images without a split")
    try:
        refuse_layout(known.folders)
    except DataError as error:
        raise NotPlannable(error.what) from None
    refuse_bad(config, known.judged, len(known.bad))


def refuse_bad(config: ImagesConfig, judged: int, bad: int) -> None:
    """Raise NotPlannable for more rejected records than --max-bad allows."""
    if bad and Fraction(bad, judged) > config.max_bad_share:
        raise NotPlannable(f"{bad} of {judged} are bad")


@dataclass(frozen=True)
class ShardPlans:
    """The shards of the known files; raises NotPlannable when they are asked for."""

    config: ImagesConfig
    plan: ImagePlan
    known: Known
    schema: Schema

    @cached_property
    def late(self) -> LateImages:
        """How images are made."""
        return LateImages(self.schema["image"], self.config.intake, content=True)

    @cached_property
    def _rows(self) -> pa.Table:
        """Rows of lockstep.etl.write.late.AssignLate without images, with the columns of FILES that locate these."""
        config, files = self.config, self.known.files
        whole = Assign(self.schema, ID_COLUMNS, config.split_spec, config.seed, config.fmt, files=True)
        assign = replace(AssignLate.of(whole, self.late), carry=False)
        names = pa.array(self.known.classes, pa.string())
        batches = []
        for batch in filter(len, files.to_batches()):
            zeros = pa.repeat(pa.scalar(0, pa.int64()), len(batch))
            more = {
                "number": zeros,
                c.OCCURRENCE: zeros,
                c.LEAK: pa.nulls(len(batch), pa.int64()),
                "label": pc.index_in(batch.column("class"), names).cast(pa.int64()),
            }
            found = assign.rows(_with(batch, more))
            for name in (OFFSET, LENGTH):
                found = found.append_column(name, batch.column(name))
            batches.append(found)
        rows = pa.Table.from_batches(batches).combine_chunks()
        if pc.count_distinct(rows.column(SAMPLE_ID)).as_py() < len(rows):
            raise NotPlannable("two names have one id")
        return rows

    @cached_property
    def table(self) -> ShardTable:
        """The number of shards of each split, and the records of a block."""
        config, split, rows = self.config, self.config.split_spec, self._rows
        found = rows.group_by(c.SPLIT).aggregate([(c.BYTES, "count"), (c.BYTES, "sum")])
        found = found.select([c.SPLIT, f"{c.BYTES}_count", f"{c.BYTES}_sum"])
        sizes = {name: (count, size) for name, count, size in sorted(zip(*found.to_pydict().values(), strict=True))}
        if set(split.names) - set(sizes):
            raise NotPlannable("an empty split")
        table = plan_shards(sizes, config.shard_bytes, config.row_group_bytes)
        archives = sum(source.size_bytes for source in self.plan.sources)
        read = archives * table.total
        if read > max(MAX_READS * archives, FREE_READ_BYTES) or len(self.plan.sources) * table.total > MAX_OPENED:
            raise NotPlannable(f"{table.total} shards out of {archives} bytes")
        if pc.sum(rows.column(LENGTH)).as_py() > len(rows) * self.late.size:
            raise NotPlannable("files that are longer than their pixels")
        return table

    @property
    def classes(self) -> dict[str, dict[str, int]]:
        """The records of each class in each split, including images that turn out to be broken."""
        found: dict[str, dict[str, int]] = {}
        for row in self._rows.group_by([c.SPLIT, "label"]).aggregate([("label", "count")]).to_pylist():
            found.setdefault(row[c.SPLIT], {})[str(row["label"])] = row["label_count"]
        return {name: dict(sorted(found[name].items())) for name in sorted(found)}

    def shards(self) -> list[PlannedShard]:
        """The plan of each shard, for its task."""
        rows, table = self._rows, self.table
        keys, shards = np.asarray(rows.column(c.KEY)), np.zeros(len(rows), dtype=np.int64)
        base = 0
        for name, count, _ in table.splits:
            here = np.asarray(pc.equal(rows.column(c.SPLIT), name))
            shards[here] = base + shards_of(keys[here].view(np.uint64) ^ _SIGN, count).astype(np.int64)
            base += count
        order = np.lexsort((np.asarray(rows.column(SAMPLE_ID)), keys, shards))
        borders = np.searchsorted(shards[order], np.arange(table.total + 1))
        carried = [name for name in rows.column_names if name not in (c.SPLIT, c.DROPPED, c.LEAK, c.BYTES)]
        plans = []
        for shard, (first, last) in enumerate(itertools.pairwise(borders.tolist())):
            mine = rows.select(carried).take(pa.array(order[first:last]))
            if (pc.sum(mine.column(LENGTH)).as_py() or 0) > MAX_HELD_BYTES:
                raise NotPlannable(f"a shard of more than {MAX_HELD_BYTES} bytes of files")
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, mine.schema, options=_PACKED) as stream:
                stream.write_table(mine)
            if sink.tell() > MAX_PLAN_BYTES:
                raise NotPlannable(f"a shard of {len(mine)} files")
            plans.append(PlannedShard(shard, sink.getvalue().to_pybytes()))
        return plans


def _with(batch: pa.RecordBatch, more: Mapping[str, pa.Array]) -> pa.RecordBatch:
    for name, column in more.items():
        batch = batch.append_column(name, column)
    return batch


def shards_of(keys: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """Compute floor(key * count / 2^64) of each key, with `count` below 2^31."""
    number = np.uint64(count)
    return ((keys >> _HALF) * number + ((keys & _LOW) * number >> _HALF)) >> _HALF


class _FoundEarly(Exception):
    """Images that the general way rejects before it plans shards: plan and write again without them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(f"{len(rows)} images")
        self.rows = rows


def run(spark: SparkSession, config: ImagesConfig, plan: ImagePlan) -> DatasetManifest:
    """Plan, write and publish. Raises NotPlannable, with nothing published, and the errors of
    lockstep.etl.images.job.run.
    """
    early: list[dict[str, Any]] = []
    while True:
        known = known_of(plan, early)
        refuse(config, known)
        schema = check_schema(config, config.fields(plan.shape, len(known.classes)))
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
    """One attempt to write a dataset by plans of its shards."""

    spark: SparkSession
    plans: ShardPlans

    def published(self) -> DatasetManifest:
        """Write the shards and publish the dataset. Raises NotPlannable and _FoundEarly."""
        config, known, schema = self.plans.config, self.plans.known, self.plans.schema
        origin = Origin(quarantine=self._frame(known.bad), created_config=config.with_classes(known.classes))
        job = Job(Target(config, schema, schema, None), ID_COLUMNS, origin)
        shards = self.plans.shards()
        with building(job) as place:
            manifest = publish(place, job, self._done(place.staging, job, shards))
        log_names(known.classes)
        return manifest

    def _done(self, staging: Staging, job: Job, shards: list[PlannedShard]) -> Done:
        plans, config, sources = self.plans, job.config, self.plans.plan.sources
        known, table = plans.known, plans.table
        urls = tuple(source.url for source in sources)
        write = WriteShards(job.schema, config.fmt, table, staging.attempts, urls, compression_of(config), files=True)
        make = MakeShards(WriteLate(write, plans.late), tuple(map(absolute, urls)), settings_for_tasks())
        files = [SourceFile(number, absolute(s.url), s.size_bytes) for number, s in enumerate(sources)]
        context = self.spark.sparkContext
        runs = slices([file.size_bytes for file in files], DEFAULT_SPLIT_BYTES, context.defaultParallelism)
        # First, since the digest of an archive may take longest.
        items: list[tuple[SourceFile | PlannedShard, ...]] = [tuple(files[run.start : run.stop]) for run in runs]
        items += [(shard,) for shard in shards]
        with job_description(self.spark, "make the images and write the shards"):
            found = context.parallelize(items, len(items)).mapPartitions(make).collect()
        digests = [item for item in found if isinstance(item, dict)]
        made = [item for item in found if isinstance(item, ShardMade)]
        if len(made) < table.total or sum(shard.row["rejected_bytes"] for shard in made) > MAX_RAW_BYTES:
            raise NotPlannable("much that is rejected")
        broken = [row for shard in made for row in shard.bad]
        early = {place for shard in made for place in shard.early}
        bad = [*known.bad, *broken]
        refuse_bad(plans.config, known.judged, len(bad))
        if early:
            raise _FoundEarly([row for row in broken if (row[c.SOURCE], row[c.POSITION]) in early])
        paths = DatasetPaths(staging.root)
        splits, indexes = placed(staging.fs, paths, [shard.row for shard in made], table, config.fmt)
        if not all(any(shard.records for shard in split.shards) for split in splits.values()):
            raise NotPlannable("a split with only broken images")
        origin = replace(
            job.origin,
            sources=infos_of(sources, digests),
            read=known.read,
            quarantined=len(bad),
            quarantined_raw_bytes=sum(len(row[c.RAW]) for row in bad),
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
        """Records whose pixels equal those of a record of another split; ids are unique already."""
        keys = [np.frombuffer(shard.leaks, dtype=np.int64) for shard in made]
        splits = [number for number, (_, count, _) in enumerate(self.plans.table.splits) for _ in range(count)]
        sides = np.repeat(splits, [len(shard) for shard in keys])
        values = on_two_sides(np.concatenate(keys), sides)
        checks = checks_of(job.split, job.schema)
        found = {check: values.shared if check == CONTENT else 0 for check in checks}
        return logged(job.split, found, {CONTENT: values} if CONTENT in checks else {}, records)

    def _frame(self, bad: list[dict[str, Any]]) -> DataFrame:
        return self.spark.createDataFrame(pa.Table.from_pylist(bad, c.REJECTED))


def on_two_sides(keys: NDArray[np.int64], sides: NDArray[np.int64]) -> Values:
    """The Values of records, from their keys and the numbers of their splits: (n,) each."""
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
