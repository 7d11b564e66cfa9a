"""Loops over the rows of a table: first values, look-ups, sums of gradients, row-wise Adagrad."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from lockstep.storage.kernels.jit import kernels

_kernel = kernels(__name__)
_U = np.uint64
AHEAD = 16  # rows between the one that is copied and the one that is fetched; 8 to 32 measured alike


@intrinsic
def _prefetch(typingctx: Any, array: Any, row: Any) -> Any:
    """Ask for the first cache line of a row of a contiguous array (n, width)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = context.make_array(signature.args[0])(context, builder, args[0])
        stride = builder.extract_value(found.strides, 0)
        byte = ir.IntType(8).as_pointer()
        address = builder.gep(builder.bitcast(found.data, byte), [builder.mul(stride, args[1])])
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        builder.call(function, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@njit
def _mixed(counter: Any) -> Any:
    """SplitMix64's finaliser (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
    z = _U(counter * _U(0x9E3779B97F4A7C15))
    z = _U((z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9))
    z = _U((z ^ (z >> _U(27))) * _U(0x94D049BB133111EB))
    return _U(z ^ (z >> _U(31)))


@_kernel
def draw(rows: Any, first: Any, key: Any, spread: Any) -> None:
    """Fill `rows` (n, width) with numbers from -spread to spread: a function of key (uint64) and place in the table.

    Row 0 of `rows` is row `first` of the table.
    """
    count, width = rows.shape
    for row in range(count):
        for column in range(width):
            place = _U(first + row) * _U(width) + _U(column)
            unit = np.float64(_mixed(_U(_mixed(_U(place + _U(1))) ^ key)) >> _U(11)) * 2.0**-53
            rows[row, column] = (2.0 * unit - 1.0) * spread


@_kernel
def gather(rows: Any, chosen: Any, first: Any, out: Any) -> None:
    """Copy row chosen[i] - first of `rows` (n, width) to out[i]; `chosen` (m,) int64, `out` (m, width)."""
    count, width = out.shape
    for i in range(count):
        if i + AHEAD < count:
            _prefetch(rows, chosen[i + AHEAD] - first)
        row = chosen[i] - first
        for column in range(width):
            out[i, column] = rows[row, column]


@_kernel
def add_by_place(values: Any, places: Any, factor: Any, out: Any) -> None:
    """Add factor * values[i] to out[places[i]] in the order of i; `values` (n, width), `places` (n,) int64."""
    count, width = values.shape
    for i in range(count):
        place = places[i]
        for column in range(width):
            out[place, column] += values[i, column] * factor


@_kernel
def adagrad(rows: Any, squares: Any, chosen: Any, first: Any, sums: Any, rate: Any, epsilon: Any) -> None:
    """Update row chosen[i] - first of `rows` (n, width) by its gradient sums[i]; each row is in `chosen` (m,) once.

    squares[row] grows by the mean of the squared gradient; the row moves by rate / (sqrt(squares[row]) + epsilon).
    """
    count, width = sums.shape
    for i in range(count):
        if i + AHEAD < count:
            _prefetch(rows, chosen[i + AHEAD] - first)
        row = chosen[i] - first
        total = squares[row] * 0
        for column in range(width):
            total += sums[i, column] * sums[i, column]
        squares[row] += total / width
        step = rate / (np.sqrt(squares[row]) + epsilon)
        for column in range(width):
            rows[row, column] -= step * sums[i, column]
