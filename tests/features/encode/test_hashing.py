"""XXH64 of columns against the reference written out in plain Python, and the table of tokens against a dictionary."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.encode.hashing import TokenTable, buckets_of, hash_values

MASK = (1 << 64) - 1
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & MASK


def round_of(lane: int, word: int) -> int:
    return rotated((lane + word * P2) & MASK, 31) * P1 & MASK


def reference(data: bytes, seed: int) -> int:
    """XXH64 after its specification, one value at a time."""
    size, words = len(data), [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]
    value, used = (seed + P5) & MASK, 0
    if size >= 32:
        lanes = [(seed + P1 + P2) & MASK, (seed + P2) & MASK, seed, (seed - P1) & MASK]
        used = size // 32 * 4
        for start in range(0, used, 4):
            lanes = [round_of(lane, words[start + i]) for i, lane in enumerate(lanes)]
        value = sum(rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            value = ((value ^ round_of(0, lane)) * P1 + P4) & MASK
    value = (value + size) & MASK
    for word in words[used:]:
        value = (rotated(value ^ round_of(0, word), 27) * P1 + P4) & MASK
    rest = data[len(words) * 8 :]
    if len(rest) >= 4:
        value = (rotated(value ^ (int.from_bytes(rest[:4], "little") * P1 & MASK), 23) * P2 + P3) & MASK
        rest = rest[4:]
    for byte in rest:
        value = rotated(value ^ (byte * P5 & MASK), 11) * P1 & MASK
    value = (value ^ value >> 33) * P2 & MASK
    value = (value ^ value >> 29) * P3 & MASK
    return value ^ value >> 32


def test_published_values() -> None:
    """The reference itself, against xxhsum's own test values."""
    assert reference(b"", 0) == 0xEF46DB3751D8E999
    assert reference(b"abc", 0) == 0x44BC2CF5AD770999


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=90), max_size=12), st.integers(0, 2**63 - 1), st.integers(0, 3))
def test_bytes_of_any_length_in_slices_too(values: list[bytes], seed: int, skip: int) -> None:
    column = pa.array(values, type=pa.binary()).slice(skip)
    expected = [reference(value, seed) for value in values[skip:]]
    assert hash_values(column, seed).view(np.uint64).tolist() == expected
    signed = [value - (1 << 64) if value >> 63 else value for value in expected]
    assert buckets_of(column, 7, seed).tolist() == [value % 7 for value in signed]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_numbers_are_hashed_as_their_bytes(values: list[int]) -> None:
    expected = [reference(value.to_bytes(8, "little", signed=True), 42) for value in values]
    assert hash_values(pa.array(values, pa.int64()), 42).view(np.uint64).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=3), unique=True, max_size=40), st.lists(st.text(max_size=3), max_size=40))
def test_tokens_are_found_where_they_are(tokens: list[str], asked: list[str]) -> None:
    places = {token: place for place, token in enumerate(tokens)}
    found, _ = TokenTable(tokens).find(pa.array([*tokens, *asked], pa.string()))
    assert found.tolist() == [places.get(token, -1) for token in [*tokens, *asked]]


def test_no_values_and_no_tokens() -> None:
    assert hash_values(pa.array([], pa.string()), 1).tolist() == []
    found, hashes = TokenTable([]).find(pa.array(["a", None], pa.string()))
    assert found.tolist() == [-1, -1] and len(hashes) == 2


@pytest.mark.parametrize("seed", [0, 42, 2**63 - 1])
def test_a_seed_changes_buckets(seed: int) -> None:
    words = pa.array([f"w{i}" for i in range(1000)])
    found = np.bincount(buckets_of(words, 10, seed), minlength=10)
    assert found.min() > 60 and found.max() < 140, "spread evenly"
    assert (buckets_of(words, 10, seed) != buckets_of(words, 10, seed + 1)).sum() > 800
