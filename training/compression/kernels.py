"""Compiled loops of the codecs: one pass that finds a block's scale, one that rounds, and packed codes.

A random number depends only on a key and the position, so that results do not depend on threads or on the order of
calls: splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.storage.kernels.jit import kernels

SIGNLESS = np.int32(0x7FFFFFFF)
LARGEST = np.int32(0x7F7FFFFF)  # bits of the largest finite float32
_GOLDEN, _A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = np.float32(2.0**-24)
_ROUND = np.float32(1.5 * 2**23)
_TINY = np.float32(1e-30)  # a block of smaller numbers counts as zeros: 127 / scale would be infinite
_CHUNK = 4096  # stays in the caches
_HALF = np.float32(0.5)
_UP, _DOWN = np.float32(2.0**112), np.uint32(112 << 23)  # between the exponents of float32 and float16


@kernels(__name__)
def largest_bits(bits: Any) -> Any:
    """The largest absolute value of float32s given as `bits` (n,) int32, as bits; above LARGEST if one is no number."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & SIGNLESS)
    return largest


@kernels(__name__)
def quantise(x: Any, bits: Any, block: Any, levels: Any, random: Any, key: Any, scales: Any, codes: Any) -> None:
    """scales[b] = max|x| / levels of each block, codes = round(x / scale) + levels, 0 to 2 * levels.

    `random`: rounds up with the probability of the fraction; else to the nearest, of two equally near to the even one.
    A block with a number that is not finite has the scale NaN.
    """
    whole = np.empty(1, np.int32)
    number = whole.view(np.float32)  # the same bits
    top = np.float32(levels)
    for b in range(scales.size):
        first = b * block
        x_b, bits_b, codes_b = x[first : first + block], bits[first : first + block], codes[first : first + block]
        largest = np.int32(0)
        for i in range(bits_b.size):
            largest = max(largest, bits_b[i] & SIGNLESS)
        whole[0] = largest
        peak = number[0]
        if largest > LARGEST or peak < _TINY:
            scales[b] = np.float32(np.nan) if largest > LARGEST else np.float32(0)
            codes_b[:] = levels
            continue
        scales[b] = peak / top
        factor = top / peak
        if random:
            for i in range(x_b.size):
                z = key + np.uint64(first + i + 1) * _GOLDEN
                z = (z ^ (z >> np.uint64(30))) * _A
                z = (z ^ (z >> np.uint64(27))) * _B
                z = z ^ (z >> np.uint64(31))
                draw = np.float32(np.int32(z >> np.uint64(40))) * _UNIT
                code = np.int32(np.floor(x_b[i] * factor + draw))
                codes_b[i] = np.uint8(min(max(code, -levels), levels) + levels)
        else:
            for i in range(x_b.size):  # adding _ROUND leaves no digits behind the point
                code = np.int32((x_b[i] * factor + _ROUND) - _ROUND)
                codes_b[i] = np.uint8(code + levels)


@kernels(__name__)
def dequantise(codes: Any, block: Any, levels: Any, scales: Any, out: Any) -> None:
    """out = (codes - levels) * scales of each block."""
    for b in range(scales.size):
        scale, first = scales[b], b * block
        codes_b, out_b = codes[first : first + block], out[first : first + block]
        for i in range(out_b.size):
            out_b[i] = np.float32(np.int32(codes_b[i]) - levels) * scale


@kernels(__name__)
def split_signs(x: Any, block: Any, means: Any, codes: Any) -> None:
    """codes = x >= 0; means[2 b] of the numbers of block b below 0, means[2 b + 1] of the others."""
    for b in range(means.size // 2):
        below, above, count = 0.0, 0.0, 0
        first, last = b * block, min(x.size, (b + 1) * block)
        for i in range(first, last):
            value = np.float64(x[i])
            positive = value >= 0.0
            codes[i] = positive
            count += int(positive)
            above += value if positive else 0.0
            below += 0.0 if positive else value
        means[2 * b] = below / max(1, last - first - count)
        means[2 * b + 1] = above / max(1, count)
        if not np.isfinite(below + above):
            means[2 * b] = means[2 * b + 1] = np.float32(np.nan)


@kernels(__name__)
def join_signs(codes: Any, block: Any, means: Any, out: Any) -> None:
    """The inverse of `split_signs`: the mean of each element's sign."""
    for b in range(means.size // 2):
        below, above, first = means[2 * b], means[2 * b + 1], b * block
        codes_b, out_b = codes[first : first + block], out[first : first + block]
        for i in range(out_b.size):
            out_b[i] = above if codes_b[i] else below


@kernels(__name__)
def pack(codes: Any, width: Any, out: Any) -> None:
    """Pack codes of `width` bits (1, 2 or 4) into bytes, the first in the lowest bits."""
    each = 8 // width
    out[:] = 0
    for j in range(each):
        shift, places = np.uint8(j * width), codes[j::each]
        for i in range(places.size):
            out[i] |= np.uint8(places[i] << shift)


@kernels(__name__)
def unpack(packed: Any, width: Any, codes: Any) -> None:
    """The inverse of `pack`."""
    each, mask = 8 // width, np.uint8((1 << width) - 1)
    whole = codes.size // each
    for j in range(each):
        shift, places = np.uint8(j * width), codes[j::each]
        for i in range(whole):
            places[i] = (packed[i] >> shift) & mask
        if places.size > whole:
            places[whole] = (packed[whole] >> shift) & mask


@kernels(__name__)
def to_bfloat16(bits: Any, out: Any) -> None:
    """Round float32 as `bits` (n,) uint32 to bfloat16 as uint16: to the nearest, of two as near to the even one."""
    for i in range(bits.size):
        value = bits[i]
        rounded = (value + np.uint32(0x7FFF) + ((value >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        no_number = (value & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16(0x7FC0) if no_number else np.uint16(rounded)


@kernels(__name__)
def from_bfloat16(halves: Any, bits: Any) -> None:
    """The inverse of `to_bfloat16`, exact."""
    for i in range(bits.size):
        bits[i] = np.uint32(halves[i]) << np.uint32(16)


@kernels(__name__)
def add_to(total: Any, part: Any) -> None:
    """Add `part` to `total`, both float32."""
    for i in range(total.size):
        total[i] += part[i]


@kernels(__name__)
def count_sizes(bits: Any, counts: Any) -> None:
    """Count in counts[c] (4096,) int64 the float32s, given as `bits` (n,) int32, whose absolute value has the upper
    bits c.
    """
    for i in range(bits.size):
        counts[(bits[i] & SIGNLESS) >> np.int32(19)] += 1


@kernels(__name__)
def to_float16(x: Any, factor: Any, out: Any) -> None:
    """Round x * factor (n,) float32, below 2**15 in size, to float16 as uint16: to the nearest, else the even one."""
    value, small = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.float32)
    bits, small_bits = value.view(np.uint32), small.view(np.uint32)
    for first in range(0, x.size, _CHUNK):
        x_c, out_c = x[first : first + _CHUNK], out[first : first + _CHUNK]
        for i in range(x_c.size):
            value[i] = x_c[i] * factor
            small[i] = abs(value[i]) + _HALF  # its last digits are those of a subnormal float16
        for i in range(x_c.size):
            size = bits[i] & np.uint32(0x7FFFFFFF)
            odd = (size >> np.uint32(13)) & np.uint32(1)
            normal = (size - _DOWN + np.uint32(0xFFF) + odd) >> np.uint32(13)
            half = normal if size >= np.uint32(0x38800000) else small_bits[i] - np.uint32(0x3F000000)
            out_c[i] = np.uint16(half | ((bits[i] >> np.uint32(16)) & np.uint32(0x8000)))


@kernels(__name__)
def from_float16(halves: Any, scale: Any, out: Any, bits: Any) -> None:
    """out = halves * scale, float16 as uint16, finite; `bits` (n,) is `out` as uint32."""
    for i in range(bits.size):
        half = np.uint32(halves[i])
        bits[i] = ((half & np.uint32(0x7FFF)) << np.uint32(13)) | ((half & np.uint32(0x8000)) << np.uint32(16))
    for i in range(out.size):
        out[i] = out[i] * _UP * scale
