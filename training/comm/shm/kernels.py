"""Reductions of shared memory, each a kernel that does everything, waiting included, without the GIL.

Three ways, by what the ranks have announced: small buffers lie beside the announcements and every rank reduces all of
them; buffers in the segment are reduced where they lie, a part by each rank; others go through the stages in chunks.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import copy, load_i64
from training.comm.shm import atomics, shm_layout, shm_rounds
from training.comm.shm.atomics import call_reducer
from training.comm.shm.shm_layout import INLINE_BYTES
from training.comm.shm.shm_rounds import (
    ALL,
    BUFFER,
    CHUNK,
    ITEM,
    OP,
    RANK,
    RANKS,
    REDUCER,
    ROUND,
    SEGMENT,
    SELF,
    SIZE,
    SOURCES,
    TARGETS,
    announce_self,
    call_of,
    chunk,
    compare,
    end_call,
    half_of,
    inline_of,
    meet,
    next_round,
    part,
    table,
)

_kernel = kernels(__name__, memory, shm_layout, atomics, shm_rounds)


@njit
def _reduce(ctx: Any, targets: Any, count: Any) -> Any:
    sources = ctx[SELF] + 8 * table(ctx, SOURCES)
    call_reducer(ctx[REDUCER], ctx[OP], ctx[RANKS], sources, targets, ctx[SELF] + 8 * table(ctx, TARGETS), count)


@njit
def _all_in_segment(ctx: Any) -> Any:
    outside = 0
    for rank in range(ctx[RANKS]):
        outside += load_i64(call_of(ctx, rank) + 16) < 0
    return outside == 0


@njit
def _reduce_inline(ctx: Any) -> Any:
    """Every rank reduces all, or its part, from everybody's announcement."""
    start, size = types.int64(0), ctx[SIZE]
    if ctx[ALL] == 0:
        start, size = part(ctx, ctx[RANK])
    for rank in range(ctx[RANKS]):
        ctx[table(ctx, SOURCES) + rank] = inline_of(ctx, rank) + start
    ctx[table(ctx, TARGETS)] = ctx[BUFFER] + start
    if size:
        _reduce(ctx, 1, size // ctx[ITEM])


@njit
def _reduce_in_place(ctx: Any) -> Any:
    """Reduce the own part of everybody's buffer, into everybody's buffer."""
    start, size = part(ctx, ctx[RANK])
    for rank in range(ctx[RANKS]):
        address = ctx[SEGMENT] + load_i64(call_of(ctx, rank) + 16) + start
        ctx[table(ctx, SOURCES) + rank] = address
        ctx[table(ctx, TARGETS) + rank] = address
    if ctx[ALL] == 0:
        ctx[table(ctx, TARGETS)] = ctx[BUFFER] + start
    if size:
        _reduce(ctx, ctx[RANKS] if ctx[ALL] else 1, size // ctx[ITEM])


@njit
def _reduce_staged(ctx: Any, turn: Any) -> Any:
    """Stage chunk `turn` of the others' parts, reduce the one before of the own part, fetch the one before that."""
    mine = ctx[RANK]
    for rank in range(ctx[RANKS]):
        start, size = chunk(ctx, rank, turn)
        if rank != mine and size:
            copy(half_of(ctx, mine, turn) + rank * ctx[CHUNK], ctx[BUFFER] + start, size)
    start, size = chunk(ctx, mine, max(turn - 1, 0))
    if turn >= 1 and size:
        for rank in range(ctx[RANKS]):
            ctx[table(ctx, SOURCES) + rank] = half_of(ctx, rank, turn - 1) + mine * ctx[CHUNK]
        ctx[table(ctx, SOURCES) + mine] = ctx[BUFFER] + start
        ctx[table(ctx, TARGETS)] = ctx[BUFFER] + start
        ctx[table(ctx, TARGETS) + 1] = half_of(ctx, mine, turn - 1) + ctx[RANKS] * ctx[CHUNK]
        _reduce(ctx, 2 if ctx[ALL] else 1, size // ctx[ITEM])
    if turn >= 2 and ctx[ALL]:
        for rank in range(ctx[RANKS]):
            start, size = chunk(ctx, rank, turn - 2)
            if rank != mine and size:
                copy(ctx[BUFFER] + start, half_of(ctx, rank, turn - 2) + ctx[RANKS] * ctx[CHUNK], size)


@_kernel
def reduce_all(ctx: Any) -> Any:
    """all_reduce, reduce_scatter (ctx[ALL] 0) and barrier (ctx[SIZE] 0)."""
    if ctx[ROUND] == 0:
        announce_self(ctx)
    _, longest = part(ctx, 0)
    chunks = -(-longest // ctx[CHUNK])
    while True:
        waiting = meet(ctx)
        if waiting:
            return waiting
        if ctx[ROUND] == 1:
            different = compare(ctx)
            if different:
                return different
        if ctx[SIZE] <= INLINE_BYTES:
            _reduce_inline(ctx)
            return end_call(ctx)
        if _all_in_segment(ctx):
            if ctx[ROUND] == 2:
                return end_call(ctx)
            _reduce_in_place(ctx)
            next_round(ctx)
        else:
            turn = ctx[ROUND] - 1
            _reduce_staged(ctx, turn)
            if turn == chunks + (1 if ctx[ALL] else 0):
                return end_call(ctx)
            next_round(ctx)
