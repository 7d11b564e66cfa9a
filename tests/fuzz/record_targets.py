"""Fuzz targets: TFRecord files and the tf.Examples in them, ours and those of others, by all readers that we have."""

from __future__ import annotations

import io
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from lockstep.features.examples import decode_batch, foreign
from lockstep.features.examples.codec import RecordDecoder
from lockstep.features.examples.foreign import infer_schema, refuse_sequences
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Schema, foreign_field
from lockstep.features.shards.foreign_files import is_gzip, pieces
from lockstep.features.shards.read import Lenient
from lockstep.storage.errors import LockstepError
from lockstep.storage.formats.gzip_blocks import pack, unpack
from lockstep.storage.formats.tfrecord import frame, parse_records, read_records, record_offsets
from lockstep.storage.fs import filesystem
from tests.builders.records import encode_batch
from tests.features.examples.framed import decode_foreign
from tests.fuzz.target import Take, Target, refused, scratch, verdict

_FIELDS = (
    sample_id_field(),
    Field(name="b", dtype="bool", nullable=True),
    Field(name="d", dtype="float64", nullable=True),
    Field(name="f", dtype="float32"),
    Field(name="fs", dtype="float32", shape=(None,)),
    Field(name="i", dtype="int64", nullable=True),
    Field(name="is", dtype="int64", shape=(None,)),
    Field(name="p", dtype="uint8", shape=(2, 2)),
    Field(name="s", dtype="string"),
    Field(name="ss", dtype="string", shape=(None,)),
    Field(name="u", dtype="uint64", nullable=True),
    Field(name="us", dtype="uint64", shape=(None,)),
    Field(name="x", dtype="bytes", nullable=True),
)
EXAMPLES, SEQUENCES = Schema(_FIELDS), Schema(_FIELDS, SEQUENCE_EXAMPLE)
FOREIGN = [
    foreign_field("b", "bytes", False),
    foreign_field("f", "float32", False),
    foreign_field("fs", "float32", True),
    foreign_field("i", "int64", False),
    foreign_field("is", "int64", True),
    foreign_field("s", "string", False),
    foreign_field("ss", "string", True),
]
_ROWS: list[dict[str, Any]] = [
    {"sample_id": -1, "b": True, "d": -0.5, "f": 1.5, "fs": [1.0, 2.0], "i": 300, "is": [1, -1, 1 << 62], "p": b"abcd",
     "s": "é", "ss": ["a", ""], "u": Decimal((1 << 64) - 1), "us": [Decimal(1)], "x": b"\0"},
    {"sample_id": 7, "b": None, "d": None, "f": 0.0, "fs": [], "i": None, "is": [], "p": b"wxyz", "s": "", "ss": [],
     "u": None, "us": [], "x": None},
]  # fmt: skip


def split(data: bytes) -> list[bytes]:
    """Records out of an input: each behind two bytes of its length."""
    take, found = Take(data), []
    while take:
        found.append(take.part(take.number(65536)))
    return found


def joined(records: list[bytes]) -> bytes:
    """The input that `split` takes apart."""
    return b"".join(len(record).to_bytes(2, "little") + record for record in records)


def tfrecord_files(data: bytes) -> None:
    """Four readers agree on a file: one by one, all at once, the kernel, and piece by piece as files of others are.

    With a first byte below 128 the input is what the records hold, and their checksums are right.
    """
    body = data[1:]
    if data[:1] < b"\x80":
        body = b"".join(map(frame, split(body)))
        body = body[: len(body) - data[0] % 3] if data else body
    url = scratch(body)

    def by_pieces() -> list[bytes]:
        found: list[bytes] = []
        with open(url, "rb") as file:
            for piece in pieces(file, url):
                views = parse_records(piece.data.data, file=url, first_record=piece.first_record)
                assert len(views) == piece.records
                found += map(bytes, views)
        return found

    def by_kernel() -> list[bytes]:
        offsets = record_offsets(body, file=url).tolist()
        return [body[a + 12 : b - 4] for a, b in itertools.pairwise(offsets)]

    readers: list[Callable[[], list[bytes]]] = [
        lambda: list(read_records(io.BytesIO(body), file=url)),
        lambda: list(map(bytes, parse_records(body, file=url))),
        by_kernel,
        by_pieces,
    ]
    found = [verdict(read) for read in readers]
    assert all(one == found[0] for one in found), found
    with refused():
        is_gzip(filesystem(url), url)


def gzip_blocks(data: bytes) -> None:
    """A block of a gzip shard gives as many bytes as its manifest says, and those that inflate gives, or is refused."""
    take = Take(data)
    size, block = take.number(65536), take.rest()
    found = verdict(lambda: unpack(block, size, file="f", record=0, offset=0))
    if isinstance(found, bytes):
        assert len(found) == size and zlib.decompressobj(-15).decompress(block) == found


def own_records(data: bytes) -> None:
    """The compiled decoder and the plain one agree on records of a dataset, and what they take is encoded so again."""
    records = split(data)
    framed = b"".join(map(frame, records))
    for schema in (EXAMPLES, SEQUENCES):
        plain = verdict(partial(decode_batch, schema, records))
        if isinstance(plain, pa.RecordBatch):
            assert encode_batch(schema, plain) == records
        for columns in (None, ["is", "s"]) if schema is EXAMPLES else ():
            fast = verdict(partial(RecordDecoder(schema, columns).decode, framed, file="f"))
            _agree(fast, plain.select(columns) if columns and isinstance(plain, pa.RecordBatch) else plain)


def foreign_records(data: bytes) -> None:
    """Three readers agree on Examples of others; what a sample shows can be read as what it shows."""
    records = split(data)
    framed = b"".join(map(frame, records))
    plain = verdict(lambda: foreign.decode_foreign(FOREIGN, records))
    _agree(verdict(lambda: decode_foreign(FOREIGN, records)), plain)
    lenient = verdict(lambda: Lenient(FOREIGN)(framed, "f", 0, 0))
    if isinstance(lenient, type) and isinstance(plain, pa.RecordBatch):  # it refuses SequenceExamples besides
        assert isinstance(verdict(lambda: refuse_sequences(records)), type), "refused by nobody else"
    else:
        _agree(lenient, plain)
    with refused():
        shown = infer_schema(records)
        try:
            found = decode_foreign([foreign_field(*column) for column in shown], records)
        except LockstepError as error:
            raise AssertionError(f"inferred, but not read: {shown}") from error
        found.validate(full=True)


def _agree(one: object, other: object) -> None:
    if isinstance(one, type) or isinstance(other, type):
        assert one is other, f"{one} and {other}"
        return
    assert isinstance(one, pa.RecordBatch) and isinstance(other, pa.RecordBatch)
    one.validate(full=True)
    assert one.schema.equals(other.schema)
    assert list(_bits(one)) == list(_bits(other))


def _bits(batch: pa.RecordBatch) -> Iterator[object]:
    """The values, with one NaN for all and 0.0 apart from -0.0."""
    for column in batch.columns:
        for value in column.to_pylist():
            yield repr(value) if not isinstance(value, float) or not math.isnan(value) else "nan"


def _own_seeds() -> list[bytes]:
    seeds = []
    for schema in (EXAMPLES, SEQUENCES):
        batch = pa.RecordBatch.from_pylist(_ROWS, schema=schema.arrow_schema())
        records = encode_batch(schema, batch)
        seeds += [joined(records), joined(records[:1])]
    return seeds


def _foreign_seeds() -> list[bytes]:
    def item(number: int, body: bytes) -> bytes:
        return bytes([number << 3 | 2, len(body)]) + body

    def entry(name: bytes, feature: bytes) -> bytes:
        return item(1, item(1, name) + item(2, feature))

    ints, floats = item(3, b"\x08\x05"), item(2, item(1, np.array([1, 2], np.float32).tobytes()))
    mixed = [
        entry(b"ss", item(1, item(1, b"a") + item(1, b""))),
        entry(b"fs", floats),
        entry(b"i", ints),
        entry(b"", b""),
    ]
    twice = [entry(b"i", item(3, item(1, b"\x80\x01"))), entry(b"i", ints), entry(b"other", floats), entry(b"b", b"")]
    return [
        joined([item(1, b"".join(part)) for part in (mixed, twice)]),
        *_own_seeds()[:2],
        joined([b"", item(2, b"")]),
    ]


TARGETS = (
    Target("tfrecord", tfrecord_files, lambda: [b"\0" + joined([b"a", b"", b"bc" * 40]), b"\xff" + frame(b"x") * 2]),
    Target("gzip_blocks", gzip_blocks, lambda: [b"\xb8\x0b" + pack(b"a row " * 500), b"\0\0" + pack(b"")]),
    Target("own_records", own_records, _own_seeds),
    Target("foreign_records", foreign_records, _foreign_seeds),
)
