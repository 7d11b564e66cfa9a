"""Reading and writing memory by its address, inside kernels only.

Kernels take the addresses of many columns of different types in one array of int64: so one compiled function serves
all schemas. Addresses are arguments, never constants, so that compiled code can be kept. Numbers of more than a byte
are little-endian as the machine is, and need not be aligned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


def _load(bits: int, result: Any) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            return builder.load(pointer, align=1)

        return result(types.int64), generate

    return load


def _store(bits: int, value_type: Any) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            builder.store(args[1], pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return store


load_u8 = _load(8, types.uint8)
load_u32 = _load(32, types.uint32)
load_i32 = _load(32, types.int32)
load_u64 = _load(64, types.uint64)
load_i64 = _load(64, types.int64)
store_u8 = _store(8, types.uint8)
store_u16 = _store(16, types.uint16)
store_u32 = _store(32, types.uint32)
store_u64 = _store(64, types.uint64)


@intrinsic
def store_f32(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def copy(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes between places that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        to, start = builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte)
        cgutils.raw_memcpy(builder, to, start, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _stream16(typingctx: Any, target: Any, source: Any) -> Any:
    """Copy 16 bytes past the caches; `target` is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(64), 2).as_pointer()
        value = builder.load(builder.inttoptr(args[1], kind), align=1)
        store = builder.store(value, builder.inttoptr(args[0], kind), align=16)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fence(typingctx: Any) -> Any:
    """Make earlier writes, also those past the caches, visible to other threads before later writes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit(forceinline=True)
def stream(target: Any, source: Any, size: Any) -> None:
    """Copy as `copy` does, past the caches, for data that are not read again soon: the target is not loaded into them
    first.

    The caller ends with `fence`.
    """
    head = min(-target % 16, size)
    copy(target, source, head)
    middle = (size - head) // 16 * 16
    for place in range(head, head + middle, 16):
        _stream16(target + place, source + place)
    copy(target + head + middle, source + head + middle, size - head - middle)


@intrinsic
def leading_zeros(typingctx: Any, value: Any) -> Any:
    """How many of the 64 bits are zero before the first one; `value` must not be 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@njit(forceinline=True)
def same(at: Any, other: Any, size: Any) -> Any:
    """Whether `size` bytes are equal; 8 at a time, the last ones twice."""
    if size < 8:
        different = 0
        for place in range(size):
            different += load_u8(at + place) != load_u8(other + place)
        return different == 0
    for place in range(0, size - 8, 8):
        if load_u64(at + place) != load_u64(other + place):
            return False
    return load_u64(at + size - 8) == load_u64(other + size - 8)


@njit
def offset(address: Any, width: Any, number: Any) -> Any:
    """The offset of a value or list, `width` bytes each from `address` on."""
    if width == 4:
        return np.int64(load_i32(address + 4 * number))
    return load_i64(address + 8 * number)
