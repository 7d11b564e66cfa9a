"""Reads and writes tf.Example and tf.SequenceExample, in plain Python and compiled."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from lockstep.features.examples.example import BytesLike, decode_examples
from lockstep.features.examples.sequence_example import decode_sequence_batch
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Columns


def decode_batch(schema: Columns, records: Sequence[BytesLike]) -> pa.RecordBatch:
    """Rows from records in the form that Lockstep writes, as columns of schema.arrow_schema().

    Raises DataError naming the record for all other bytes.
    """
    decode = decode_sequence_batch if schema.record == SEQUENCE_EXAMPLE else decode_examples
    return decode(schema, records)
