"""Codecs of flat float32 arrays: each rank's part of a bucket in fewer bytes, and back.

    bf16, fp16      the upper half of each number; or float16 with one power of two for the part, so that none overflows
    int8            Dettmers, "8-bit approximations for parallelism in deep learning" (ICLR 2016): 8 bits and a scale
    qsgd:LEVELS     Alistarh et al., "QSGD" (NeurIPS 2017), scaled by a block's maximum, as the authors' experiments are
    terngrad        Wen et al., "TernGrad" (NeurIPS 2017): three values, for each block; without its clipping
    1bit            Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014): the sign, and two means

`qsgd` and `terngrad` round at random so that the mean over draws is the number itself; the others round to nearest.
A number that is not finite makes its block NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.training.compression import kernels as k
from lockstep.training.compression.method import Compression

Array = NDArray[Any]
BLOCK = 512  # elements with one scale: 8 bits and a scale are 1 / 3.97 of float32
SIGN_BLOCK = 2048  # elements with two means: a bit and these are 1 / 31


class Codec(ABC):
    """Encodes float32 (n,) as bytes whose number depends only on n."""

    block = 1
    """Elements that are encoded together: parts of a bucket are cut at multiples of it."""

    @abstractmethod
    def size(self, n: int) -> int:
        """Bytes of n encoded elements."""

    @abstractmethod
    def encode(self, x: Array, key: int) -> Array:
        """The bytes (size(n),) uint8 of `x` (n,) float32; `key`, of 64 bits, decides all random draws."""

    @abstractmethod
    def decode(self, data: Array, out: Array) -> None:
        """Fill `out` (n,) float32 from the bytes of `encode`."""


class Bfloat16(Codec):
    def size(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Array, key: int) -> Array:
        halves = np.empty(x.size, np.uint16)
        k.to_bfloat16(x.view(np.uint32), halves)
        return halves.view(np.uint8)

    def decode(self, data: Array, out: Array) -> None:
        k.from_bfloat16(_as(data, np.uint16), out.view(np.uint32))


class Float16(Codec):
    """float16 of x / scale, where the scale is the power of two that brings the largest number below 2**15."""

    def size(self, n: int) -> int:
        return 2 * n + 4 if n else 0

    def encode(self, x: Array, key: int) -> Array:
        data = np.empty(self.size(x.size), np.uint8)
        if x.size:
            largest = np.int32(k.largest_bits(x.view(np.int32))).view(np.float32)
            finite = bool(np.isfinite(largest))
            power = max(int(np.frexp(largest)[1]) - 15, -126) if finite else 0  # of the scale; a normal number
            data[:4].view(np.float32)[0] = np.ldexp(np.float32(1), power) if finite else np.nan
            factor = np.float32(2.0**-power if finite else 0.0)
            k.to_float16(x, factor, data[4:].view(np.uint16))
        return data

    def decode(self, data: Array, out: Array) -> None:
        if out.size:
            k.from_float16(_as(data[4:], np.uint16), _as(data[:4], np.float32)[0], out, out.view(np.uint32))


class Levels(Codec):
    """Whole numbers from -levels to levels, in 2, 4 or 8 bits, and a scale for each block."""

    block = BLOCK

    def __init__(self, levels: int, *, random: bool) -> None:
        self._levels, self._random = levels, random
        self._width = 2 if levels == 1 else 4 if levels <= 7 else 8

    def size(self, n: int) -> int:
        return 4 * _count(n, BLOCK) + _count(n * self._width, 8)

    def encode(self, x: Array, key: int) -> Array:
        data, scales = np.empty(self.size(x.size), np.uint8), _count(x.size, BLOCK)
        packed = data[4 * scales :]
        codes = packed if self._width == 8 else np.empty(x.size, np.uint8)
        bits = x.view(np.int32)
        k.quantise(
            x, bits, BLOCK, self._levels, self._random, np.uint64(key), data[: 4 * scales].view(np.float32), codes
        )
        if self._width < 8:
            k.pack(codes, self._width, packed)
        return data

    def decode(self, data: Array, out: Array) -> None:
        scales = _count(out.size, BLOCK)
        codes = packed = data[4 * scales :]
        if self._width < 8:
            codes = np.empty(out.size, np.uint8)
            k.unpack(packed, self._width, codes)
        k.dequantise(codes, BLOCK, self._levels, _as(data[: 4 * scales], np.float32), out)


class OneBit(Codec):
    """The sign of each number; a block's numbers below 0 become their mean, and the others theirs."""

    block = SIGN_BLOCK

    def size(self, n: int) -> int:
        return 8 * _count(n, SIGN_BLOCK) + _count(n, 8)

    def encode(self, x: Array, key: int) -> Array:
        data, means = np.empty(self.size(x.size), np.uint8), 8 * _count(x.size, SIGN_BLOCK)
        codes = np.empty(x.size, np.uint8)
        k.split_signs(x, SIGN_BLOCK, data[:means].view(np.float32), codes)
        k.pack(codes, 1, data[means:])
        return data

    def decode(self, data: Array, out: Array) -> None:
        means, codes = 8 * _count(out.size, SIGN_BLOCK), np.empty(out.size, np.uint8)
        k.unpack(data[means:], 1, codes)
        k.join_signs(codes, SIGN_BLOCK, _as(data[:means], np.float32), out)


def codec_of(method: Compression) -> Codec:
    """The codec of a method that has one: bf16, fp16, int8, 1bit, qsgd, terngrad."""
    if method.name == "bf16":
        return Bfloat16()
    if method.name == "fp16":
        return Float16()
    if method.name == "1bit":
        return OneBit()
    levels = {"int8": 127, "terngrad": 1}.get(method.name) or int(method.value)
    return Levels(levels, random=method.name != "int8")


def _count(n: int, each: int) -> int:
    return -(-n // each)


def _as(data: Array, dtype: Any) -> Array:
    """A view of bytes, or a copy where they do not begin at a multiple of the dtype's size."""
    return data.view(dtype) if data.ctypes.data % np.dtype(dtype).itemsize == 0 else data.copy().view(dtype)
