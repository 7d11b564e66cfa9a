"""HDFS's checksum of local bytes, held against what a real HDFS 3.5.0 has told of the same ones."""

from __future__ import annotations

import io

import pytest

from lockstep.storage.files.interface import StoredChecksum
from lockstep.storage.upload import same_as


def content(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


# Told by GETFILECHECKSUM for `content(size)` in HDFS blocks of 1,024 bytes.
TOLD = [
    (1, "MD5-of-0MD5-of-512CRC32C", "000002000000000000000000dc236201841049096ad31b6213203a90"),
    (512, "MD5-of-0MD5-of-512CRC32C", "000002000000000000000000e6e61fbd4c76a34aad61c16d8e9352dd"),
    (1024, "MD5-of-0MD5-of-512CRC32C", "00000200000000000000000050ff11bcb16278c91f4d4bdfcbaa2bab"),  # just one block
    (1025, "MD5-of-2MD5-of-512CRC32C", "0000020000000000000000026b68d6b32910d0b88362eb2823328479"),
    (3000, "MD5-of-2MD5-of-512CRC32C", "00000200000000000000000237056291c057788dc089cb8c9a94b1d4"),  # 48 of 64 bytes
    (5000, "MD5-of-2MD5-of-512CRC32C", "0000020000000000000000022dda31ce8ffbb69839e22b05b8643617"),
]


@pytest.mark.parametrize(("size", "algorithm", "value"), TOLD)
def test_equal_and_changed_content(size: int, algorithm: str, value: str) -> None:
    stored = StoredChecksum(algorithm, bytes.fromhex(value))
    data = bytearray(content(size))
    assert same_as(stored, io.BytesIO(data)) is True
    data[size // 2] ^= 1
    assert same_as(stored, io.BytesIO(data)) is False
    assert same_as(stored, io.BytesIO(content(size)[:-1])) is False
    assert same_as(stored, io.BytesIO(content(size) + b"\0")) is False


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [
        ("COMPOSITE-CRC32C", "00000000"),  # what a cluster may be set to instead
        ("MD5-of-0MD5-of-0CRC32", "00000000000000000000000070bc8f4b72a86921468bf8e8441dce51"),  # an empty file
        ("MD5-of-0MD5-of-512CRC32", TOLD[0][2]),  # the older CRC
        ("MD5-of-0MD5-of-512CRC32C", TOLD[0][2][:-2]),  # cut off
        ("MD5-of-0MD5-of-512CRC32C", "00000000" + TOLD[0][2][8:]),  # no bytes a CRC
        ("MD5-of-0MD5-of-512CRC32C", "7fffffff" + TOLD[0][2][8:]),  # more than is held in memory
        ("MD5-of-0MD5-of-512CRC32C", TOLD[0][2][:8] + "ffffffffffffffff" + TOLD[0][2][24:]),
    ],
)
def test_another_algorithm_is_not_judged(algorithm: str, value: str) -> None:
    stored = StoredChecksum(algorithm, bytes.fromhex(value))
    assert same_as(stored, io.BytesIO(content(1))) is None
