"""Counts the records of a run's splits that meet its --where, block by block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.documents import unseal_as
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.progress import Progress
from lockstep.storage.urls import join
from lockstep.training.config import TrainConfig
from lockstep.training.plan.datasets import split_of, widest
from lockstep.training.plan.selection import Selection
from lockstep.training.reading.files import ShardFiles
from lockstep.training.reading.parquet_shard import ParquetShard
from lockstep.training.reading.shards import Shard, ShardOpener
from lockstep.training.run.paths import RunPaths

if TYPE_CHECKING:
    from lockstep.features.condition import Condition

SHARDS_AT_ONCE = 4


def selection_of(config: TrainConfig, datasets: Sequence[str] | None = None) -> Selection | None:
    """The records that a run trains and validates on: as its run directory has them, else counted now, with progress;
    None without --where. `datasets` are where the run's datasets are now, if not where they were.

    Raises ConfigError for a condition that does not fit the datasets' columns, and as reading the splits does.
    """
    where = config.data.where
    if where is None:
        return None
    fs, path = filesystem(config.run), RunPaths(config.run).selection
    known = Selection(where, {})
    with suppress(NotFoundError):
        stored = Selection.from_json(unseal_as("selection", fs.read_bytes(path), path), path)
        known = stored if stored.where == where else known
    held_out = config.validation.validate
    names = [*config.data.split.split(","), *([] if held_out is None else [held_out])]
    return select(known, datasets or config.data.datasets, names)


def select(known: Selection, datasets: Sequence[str], splits: Sequence[str]) -> Selection:
    """The records of splits of datasets that meet the condition of `known`, which has the counts of some; raises as
    `selection_of` does.
    """
    from lockstep.features.condition import Condition  # its parser is loaded only for those who need it

    kept = dict(known.kept)
    manifests = [load_dataset(url) for url in datasets]
    schema = Schema.from_json(manifests[widest(manifests)].schema)
    condition = Condition.parse(known.where, schema)
    for url, manifest in zip(datasets, manifests, strict=True):
        for name in splits:
            if name in manifest.splits and (manifest.digest, name) not in kept:
                kept[manifest.digest, name] = _counted(url, manifest, name, condition, schema)
    return Selection(known.where, kept)


def _counted(url: str, manifest: DatasetManifest, split: str, condition: Condition, schema: Schema) -> tuple[int, ...]:
    shards, whole = len(manifest.splits[split].shards), manifest.splits[split].records
    with Progress("where", shards, "shards") as progress:
        kept = count_kept(url, manifest, split, condition, progress.update, schema)
    if not sum(kept):
        raise ConfigError(
            f"no sample of split `{split}` of {url} meets --where",
            got=f"{condition.text}: 0 of {whole:,} samples",
            allowed="a condition that one sample or more meets",
            next_step="Correct --where; lockstep describe shows the values of each column.",
        )
    print(f"where: {sum(kept):,} of {whole:,} samples of {split} meet {condition.text}", file=sys.stderr, flush=True)
    return kept


def count_kept(
    dataset_url: str,
    manifest: DatasetManifest,
    split: str,
    condition: Condition,
    report: Callable[[], None],
    schema: Schema | None = None,
) -> tuple[int, ...]:
    """Count the records of each block of a split that meet a condition, in the order of the shards. `schema` has fields
    with a default that the dataset may lack (None: the dataset's own).

    Of Parquet files it reads only the columns of the condition, in blocks that the statistics of their row groups leave
    open; of other files, all records. Calls `report` after each shard. Raises as reading the split does.
    """
    info, fs, own = split_of(manifest, split), filesystem(dataset_url), Schema.from_json(manifest.schema)
    opener = ShardOpener(schema or own, condition.columns)

    def counted(number: int) -> list[int]:
        shard, files = info.shards[number], ShardFiles()
        url = join(dataset_url, shard.path)
        opened = opener.open(fs, dataset_url, manifest, split, number)
        files.add(fs, url, shard.bytes, opened.stretches)
        with closing(files):
            return [
                _kept_in(files, opened, first, min(info.block_records, shard.records - first), condition)
                for first in range(0, shard.records, info.block_records)
            ]

    found: list[int] = []
    with ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="where") as threads:
        for counts in threads.map(counted, range(len(info.shards))):
            found += counts
            report()
    return tuple(found)


def _kept_in(files: ShardFiles, shard: Shard, first: int, count: int, condition: Condition) -> int:
    """The number of records of a block of the only shard of `files` that meet a condition."""
    if isinstance(shard, ParquetShard) and not shard.left_open(first, count, condition):
        return 0
    start, stop = shard.extent(first, count)
    return len(condition.kept(shard.decode(files.read(0, start, stop), start, first, count)))
