"""Loops over the rows of a table: an index of keys, first values, look-ups, sums of gradients, the optimizers."""

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


@njit
def _drawn(place: Any, key: Any, spread: Any) -> Any:
    """A number from -spread to spread: a function of place (uint64) and key (uint64)."""
    unit = np.float64(_mixed(_U(_mixed(_U(place + _U(1))) ^ key)) >> _U(11)) * 2.0**-53
    return (2.0 * unit - 1.0) * spread


@_kernel
def draw(rows: Any, first: Any, key: Any, spread: Any) -> None:
    """Fill `rows` (n, width) with numbers from -spread to spread: a function of key (uint64) and place in the table.

    Row 0 of `rows` is row `first` of the table.
    """
    count, width = rows.shape
    for row in range(count):
        for column in range(width):
            rows[row, column] = _drawn(_U(first + row) * _U(width) + _U(column), key, spread)


@_kernel
def draw_each(rows: Any, keys: Any, key: Any, spread: Any) -> None:
    """Draw rows (n, width) as `draw` does, where row i depends only on its key keys[i] (int64)."""
    count, width = rows.shape
    for row in range(count):
        for column in range(width):
            rows[row, column] = _drawn(_U(_U(keys[row]) * _U(width) + _U(column)), key, spread)


@_kernel
def find(slots: Any, keys: Any, asked: Any, out: Any) -> None:
    """The place of each of `asked` (n,) in `keys` (int64), in out (n,); 0 for a key that is not there.

    `slots` is a hash table by linear probing: places in `keys`, 0 where empty; a power of two, never full. Keys are
    mixed already, so their low bits are the first slot.
    """
    last = len(slots) - 1
    for i in range(len(asked)):
        slot = asked[i] & last
        while slots[slot] != 0 and keys[slots[slot]] != asked[i]:
            slot = (slot + 1) & last
        out[i] = slots[slot]


@_kernel
def insert(slots: Any, keys: Any, start: Any, stop: Any) -> None:
    """Put the places `start` to `stop` of `keys`, whose keys are new, into the hash table of `find`."""
    last = len(slots) - 1
    for place in range(start, stop):
        slot = keys[place] & last
        while slots[slot] != 0:
            slot = (slot + 1) & last
        slots[slot] = place


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


@_kernel
def adam(
    rows: Any, means: Any, squares: Any, chosen: Any, first: Any, sums: Any, rate: Any, keep: Any, epsilon: Any
) -> None:
    """Update row chosen[i] - first of `rows` (n, width) by its gradient sums[i]; other rows and their state stay.

    `keep` (2,): how much of the mean of gradients and of squared gradients, `means` and `squares` (n, width), is kept.
    `rate` has the correction of their bias.
    """
    count, width = sums.shape
    one = keep[0] / keep[0]
    for i in range(count):
        if i + AHEAD < count:
            _prefetch(rows, chosen[i + AHEAD] - first)
        row = chosen[i] - first
        for column in range(width):
            gradient = sums[i, column]
            mean = means[row, column] * keep[0] + gradient * (one - keep[0])
            square = squares[row, column] * keep[1] + gradient * gradient * (one - keep[1])
            means[row, column], squares[row, column] = mean, square
            rows[row, column] -= rate * mean / (np.sqrt(square) + epsilon)
