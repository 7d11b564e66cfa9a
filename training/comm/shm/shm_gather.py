"""Kernels of shared memory that copy: gathers, broadcast, send and receive."""

from __future__ import annotations

from typing import Any

from numba import njit, types

from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import copy, load_i64, store_u64
from training.comm.shm import atomics, shm_layout, shm_rounds
from training.comm.shm.atomics import publish, wait_until
from training.comm.shm.shm_layout import HEADER_BYTES, HEADERS, INLINE_BYTES, PAGE_BYTES, SENT, SLOT_BYTES, SLOTS, TAKEN
from training.comm.shm.shm_rounds import (
    BUFFER,
    DIFFERENT,
    DONE,
    HALF,
    MESSAGE,
    PAIRS,
    PEER,
    RANK,
    RANK_FROM,
    RANKS,
    ROUND,
    SEGMENT,
    SELF,
    SIZE,
    SIZES,
    SPINS,
    TAG,
    TARGETS,
    TIMEOUT_S,
    WAITING,
    announce_self,
    call_of,
    compare,
    end_call,
    half_of,
    inline_of,
    meet,
    next_round,
    table,
)

_kernel = kernels(__name__, memory, shm_layout, atomics, shm_rounds)


@_kernel
def announce(ctx: Any) -> Any:
    """Round 0 of a gather whose sizes differ: afterwards `announced_size` knows them, and `gather` goes on."""
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
    """Copy SIZES[r] bytes of each rank r to TARGETS[r] (0: not wanted) on every rank; the OWN ones are at BUFFER."""
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
        # A buffer that others read must stay as it is until all have: one more round.
        if turn >= (1 if direct and chunks == 0 else chunks):
            return end_call(ctx)
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
    """The other side of `send`."""
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
