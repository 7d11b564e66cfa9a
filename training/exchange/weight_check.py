"""Every so many steps ranks compare checksums of their weights: copies that parted are no longer one model.

Ranks apply equal sums to equal weights, so they stay equal bit for bit, unless memory or a processor fails on one of
them, or a layer or callback changes weights by what one rank alone sees. The sums hide it: each rank goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import LockstepError
from training.comm.base import Communicator
from training.exchange.variable_view import view_of

MAX_NAMED = 10


class DivergedError(LockstepError):
    """Ranks' weights are not equal bit for bit; a restart goes on from a checkpoint, whose weights were compared."""


class WeightCheck:
    """Compares `variables` (of Keras, equal in order on all ranks) after each step that `every` divides."""

    def __init__(self, communicator: Communicator, variables: Sequence[Any], every: int) -> None:
        self._comm, self._variables, self._every = communicator.on_host, list(variables), every

    def after(self, step: int) -> None:
        """A collective after each step that is due. Raises DivergedError, on every rank alike."""
        if step % self._every == 0:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare now: 4 bytes a variable from each rank, in one message. Raises DivergedError, on every rank alike."""
        if self._comm.num_ranks == 1:
            return
        sums = checksums(self._variables)
        everyone = self._comm.all_gather(sums)
        if (everyone == everyone[0]).all():
            return
        raise _diverged(step, everyone, [variable.path for variable in self._variables])


def checksums(variables: Sequence[Any]) -> NDArray[np.int64]:
    """(variables,) int64: CRC32C of the bytes of each, which finds any burst of up to 32 changed bits for sure."""
    return np.array([google_crc32c.value(_bytes(variable)) for variable in variables], np.int64)


def _bytes(variable: Any) -> NDArray[np.uint8]:
    """The variable's memory, flat; on a CPU without a copy where TensorFlow lends it."""
    flat = np.ascontiguousarray(view_of(variable)).reshape(-1).view(np.uint8)
    flat.flags.writeable = False  # google_crc32c takes no other, and no memoryview
    return flat


def _diverged(step: int, sums: NDArray[np.int64], paths: Sequence[str]) -> DivergedError:
    """sums (ranks, variables)."""
    rows = [tuple(row) for row in sums.tolist()]
    (common, count), *_ = Counter(rows).most_common()
    if 2 * count > len(rows):
        odd = [rank for rank, row in enumerate(rows) if row != common]
        what = f"the weights of {_ranks(odd)} are not those of the other {count} ranks after step {step}"
        allowed = f"the same on all ranks, bit for bit; a majority, {count} of {len(rows)}, agrees"
    else:
        common, odd = rows[0], [rank for rank, row in enumerate(rows) if row != rows[0]]
        what = f"the weights of {_ranks(odd)} are not those of rank 0 after step {step}"
        allowed = "the same on all ranks, bit for bit; no majority agrees, so any of them may be wrong"
    # The first variable in which any of them differs: what went wrong there may have spread since.
    first = next(i for i in range(len(paths)) if any(rows[rank][i] != common[i] for rank in odd))
    values = ", ".join(f"{rows[rank][first]:08x} on rank {rank}" for rank in odd[:MAX_NAMED])
    count = sum(any(rows[rank][i] != common[i] for rank in odd) for i in range(len(paths)))
    return DivergedError(
        what,
        got=f"{paths[first]} and {count - 1} more of {len(paths)} variables; CRC32C of the first: {values}, "
        f"{common[first]:08x} elsewhere",
        allowed=allowed,
        next_step="A restart goes on from the last checkpoint. Where it comes again on one host, test its memory; "
        "where at the same step, look for a layer or callback that changes weights by what one rank alone sees.",
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
