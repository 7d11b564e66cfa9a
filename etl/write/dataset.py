"""write_dataset: rows are split, ordered, encoded, written as shards, and published with a manifest."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, cast

from lockstep.etl import columns as c
from lockstep.etl.choices import DEFAULT_SHARD_BYTES, Weights
from lockstep.etl.columns import PACKED, PLACE
from lockstep.etl.fit.bake import Bake, baked_rows, fitted_of
from lockstep.etl.fit.statistics import class_counts, classes_of, fit_all
from lockstep.etl.spark.errors import SameIdError, translating_errors
from lockstep.etl.spark.session import at_once, bounded, sized
from lockstep.etl.spark.tasks import mapped
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.counted import assign_by_counts, check_values
from lockstep.etl.split.leakage import GROUP, Leakage, Values, check_leakage, leak_key
from lockstep.etl.split.sampling import balanced
from lockstep.etl.split.splits import TRAIN, SplitSpec, span_of
from lockstep.etl.split.warnings import far_from_shares, percent
from lockstep.etl.write.append import Parent, check_new_ids
from lockstep.etl.write.carried import Carried, Carry, place_carried
from lockstep.etl.write.chance import refuse_chance
from lockstep.etl.write.checks import Target, check_output, check_target
from lockstep.etl.write.config import OutputConfig, WriteConfig
from lockstep.etl.write.frame import named_repeats, prepared
from lockstep.etl.write.late import AssignLate, LateImages, write_late
from lockstep.etl.write.pandas_rows import is_frame, spark_frame
from lockstep.etl.write.publication import Done, Job, building, compression_of, publish, urls_of
from lockstep.etl.write.quarantine import Origin
from lockstep.etl.write.shards import RUN_AGAIN, WriteShards, other_rows, plan_shards, sizes_of, write_shards
from lockstep.etl.write.staging import Staging
from lockstep.features.arrow import ArrowTable
from lockstep.features.schema.sampled import Sampled
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import Compression, DatasetPaths, Format, split_name
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.urls import absolute, several

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

__all__ = ["Origin", "write_dataset"]

log = logging.getLogger(__name__)
MAX_SPLITS = 100
SMALL_BYTES, ROW_BYTES = 4 << 20, 64  # rows that one task counts; of a row, besides its record


def write_dataset(
    df: DataFrame | pd.DataFrame | ArrowTable,
    url: str | os.PathLike[str],
    *,
    id_columns: str | Sequence[str],
    schema: Schema | None = None,
    label: str | None = None,
    fmt: Format = "tfrecord",
    compression: Compression = "none",
    split: SplitSpec | str = "80/20",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    row_group_bytes: int | None = None,
    seed: int = 0,
    sample: str | None = None,
    weights: Weights = "none",
    quarantine: str | None = None,
    append_to: str | None = None,
    clean: bool = False,
    petastorm: bool = False,
    bake: bool = False,
    label_window: int | None = None,
    unlabelled: bool = False,
    origin: Origin | None = None,
) -> DatasetManifest:
    """Split, order, encode and publish the rows of a data frame as the dataset `url`.

    `df` is a data frame of Spark, or of pandas in an active Spark session, whose NaN and NA are null. `id_columns`
    identify a record; they must be unique unless `df` has `_source` (int) and `_position` (bigint), which say where a
    row comes from. `schema` None takes all columns by their types, `label` among them: numbers as they are, null as 0,
    texts by their hash (`lockstep.propose_schema` looks at the values too); one ConfigError names every column that
    cannot be stored or trained on. The other arguments are those of WriteConfig. `df` may have `_occurrence` (bigint:
    which repetition of its id columns a row is), `_dropped` (string: why a row is not written) and, for the split
    `given`, `_split`; it may be read more than once and must give the same rows each time. `origin` says where the rows
    come from, for the manifest.

    Nothing appears at `url` before the dataset is complete. Raises ExistsError for an existing output, ConfigError for
    arguments and columns that do not fit and for rows that depend on chance, DataError if `df` gave other rows when it
    was read again, a split would be empty, a group or time would be in two splits, or two records have one id
    (SameIdError).

    >>> import lockstep
    >>> with lockstep.spark_session("visits", "local[2]") as spark:
    ...     hours = spark.range(500).selectExpr("id AS visit", "id % 24 AS hour", "id % 3 = 0 AS bought")
    ...     manifest = lockstep.write_dataset(hours, "visits", id_columns="visit", label="bought")
    >>> manifest.counts.written, sorted(manifest.splits)
    (500, ['test', 'train'])
    """
    config = WriteConfig(
        output=absolute(url), fmt=fmt, compression=compression,
        split=split if isinstance(split, str) else split.text, shard_bytes=shard_bytes,
        row_group_bytes=row_group_bytes, seed=seed,
        sample=sample, weights=weights, quarantine=quarantine, append_to=append_to, clean=clean,
        petastorm=petastorm, bake=bake, label_window=label_window, unlabelled=unlabelled,
    )  # fmt: skip
    parent, ids = check_output(config), several(id_columns)
    used = None if schema is None else _used(config, schema, ids)
    rows = spark_frame(df, used) if is_frame(df) else cast("DataFrame", df)
    return write_frame(rows, config, parent, id_columns=ids, schema=schema, label=label, origin=origin)


def _used(config: WriteConfig, schema: Schema, id_columns: Sequence[str]) -> set[str]:
    """The columns of a frame that the writer looks at, if it has them."""
    own = (c.SOURCE, c.POSITION, c.OCCURRENCE, c.SPLIT, c.DROPPED, c.CARRIED)
    column = config.split_spec.column
    also = (*_looked_at(config), *(() if column is None else (column,)))
    return {*(field.name for field in schema), *id_columns, *also, *own}


def write_frame(
    df: DataFrame,
    config: WriteConfig,
    parent: Parent | None,
    *,
    id_columns: tuple[str, ...],
    schema: Schema | None,
    label: str | None = None,
    origin: Origin | None = None,
) -> DatasetManifest:
    """write_dataset for a `config` whose output was checked and continues `parent`."""
    schema = None if schema is None else config.stored(schema)
    rows, schema = prepared(df, schema, id_columns, config.split_spec, label, _looked_at(config))
    refuse_chance(df)
    target = check_target(config, schema, dict(rows.dtypes), parent)
    return _published(df, rows, Job(target, id_columns, origin or Origin()))


def write_rows(
    df: DataFrame,
    target: Target,
    id_columns: tuple[str, ...],
    origin: Origin,
    late: LateImages | None = None,
    carry: Carry | None = None,
    *,
    files: bool = False,
) -> DatasetManifest:
    """write_dataset for a target that was checked. With `late`, images become pixels in the tasks that write them; with
    `carry`, the column lockstep.etl.columns.CARRIED is kept for appends, and an append may leave a split without
    records; with `files`, the dataset says which file each record was, by the column lockstep.etl.columns.FILE.
    """
    also = (*_looked_at(target.config), *(() if late is None else (PACKED, PLACE)), *((c.FILE,) if files else ()))
    rows, _ = prepared(df, target.rows, id_columns, target.config.split_spec, None, also)
    return _published(df, rows, Job(target, id_columns, origin, late, carry, files=files))


def _looked_at(config: WriteConfig) -> tuple[str, ...]:
    return () if config.sampling is None else (config.sampling.column,)


def _published(df: DataFrame, rows: DataFrame, job: Job) -> DatasetManifest:
    """Publish `rows`, which are `df` as `prepared` makes it."""
    config, split = job.config, job.split
    window = config.stored_window
    if window is not None:
        window = span_of(dict(df.dtypes).get(str(split.column), ""), window)
    if config.sampling is not None:
        job = replace(job, sampled=config.sampling.sampled(dict(rows.dtypes)[config.sampling.column], split))
    spark = df.sparkSession
    try:
        with translating_errors(spark, "writing the dataset"), bounded(spark):
            return _written(rows, job, window)
    except SameIdError as error:
        if c.POSITION in df.columns:
            raise
        with translating_errors(spark, "looking for equal ids"):
            # Rows without a place cannot be named by it, so the error names equal ids by their columns.
            raise named_repeats(df, job.id_columns) or error from None


def _written(df: DataFrame, job: Job, window: int | None) -> DatasetManifest:
    config, split, schema = job.config, job.split, job.schema
    late = job.late
    df = df.withColumn(c.LEAK, leak_key(df, split, schema, late=late is not None and late.content))
    # Baking needs statistics, so the fields stay columns until these are known.
    fmt = "parquet" if config.bake else config.fmt
    assign = Assign(schema, job.id_columns, split, config.seed, fmt, config.sampling, files=job.files)
    if config.weights == "balanced":
        # An append takes its parent's weights, as it takes the fitted files: a class has one weight in a whole chain.
        parent = job.target.parent
        counts = class_counts(df, job.target.rows, assign, window) if parent is None else parent.class_counts
        job = replace(job, class_counts=counts)
        assert schema.label is not None
        assign = replace(assign, weights=balanced(schema.label.name, counts))
    if job.carry is not None:
        assign = replace(assign, carried=tuple(job.carry.schema))
    full = None
    if late is None:
        rows = mapped(df, assign, assign.output).persist()
    else:
        # Counted without the images: these are read again where they are written, and never cached.
        whole = AssignLate.of(assign, late)
        thin = replace(whole, carry=False, files=False)
        rows = mapped(df.drop(late.field.name, PACKED, PLACE), thin, thin.output).persist()
        full = mapped(df, whole, whole.output)
    try:
        if split.kind == "subset" and job.target.parent is None:  # an append need not have all values
            check_values(rows, df, split)
        with building(job) as place, ExitStack() as stack:
            done = _built(place.staging, df, assign_by_counts(rows, split, window), full, job, stack)
            return publish(place, job, done)
    finally:
        rows.unpersist()


def _built(
    staging: Staging, df: DataFrame, rows: DataFrame, full: DataFrame | None, job: Job, stack: ExitStack
) -> Done:
    from pyspark.sql import functions as f

    config, schema, origin, paths = job.config, job.schema, job.origin, DatasetPaths(staging.root)
    found = sizes_of(rows, c.class_field(schema))
    _check_classes(rows, job, found.classes)
    sizes, dropped = found.splits, {**origin.dropped, **found.dropped}
    past, parent = dropped.pop(c.PAST, 0), job.target.parent
    if job.carry is not None and parent is not None:
        # A short night may add no record to a split: what it holds open comes with the next one.
        sizes = {name: sizes.get(name, (0, 0)) for name in sorted({*parent.manifest.splits, *sizes})}
    written = sum(count for count, _ in sizes.values())
    counted = written + origin.quarantined + sum(dropped.values())
    names = _names(job.split, sizes, counted if origin.read is None else origin.read, origin.quarantined, dropped)
    size = sum(of for _, of in sizes.values()) + ROW_BYTES * (written + sum(found.dropped.values()))
    is_small = size <= SMALL_BYTES
    stack.enter_context(sized(df.sparkSession, 0 if is_small else size))
    if is_small:
        rows = rows.coalesce(1)  # one task has all rows, so that nothing needs to be shuffled to be counted
    kept = rows.where(f.col(c.DROPPED).isNull())
    if job.sampled is not None:
        _check_sampled(job.sampled, names)
    records = {name: sizes[name][0] for name in names}
    all_rows = rows

    def checked() -> tuple[Leakage | None, tuple[dict[str, FileInfo], Carried] | None]:
        # The features of late images are known only when they are written.
        leakage = check_leakage(kept, job.split, schema, records) if full is None else None
        return leakage, None if job.carry is None else place_carried(staging, all_rows, past, job.carry, parent)

    (leakage, left), fitted = at_once(checked, lambda: _fitted(kept, rows, job, names))
    if config.bake:
        bake = Bake(schema, config.fmt, fitted_of(schema, fitted))
        rows, schema = stack.enter_context(baked_rows(rows, bake)), bake.baker.schema
        sizes = sizes_of(rows).splits
    blocks = None if parent is None else parent.block_records
    table = plan_shards(sizes, config.shard_bytes, config.row_group_bytes, blocks)
    # A record that comes back has the source -1.
    urls = urls_of(origin) if parent is None else (*urls_of(origin), parent.url)
    compression, keys = compression_of(config), found.keys
    write = WriteShards(schema, config.fmt, table, staging.attempts, urls, compression, job.files)
    if full is None:
        splits, files = write_shards(staging.fs, paths, rows, table, write, keys)
    else:
        assert job.late is not None
        assert isinstance(config, OutputConfig), "only jobs that read image files have late images"
        late = write_late(staging.fs, paths, full, table, write, keys, job.late, config, origin, stack)
        splits, files = late.splits, late.files
        written -= late.origin.quarantined - origin.quarantined
        origin = late.origin
        records = {name: splits[name].records for name in names}
        leakage = check_leakage(late.rows, job.split, schema, records)
    assert leakage is not None
    _warn_of_groups(df, job.split, records, leakage.values.get(GROUP))
    done = Done(
        schema=schema, splits=splits, files=files | ({} if left is None else left[0]), origin=origin, dropped=dropped,
        leakage=leakage, fitted=fitted, classes=found.classes, carried=None if left is None else left[1],
    )  # fmt: skip
    if written != done.written:
        raise DataError(
            "rows were lost on their way to the shards",
            got=f"{done.written} records in shards",
            allowed=f"{written}, as were split",
            next_step=RUN_AGAIN,
        )
    return done


def _check_classes(rows: DataFrame, job: Job, found: Mapping[str, Mapping[str, int]]) -> None:
    """Raise DataError if the classes of `rows` are not those that the weights were computed for, in a pass of its own.
    `found` are Sizes.classes.
    """
    if job.class_counts is None or job.target.parent is not None:  # an append has its parent's weights
        return
    assert job.schema.label is not None
    names = [TRAIN] if TRAIN in found else list(found)
    if all(found[name] for name in names):
        counts = dict(sum((Counter(found[name]) for name in names), Counter[str]()))
    else:  # more classes than sizes_of counts
        counts = classes_of(rows, job.schema.label)
    if counts != job.class_counts:
        first = job.class_counts
        name = min(name for name in {*counts, *first} if counts.get(name) != first.get(name))
        raise other_rows(
            f"{first.get(name, 0)} records of class `{name[:100]}` first, {counts.get(name, 0)} afterwards"
        )


def _fitted(kept: DataFrame, rows: DataFrame, job: Job, names: Sequence[str]) -> dict[str, bytes]:
    """The fitted files; those of its parent for an append, whose records must be new."""
    parent = job.target.parent
    if parent is None:
        return {name: canonical_bytes(found) for name, found in fit_all(rows, job.schema, names).items()}
    check_new_ids(kept, parent)
    return parent.fitted()


def _check_sampled(sampled: Sampled, names: Sequence[str]) -> None:
    """Raise DataError if no split is sampled; log a warning if folds are."""
    if not set(sampled.splits) & set(names):
        raise DataError(
            "--sample leaves out records for training, and no split is there to train on",
            got=f"splits {', '.join(names)}"[:500],
            allowed=f"a split {sampled.splits[0]}",
            next_step="Name that split train in the input, or leave --sample out.",
        )
    if set(sampled.splits) == set(names):
        log.warning(
            "sample: all folds are sampled, so a model is tested on a fold without those records too: correct its"
            " predictions (lockstep.features.schema.sampled), or use --weights balanced in place of --sample"
        )


def _warn_of_groups(df: DataFrame, split: SplitSpec, records: Mapping[str, int], groups: Values | None) -> None:
    """Log a warning if whole groups gave other shares than asked for; a pass over `df` finds the largest group."""
    from pyspark.sql import functions as f

    line = far_from_shares(split, records)
    if line is None or groups is None or split.column is None:
        return
    of_group = df.where(f.col(c.LEAK) == groups.largest)
    name = of_group.agg(f.min(c.quoted(split.column)).alias("name")).collect()[0]["name"]
    log.warning(
        "split: %s; of %d groups the largest, `%s` = %s, has %s: leave it out, or split by a column of smaller groups",
        line,
        sum(groups.counts.values()),
        split.column,
        repr(name)[:100],
        percent(Fraction(max(groups.counts), groups.records)),
    )


def _names(
    split: SplitSpec, sizes: Mapping[str, object], read: int, quarantined: int, dropped: Mapping[str, int]
) -> tuple[str, ...]:
    """The names of all splits in order. Raises DataError for a split without records and for an invalid name."""
    names = split.names or tuple(sizes)
    missing = [name for name in names if name not in sizes]
    if missing or not names:
        left_out = ", ".join([f"{quarantined} quarantined", *(f"{n} {why}" for why, n in sorted(dropped.items()))])
        raise DataError(
            "no record was left to write" if not sizes else f"split {missing[0]} would be empty",
            got=f"{read} records read, {left_out}; records in {', '.join(sizes) or 'no split'}",
            allowed=f"records in each of {', '.join(names) or 'the splits that are given'}",
            next_step="Look at the input, the label and its window; give more input or another --split.",
        )
    if len(names) > MAX_SPLITS:
        raise DataError(
            f"column `{c.SPLIT}` names too many splits",
            got=f"{len(names)}, such as {', '.join(names[:3])}",
            allowed=f"{MAX_SPLITS} at most",
            next_step="Name splits such as train and test there.",
        )
    try:
        return tuple(split_name(name) for name in names)
    except ConfigError as error:
        raise DataError(error.what, got=error.got, allowed=error.allowed, next_step="Rename that split.") from None
