"""write_dataset: the one writer behind every ETL job, from a data frame to a published dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from etl import VERSION
from etl import columns as c
from etl.append import Parent, check_new_ids, open_parent
from etl.assign import Assign
from etl.clean import clean as clean_beside
from etl.config import DEFAULT_SHARD_BYTES, WriteConfig
from etl.fit import fit_all
from etl.leakage import check_leakage, leak_key
from etl.place import move, plan_shards, sizes_of, write_shards
from etl.quarantine import write_quarantine
from etl.sampling import Sampling, weight_field
from etl.settle import settle
from etl.shards import WriteShards
from etl.spark_errors import translated
from etl.splits import SplitSpec
from etl.staging import Staging
from etl.table import named_repeats, prepared
from etl.weighing import class_weights
from features.schema import Schema
from storage.canonical import canonical_bytes, sha256_hex
from storage.errors import ConfigError, DataError, ExistsError
from storage.fs import absolute, filesystem, join, parent
from storage.layout import DatasetPaths, fitted_path, split_name
from storage.manifest import Counts, DatasetManifest, FileInfo, SourceInfo
from storage.publish import occupied, write_file
from storage.settings import hadoop_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NOT_KEPT = "none"
MAX_SPLITS = 100


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a data frame's rows come from, for counts, quarantine and the manifest; `read` None: as many as it has."""

    sources: tuple[SourceInfo, ...] = ()
    read: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
    quarantined_raw_bytes: int = 0
    quarantine: DataFrame | None = None
    created_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Job:
    """One call of write_dataset, with all that it says read and checked."""

    config: WriteConfig
    schema: Schema
    id_columns: tuple[str, ...]
    split: SplitSpec
    origin: Origin
    parent: Parent | None


def refuse_existing(url: str) -> None:
    """Raise ExistsError where the output, or a file in place of a directory above it, is there already.

    Asked before Spark starts, so that nobody waits for what cannot be published.
    """
    fs, above = filesystem(url), parent(absolute(url))
    if fs.exists(url):
        raise occupied(url)
    while not fs.exists(above) and parent(above) != above:
        above = parent(above)
    if fs.exists(above) and not fs.stat(above).is_dir:
        raise ExistsError(
            f"{url} cannot be made: {above} is a file",
            got="a file",
            allowed="directories above the output",
            next_step="Correct --output.",
        )


def write_dataset(
    df: DataFrame,
    url: str,
    *,
    id_columns: Sequence[str],
    schema: Schema | None = None,
    label: str | None = None,
    fmt: str = "tfrecord",
    split: SplitSpec | str = "80/20",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    row_group_bytes: int | None = None,
    seed: int = 0,
    sample: str | None = None,
    weights: str = "none",
    quarantine: str | None = None,
    append_to: str | None = None,
    clean: bool = False,
    origin: Origin | None = None,
) -> DatasetManifest:
    """Split, order, encode and publish the rows of a data frame as the dataset `url`.

    `id_columns` name a record; where `df` has no `_source` (int) and `_position` (bigint) that say where a row comes
    from, they must be unique. `schema` None takes all columns by the rules of etl.table, `label` among them. The other
    arguments are those of WriteConfig. `df` may hold `_occurrence` (bigint: which repetition of its id columns a row
    is), `_dropped` (string: why a row is not written) and, for the split `given`, `_split`; it is read more than once
    and must give the same rows each time. `origin` is what an ETL job says of its input.

    Nothing is seen at `url` before all of it is there. Raises ExistsError for an existing output, ConfigError for
    arguments and columns that do not fit, DataError where a split would be empty, two records have one id, or a group
    or time lies on two sides of the split.
    """
    text = split if isinstance(split, str) else split.text
    config = WriteConfig(
        output=absolute(url), fmt=fmt, split=text, shard_bytes=shard_bytes, row_group_bytes=row_group_bytes, seed=seed,
        sample=sample, weights=weights, quarantine=quarantine, append_to=append_to, clean=clean,
    )  # fmt: skip
    spec = config.split_spec
    refuse_existing(config.output)
    if quarantine not in (None, NOT_KEPT):
        refuse_existing(str(quarantine))
    picked = () if sample is None else (Sampling.parse(sample).column,)
    rows, schema = prepared(df, schema, id_columns, spec, label, picked)
    weighed = weights == "balanced" and schema.weight is None
    full = Schema((*schema.fields, weight_field())) if weighed else schema
    above = None if append_to is None else open_parent(append_to, config, full)
    job = _Job(config, full, tuple(id_columns), spec, origin or Origin(), above)
    try:
        with translated(df.sparkSession, "writing the dataset"):
            return _written(rows, job, schema if weighed else None)
    except DataError as error:
        # Rows without a place cannot be named by it, so equal ids are told by their columns.
        raise (named_repeats(df, id_columns) if c.POSITION not in df.columns else None) or error from None


def _written(df: DataFrame, job: _Job, unweighed: Schema | None) -> DatasetManifest:
    config, split, schema = job.config, job.split, job.schema
    df = df.withColumn(c.LEAK, leak_key(df, split, schema))
    sample = None if config.sample is None else Sampling.parse(config.sample)
    assign = Assign(schema, job.id_columns, split, config.seed, config.fmt, sample)
    if unweighed is not None:
        assign = replace(assign, weights=class_weights(df, unweighed, assign))
    rows = df.mapInArrow(assign, assign.ddl()).persist()
    try:
        with Staging(config.output) as staging, ExitStack() as stack:
            if config.clean:
                clean_beside(staging.fs, config.output, staging.signed_ms())
            apart = None
            if job.origin.quarantine is not None and config.quarantine not in (None, NOT_KEPT):
                apart = stack.enter_context(Staging(str(config.quarantine), mode=0o700))
            manifest = _build(staging, settle(rows, split), job, apart)
            if apart is not None:
                apart.publish(None)
            try:
                staging.publish(manifest.to_bytes())
            except BaseException:
                if apart is not None:
                    apart.withdraw()
                raise
    finally:
        rows.unpersist()
    return manifest


def _build(staging: Staging, rows: DataFrame, job: _Job, apart: Staging | None) -> DatasetManifest:
    from pyspark.sql import functions as f

    config, schema, origin, paths = job.config, job.schema, job.origin, DatasetPaths(staging.root)
    urls = tuple(source.url for source in origin.sources) or ("the data frame",)
    sizes, late_drops = sizes_of(rows)
    dropped = dict(sorted({**origin.dropped, **late_drops}.items()))
    written = sum(count for count, _ in sizes.values())
    counted = written + origin.quarantined + sum(dropped.values())
    read = counted if origin.read is None else origin.read
    names = _names(job.split, sizes, read, origin.quarantined)
    kept = rows.where(f.col(c.DROPPED).isNull())
    leakage = check_leakage(kept, job.split, schema, names)
    if job.parent is not None:
        check_new_ids(kept, job.parent)
    blocks = None if job.parent is None else job.parent.block_records
    table = plan_shards(sizes, config.shard_bytes, config.row_group_bytes, blocks, alike=job.split.kind == "kfold")
    write = WriteShards(schema, config.fmt, table, staging.attempts, urls, hadoop_settings())
    splits, files = write_shards(staging.fs, paths, rows, table, write)
    files |= _write_fitted(staging, rows, job, names)
    if apart is not None:
        _place_quarantine(apart, apart.root, origin, urls)
    elif origin.quarantine is not None and config.quarantine != NOT_KEPT:
        files |= _place_quarantine(staging, paths.quarantine, origin, urls)
    assert read == counted, f"{read} records read, but {counted} accounted for"
    return DatasetManifest.build(
        format=config.fmt,
        created_by={"version": VERSION, "config": _created(job), "seed": config.seed},
        schema=schema.to_json(),
        splits=splits,
        files=files,
        counts=Counts(read, written, origin.quarantined, dropped),
        source=origin.sources,
        parent=None if job.parent is None else job.parent.to_json(),
        leakage=leakage.to_json(),
    )


def _created(job: _Job) -> dict[str, Any]:
    if job.origin.created_config:
        return dict(job.origin.created_config)
    return {"job": "write_dataset", "id_columns": list(job.id_columns), **job.config.to_json()}


def _names(split: SplitSpec, sizes: Mapping[str, object], read: int, quarantined: int) -> tuple[str, ...]:
    """The names of all splits in their order. Raises DataError for one without records or one that is no name."""
    names = split.names or tuple(sizes)
    missing = [name for name in names if name not in sizes]
    if missing or not names:
        raise DataError(
            "no record was left to write" if not sizes else f"split {missing[0]} would be empty",
            got=f"{read} records read, {quarantined} quarantined; records in {', '.join(sizes) or 'no split'}",
            allowed=f"records in each of {', '.join(names) or 'the splits that are given'}",
            next_step="Look at the input and the label; give more input or another --split.",
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


def _write_fitted(staging: Staging, rows: DataFrame, job: _Job, names: Sequence[str]) -> dict[str, FileInfo]:
    if job.parent is not None:
        documents = job.parent.fitted()
    else:
        documents = {name: canonical_bytes(found) for name, found in fit_all(rows, job.schema, names).items()}
    files = {}
    for name, data in sorted(documents.items()):
        write_file(staging.fs, DatasetPaths(staging.root).fitted(name), data)
        files[fitted_path(name)] = FileInfo(len(data), sha256_hex(data))
    return files


def _place_quarantine(staging: Staging, folder: str, origin: Origin, urls: tuple[str, ...]) -> dict[str, FileInfo]:
    assert origin.quarantine is not None
    staging.fs.mkdirs(folder, mode=0o700)
    written = write_quarantine(
        origin.quarantine,
        count=origin.quarantined,
        raw_bytes=origin.quarantined_raw_bytes,
        attempts=staging.attempts,
        source_urls=urls,
    )
    files = {}
    for number, (attempt, info) in enumerate(written):
        name = f"part-{number:05d}.parquet"
        move(staging.fs, attempt, join(folder, name))
        files[f"_quarantine/{name}"] = info
    return files
