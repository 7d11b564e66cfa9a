"""Counts the records of a run's splits that meet its --where, block by block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.documents import unseal_as
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.parquet_footer import damaged_footer, read_published_footer
from lockstep.storage.fs import filesystem
from lockstep.storage.progress import Progress
from lockstep.storage.urls import join
from lockstep.training.config import TrainConfig
from lockstep.training.plan.datasets import split_of, widest
from lockstep.training.plan.selection import Selection
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
    from lockstep.features.condition import Condition  # its parser is loaded only for those who need it

    fs, path = filesystem(config.run), RunPaths(config.run).selection
    kept: dict[tuple[str, str], tuple[int, ...]] = {}
    with suppress(NotFoundError):
        stored = Selection.from_json(unseal_as("selection", fs.read_bytes(path), path), path)
        kept = dict(stored.kept) if stored.where == where else {}
    held_out = config.validation.validate
    names = [*config.data.split.split(","), *([] if held_out is None else [held_out])]
    urls = datasets or config.data.datasets
    manifests = [load_dataset(url) for url in urls]
    schema = Schema.from_json(manifests[widest(manifests)].schema)
    condition = Condition.parse(where, schema)
    for url, manifest in zip(urls, manifests, strict=True):
        for name in names:
            if name in manifest.splits and (manifest.digest, name) not in kept:
                kept[manifest.digest, name] = _counted(url, manifest, name, condition, schema)
    return Selection(where, kept)


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

    Of Lockstep's own Parquet it reads only the columns of the condition, in row groups whose statistics leave it open;
    of other files, all records. Calls `report` after each shard. Raises as reading the split does.
    """
    info, fs, own = split_of(manifest, split), filesystem(dataset_url), Schema.from_json(manifest.schema)
    schema = schema or own
    opener, lacks = ShardOpener(schema), bool(schema.added_to(own))

    def counted(number: int) -> list[int]:
        shard = info.shards[number]
        url = join(dataset_url, shard.path)
        opened = opener.open(fs, dataset_url, manifest, split, number)
        if manifest.format == "parquet" and manifest.indexed is None and not lacks:
            return list(_kept_of_parquet(fs, url, shard, condition))
        blocks = range(0, shard.records, info.block_records)
        return [
            _kept_in(fs, url, opened, first, min(info.block_records, shard.records - first), condition)
            for first in blocks
        ]

    found: list[int] = []
    with ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="where") as threads:
        for counts in threads.map(counted, range(len(info.shards))):
            found += counts
            report()
    return tuple(found)


def _kept_in(fs: FileSystem, url: str, shard: Shard, first: int, count: int, condition: Condition) -> int:
    start, stop = shard.extent(first, count)
    return len(condition.kept(shard.decode(fs.read_range(url, start, stop - start), start, first, count)))


def _kept_of_parquet(fs: FileSystem, url: str, info: ShardInfo, condition: Condition) -> Iterator[int]:
    """The number of rows of each row group that meet a condition."""
    footer = read_published_footer(fs, url, info)
    with fs.open_read(url) as file:
        source = pa.PythonFile(file, mode="r")
        try:
            metadata = pq.read_metadata(pa.BufferReader(footer))
            open_groups = _left_open(source, condition, metadata.num_row_groups)
            with pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True, pre_buffer=True) as opened:
                for group in range(metadata.num_row_groups):
                    if group not in open_groups:
                        yield 0
                        continue
                    table = opened.read_row_group(group, columns=list(condition.columns), use_threads=False)
                    yield sum(pc.sum(condition.keeps(batch)).as_py() or 0 for batch in table.to_batches())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged_footer(url, str(error).splitlines()[0], "columns that can be read") from error


def _left_open(source: Any, condition: Condition, groups: int) -> frozenset[int]:
    """The row groups of which statistics do not exclude that rows meet the condition."""
    if not condition.statistics_decide:
        return frozenset(range(groups))
    fragment = ds.ParquetFileFormat().make_fragment(source)
    found = fragment.split_by_row_group(condition.expression())
    return frozenset(group.id for one in found for group in one.row_groups)
