"""Ids, keys and shares: fixed values (they must never change), and laws."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.sample_id import sample_id, sample_ids, shard_keys, shard_of, splitmix64, unit_hashes
from tests.builders.records import shard_key
from tests.features.split_hashes import share_of, unit_hash


def test_splitmix64_gives_the_published_sequence() -> None:
    # The reference implementation seeded with 1234567: its state grows by the constant that splitmix64 adds.
    state, found = 1234567, []
    for _ in range(3):
        found.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_an_id_is_the_start_of_a_digest_over_lengths_and_fields() -> None:
    data = b"\x02" + bytes(7) + b"ab" + b"\x01" + bytes(7) + b"c" + bytes(8)
    assert sample_id([b"ab", b"c"], 0) == int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)
    assert sample_id([b"a", b"bc"], 0) != sample_id([b"ab", b"c"], 0) != sample_id([b"ab", b"c"], 1)


# Lengths around the 64 bytes of a SHA-256 block, where its padding takes one block more.
@given(st.lists(st.tuples(st.binary(max_size=140), st.text(max_size=20), st.integers(0, 2**63 - 1)), max_size=5))
@settings(max_examples=80, deadline=None)
def test_ids_of_columns_are_those_of_their_rows(rows: list[tuple[bytes, str, int]]) -> None:
    rows = [(b"before", "the slice", 0), *rows]
    raw, text, occurrences = zip(*rows, strict=True)
    columns = [pa.array(raw, pa.binary()), pa.array(text, pa.string()), pa.array(raw, pa.large_binary())]
    found = sample_ids([column.slice(1) for column in columns], np.array(occurrences[1:], dtype=np.int64))
    assert found.tolist() == [sample_id([a, b.encode(), a], n) for a, b, n in rows[1:]]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=50, deadline=None)
def test_split_hashes_of_arrays_are_those_of_their_values(samples: list[int], seed: int) -> None:
    found = unit_hashes(np.array(samples, dtype=np.int64), seed)
    assert found.tolist() == [unit_hash(sample.to_bytes(8, "little", signed=True), seed) for sample in samples]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(0, 2**63 - 1))
def test_arrays_and_numbers_agree(samples: list[int], seed: int) -> None:
    keys = shard_keys(np.array(samples, dtype=np.int64), seed)
    assert keys.tolist() == [shard_key(sample, seed) for sample in samples]


@given(st.integers(0, 2**64 - 1), st.integers(1, 10**6))
def test_a_shard_is_one_of_them_and_rises_with_the_key(key: int, count: int) -> None:
    assert 0 <= shard_of(key, count) < count
    assert shard_of(key, count) == key * count // 2**64
    assert shard_of(0, count) == 0 and shard_of(2**64 - 1, count) == count - 1


def test_shares_are_as_large_as_asked() -> None:
    found = [share_of(unit_hash(str(n).encode(), 3), (80, 20)) for n in range(20_000)]
    assert abs(found.count(0) / len(found) - 0.8) < 0.01
    assert share_of(0, (1, 1)) == 0 and share_of(2**64 - 1, (1, 1)) == 1
    assert unit_hash(b"a", 1) != unit_hash(b"a", 2)
