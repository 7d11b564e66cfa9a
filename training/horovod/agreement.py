"""Whether all ranks make the same call: Horovod pairs calls by name, here the n-th calls of all ranks belong together.

One small all_gather before each call compares what it is. So a script whose ranks differ (rank 0 alone calls, another
order, another shape) ends with an error that names both calls, and never with a wrong sum or a silent wait.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from lockstep.storage.errors import TrainingFailedError
from training.comm.base import Communicator


def agree(communicator: Communicator, number: int, text: str, extra: int = 0) -> list[int]:
    """Compare call `number` of this rank with the others'; returns every rank's `extra`.

    Raises TrainingFailedError on every rank alike, naming rank 0's call and the first that differs.
    """
    if communicator.num_ranks == 1:
        return [extra]
    digest = int.from_bytes(blake2b(f"{number} {text}".encode(), digest_size=8).digest(), "big", signed=True)
    rows = communicator.all_gather(np.array([digest, extra], np.int64))
    if (rows[:, 0] != rows[0, 0]).any():
        told = [part.decode() for part in communicator.all_gather_bytes(f"{text} (call {number})".encode())]
        other = next(rank for rank in range(len(told)) if told[rank] != told[0])
        raise TrainingFailedError(
            f"ranks 0 and {other} make different calls",
            got=f"rank 0: {told[0]}; rank {other}: {told[other]}",
            allowed="the same calls in the same order on all ranks, with equal shapes and dtypes",
            next_step="Look for a call under `if rank() == 0`, or for ranks with different numbers of batches.",
        )
    return [int(row) for row in rows[:, 1]]
