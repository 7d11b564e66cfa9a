"""A peer of benchmarks.object_reading, in an environment with torch, tensorflow and the peers.

PYTHON object_peer.py write PARQUET FOLDER ROWS_A_SHARD     writes FOLDER/streaming and FOLDER/litdata
PYTHON object_peer.py NAME s3://BUCKET/PATH                 reads one shuffled epoch; prints seconds and rows as JSON

The store is the one of AWS_ENDPOINT_URL_S3.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BATCH, WORKERS, IMAGE_BYTES = 512, 2, 3072
SHUFFLE_RECORDS = 8192


def rows_of(parquet: str) -> Iterator[dict[str, object]]:
    """Each image, (32, 32, 3) uint8, and its label."""
    import pyarrow.parquet as pq

    for file in sorted(Path(parquet).glob("*.parquet")):
        for row in pq.read_table(file, columns=["image", "label"]).to_pylist():
            yield {"image": np.frombuffer(row["image"], np.uint8).reshape(32, 32, 3), "label": int(row["label"])}


def write(parquet: str, folder: str, rows_a_shard: int) -> None:
    """Write the same rows in the formats of both streaming libraries."""
    from litdata.streaming.writer import BinaryWriter
    from streaming import MDSWriter

    shard_bytes = rows_a_shard * IMAGE_BYTES
    columns = {"image": "ndarray:uint8:32,32,3", "label": "int"}
    with MDSWriter(out=f"{folder}/streaming", columns=columns, size_limit=shard_bytes) as writer:
        for row in rows_of(parquet):
            writer.write(row)
    os.makedirs(f"{folder}/litdata")
    chunks = BinaryWriter(f"{folder}/litdata", chunk_size=rows_a_shard)
    for number, row in enumerate(rows_of(parquet)):
        chunks.add_item(number, row)
    chunks.done()
    chunks.merge()


def streaming_batches(url: str) -> Iterator[int]:
    """MosaicML Streaming: its dataset, shuffled, in a DataLoader, whose process reads itself: with two workers it ended
    with `IndexError: Relative sample index 2269 is not present` each time.
    """
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL_S3"]
    local = tempfile.mkdtemp()
    dataset = StreamingDataset(remote=url, local=local, shuffle=True, batch_size=BATCH)
    for batch in DataLoader(dataset, batch_size=BATCH):
        yield len(batch["label"])


def litdata_batches(url: str) -> Iterator[int]:
    """litdata: its dataset, shuffled, in its own DataLoader with workers."""
    from litdata import StreamingDataLoader, StreamingDataset

    os.environ["AWS_ALLOW_HTTP"] = "true"
    options = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL_S3"],
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    dataset = StreamingDataset(url, shuffle=True, storage_options=options)
    for batch in StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS):
        yield len(batch["label"])


def s3fs_batches(url: str) -> Iterator[int]:
    """tf.data over TFRecord files that s3fs reads: eight at once, a shuffle buffer, tf.io.parse_example."""
    import s3fs
    import tensorflow as tf

    store = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])
    files = [name for name in store.ls(url.removeprefix("s3://")) if name.endswith(".tfrecord")]
    spec = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def records(name: bytes) -> Iterator[bytes]:
        with store.open(name.decode(), "rb", block_size=4 << 20) as file:
            while head := file.read(12):
                size = int.from_bytes(head[:8], "little")
                yield file.read(size + 4)[:size]

    def of(name: object) -> object:
        return tf.data.Dataset.from_generator(records, args=(name,), output_signature=tf.TensorSpec((), tf.string))

    shuffled = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files))
    read = shuffled.interleave(of, cycle_length=len(files), num_parallel_calls=tf.data.AUTOTUNE)
    batches = read.shuffle(SHUFFLE_RECORDS).batch(BATCH).map(lambda each: tf.io.parse_example(each, spec))
    for batch in batches.prefetch(tf.data.AUTOTUNE):
        yield int(batch["label"].shape[0])


READERS = {"streaming": streaming_batches, "litdata": litdata_batches, "s3fs + tf.data": s3fs_batches}


def load(name: str) -> None:
    """Import what a reader needs, which is not timed."""
    if name == "s3fs + tf.data":
        import s3fs
        import tensorflow as tf

        tf.zeros(1)
        del s3fs
    else:
        import importlib

        importlib.import_module(name)
        importlib.import_module("torch.utils.data")


def main() -> None:
    """Write, or read once."""
    name, *rest = sys.argv[1:]
    if name == "write":
        write(rest[0], rest[1], int(rest[2]))
        return
    load(name)
    began, rows, first = time.perf_counter(), 0, 0.0
    for count in READERS[name](rest[0]):
        first = first or time.perf_counter() - began
        rows += count
    print(json.dumps({"first_s": first, "all_s": time.perf_counter() - began, "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
