"""A collective of shared memory goes in rounds; what its kernels have in common.

In round 0 a rank announces what it calls (tag, size, where its buffer lies) and sets its flag; round i begins once
every flag has come to i, and ends by setting the own one. So the ranks move in step, two halves of a stage are enough,
and what a rank reads has been written in an earlier round. Before the first byte is touched all announcements are
compared.

A kernel that waits too long returns WAITING and the rank; called again, it goes on where it was. `ctx` is one array of
int64: the numbers below, then tables of a number a rank. Counters and addresses are numbers, sizes are bytes.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from lockstep.storage.kernels.memory import copy, load_i64, store_u64
from training.comm.shm.atomics import load_word, publish, reached, wait_until
from training.comm.shm.shm_layout import CALL_BYTES, CALLS, FLAG, INLINE_BYTES, PAGE_BYTES

DONE, WAITING, DIFFERENT = 0, 1, 2  # what a kernel returns, plus RANK_FROM times the rank concerned
RANK_FROM = 4
(
    RANK, RANKS, STEP, CALL, ROUND, SPINS, TIMEOUT_S, TIMEOUT_NS,  # who, how far, how to wait
    TAG, SIZE, PLACE, LOOSE,  # the announcement; LOOSE 1 where sizes may differ by rank
    BUFFER, OWN, REDUCER, OP, ITEM, ALL, CHUNK, HALF,  # a reduction: ALL 1 where every rank gets the result
    CONTROL, INLINE, STAGE, PAIRS, SEGMENT,  # addresses in this process
    PEER, MESSAGE, SELF,  # send and recv: the other rank, slots used before; the address of ctx
) = range(28)  # fmt: skip
TABLES = 32
SOURCES, TARGETS, SIZES = range(3)  # tables behind the numbers, each of RANKS numbers


@njit
def table(ctx: Any, table: Any) -> Any:
    return TABLES + table * ctx[RANKS]


@njit
def flag(ctx: Any, rank: Any) -> Any:
    return ctx[CONTROL] + rank * PAGE_BYTES + FLAG


@njit
def call_of(ctx: Any, rank: Any) -> Any:
    """The address of a rank's announcement of this call: two take turns, since nobody is two calls ahead."""
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
    """Wait until all have ended the round before; 0, or what to return."""
    target = types.int32(ctx[STEP] + ctx[ROUND])
    for rank in range(ctx[RANKS]):
        if rank == ctx[RANK] or reached(load_word(flag(ctx, rank)), target):
            continue
        if not wait_until(flag(ctx, rank), target, ctx[SPINS], ctx[SELF] + 8 * TIMEOUT_S):
            return WAITING + RANK_FROM * rank
    return 0


@njit
def compare(ctx: Any) -> Any:
    """0 if every rank has announced the same, else what to return."""
    for rank in range(ctx[RANKS]):
        place = call_of(ctx, rank)
        differs = load_i64(place) != ctx[TAG]
        if differs or (ctx[LOOSE] == 0 and load_i64(place + 8) != ctx[SIZE]):
            return DIFFERENT + RANK_FROM * rank
    return 0


@njit
def part(ctx: Any, rank: Any) -> Any:
    """(first byte, bytes) of a rank's part, as training.comm.base.part_bounds."""
    count = ctx[SIZE] // ctx[ITEM]
    each, longer = count // ctx[RANKS], count % ctx[RANKS]
    start = rank * each + min(rank, longer)
    return start * ctx[ITEM], (each + (1 if rank < longer else 0)) * ctx[ITEM]


@njit
def chunk(ctx: Any, rank: Any, turn: Any) -> Any:
    """(first byte, bytes) of chunk `turn` of a rank's part; 0 bytes where it has no such chunk."""
    start, size = part(ctx, rank)
    done = min(size, turn * ctx[CHUNK])
    return start + done, min(size - done, ctx[CHUNK])
