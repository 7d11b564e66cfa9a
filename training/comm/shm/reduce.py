"""The arithmetic of shared memory: elementwise sum, mean, minimum or maximum of several buffers, in rank order.

One function, compiled for a dtype when that is first reduced, and called by its address, so that the kernels that
wait and copy are compiled once for all dtypes. float16 and bfloat16 are widened to float32, summed there, and rounded
once, to the nearest, ties to even; their conversion is integer arithmetic, since not every processor has it (F. Giesen,
float->half variants, 2012, has the method).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import compiler
from numba.core.ccallback import CFunc
from numba.extending import overload, register_jitable
from numba.np.numpy_support import as_dtype

from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import load_i64
from lockstep.training.comm.shm import atomics
from lockstep.training.comm.shm.atomics import bits_of, float_of, pointer_like

SUM, MEAN, MIN, MAX = range(4)
OP_CODES = {"sum": SUM, "mean": MEAN, "min": MIN, "max": MAX}
_BLOCK = 1024  # elements in the accumulator: with as many of each source they stay in the first-level cache
_HALF, _BRAIN = types.int16, types.uint16  # in place of float16 and bfloat16, which Numba does not know
_TYPES = {
    "uint8": types.uint8,
    "int32": types.int32,
    "int64": types.int64,
    "float16": _HALF,
    "bfloat16": _BRAIN,
    "float32": types.float32,
    "float64": types.float64,
}
_U32 = np.uint32
_INFINITE, _SIGN, _QUIET = _U32(0x7F800000), _U32(0x80000000), _U32(0x00400000)  # of float32


@register_jitable
def _from_half(number: Any) -> Any:
    bits = _U32(_U32(number) & _U32(0x7FFF)) << _U32(13)
    # Read as a float32, these bits are 2^112 too small, which a product corrects exactly, subnormal numbers included.
    wide = bits_of(float_of(_U32(bits)) * np.float32(2.0**112))
    wide = _U32(wide | _INFINITE) if bits >= _U32(0x0F800000) else wide
    return float_of(_U32(wide | (_U32(_U32(number) & _U32(0x8000)) << _U32(16))))


@register_jitable
def _to_half(number: Any) -> Any:
    bits = bits_of(number)
    size = _U32(bits & _U32(0x7FFFFFFF))
    odd = _U32(_U32(size >> _U32(13)) & _U32(1))
    normal = _U32(_U32(size - _U32(112 << 23)) + _U32(0xFFF) + odd) >> _U32(13)
    # A unit in the last place of 0.5 is the smallest subnormal float16: adding 0.5 rounds to it.
    small = _U32(bits_of(float_of(size) + np.float32(0.5)) - _U32(0x3F000000))
    large = _U32(0x7E00) if size > _INFINITE else _U32(0x7C00)
    found = large if size >= _U32(0x47800000) else (small if size < _U32(0x38800000) else normal)
    return np.int16(np.uint16(_U32(found) | (_U32(bits & _SIGN) >> _U32(16))))


@register_jitable
def _from_brain(number: Any) -> Any:
    return float_of(_U32(_U32(number) << _U32(16)))


@register_jitable
def _to_brain(number: Any) -> Any:
    bits = bits_of(number)
    odd = _U32(_U32(bits >> _U32(16)) & _U32(1))
    rounded = _U32(bits + _U32(0x7FFF) + odd)
    no_number = _U32(bits & _U32(0x7FFFFFFF)) > _INFINITE
    return np.uint16(_U32(_U32(bits | _QUIET) if no_number else rounded) >> _U32(16))


def _widen(number: Any) -> Any: ...
def _narrow(number: Any, like: Any) -> Any: ...
def _divided(number: Any, count: Any) -> Any: ...
def _accumulator(like: Any) -> Any: ...


@overload(_widen, strict=False)
def _widen_of(number: Any) -> Any:
    if number == _HALF:
        return lambda number: _from_half(number)
    if number == _BRAIN:
        return lambda number: _from_brain(number)
    return lambda number: number


@overload(_narrow, strict=False)
def _narrow_of(number: Any, like: Any) -> Any:
    if like.dtype == _HALF:
        return lambda number, like: _to_half(number)
    if like.dtype == _BRAIN:
        return lambda number, like: _to_brain(number)
    return lambda number, like: number


@overload(_divided, strict=False)
def _divided_of(number: Any, count: Any) -> Any:
    if isinstance(number, types.Float):
        kind = as_dtype(number).type
        return lambda number, count: kind(number / kind(count))
    return lambda number, count: number  # unused: a mean of integers has been refused


@overload(_accumulator, strict=False)
def _accumulator_of(like: Any) -> Any:
    dtype = np.dtype("float32") if like.dtype in (_HALF, _BRAIN) else as_dtype(like.dtype)
    return lambda like: np.empty(_BLOCK, dtype)


@njit
def _combine(total: Any, first: Any, more: Any, op: Any) -> Any:
    """Write `first` combined with `more` to `total`, a block each. A NaN of either stays."""
    if op <= MEAN:
        for at in range(len(total)):
            total[at] = _widen(first[at]) + _widen(more[at])
    elif op == MIN:
        for at in range(len(total)):
            a, b = _widen(first[at]), _widen(more[at])
            total[at] = a if a < b or a != a else b
    else:
        for at in range(len(total)):
            a, b = _widen(first[at]), _widen(more[at])
            total[at] = a if a > b or a != a else b


@njit
def sources_are_targets(sources: Any, targets: Any) -> Any:
    """Whether two buffers are reduced in place."""
    return load_i64(sources) == load_i64(targets) and load_i64(sources + 8) == load_i64(targets + 8)


@njit
def _add_in_place(first: Any, second: Any) -> Any:
    """Two ranks need no accumulator: 1.5 times as fast if both buffers are in a cache."""
    for at in range(len(first)):
        total = _narrow(_widen(first[at]) + _widen(second[at]), first)
        first[at] = total
        second[at] = total


def reduce(like: Any, op: int, n: int, sources: int, m: int, targets: int, count: int) -> None:
    """Reduce `count` elements of `n` >= 2 buffers into `m` others, which may be the same.

    `sources` and `targets` are the addresses of tables of addresses (int64); `like` is a pointer of the dtype.
    """
    item = like_bytes(like)
    if n == 2 and m == 2 and op == SUM and sources_are_targets(sources, targets):
        _add_in_place(
            carray(pointer_like(like, load_i64(sources)), count),
            carray(pointer_like(like, load_i64(sources + 8)), count),
        )
        return
    whole = _accumulator(like)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        total = whole[:size]
        first = carray(pointer_like(like, load_i64(sources) + start * item), size)
        second = carray(pointer_like(like, load_i64(sources + 8) + start * item), size)
        _combine(total, first, second, op)
        for source in range(2, n):
            more = carray(pointer_like(like, load_i64(sources + 8 * source) + start * item), size)
            _combine(total, total, more, op)
        if op == MEAN:
            for at in range(size):
                total[at] = _divided(total[at], n)
        for target in range(m):
            out = carray(pointer_like(like, load_i64(targets + 8 * target) + start * item), size)
            for at in range(size):
                out[at] = _narrow(total[at], like)


def like_bytes(like: Any) -> Any: ...


@overload(like_bytes, strict=False)
def _like_bytes_of(like: Any) -> Any:
    size = like.dtype.bitwidth // 8
    return lambda like: size


_cached: Any = kernels(__name__, memory, atomics)(reduce)


@cache
def reducer(dtype: str) -> tuple[int, Any]:
    """Return (address, owner) of `reduce` compiled for a dtype, valid while the owner lives; this takes half a second
    if it is not cached.
    """
    signature = ((types.CPointer(_TYPES[dtype]), *[types.int64] * 6), types.void)
    compiled: Any = CFunc(reduce, signature, locals={}, options={}, pipeline_class=compiler.Compiler)
    compiled._cache = _cached._cache
    compiled.compile()
    return compiled.address, compiled
