from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.features.examples import foreign
from lockstep.features.examples.foreign import records_between
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import foreign_field
from lockstep.features.shards.foreign_files import ForeignFile, infer_columns
from lockstep.features.shards.read import Lenient
from lockstep.storage.errors import DataError
from lockstep.storage.formats.tfrecord import frame

FIELDS = [
    foreign_field("b", "int64", False),
    foreign_field("a", "string", False),
    foreign_field("aa", "float32", True),
    foreign_field("ä", "bytes", True),
    foreign_field("z", "int64", True),
]


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def message(tag: int, body: bytes, *, long_key: bool = False) -> bytes:
    return (bytes([tag | 128, 0]) if long_key else bytes([tag])) + varint(len(body)) + body


def entry(name: str, feature: bytes, long_keys: int = 0) -> bytes:
    """`long_keys`: the bits of those keys, outermost first, that take two bytes."""
    key, value = message(0x0A, name.encode(), long_key=bool(long_keys & 2)), message(0x12, feature)
    return message(0x0A, key + value, long_key=bool(long_keys & 1))


FEATURES = st.one_of(
    st.lists(st.integers(0, 2**64 - 1), max_size=3).map(
        lambda values: message(0x1A, message(0x0A, b"".join(map(varint, values))) if values else b"")
    ),
    st.lists(st.integers(0, 300), max_size=3).map(  # not packed
        lambda values: message(0x1A, b"".join(b"\x08" + varint(value) for value in values))
    ),
    st.lists(st.binary(min_size=4, max_size=4), max_size=3).map(
        lambda values: message(0x12, message(0x0A, b"".join(values)) if values else b"")
    ),
    st.lists(st.one_of(st.binary(max_size=200), st.text(max_size=3).map(str.encode)), max_size=3).map(
        lambda values: message(0x0A, b"".join(message(0x0A, value) for value in values))
    ),
    # no list, an unknown one, an empty packed one, one that leaves its feature
    st.sampled_from([b"", b"\x22\x00", b"\x1a\x02\x0a\x00", b"\x1a\x05\x0a"]),
)
NAMES = st.sampled_from(["b", "a", "aa", "ä", "z", "other", ""])
LONG_KEYS = st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2])
ENTRIES = st.lists(st.tuples(NAMES, FEATURES, LONG_KEYS).map(lambda parts: entry(*parts)), max_size=8)
RECORDS = st.one_of(
    ENTRIES.map(lambda entries: message(0x0A, b"".join(entries))),
    ENTRIES.map(lambda entries: message(0x0A, b"".join(entries), long_key=True)),
    st.binary(max_size=20),
)


def by_python(
    fields: list[Field], data: NDArray[np.uint8], offsets: NDArray[np.int64], known: list[str] | None
) -> pa.RecordBatch:
    return foreign.decode_foreign(fields, records_between(data, offsets), known)


def outcome(lenient: Lenient, data: bytes) -> tuple[Any, str]:
    try:
        return lenient(data, "f", 0, 0).to_pylist(), ""
    except DataError as error:
        return None, str(error)


@settings(max_examples=150, deadline=None)
@given(st.lists(RECORDS, min_size=1, max_size=4), st.integers(1, 31), st.none() | st.sets(NAMES))
def test_compiled_and_plain_reading_agree_in_values_and_errors(
    records: list[bytes], asked: int, others: set[str] | None
) -> None:
    fields = [field for number, field in enumerate(FIELDS) if asked >> number & 1]
    known = None if others is None else sorted({*others, *(field.name for field in fields)})
    data = b"".join(map(frame, records))
    plain = Lenient(fields, known)
    plain._ours = False
    found = outcome(Lenient(fields, known), data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.features.shards.read.decode_foreign_frames", by_python)
        wanted = outcome(plain, data)
    # NaN is not equal to itself
    assert repr(found) == repr(wanted)


@pytest.mark.parametrize("outer, inner", [(True, 0), (False, 1), (False, 2)])
def test_a_key_longer_than_it_need_be_loses_no_feature(outer: bool, inner: int) -> None:
    value = message(0x1A, message(0x0A, b"\x07"))
    usual, odd = message(0x0A, entry("b", value)), message(0x0A, entry("b", value, inner), long_key=outer)
    optional = [foreign_field("b", "int64", False)]
    assert Lenient(optional)(frame(usual) + frame(odd), "f", 0, 0).to_pylist() == [{"b": 7}] * 2


def test_another_order_and_unknown_features_are_read_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.features.examples.foreign.decode_foreign", None)
    shuffler = random.Random(1)
    records = []
    for number in range(300):
        parts = [entry("other", b"\x0a\x03\x0a\x01x"), entry("aa", message(0x12, message(0x0A, bytes(4))))]
        parts += [] if number % 3 == 0 else [entry("b", message(0x1A, message(0x0A, varint(number))))]
        shuffler.shuffle(parts)
        records.append(message(0x0A, b"".join(parts)))
    batch = Lenient(FIELDS[:4])(b"".join(map(frame, records)), "f", 0, 0)
    assert batch.column("b").to_pylist() == [None if number % 3 == 0 else number for number in range(300)]
    assert batch.column("aa").to_pylist() == [[0.0]] * 300 and batch.column("ä").to_pylist() == [[]] * 300


def test_records_of_more_features_than_the_kernel_remembers_places_of() -> None:
    fields = [foreign_field(f"f{n:03d}", "int64", False) for n in range(300)]
    orders = [list(range(300)), list(range(299, -1, -1)), [*range(150, 300), *range(150)]]
    value = [message(0x1A, message(0x0A, varint(n))) for n in range(300)]
    records = [message(0x0A, b"".join(entry(f"f{n:03d}", value[n]) for n in order)) for order in orders * 2]
    batch = Lenient(fields)(b"".join(map(frame, records)), "f", 0, 0)
    assert batch.to_pylist() == [{f"f{n:03d}": n for n in range(300)}] * 6


def test_hundreds_of_lists_that_no_record_has_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of 601 features in 500 records, 16 bytes each, take 5 MB: here 1 MiB is what may be taken at once."""
    monkeypatch.setattr("lockstep.features.arrow._RUN_BYTES", 1 << 20)
    fields = [foreign_field("b", "int64", False), *(foreign_field(f"list_{n:04d}", "int64", True) for n in range(600))]
    records = [message(0x0A, entry("b", message(0x1A, message(0x0A, varint(number))))) for number in range(500)]
    lenient, taken = Lenient(fields), []
    lenient._ours = False
    fast = foreign.fast_records

    def watched(asked: Any, data: Any, starts: Any, ends: Any, known: Any) -> Any:
        taken.append(len(starts) * len(asked) * 16)
        return fast(asked, data, starts, ends, known)

    monkeypatch.setattr(foreign, "fast_records", watched)
    monkeypatch.setattr(foreign, "decode_foreign", None)
    batch = lenient(b"".join(map(frame, records)), "f", 0, 0)
    assert batch.column("b").to_pylist() == list(range(500)) and batch.column("list_0300")[499].as_py() == []
    assert len(taken) > 4 and max(taken) <= 1 << 20


def test_a_sequence_example_does_not_lose_its_lists_in_silence() -> None:
    context = message(0x0A, entry("b", message(0x1A, message(0x0A, b"\x07"))))
    lists = message(0x12, message(0x0A, message(0x0A, b"l") + message(0x12, b"")))
    assert Lenient(FIELDS[:1])(frame(context), "f", 0, 0).to_pylist() == [{"b": 7}]
    unknown = b"\x18\x01"
    long_key = message(0x12, lists[2:], long_key=True)
    for record in (context + lists, lists, unknown + lists, context + unknown + lists, context + context + long_key):
        with pytest.raises(DataError, match="f, records from 0 on: record 1 of the batch is a SequenceExample"):
            Lenient(FIELDS[:1])(frame(context) + frame(record), "f", 0, 0)
        with pytest.raises(DataError, match="SequenceExample"):
            infer_columns([ForeignFile("u", "u", 0)], [context, record])
