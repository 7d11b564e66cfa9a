"""tfx-bsl's decoder, as a process of another environment: benchmarks.tfx_reads starts it.

    PYTHON_WITH_TFX_BSL benchmarks/peers/tfx_reads_peer.py OUT.arrow inferred|declared KINDS SHARD...

KINDS is JSON: the type (INT, FLOAT or BYTES) of each feature, which the decoder is told with `declared`.
"""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import tensorflow as tf
from tensorflow_metadata.proto.v0 import schema_pb2
from tfx_bsl.coders.example_coder import ExamplesToRecordBatchDecoder


def schema_of(kinds: dict[str, str]) -> bytes:
    """The features as a serialised schema of TFMetadata."""
    schema = schema_pb2.Schema()
    for name, kind in kinds.items():
        schema.feature.add(name=name, type=schema_pb2.FeatureType.Value(kind))
    return schema.SerializeToString()


def main() -> None:
    """Decode the records of all shards in batches."""
    out, mode, kinds, *shards = sys.argv[1:]
    told = (schema_of(json.loads(kinds)),) if mode == "declared" else ()
    decoder = ExamplesToRecordBatchDecoder(*told)
    records = list(tf.data.TFRecordDataset(shards).as_numpy_iterator())
    batches = [decoder.DecodeBatch(records[start : start + 100]) for start in range(0, len(records), 100)]
    table = pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches], promote_options="default")
    with pa.OSFile(out, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


if __name__ == "__main__":
    main()
