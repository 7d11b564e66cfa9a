"""Small valid datasets for the training tests, written straight through storage and features: no Spark, no ETL.

write_table(root):  float features `a` (1.5 * b + noise), `b`, a yes-or-no label `label` that `a` + `b` decides
write_images(root): `image` (8, 8, 1) uint8 and `label` int64 in 0..3, the brightest quadrant of the image
write_files(root):  `image` (4, 4, 3) as PNG files, some of them bad, and `label` int64 in 0..1
write_clicks(root): int64 `page` in 0..9, float `a`, a rare yes-or-no label `click` that both decide, float `weight`

Rows depend on the seed alone, not on format or sharding; row i of the dataset has sample id sample_id([str(i)], 0).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from lockstep.features.encode.encoder import Encoder
from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Fitted
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import DatasetPaths, fitted_path, index_path, shard_path
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import Counts, FileInfo, ShardInfo, SplitInfo
from lockstep.storage.documents import canonical_bytes, sha256_hex
from lockstep.storage.fs import filesystem
from tests.builders.records import RecordWriter, crc32c_hex, encode_batch
from tests.storage.make_dataset import footer_of

TABLE_SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="a", dtype="float32"),
        Field(name="b", dtype="float32"),
        Field(name="label", dtype="bool", kind="label"),
    )
)
IMAGE_SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="image", dtype="uint8", shape=(8, 8, 1)),
        Field(name="label", dtype="int64", kind="label", num_classes=4),
    )
)
FILE_SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="image", dtype="bytes", encoding={"kind": "image", "height": 4, "width": 4, "channels": 3}),
        Field(name="label", dtype="int64", kind="label", num_classes=2),
    )
)
CLICK_SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="page", dtype="int64"),
        Field(name="a", dtype="float32"),
        Field(name="click", dtype="bool", kind="label"),
        Field(name="weight", dtype="float32", kind="weight"),
    )
)


def write_table(
    root: object,
    *,
    records: Mapping[str, int] | None = None,
    fmt: str = "tfrecord",
    shards: int = 2,
    block_records: int = 8,
    seed: int = 0,
    nan_rows: Sequence[int] = (),
) -> DatasetManifest:
    """Write the table dataset at `root` (a path or URL), by default 100 train and 30 test records.

    In `nan_rows`, `a` is no number.
    """
    records = records or {"train": 100, "test": 30}
    rng = np.random.default_rng(seed)
    total = sum(records.values())
    b = rng.standard_normal(total).astype(np.float32)
    a = (1.5 * b + rng.standard_normal(total)).astype(np.float32)
    labels = a + b > 0
    a[list(nan_rows)] = np.nan
    columns = [_ids(total), pa.array(a), pa.array(b), pa.array(labels)]
    rows = pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA.arrow_schema())
    return write_rows(str(root), TABLE_SCHEMA, rows, records, fmt, shards, block_records, seed)


def write_images(
    root: object,
    *,
    records: Mapping[str, int] | None = None,
    fmt: str = "parquet",
    shards: int = 2,
    block_records: int = 8,
    seed: int = 0,
    class_names: Sequence[str] = (),
) -> DatasetManifest:
    """Write the image dataset at `root` (a path or URL), by default 100 train and 30 test records."""
    config = {"class_names": list(class_names) or None}
    records = records or {"train": 100, "test": 30}
    rng = np.random.default_rng(seed)
    total = sum(records.values())
    labels = rng.integers(0, 4, total)
    images = rng.integers(0, 128, (total, 8, 8, 1), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[label // 2 * 4 : label // 2 * 4 + 4, label % 2 * 4 : label % 2 * 4 + 4] += 100
    pixels = pa.array([image.tobytes() for image in images], type=pa.binary())
    columns = [_ids(total), pixels, pa.array(labels, type=pa.int64())]
    rows = pa.RecordBatch.from_arrays(columns, schema=IMAGE_SCHEMA.arrow_schema())
    return write_rows(str(root), IMAGE_SCHEMA, rows, records, fmt, shards, block_records, seed, config=config)


def write_files(
    root: object,
    bad: Mapping[int, bytes],
    *,
    records: Mapping[str, int] | None = None,
    without: Sequence[int] = (),
) -> DatasetManifest:
    """Write small PNG files and their classes, by default 50 train records, but for those of the numbers `without`.

    Their numbers are their sample ids; the files in `bad` are replaced.
    """
    records, files = records or {"train": 50}, []
    numbers = [number for number in range(sum(records.values()) + len(without)) if number not in without]
    for number in numbers:
        out = io.BytesIO()
        Image.new("RGB", (4, 4), (number + 1, 0, 0)).save(out, "PNG")
        files.append(bad.get(number, out.getvalue()))
    columns = [pa.array(numbers), pa.array(files), pa.array([number % 2 for number in numbers])]
    rows = pa.RecordBatch.from_arrays(columns, schema=FILE_SCHEMA.arrow_schema())
    return write_rows(str(root), FILE_SCHEMA, rows, records, "tfrecord", 2, 8, 0)


def write_clicks(
    root: object, *, records: Mapping[str, int], log_odds: float = -6.0, block_records: int = 64, seed: int = 0
) -> DatasetManifest:
    """Write clicks with the log-odds `log_odds` + a / 2 + page / 4; weights of 0 to 5 do not depend on them."""
    rng = np.random.default_rng(seed)
    total = sum(records.values())
    page = rng.integers(0, 10, total)
    a = rng.standard_normal(total).astype(np.float32)
    clicks = rng.random(total) < 1 / (1 + np.exp(-(log_odds + 0.5 * a + 0.25 * page)))
    weight = rng.choice(np.array([0.0, 0.3, 1.0, 5.0], np.float32), total)
    columns = [_ids(total), pa.array(page), pa.array(a), pa.array(clicks), pa.array(weight)]
    rows = pa.RecordBatch.from_arrays(columns, schema=CLICK_SCHEMA.arrow_schema())
    return write_rows(str(root), CLICK_SCHEMA, rows, records, "tfrecord", 2, block_records, seed)


def encoder_of(manifest: DatasetManifest) -> Encoder:
    """The encoder of a tiny dataset, which has no fitted files."""
    return Encoder(Schema.from_json(manifest.schema), {})


def _ids(total: int) -> pa.Array:
    return pa.array([sample_id([str(row).encode()], 0) for row in range(total)], type=pa.int64())


def write_rows(
    root: str,
    schema: Schema,
    rows: pa.RecordBatch,
    records: Mapping[str, int],
    fmt: str,
    shards: int,
    block_records: int,
    seed: int,
    fitted: tuple[Fitted, ...] = (),
    *,
    config: Mapping[str, object] | None = None,
    parent: tuple[object, DatasetManifest] | None = None,
) -> DatasetManifest:
    """Write any rows as a dataset, cut into splits of `records` rows each, in order; `fitted` under their names. It
    continues `parent`, a place and its manifest.
    """
    splits: dict[str, SplitInfo] = {}
    files: dict[str, FileInfo] = {}
    for each in fitted:
        document = canonical_bytes(each.to_json())
        files[fitted_path(f"{each.name}.json")] = FileInfo(len(document), sha256_hex(document))
        _put(DatasetPaths(root).fitted(f"{each.name}.json"), document)
    row = 0
    for split, count in records.items():
        # Uneven shards on purpose: shard i gets the rows from count * i / shards on, so most end in a short block.
        cuts = [row + count * number // shards for number in range(shards + 1)]
        parts = [rows.slice(start, stop - start) for start, stop in pairwise(cuts)]
        infos = [_shard(root, schema, part, split, i, fmt, block_records, files) for i, part in enumerate(parts)]
        splits[split] = SplitInfo(block_records, tuple(infos))
        row += count
    manifest = DatasetManifest.build(
        format=fmt,
        created_by={"version": "tiny", "config": dict(config or {}), "seed": seed},
        schema=schema.to_json(),
        splits=splits,
        files=files,
        counts=Counts(read=row, written=row, quarantined=0, dropped={}),
        source=(),
        parent=None if parent is None else {"url": str(parent[0]), "digest": parent[1].digest},
    )
    _put(DatasetPaths(root).manifest, manifest.to_bytes())
    return manifest


def _shard(
    root: str,
    schema: Schema,
    rows: pa.RecordBatch,
    split: str,
    number: int,
    fmt: str,
    block_records: int,
    files: dict[str, FileInfo],
) -> ShardInfo:
    sink = pa.BufferOutputStream()
    if fmt == "tfrecord":
        writer = RecordWriter(sink)
        writer.write_many(encode_batch(schema, rows))
        offsets = tuple(writer.block_offsets(block_records))
        index = writer.index_bytes()
        files[index_path(split, number)] = FileInfo(len(index), sha256_hex(index))
        _put(DatasetPaths(root).index(split, number), index)
    else:
        with pq.ParquetWriter(sink, schema.arrow_schema(), compression="zstd", write_page_checksum=True) as parquet:
            for start in range(0, len(rows), block_records):
                parquet.write_batch(rows.slice(start, block_records), row_group_size=block_records)
        offsets = tuple(range(0, len(rows), block_records))
    data = sink.getvalue().to_pybytes()
    _put(DatasetPaths(root).shard(split, number, fmt), data)
    return ShardInfo(
        path=shard_path(split, number, fmt),
        records=len(rows),
        bytes=len(data),
        sha256=sha256_hex(data),
        crc32c=crc32c_hex(data),
        footer_sha256=sha256_hex(footer_of(data)) if fmt == "parquet" else None,
        block_offsets=offsets,
    )


def _put(url: str, data: bytes) -> None:
    with filesystem(url).create(url) as writer:
        writer.write(data)
