"""CRC-32C inside kernels, by the processor's own instruction where it has one.

x86-64 takes three cycles for eight bytes, but can begin three at a time: longer data are cut into three streams, whose
checksums are put together by one carry-less multiplication each (V. Gopal and others: Fast CRC computation for iSCSI
polynomial using CRC32 instruction, 2011). aarch64 goes through data in one stream, other processors by tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from lockstep.storage.kernels.memory import load_u8, load_u64

POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits reflected
_STREAM_WORDS = 256  # at most so many words of 8 bytes in a stream: the length of a table below
_STREAMS_FROM_WORDS = 12  # shorter data gain nothing: putting together costs as much as so many words
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_PAIR = ir.VectorType(_I64, 2)
_ONES, _ZERO = np.uint64(0xFFFFFFFF), np.uint64(0)


def _processor() -> str:
    # What Numba compiles for, which NUMBA_CPU_NAME and NUMBA_CPU_FEATURES change: LLVM ends the process for an
    # instruction that its target lacks.
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    has = set(features.split(","))
    if triple.startswith("x86_64") and {"+sse4.2", "+pclmul"} <= has:
        return "x86"
    return "aarch64" if triple.startswith("aarch64") and "+crc" in has else "tables"


def _times_x(value: int) -> int:
    return value >> 1 ^ (POLYNOMIAL if value & 1 else 0)


def _tables() -> np.ndarray:
    """Return (8, 256) uint32: [k, b] is the checksum of byte b followed by k zero bytes, from 0."""
    tables = np.zeros((8, 256), dtype=np.uint32)
    for byte in range(256):
        value = byte
        for row in range(8):
            for _ in range(8):
                value = _times_x(value)
            tables[row, byte] = value
    return tables


def _shifts() -> np.ndarray:
    """Return (2 * _STREAM_WORDS + 1,) uint64: [m] is x^(64 m - 33), by which a checksum moves over m words."""
    value, found = 1, [0]  # 1 is x^31, the first: 64 - 33
    for _ in range(2 * _STREAM_WORDS):
        found.append(value)
        for _ in range(64):
            value = _times_x(value)
    return np.array(found, dtype=np.uint64)


def _instruction(name: str, result: ir.Type, operands: tuple[ir.Type, ...]) -> Any:
    def call(builder: Any, values: list[Any]) -> Any:
        kind = ir.FunctionType(result, operands)
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(function, values)

    return call


@intrinsic
def _x86_word(typingctx: Any, crc: Any, word: Any) -> Any:
    run = _instruction("llvm.x86.sse42.crc32.64.64", _I64, (_I64, _I64))
    return types.uint64(types.uint64, types.uint64), lambda context, builder, signature, args: run(builder, list(args))


@intrinsic
def _x86_byte(typingctx: Any, crc: Any, byte: Any) -> Any:
    run = _instruction("llvm.x86.sse42.crc32.32.8", _I32, (_I32, _I8))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(run(builder, [builder.trunc(args[0], _I32), args[1]]), _I64)

    return types.uint64(types.uint64, types.uint8), generate


@intrinsic
def _x86_multiply(typingctx: Any, a: Any, b: Any) -> Any:
    """The low 64 bits of the carry-less product."""
    run = _instruction("llvm.x86.pclmulqdq", _PAIR, (_PAIR, _PAIR, _I8))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(_PAIR, [0, 0])
        vectors = [builder.insert_element(zero, value, ir.Constant(_I32, 0)) for value in args]
        return builder.extract_element(run(builder, [*vectors, ir.Constant(_I8, 0)]), ir.Constant(_I32, 0))

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _aarch64_word(typingctx: Any, crc: Any, word: Any) -> Any:
    run = _instruction("llvm.aarch64.crc32cx", _I32, (_I32, _I64))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(run(builder, [builder.trunc(args[0], _I32), args[1]]), _I64)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _aarch64_byte(typingctx: Any, crc: Any, byte: Any) -> Any:
    run = _instruction("llvm.aarch64.crc32cb", _I32, (_I32, _I32))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(run(builder, [builder.trunc(args[0], _I32), builder.zext(args[1], _I32)]), _I64)

    return types.uint64(types.uint64, types.uint8), generate


_TABLES = _tables()
_SHIFTS = _shifts()
_8, _FF = np.uint64(8), np.uint64(0xFF)


@njit(inline="never")
def table_word(crc: Any, word: Any) -> Any:
    """The checksum `crc` after 8 more bytes, by tables."""
    left = word ^ crc
    found = _ZERO
    for row in range(8):
        found ^= np.uint64(_TABLES[7 - row, left & _FF])
        left >>= _8
    return found


@njit
def table_byte(crc: Any, byte: Any) -> Any:
    """The checksum `crc` after one more byte, by tables."""
    return np.uint64(_TABLES[0, (crc ^ np.uint64(byte)) & _FF]) ^ (crc >> _8)


PROCESSOR = _processor()
_word, _byte = {
    "x86": (_x86_word, _x86_byte),
    "aarch64": (_aarch64_word, _aarch64_byte),
    "tables": (table_word, table_byte),
}[PROCESSOR]


@njit
def _one_stream(crc: Any, address: Any, words: Any) -> Any:
    for at in range(words):
        crc = _word(crc, load_u64(address + 8 * at))
    return crc


@njit
def _three_streams(crc: Any, address: Any, words: Any) -> Any:
    while words >= _STREAMS_FROM_WORDS:
        size = min(words // 3, _STREAM_WORDS)
        first, second, third = crc, _ZERO, _ZERO
        for at in range(address, address + 8 * size, 8):
            first = _word(first, load_u64(at))
            second = _word(second, load_u64(at + 8 * size))
            third = _word(third, load_u64(at + 16 * size))
        # A word's step multiplies by x^32, the product of reflected numbers by x: 33 in all, which _SHIFTS leaves out.
        first = _word(_ZERO, _x86_multiply(first, _SHIFTS[2 * size]))
        second = _word(_ZERO, _x86_multiply(second, _SHIFTS[size]))
        crc = first ^ second ^ third
        address += 24 * size
        words -= 3 * size
    return _one_stream(crc, address, words)


_words = _three_streams if PROCESSOR == "x86" else _one_stream


@njit
def masked(crc: Any) -> Any:
    """A checksum as TFRecord stores it: rotated right by 15 bits, plus a constant. uint64 in, uint32 out."""
    turned = (crc >> np.uint64(15) | crc << np.uint64(17)) & _ONES
    return np.uint32((turned + np.uint64(0xA282EAD8)) & _ONES)


@njit
def extended(crc: Any, address: Any, size: Any) -> Any:
    """The CRC-32C (uint64) of what had the CRC-32C `crc`, and the `size` bytes (int64) at `address` (int64)."""
    words = size >> 3
    crc = _words(crc ^ _ONES, address, words)
    for at in range(address + 8 * words, address + size):
        crc = _byte(crc, load_u8(at))
    return crc ^ _ONES


@njit
def masked_crc32c(address: Any, size: Any) -> Any:
    """The masked CRC-32C of `size` bytes (int64) at `address` (int64), as uint32."""
    return masked(extended(_ZERO, address, size))


@njit
def masked_crc32c_of_word(word: Any) -> Any:
    """The masked CRC-32C of the 8 bytes of a number, as uint32: that of a record's length."""
    return masked(_word(_ONES, word) ^ _ONES)
