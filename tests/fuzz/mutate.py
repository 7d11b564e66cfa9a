"""Inputs near to those that are as they should be, the same ones in each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF)


def mutated(seeds: Sequence[bytes], count: int, max_bytes: int) -> Iterator[bytes]:
    """`count` inputs, each a seed with one to four changes, of `max_bytes` at most."""
    for number in range(count):
        chance = Random(number)
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(chance.randint(1, 4)):
            _change(data, chance, seeds)
        yield bytes(data[:max_bytes])


def _change(data: bytearray, chance: Random, seeds: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    size = chance.choice((1, 1, 2, 4, 8, 64))
    what = chance.randrange(7)
    if what == 0:
        del data[at : at + size]
    elif what == 1:
        del data[at:]
    elif what == 2:
        data[at:at] = data[at : at + size] * chance.choice((1, 3))
    elif what == 3:
        data[at:at] = chance.randbytes(size)
    elif what == 4:
        other = chance.choice(seeds)
        start = chance.randrange(len(other) + 1)
        data[at : at + size] = other[start : start + size]
    elif at < len(data):
        data[at] = chance.choice((*_NUMBERS, data[at] ^ 1 << chance.randrange(8), chance.randrange(256)))
