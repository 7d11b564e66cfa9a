"""Copies rows of many columns straight into batches: loops over the addresses of arrays, without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import (
    copy,
    fence,
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    store_f32,
    store_u8,
    store_u32,
    store_u64,
    stream,
)

_kernel = kernels(__name__, memory)

# The forms of a source: rows end to end, the address of each row, or int64 that become float32.
VALUES, ADDRESSES, NARROWED = range(3)
ADDRESS_BYTES = 8
EXACT = 1 << 24  # up to here float32 holds every integer
STREAM_BYTES = 1024  # rows from this size on bypass the caches, which their batches would overflow
PAIR_BYTES = 16  # of a list: the address of its values, and their number


@_kernel
def assign_rows(
    orders: Any,
    pieces: Any,
    each: Any,
    rows: Any,
    base: Any,
    chunk_steps: Any,
    start: Any,
    epoch_targets: Any,
    chunk_of: Any,
    row_of: Any,
) -> None:
    """Compute the chunk and row of each record of some pieces of windows, and write its epoch there.

    pieces (p, 7) int64: the lane's number among this rank's, epoch, first sample, size, skip and count of
    lockstep.training.batches.assembly.Piece, and the start of its window's order in `orders`. A step takes `each`
    samples of a lane and has `rows` rows; a chunk has `chunk_steps` steps, and step `base` is the first of chunk 0. The
    results are chunk_of and row_of (n,) int64, piece after piece, with chunk -1 for samples before `start`; epochs are
    written to the arrays at the addresses epoch_targets (chunks,).
    """
    at = 0
    for piece in range(len(pieces)):
        lane, epoch, first = pieces[piece, 0], pieces[piece, 1], pieces[piece, 2]
        size, skip, count = pieces[piece, 3], pieces[piece, 4], pieces[piece, 5]
        order = pieces[piece, 6]
        for number in range(size):
            record = orders[order + number] - skip
            if record < 0 or record >= count:
                continue
            sample = first + number
            if sample < start:
                chunk_of[at + record] = -1
                continue
            step, rest = sample // each - base, sample % each
            chunk = step // chunk_steps
            row = (step - chunk * chunk_steps) * rows + lane * each + rest
            chunk_of[at + record], row_of[at + record] = chunk, row
            store_u64(epoch_targets[chunk] + 8 * row, np.uint64(epoch))
        at += count


@njit(forceinline=True)
def _put(target: Any, source: Any, width: Any) -> None:
    if width >= STREAM_BYTES:
        stream(target, source, width)
    else:
        copy(target, source, width)


@_kernel
def scatter(
    widths: Any,
    forms: Any,
    sources: Any,
    tables: Any,
    firsts: Any,
    counts: Any,
    chunk_of: Any,
    row_of: Any,
    targets: Any,
) -> Any:
    """Copy rows to their batches: those of segment s are counts[s] rows of table tables[s] from row firsts[s] on.

    widths (k,) int64: bytes of a row of each column f; sources[t, f], forms[t, f]: the column's address and form in
    table t; targets[c, f]: its address in chunk c. Returns the first column that has an integer which float32 cannot
    hold, and its table; (-1, 0) if there is none.
    """
    for f in range(len(widths)):
        width, at = widths[f], 0
        for segment in range(len(tables)):
            table = tables[segment]
            end = at + counts[segment]
            if forms[table, f] == ADDRESSES:
                source = sources[table, f] + ADDRESS_BYTES * firsts[segment]
                for row in range(at, end):
                    if chunk_of[row] >= 0:
                        _put(targets[chunk_of[row], f] + width * row_of[row], load_i64(source), width)
                    source += ADDRESS_BYTES
                at = end
                continue
            if forms[table, f] == NARROWED:
                source, wrong = sources[table, f] + 8 * firsts[segment], 0
                for row in range(at, end):
                    value = load_i64(source)
                    wrong += (value > EXACT) | (value < -EXACT)
                    if chunk_of[row] >= 0:
                        store_f32(targets[chunk_of[row], f] + 4 * row_of[row], np.float32(value))
                    source += 8
                if wrong:
                    return f, table
                at = end
                continue
            source = sources[table, f] + width * firsts[segment]
            if width == 4:
                for row in range(at, end):
                    if chunk_of[row] >= 0:
                        store_u32(targets[chunk_of[row], f] + 4 * row_of[row], load_u32(source))
                    source += 4
            elif width == 8:
                for row in range(at, end):
                    if chunk_of[row] >= 0:
                        store_u64(targets[chunk_of[row], f] + 8 * row_of[row], load_u64(source))
                    source += 8
            elif width == 1:
                for row in range(at, end):
                    if chunk_of[row] >= 0:
                        store_u8(targets[chunk_of[row], f] + row_of[row], load_u8(source))
                    source += 1
            else:
                for row in range(at, end):
                    if chunk_of[row] >= 0:
                        _put(targets[chunk_of[row], f] + width * row_of[row], source, width)
                    source += width
            at = end
    fence()
    return -1, 0


@_kernel
def join_lists(pairs: Any, width: Any, offsets: Any, target: Any) -> None:
    """Copy lists end to end to the address `target`: pairs (n, 2) int64 are the address of each list and its number of
    values of `width` bytes, offsets (n + 1,) int64 their positions in the target.
    """
    for row in range(len(pairs)):
        copy(target + width * offsets[row], pairs[row, 0], width * pairs[row, 1])
