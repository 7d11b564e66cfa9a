"""Appends: a new dataset that continues another one, so that both can be used together; no record is in both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.etl.columns import listed
from lockstep.etl.spark.tasks import mapped
from lockstep.etl.split.sampling import Sampling
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.write.config import WriteConfig
from lockstep.features.encode.bake import raw_schema
from lockstep.features.examples.foreign import decode_foreign_frames
from lockstep.features.schema.fields import SAMPLE_ID, Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.foreign_files import open_unpacked, pieces
from lockstep.storage.dataset.manifest import (
    MAX_CHAIN,
    DatasetManifest,
    chain_too_long,
    link_to,
    load_chain,
    read_checked,
)
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.errors import ConfigError, CorruptionError, DataError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.parquet_footer import read_published_footer
from lockstep.storage.formats.tfrecord import record_offsets
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CLASS_COUNTS = "class_counts"  # in created_by.config: the counts that balanced weights are computed from
_FLAGS = {name: f"--{name}" for name in ("weights", "sample", "label", "format", "split", "seed")}
_IDS = pa.schema([(SAMPLE_ID, pa.int64())])


@dataclass(frozen=True)
class Parent:
    """The dataset that an append continues, and those that it continues itself, nearest first."""

    chain: tuple[tuple[str, DatasetManifest], ...]

    @property
    def url(self) -> str:
        """Where the parent is."""
        return self.chain[0][0]

    @property
    def manifest(self) -> DatasetManifest:
        """The parent's manifest."""
        return self.chain[0][1]

    @property
    def block_records(self) -> dict[str, int]:
        """Records of a block, by split: equal in all datasets of a chain, so that one epoch plan covers them."""
        return {name: split.block_records for name, split in self.manifest.splits.items()}

    @property
    def class_counts(self) -> dict[str, int]:
        """The records of each class that the weights were computed for, by the text of the class."""
        return dict(self.manifest.created_by["config"][CLASS_COUNTS])  # open_parent checked them

    def to_json(self, output: str) -> dict[str, Any]:
        """The `parent` in the manifest of a dataset at `output`."""
        return link_to(self.url, self.manifest.digest, output)

    def check_schema(self, schema: Schema) -> None:
        """Raise ConfigError for a schema that is not the parent's, but for new columns that state a default."""
        theirs = raw_schema(Schema.from_json(self.manifest.schema))
        added = schema.added_to(theirs)
        if added is not None:
            _check_added(self.url, added)
            return
        there = {field.name for field in theirs}
        without = [field.name for field in schema if field.name not in there and field.default is None]
        rest = replace(schema, fields=tuple(field for field in schema if field.name not in without))
        if without and rest.added_to(theirs) is not None:
            raise ConfigError(
                f"{self.url} cannot be continued: it lacks {listed(without)}",
                got="a new column without a default",
                allowed="new columns that are nullable and state the `default` of earlier records",
                next_step="Declare `nullable = true` and `default = ...` for it in --schema, or make a separate dataset"
                " without --append-to.",
            )
        raise other_parent(self.url, "schema", f"the schema of {self.url}", schema.differences(theirs))

    def fitted(self) -> dict[str, bytes]:
        """The parent's fitted files by name: an append is encoded with its parent's statistics."""
        url, fs = self.url, filesystem(self.url)
        listed = {path: info for path, info in self.manifest.files.items() if path.startswith("_fitted/")}
        return {path.removeprefix("_fitted/"): read_checked(fs, url, path, info) for path, info in listed.items()}


def open_parent(url: str, config: WriteConfig) -> Parent:
    """The dataset at `url` and all that it continues.

    Raises ConfigError if it is split by time or in balanced folds, if `config` asks for other weights, sample, label,
    form of features, format, split or seed than the parent has, or if the parent's manifest holds a sample or class
    counts that cannot be read. Raises DataError if an earlier dataset has changed, or for a chain without room.
    """
    url = absolute(url)
    chain = load_chain(url)
    if len(chain) == MAX_CHAIN:
        raise chain_too_long(config.output)
    first = chain[0][1]
    if first.indexed is not None:
        raise other_parent(url, "kind", "a dataset that a job of lockstep wrote", "indexed files of another program")
    stored, above = first.created_by["config"], Schema.from_json(first.schema)
    split = _split_of(stored.get("split"))
    if split is not None:
        split.check_append(url)
    own = config.to_json()
    settings = {
        "weights": (stored.get("weights"), config.weights),
        "sample": _samples(_sample_of(url, stored.get("sample")), config.sample),
        "label": (stored.get("label", own.get("label")), own.get("label", stored.get("label"))),
        "form of features": (_form(baked=any(field.is_baked for field in above)), _form(baked=config.bake)),
        "format": (first.format, config.fmt),
        "split": (split.text if split else "unknown", config.split_spec.text),
        "seed": (first.created_by["seed"], config.seed),
    }
    for what, (theirs, ours) in settings.items():
        if theirs != ours:
            raise other_parent(url, what, theirs, ours)
    if config.weights == "balanced":
        _check_counts(url, stored.get(CLASS_COUNTS))
    return Parent(chain)


def _check_added(url: str, added: Sequence[Field]) -> None:
    """Raise ConfigError for a new column with statistics: an append is encoded with those of its parent."""
    fitted = [field.name for field in added if field.fitted_file is not None]
    if fitted:
        raise ConfigError(
            f"{url} cannot be continued: it has no statistics of {listed(fitted)}",
            got="a new column whose encoding is vocabulary or standardise",
            allowed="new columns with an encoding without statistics: hash, bucketise, number, log, clip, ignore",
            next_step="Declare another encoding, or make a separate dataset of all files without --append-to.",
        )


def check_new_ids(rows: DataFrame, parent: Parent) -> None:
    """Raise DataError if a sample id of `rows` is in the parent or in a dataset before it."""
    shards = tuple(
        (join(url, shard.path), replace(shard, block_offsets=(), unpacked_offsets=None))
        for url, manifest in parent.chain
        for split in manifest.splits.values()
        for shard in split.shards
    )
    planned = rows.sparkSession.range(0, len(shards), 1, max(1, len(shards)))
    old = mapped(planned, ReadIds(shards), _IDS)
    again = rows.select(SAMPLE_ID).join(old, SAMPLE_ID, "left_semi").persist()
    try:
        count = again.count()
        if count:
            first = [row[SAMPLE_ID] for row in again.orderBy(SAMPLE_ID).limit(2).collect()]
            raise DataError(
                f"{count} records are in {parent.url} already, or in what it continues",
                got=", ".join(f"sample id {sample & (1 << 64) - 1:016x}" for sample in first),
                allowed="records that are new",
                next_step="Remove the old input from --input.",
            )
    finally:
        again.unpersist()


@dataclass(frozen=True)
class ReadIds:
    """The function for mapInArrow: numbers of `shards` (URL, manifest entry) in, their sample ids out."""

    shards: tuple[tuple[str, ShardInfo], ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Raises CorruptionError or DataError for a damaged shard."""
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from ids_of(*self.shards[number])


def ids_of(url: str, shard: ShardInfo) -> Iterator[pa.RecordBatch]:
    """The sample ids of a shard, in batches with the one column `sample_id`.

    Memory: some MiB or the largest record. Raises CorruptionError for a shard that is damaged or has another number of
    records than its manifest says.
    """
    fs, count = filesystem(url), 0
    for ids in _ids_of_parquet(fs, url, shard) if shard.footer_sha256 is not None else _ids_of_tfrecord(fs, url):
        count += len(ids)
        yield pa.RecordBatch.from_arrays([ids], schema=_IDS)
    if count != shard.records:
        raise CorruptionError(
            "a shard holds another number of records than its manifest says",
            file=url,
            got=str(count),
            allowed=str(shard.records),
        )


def _ids_of_parquet(fs: FileSystem, url: str, shard: ShardInfo) -> Iterator[pa.Array]:
    footer = pq.read_metadata(pa.BufferReader(read_published_footer(fs, url, shard)))
    try:
        with fs.open_read(url) as file:
            reader = pq.ParquetFile(file, metadata=footer, page_checksum_verification=True)
            for batch in reader.iter_batches(columns=[SAMPLE_ID]):
                yield batch.column(SAMPLE_ID)
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(
            "sample ids cannot be read",
            file=url,
            got=str(error).splitlines()[0],
            allowed=f"pages of {SAMPLE_ID} that match their checksums",
        ) from None


def _ids_of_tfrecord(fs: FileSystem, url: str) -> Iterator[pa.Array]:
    with open_unpacked(fs, url) as file:
        for piece in pieces(file, url):
            offsets = record_offsets(
                piece.data, file=url, first_record=piece.first_record, base_offset=piece.base_offset
            )
            found = decode_foreign_frames((sample_id_field(),), piece.data, offsets, context_only=True)
            yield found.column(SAMPLE_ID)


def _sample_of(url: str, stored: object) -> str | None:
    """The parent's `sample`; checked, since the manifest may have been edited."""
    if stored is None:
        return None
    try:
        if isinstance(stored, str):
            Sampling.parse(stored)
            return stored
    except ConfigError as error:
        raise _odd(url, "sample", stored, error.allowed) from None
    raise _odd(url, "sample", stored, "text or null")


def _check_counts(url: str, stored: object) -> None:
    good = isinstance(stored, dict) and all(type(count) is int and count > 0 for count in stored.values())
    if not (good and stored):
        raise _odd(url, CLASS_COUNTS, stored, "how many records each class has, whole numbers above 0")


def _odd(url: str, name: str, stored: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"{url} cannot be continued: its manifest has a created_by.config.{name} that cannot be read",
        got=repr(stored)[:500],
        allowed=allowed,
        next_step="Make a separate dataset without --append-to.",
    )


def other_parent(url: str, what: str, theirs: object, ours: object) -> ConfigError:
    """The error for a parent in which `what` is another one than in this job."""
    return ConfigError(
        f"{url} cannot be continued: its {what} is another one",
        got=_setting(what, ours),
        allowed=_setting(what, theirs),
        next_step=f"{_way(what, theirs)}, or make a separate dataset without --append-to.",
    )


def _setting(what: str, value: object) -> str:
    """A setting as a flag of the command line, if one flag decides it."""
    flag = _FLAGS.get(what)
    if flag is None:
        return str(value)[:500]
    return f"no {flag}" if value is None else f"{flag} {value}"[:500]


def _way(what: str, theirs: object) -> str:
    flag = _FLAGS.get(what)
    return f"Give the same {what}" if flag is None else f"{'Leave out' if theirs is None else 'Give the same'} {flag}"


def _samples(theirs: str | None, ours: str | None) -> tuple[str | None, str | None]:
    """Both texts; ours twice if theirs means the same shares."""
    if theirs is None or ours is None:
        return theirs, ours
    one, two = Sampling.parse(theirs), Sampling.parse(ours)
    same = (one.column, dict(one.shares)) == (two.column, dict(two.shares))
    return (ours, ours) if same else (theirs, ours)


def _form(*, baked: bool) -> str:
    return "inputs of a model (--bake)" if baked else "the features themselves, without --bake"


def _split_of(stored: object) -> SplitSpec | None:
    try:
        return SplitSpec.parse(str(stored))
    except ConfigError:  # of a dataset that ETL has not made
        return None
