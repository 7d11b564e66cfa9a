"""Before the first exchange: all ranks must be about to sum the same tensors in the same order."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence

from lockstep.storage.documents import canonical_bytes, parse_canonical
from lockstep.storage.errors import ConfigError
from training.comm.base import Communicator

_LAYER = re.compile(r"([\w.-]+?)(?:_([0-9]+))?(?=/)")  # a part of a path, with the number that Keras gave it
log = logging.getLogger(__name__)


def compare(communicator: Communicator, tensors: Sequence[str]) -> None:
    """Raise ConfigError, on every rank alike, unless all give the same `tensors` (name, shape and dtype in words).

    Keras numbers layers by what the process has built before: numbers that are all higher on one rank are the same
    layers, which is logged. Names count nevertheless: of layers of one shape another may be frozen.
    """
    mine = canonical_bytes(list(tensors))
    counted = canonical_bytes(counted_from_0(tensors))
    both = communicator.all_gather_bytes(hashlib.sha256(counted).digest() + hashlib.sha256(mine).digest())
    digests = [one[:32] for one in both]
    if len(set(digests)) == 1:
        if len(set(both)) > 1:
            log.warning(
                "layers are numbered otherwise on other ranks, and taken for the same in their order; here %s",
                _words(list(tensors), len(tensors)),
            )
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


def counted_from_0(names: Sequence[str]) -> list[str]:
    """The names, the layers of each kind numbered from the lowest that is among them: dense_4/, dense_5/ are 0 and 1.

    A layer without a number is Keras' number 0.
    """
    lowest: dict[str, int] = {}
    for name in names:
        for kind, number in _LAYER.findall(name):
            lowest[kind] = min(int(number or 0), lowest.get(kind, int(number or 0)))
    return [_LAYER.sub(lambda part: f"{part[1]}_{int(part[2] or 0) - lowest[part[1]]}", name) for name in names]


def _words(names: list[str], count: int) -> str:
    shown = ", ".join(names[:20]) or "nothing that the other lacks"
    return f"{shown}{', ...' if len(names) > 20 else ''} ({count} in all)"
