"""Reads the runs of an epoch plan from a split, and checks all that it reads against the dataset's manifest."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import pyarrow as pa

from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, StorageError, require
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from lockstep.training.config import READ_AHEAD_BYTES, TrainConfig
from lockstep.training.plan.datasets import split_of
from lockstep.training.plan.order import BlockTable, Run
from lockstep.training.reading.background import end_in_thread
from lockstep.training.reading.bad_records import Skipped, StandIns
from lockstep.training.reading.cache import BlockCache, CacheCounts
from lockstep.training.reading.fetch import BlockFetcher, Buffer, FetchCounts
from lockstep.training.reading.files import CachedBytes, CachedShard, ShardFiles
from lockstep.training.reading.shards import Shard, ShardOpener, pass_bytes

log = logging.getLogger(__name__)
_RUNS_AHEAD = 8  # in `sequence`: with blocks of 1 to 4 MiB, twice what four threads read at once


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How a split is read. Raises ConfigError for invalid numbers."""

    read_ahead_bytes: int = READ_AHEAD_BYTES
    """Bytes of shards that are being fetched or wait to be decoded."""
    cache: str | None = None
    """A folder on a disk of this host, shared by all processes that use it; None is no cache."""
    cache_bytes: int = 0
    """The size limit of the folder, for all datasets and processes together."""
    ranks: int = 1
    """How many processes read the split, each its part."""

    def __post_init__(self) -> None:
        require(self.cache != "", "cache", "an empty path", "a folder", "Correct --cache.")
        for name, least in (("read_ahead_bytes", 1), ("cache_bytes", 1 if self.cache else 0), ("ranks", 1)):
            value = getattr(self, name)
            require(value >= least, name, str(value), f"{least} or more", f"Correct --{name.replace('_', '-')}.")

    @classmethod
    def of(cls, config: TrainConfig, ranks: int) -> Self:
        """The options of a run's rank."""
        return cls(
            read_ahead_bytes=config.reading.read_ahead_bytes,
            cache=config.reading.cache,
            cache_bytes=config.reading.cache_bytes,
            ranks=ranks,
        )

    def shared_by(self, readers: int) -> ReadOptions:
        """The options of each of `readers` readers in one process, which share `read_ahead_bytes`."""
        return replace(self, read_ahead_bytes=max(1, self.read_ahead_bytes // readers))

    def open_cache(self) -> BlockCache | None:
        """The cache; None if none is configured, or if its disk is full, which is logged. Raises ConfigError for a
        folder that cannot be used.
        """
        if self.cache is None:
            return None
        try:
            return BlockCache(self.cache, self.cache_bytes)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else None
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                log.warning("no cache in %s: %s; all blocks are read from the dataset", self.cache, reason)
                return None
            raise ConfigError(
                f"{self.cache!r} cannot be used as a cache",
                got=reason or str(error),
                allowed="a folder on a local disk that this user may write, with locks (flock)",
                next_step="Give --cache another folder.",
            ) from error


@dataclass(slots=True, eq=False)
class Block:
    """A decoded block of a format that is read by whole blocks."""

    rows: pa.RecordBatch
    unread: int
    """Rows that no run has read yet."""
    hinted: int = 0
    """Rows that hints have named since the block is kept and no run has read yet: it must be kept for them."""
    prepared: object = None
    """What lockstep.training.batches.decode made of the rows: it reads a block strip by strip, and makes it once."""


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """What a reader has read, and from where."""

    fetched: FetchCounts
    """What was read ahead, and what was not."""
    cached: CacheCounts | None
    """What the node's cache has served; None without a cache."""
    cache_failure: str | None
    """Why the configured cache takes no more blocks, such as a full disk; None while it does."""


class SplitReader:
    """Reads runs of records of one split. `read` is not thread-safe; any thread may call `prefetch`.

    The constructor checks the length of every shard and the digests of TFRecord indexes and Parquet footers, so that a
    truncated or replaced dataset is refused before the first step. Checksums of records and pages are checked while
    reading. Of Parquet shards an Encoder's reader reads the columns that are fed, and `also`; a Schema's reads all.
    `schema` is that of the shards; by default the encoder's.
    Memory: O(blocks) for the block tables, the blocks of `read_in_turn` as decoded Parquet row groups or gzip
    blocks (for TFRecord, the record offsets of twice as many), KEPT_INDEX_BYTES of indexes, and after the first
    `prefetch` the `read_ahead_bytes` that are being fetched or wait for `read`.
    """

    def __init__(
        self,
        dataset_url: str,
        manifest: DatasetManifest,
        split: str,
        encoder: Encoder | Schema,
        *,
        name: str | None = None,
        options: ReadOptions | None = None,
        also: Collection[str] = (),
        schema: Schema | None = None,
    ) -> None:
        self.split = name or split
        """The plan's name of the split, or of all splits after `add`."""
        self.schema = schema or (encoder if isinstance(encoder, Schema) else encoder.schema)
        self._blocks: OrderedDict[tuple[int, int], Block] = OrderedDict()  # least recently used first
        self._shards: list[Shard] = []
        self._kept: tuple[int, ...] = ()  # of each block, where only records that meet a condition are read
        self._stand_ins: StandIns | None = None
        self.stored: list[tuple[FileSystem, str, ShardInfo]] = []
        """The file system, URL and manifest entry of each shard."""
        columns = None if isinstance(encoder, Schema) else {*encoder.columns, *also}
        self._opener = ShardOpener(self.schema, columns)
        self.pass_bytes = 0
        """Bytes that one pass over all records fetches: those of the columns that are read, in blocks that are."""
        self._files = ShardFiles()
        self._options = options or ReadOptions()
        cache = self._options.open_cache()
        self._cached = None if cache is None else CachedBytes(self._files, cache)
        self._fetcher = BlockFetcher(
            self._shards,
            self._files.read if self._cached is None else self._cached.read,
            name_of=self._files.url,
            budget_bytes=self._options.read_ahead_bytes,
            threads=filesystem(dataset_url).calls_at_once,
        )
        weakref.finalize(self, _let_go, self._fetcher, self._files, cache).atexit = False
        self.read_in_turn(2)
        self.add(dataset_url, manifest, split)

    def read_in_turn(self, blocks: int) -> None:
        """Set how many blocks are read in turn (2 by default): so many are kept decoded, and share the read-ahead."""
        self._keep_blocks = blocks
        self._opener.starts.blocks = 2 * blocks + 8
        self._fetcher.share_among(blocks)

    @property
    def counts(self) -> ReadCounts:
        """What was read so far, from where."""
        if self._cached is None:
            # A disk that was full from the start: see `open_cache`.
            failure = None if self._options.cache is None else os.strerror(errno.ENOSPC)
            return ReadCounts(self._fetcher.counts, None, failure)
        cache = self._cached.cache
        return ReadCounts(self._fetcher.counts, replace(cache.counts), cache.failure)

    @property
    def is_local(self) -> bool:
        """Whether all shards are on a local disk."""
        return all(isinstance(fs, LocalFileSystem) for fs, _, _ in self.stored)

    @property
    def record_bytes(self) -> int:
        """The mean size of a record in the shards, at least 1."""
        records = sum(info.records for _, _, info in self.stored)
        return max(1, sum(info.bytes for _, _, info in self.stored) // max(1, records))

    def add(self, dataset_url: str, manifest: DatasetManifest, split: str) -> None:
        """Append the shards of another split; lockstep.training.plan.datasets says which fit together."""
        info = split_of(manifest, split)
        fs = filesystem(dataset_url)
        for opened, shard in zip(self._opener.open_all(fs, dataset_url, manifest, split), info.shards, strict=True):
            url = join(dataset_url, shard.path)
            self._files.add(fs, url, shard.bytes, opened.stretches)
            self.pass_bytes += pass_bytes(opened)
            self.stored.append((fs, url, shard))
            self._shards.append(opened)
            if self._cached is not None:
                self._cached.add(CachedShard(manifest.digest, shard.path, opened.edges, opened.stretches))
                self._cached.epoch_bytes += pass_bytes(opened) // self._options.ranks
        if info.kept is not None:
            self._kept += info.kept
        records = tuple(shard.records for _, _, shard in self.stored)
        self.table = BlockTable(records, info.block_records, None if info.where is None else self._kept)

    def prefetch(self, runs: Iterable[Run]) -> None:
        """Announce runs that will be read soon, in this order, after those of earlier calls. Their bytes are fetched in
        the background, within the budget. Returns at once; announce each run once. `read` of a run raises what its
        fetch raised.
        """
        for run in runs:
            block = self._blocks.get((run.shard, run.first_record // self.table.block_records))
            if block is None:
                self._fetcher.hint(run.shard, run.first_record, run.count)
            else:
                block.hinted += run.count

    def forget_hints(self) -> None:
        """Drop the runs that `prefetch` announced and fetched, since reading continues elsewhere. Calling this is
        optional: unused bytes also make room for those that a `read` waits for.
        """
        self._fetcher.forget()
        for block in self._blocks.values():
            block.hinted = 0

    def close(self) -> None:
        """End all background reads, and close the files; a later read opens them again."""
        self._fetcher.close()
        self._files.close()
        if self._cached is not None:
            self._cached.cache.close()

    def sequence(self, runs: Iterable[Run]) -> Iterator[pa.RecordBatch]:
        """Call `read` for one run after another, while the next ones are fetched."""
        waiting: deque[Run] = deque()
        for run in runs:
            self.prefetch([run])
            waiting.append(run)
            if len(waiting) > _RUNS_AHEAD:
                yield self.read(waiting.popleft())
        while waiting:
            yield self.read(waiting.popleft())

    def read(self, run: Run) -> pa.RecordBatch:
        """The records of a run (within one block) as columns of the dataset's schema, those that are read.

        Raises CorruptionError naming file, record and offset; see `skip_bad_records`.
        """
        if not self._shards[run.shard].by_block:
            return self._decoded(run)
        skip = run.first_record % self.table.block_records
        return self.kept_block(run).rows.slice(skip, run.count)

    def kept_block(self, run: Run) -> Block:
        """The block that holds a run: the kept one, else read now.

        A block is kept until runs have read all its rows, among the most recent of `read_in_turn`. Strips, windows and
        lanes cut blocks into parts; this is the only cache of decoded blocks, so that each is fetched and decoded once.
        """
        key = run.shard, run.first_record // self.table.block_records
        block = self._blocks.pop(key, None)
        if block is None:
            rows = self._decoded(run)
            block = Block(rows, len(rows))
        block.unread, block.hinted = block.unread - run.count, max(0, block.hinted - run.count)
        if block.unread > 0 or block.hinted:
            self._blocks[key] = block
        while len(self._blocks) > self._keep_blocks:
            self._blocks.popitem(last=False)
        return block

    def raw(self, run: Run) -> Buffer | None:
        """The framed records of a run as stored in the shard; None in a format that is read by whole blocks.

        They are not checked yet: if they do not decode, `read` reads them again and raises the error.
        """
        if self._shards[run.shard].by_block:
            return None
        with self._named(run):
            return self._fetcher.take(run.shard, run.first_record, run.count)[0]

    def _decoded(self, run: Run) -> pa.RecordBatch:
        """The records of a run or, in a format that is read by whole blocks, of its block, with stand-ins for bad ones
        if these are skipped.
        """
        with self._named(run):
            try:
                return self._checked(run)
            except DataError as error:
                if self._stand_ins is None:
                    raise
                return self._stand_ins.rows(run, error)

    def _checked(self, run: Run) -> pa.RecordBatch:
        """Read and decode a run of good records. Bytes that do not match their checksums are read once more, with a
        newly opened file and not from the cache: a bit may have flipped in transfer, or in one replica.
        """
        shard = self._shards[run.shard]
        try:
            data, start = self._fetcher.take(run.shard, run.first_record, run.count)
            return shard.decode(data, start, run.first_record, run.count)
        except CorruptionError as error:
            start, stop = shard.extent(run.first_record, run.count)
            if self._cached is not None:
                self._cached.drop(run.shard, start, stop)
            data = self._files.read(run.shard, start, stop, fresh=True)
            batch = shard.decode(data, start, run.first_record, run.count)
            log.warning("%s (%s): the second read has the right bytes", error.what, error.got)
            return batch

    @property
    def skipped(self) -> Mapping[int, str]:
        """The error's words for each record that was skipped, by the sample id that stands for its own."""
        return {} if self._stand_ins is None else self._stand_ins.skipped.words

    def skip_bad_records(self, skipped: Skipped) -> None:
        """Read another record from now on in place of one that cannot be decoded, with a sample id of its own, which is
        added to `skipped`.

        In TFRecord the index, whose digest is checked, says where the next record begins, whatever the record's length
        says. In other formats all records of the block are bad. The other record is the first good one of the block,
        else of the next block that has one (`blocks_near`); if there is none, the error is raised as before.
        """
        self._stand_ins = StandIns(
            self._shards, self._files, self.stored, self.schema, self.table.block_records, skipped
        )

    @contextmanager
    def _named(self, run: Run) -> Iterator[None]:
        """Add file, records and block to a StorageError."""
        try:
            yield
        except StorageError as error:
            block = run.first_record // self.table.block_records
            raise type(error)(
                f"records {run.first_record} to {run.first_record + run.count} (block {block}) of"
                f" {self._files.url(run.shard)} cannot be read: {error.what}",
                got=error.got,
                allowed=error.allowed,
                next_step=error.next_step,
            ) from error


def _let_go(fetcher: BlockFetcher, files: ShardFiles, cache: BlockCache | None) -> None:
    """End the threads and close the files of a reader that was not closed."""

    def end() -> None:
        fetcher.stop()
        files.close()
        if cache is not None:
            cache.close()

    end_in_thread(end)
