"""A split's shards opened: each by the reader of its format, after a look whether it is the one that was published."""

from __future__ import annotations

from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import index_path
from lockstep.storage.dataset.manifest import DatasetManifest, read_checked
from lockstep.storage.dataset.manifest_shards import ShardInfo
from lockstep.storage.errors import CorruptionError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.urls import join
from training.reading.gzip_shard import GzipShard
from training.reading.parquet_shard import ParquetShard
from training.reading.tfrecord_shard import BlockStarts, TFRecordShard

KEPT_INDEX_BYTES = 32 << 20  # 20 bytes a record: of 1.6 million records no index is read twice

Shard = TFRecordShard | GzipShard | ParquetShard


class ShardOpener:
    """Opens shards for one reader: those of TFRecord share `starts`, and keep KEPT_INDEX_BYTES of indexes in all."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._index_bytes = 0
        self.starts = BlockStarts()

    def open(self, fs: FileSystem, dataset_url: str, manifest: DatasetManifest, split: str, number: int) -> Shard:
        """A shard of a split. Raises CorruptionError for one that is missing or has another length, and for a footer
        or an index that is not what the manifest says.
        """
        info = manifest.splits[split]
        shard, block_records = info.shards[number], info.block_records
        url = join(dataset_url, shard.path)
        _check_length(fs, url, shard)
        if manifest.format == "parquet":
            return ParquetShard(fs, url, shard, block_records, self._schema)
        if manifest.compression is not None:
            return GzipShard(fs, url, shard, block_records, self._schema)
        path = index_path(split, number)
        index = read_checked(fs, dataset_url, path, manifest.files[path])
        self._index_bytes += len(index)
        keep_index = self._index_bytes <= KEPT_INDEX_BYTES
        own = (fs, url, shard, block_records, self._schema, join(dataset_url, path), index)
        return TFRecordShard(*own, starts=self.starts, keep_index=keep_index)


def _check_length(fs: FileSystem, url: str, info: ShardInfo) -> None:
    try:
        size = fs.stat(url).size_bytes
    except NotFoundError:
        raise CorruptionError("a shard is missing", file=url, got="nothing", allowed=f"{info.bytes} bytes") from None
    if size != info.bytes:
        raise CorruptionError(
            "a shard has another length than its manifest says",
            file=url,
            offset=min(size, info.bytes),
            got=f"{size} bytes",
            allowed=f"{info.bytes} bytes",
        )
