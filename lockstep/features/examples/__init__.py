"""Reads and writes tf.Example and tf.SequenceExample, in plain Python and compiled."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from lockstep.features.examples.example import BytesLike, decode_examples, encode_examples
from lockstep.features.examples.sequence_example import decode_sequence_batch, encode_sequence_batch
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Columns


def encode_batch(schema: Columns, batch: pa.RecordBatch) -> list[bytes]:
    """Each row of the batch as an Example, or as a SequenceExample where the schema says so; columns are found by name.

    Raises DataError for a null that the schema does not allow, for a tensor of the wrong length and for a column that
    lockstep.features.examples.column_checks.as_recorded refuses.
    """
    encode = encode_sequence_batch if schema.record == SEQUENCE_EXAMPLE else encode_examples
    return encode(schema, batch)


def decode_batch(schema: Columns, records: Sequence[BytesLike]) -> pa.RecordBatch:
    """Rows from records that encode_batch wrote, as columns of schema.arrow_schema().

    Raises DataError naming the record for all other bytes.
    """
    decode = decode_sequence_batch if schema.record == SEQUENCE_EXAMPLE else decode_examples
    return decode(schema, records)
