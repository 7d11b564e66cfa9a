"""Before the first exchange: all ranks must be about to sum the same tensors in the same order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from storage.canonical import canonical_bytes, parse_canonical
from storage.errors import ConfigError
from training.comm.base import Communicator


def compare(communicator: Communicator, tensors: Sequence[str]) -> None:
    """Raise ConfigError, on every rank alike, unless all give the same `tensors` (name, shape and dtype in words)."""
    mine = canonical_bytes(list(tensors))
    digests = communicator.all_gather_bytes(hashlib.sha256(mine).digest())
    if len(set(digests)) == 1:
        return
    lists = [parse_canonical(data, file="a rank") for data in communicator.all_gather_bytes(mine)]
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    theirs, first = [str(name) for name in lists[rank]], [str(name) for name in lists[0]]
    only_theirs = [name for name in theirs if name not in first]
    only_first = [name for name in first if name not in theirs]
    if not only_theirs and not only_first:
        only_theirs, only_first = theirs, first  # the order alone
    raise ConfigError(
        f"rank {rank} has gradients for other tensors than rank 0",
        got=f"on rank {rank}: {_words(only_theirs, len(theirs))}",
        allowed=f"the same on all, as on rank 0: {_words(only_first, len(first))}",
        next_step="Build the same model on every rank: the same layers in one order, frozen alike, every output in the "
        "loss of every rank.",
    )


def _words(names: list[str], count: int) -> str:
    shown = ", ".join(names[:20]) or "nothing that the other lacks"
    return f"{shown}{', ...' if len(names) > 20 else ''} ({count} in all)"
