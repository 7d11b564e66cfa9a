"""Records of others by the compiled reader, which takes them framed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from lockstep.features.examples.foreign import decode_foreign_frames
from lockstep.features.schema.fields import Field
from lockstep.storage.formats.tfrecord import frame, record_offsets


def decode_foreign(fields: Iterable[Field], records: Sequence[bytes]) -> pa.RecordBatch:
    """What decode_foreign_frames says of some records, SequenceExamples among them."""
    data = np.frombuffer(b"".join(map(frame, records)), dtype=np.uint8)
    return decode_foreign_frames(fields, data, record_offsets(data, file="f"), context_only=True)
