"""Collectives in shared memory: each kernel does the whole call, waiting included, without the GIL.

A reduction takes one of three ways, by what the ranks have announced: small buffers are stored next to the
announcements, and every rank reduces all of them; buffers in the segment are reduced in place, one part by each rank;
all others go through the stages in chunks. docs/decisions/042-shared-memory.md has the figures.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import copy, load_i64, store_u64
from lockstep.training.comm.shm import atomics, segment
from lockstep.training.comm.shm.atomics import call_reducer, load_word, publish, reached, wait_until
from lockstep.training.comm.shm.segment import (
    CALL_BYTES,
    CALLS,
    FLAG,
    HEADER_BYTES,
    HEADERS,
    INLINE_BYTES,
    PAGE_BYTES,
    SENT,
    SLOT_BYTES,
    SLOTS,
    TAKEN,
)

_kernel = kernels(__name__, memory, segment, atomics)

DONE, WAITING, DIFFERENT = 0, 1, 2  # what a kernel returns, plus RANK_FROM times the rank concerned
RANK_FROM = 4
(
    RANK, RANKS, STEP, CALL, ROUND, SPINS, TIMEOUT_S, TIMEOUT_NS,  # who, how far, how to wait
    TAG, SIZE, PLACE, LOOSE,  # the announcement; LOOSE 1 if sizes may differ by rank
    BUFFER, OWN, REDUCER, OP, ITEM, ALL, CHUNK, HALF,  # a reduction: ALL 1 if every rank gets the result
    CONTROL, INLINE, STAGE, PAIRS, SEGMENT,  # addresses in this process
    PEER, MESSAGE, SELF,  # send and recv: the other rank, slots used before; the address of ctx
) = range(28)  # fmt: skip
TABLES = 32
SOURCES, TARGETS, SIZES = range(3)  # tables after the numbers, each of RANKS numbers


@njit
def table(ctx: Any, table: Any) -> Any:
    return TABLES + table * ctx[RANKS]


@njit
def flag(ctx: Any, rank: Any) -> Any:
    return ctx[CONTROL] + rank * PAGE_BYTES + FLAG


@njit
def call_of(ctx: Any, rank: Any) -> Any:
    """The address of a rank's announcement of this call: two alternate, since no rank is two calls ahead."""
    return ctx[CONTROL] + rank * PAGE_BYTES + CALLS + (ctx[CALL] & 1) * CALL_BYTES


@njit
def inline_of(ctx: Any, rank: Any) -> Any:
    return ctx[INLINE] + (2 * rank + (ctx[CALL] & 1)) * INLINE_BYTES


@njit
def half_of(ctx: Any, rank: Any, turn: Any) -> Any:
    return ctx[STAGE] + (2 * rank + (turn & 1)) * ctx[HALF]


@njit
def announce_self(ctx: Any) -> Any:
    place = call_of(ctx, ctx[RANK])
    store_u64(place, types.uint64(ctx[TAG]))
    store_u64(place + 8, types.uint64(ctx[SIZE]))
    store_u64(place + 16, types.uint64(ctx[PLACE]))
    if ctx[OWN] <= INLINE_BYTES:
        copy(inline_of(ctx, ctx[RANK]), ctx[BUFFER], ctx[OWN])
    next_round(ctx)


@njit
def next_round(ctx: Any) -> Any:
    ctx[ROUND] += 1
    publish(flag(ctx, ctx[RANK]), types.int32(ctx[STEP] + ctx[ROUND]))


@njit
def end_call(ctx: Any) -> Any:
    ctx[STEP] += ctx[ROUND]
    ctx[CALL] += 1
    return DONE


@njit
def meet(ctx: Any) -> Any:
    """Wait until all ranks have ended the previous round; 0, or the status to return."""
    target = types.int32(ctx[STEP] + ctx[ROUND])
    for rank in range(ctx[RANKS]):
        if rank == ctx[RANK] or reached(load_word(flag(ctx, rank)), target):
            continue
        if not wait_until(flag(ctx, rank), target, ctx[SPINS], ctx[SELF] + 8 * TIMEOUT_S):
            return WAITING + RANK_FROM * rank
    return 0


@njit
def compare(ctx: Any) -> Any:
    """Return 0 if every rank has announced the same, else the status to return."""
    for rank in range(ctx[RANKS]):
        place = call_of(ctx, rank)
        differs = load_i64(place) != ctx[TAG]
        if differs or (ctx[LOOSE] == 0 and load_i64(place + 8) != ctx[SIZE]):
            return DIFFERENT + RANK_FROM * rank
    return 0


@njit
def part(ctx: Any, rank: Any) -> Any:
    """Return (first byte, bytes) of a rank's part, like lockstep.training.comm.base.part_bounds."""
    count = ctx[SIZE] // ctx[ITEM]
    each, longer = count // ctx[RANKS], count % ctx[RANKS]
    start = rank * each + min(rank, longer)
    return start * ctx[ITEM], (each + (1 if rank < longer else 0)) * ctx[ITEM]


@njit
def chunk(ctx: Any, rank: Any, turn: Any) -> Any:
    """Return (first byte, bytes) of chunk `turn` of a rank's part; 0 bytes if it has no such chunk."""
    start, size = part(ctx, rank)
    done = min(size, turn * ctx[CHUNK])
    return start + done, min(size - done, ctx[CHUNK])


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
    """Reduce all, or this rank's part, from the buffers next to the announcements."""
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
    """Reduce this rank's part of all ranks' buffers, into all ranks' buffers."""
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
    """Stage chunk `turn` of the others' parts, reduce chunk `turn - 1` of this rank's part, fetch chunk `turn - 2`."""
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
    """Do all_reduce, reduce_scatter (ctx[ALL] 0) or barrier (ctx[SIZE] 0)."""
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


@_kernel
def announce(ctx: Any) -> Any:
    """Round 0 of a gather whose sizes differ; then `announced_size` reads them, and `gather` continues the call."""
    if ctx[ROUND] == 0:
        announce_self(ctx)
    waiting = meet(ctx)
    return waiting if waiting else compare(ctx)


@_kernel
def announced_size(ctx: Any, rank: Any) -> Any:
    """The bytes that a rank has announced in this call."""
    return load_i64(call_of(ctx, rank) + 8)


@_kernel
def gather(ctx: Any) -> Any:
    """Copy SIZES[r] bytes of each rank r to TARGETS[r] (0: skip) on every rank; this rank's are at BUFFER."""
    if ctx[ROUND] == 0:
        announce_self(ctx)
    mine, ranks = ctx[RANK], ctx[RANKS]
    while True:
        waiting = meet(ctx)
        if waiting:
            return waiting
        turn = ctx[ROUND] - 1
        if turn == 0:
            different = compare(ctx)
            if different:
                return different
        chunks, direct = types.int64(0), False
        for rank in range(ranks):
            size, target = ctx[table(ctx, SIZES) + rank], ctx[table(ctx, TARGETS) + rank]
            place = load_i64(call_of(ctx, rank) + 16)
            if size <= INLINE_BYTES:
                if turn == 0 and target:
                    copy(target, inline_of(ctx, rank), size)
            elif place >= 0:
                direct = True
                if turn == 0 and target:
                    copy(target, ctx[SEGMENT] + place, size)
            else:
                chunks = max(chunks, -(-size // ctx[HALF]))
                done = min(size, turn * ctx[HALF])
                if rank == mine:
                    copy(half_of(ctx, mine, turn), ctx[BUFFER] + done, min(size - done, ctx[HALF]))
                before = min(size, (turn - 1) * ctx[HALF])
                if turn >= 1 and target:
                    copy(target + before, half_of(ctx, rank, turn - 1), min(size - before, ctx[HALF]))
        # A buffer must not change before all have read it: one more round.
        if turn >= (1 if direct and chunks == 0 else chunks):
            return end_call(ctx)
        next_round(ctx)


@_kernel
def exchange(ctx: Any) -> Any:
    """Copy SIZES[r] bytes at SOURCES[r] of each rank r's buffer to TARGETS[r].

    If a rank's buffer is not in the segment, nothing is copied on any rank, and ctx[ALL] becomes 0.
    """
    if ctx[ROUND] == 0:
        announce_self(ctx)
    while True:
        waiting = meet(ctx)
        if waiting:
            return waiting
        if ctx[ROUND] == 2:  # a buffer must not change before all have read it
            return end_call(ctx)
        different = compare(ctx)
        if different:
            return different
        if not _all_in_segment(ctx):
            ctx[ALL] = 0
            return end_call(ctx)
        for rank in range(ctx[RANKS]):
            source = ctx[SEGMENT] + load_i64(call_of(ctx, rank) + 16) + ctx[table(ctx, SOURCES) + rank]
            copy(ctx[table(ctx, TARGETS) + rank], source, ctx[table(ctx, SIZES) + rank])
        next_round(ctx)


@njit
def _pair(ctx: Any, sender: Any, receiver: Any) -> Any:
    return ctx[PAIRS] + (sender * ctx[RANKS] + receiver) * (PAGE_BYTES + SLOTS * SLOT_BYTES)


@_kernel
def send(ctx: Any) -> Any:
    """Put ctx[SIZE] bytes at BUFFER into the slots to PEER; ROUND counts the slots of this message."""
    pair = _pair(ctx, ctx[RANK], ctx[PEER])
    while ctx[ROUND] == 0 or ctx[ROUND] * SLOT_BYTES < ctx[SIZE]:
        number = ctx[MESSAGE] + ctx[ROUND]
        free_from = types.int32(number - SLOTS + 1)
        if not wait_until(pair + TAKEN, free_from, ctx[SPINS], ctx[SELF] + 8 * TIMEOUT_S):
            return WAITING + RANK_FROM * ctx[PEER]
        header = pair + HEADERS + (number % SLOTS) * HEADER_BYTES
        store_u64(header, types.uint64(ctx[TAG]))
        store_u64(header + 8, types.uint64(ctx[SIZE]))
        done = ctx[ROUND] * SLOT_BYTES
        slot = pair + PAGE_BYTES + (number % SLOTS) * SLOT_BYTES
        copy(slot, ctx[BUFFER] + done, min(ctx[SIZE] - done, SLOT_BYTES))
        ctx[ROUND] += 1
        publish(pair + SENT, types.int32(number + 1))
    return DONE


@_kernel
def receive(ctx: Any) -> Any:
    """Receive what `send` of the peer stores, a slot at a time."""
    pair = _pair(ctx, ctx[PEER], ctx[RANK])
    while ctx[ROUND] == 0 or ctx[ROUND] * SLOT_BYTES < ctx[SIZE]:
        number = ctx[MESSAGE] + ctx[ROUND]
        if not wait_until(pair + SENT, types.int32(number + 1), ctx[SPINS], ctx[SELF] + 8 * TIMEOUT_S):
            return WAITING + RANK_FROM * ctx[PEER]
        header = pair + HEADERS + (number % SLOTS) * HEADER_BYTES
        if load_i64(header) != ctx[TAG] or load_i64(header + 8) != ctx[SIZE]:
            return DIFFERENT + RANK_FROM * ctx[PEER]
        done = ctx[ROUND] * SLOT_BYTES
        slot = pair + PAGE_BYTES + (number % SLOTS) * SLOT_BYTES
        copy(ctx[BUFFER] + done, slot, min(ctx[SIZE] - done, SLOT_BYTES))
        ctx[ROUND] += 1
        publish(pair + TAKEN, types.int32(number + 1))
    return DONE
