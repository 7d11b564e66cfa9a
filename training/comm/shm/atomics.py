"""Words that processes share, inside kernels: atomic access, sleeping until one changes, numbers by their bits.

A flag is two uint32 in one cache line: a counter that wraps round, and the number of sleepers. A rank that publishes
makes the system call that wakes them only if there are any (futex(2): U. Drepper, Futexes are tricky, 2011).
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}  # the system call's number
FUTEX_CALL = _FUTEX_CALLS.get(platform.machine(), -1)  # -1: no shared memory on this processor
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF  # not FUTEX_PRIVATE: the word is shared by processes

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _word(builder: Any, address: Any, kind: Any = _I32) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    """The int32 at `address`; all that was written before it was published is then visible."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "seq_cst", 4)

    return types.int32(types.int64), generate


@intrinsic
def store_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Publish the int32 `value` at `address`, and all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), generate


@intrinsic
def add_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Add the int32 `value` at `address` in one step; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int32(types.int64, types.int32), generate


@intrinsic
def claim_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the int32 `value` at `address` if 0 is there; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(_I32, 0)
        found = builder.cmpxchg(_word(builder, args[0]), zero, args[1], "seq_cst", "seq_cst")
        return builder.extract_value(found, 0)

    return types.int32(types.int64, types.int32), generate


@intrinsic
def _futex(typingctx: Any, address: Any, operation: Any, value: Any, timeout: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64], var_arg=True)
        function = builder.module.globals.get("syscall") or ir.Function(builder.module, kind, "syscall")
        zero = ir.Constant(_I64, 0)
        return builder.call(function, [ir.Constant(_I64, FUTEX_CALL), *args, zero, zero])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def _relax(typingctx: Any) -> Any:
    """Let the processor pause for some cycles between two reads of a word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x86 = platform.machine() == "x86_64"
        name, values = ("llvm.x86.sse2.pause", []) if x86 else ("llvm.aarch64.hint", [ir.Constant(_I32, 1)])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), values)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def bits_of(typingctx: Any, value: Any) -> Any:
    """The 32 bits of a float32, as uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def pointer_like(typingctx: Any, like: Any, address: Any) -> Any:
    """Return `address` as a pointer of the type of `like`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], args[0].type)

    return like(like, types.int64), generate


@intrinsic
def call_reducer(typingctx: Any, function: Any, op: Any, n: Any, sources: Any, m: Any, targets: Any, count: Any) -> Any:
    """Call the compiled reducer at address `function`; see `lockstep.training.comm.shm.reduce`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64.as_pointer(), *[_I64] * 6])
        like = ir.Constant(_I64.as_pointer(), None)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [like, *args[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@njit
def reached(value: Any, target: Any) -> Any:
    """Whether the counter `value` has come to `target`, both int32 that wrap round."""
    return types.int32(value - target) >= 0


@njit
def publish(flag: Any, value: Any) -> Any:
    """Set the flag at address `flag` to the counter `value` (int32) and wake its sleepers."""
    store_word(flag, value)
    if load_word(flag + 4) > 0:
        _futex(flag, _WAKE, _ALL, 0)


@njit
def wait_until(flag: Any, target: Any, spins: Any, timeout: Any) -> Any:
    """Look `spins` times, then sleep until the flag reaches `target`; False if it did not move for `timeout`.

    `timeout` is the address of a timespec (two int64). False may also come early, by a signal.
    """
    for _ in range(spins):
        if reached(load_word(flag), target):
            return True
        _relax()
    add_word(flag + 4, types.int32(1))
    value = load_word(flag)
    while not reached(value, target):
        _futex(flag, _WAIT, types.int64(value), timeout)
        found = load_word(flag)
        if found == value:
            break
        value = found
    add_word(flag + 4, types.int32(-1))
    return reached(value, target)
