"""What ranks do that are two on some hosts; the name that a task gives is `tests.network.two_level_ranks:...`."""

from __future__ import annotations

import hashlib
from typing import Any

from lockstep.training.comm import CommOptions
from lockstep.training.control.context import RankContext
from tests.network.entries import values


def sums(context: RankContext) -> dict[str, Any]:
    """Joins without any option, then by two levels, and reduces by each."""
    found: dict[str, Any] = {}
    for asked in ("auto", "hierarchical"):
        joined = context.join(CommOptions(algorithm=asked))
        assert joined.plan is not None
        digest = hashlib.sha256()
        for size in (1, 3000, 200_001):
            buf = values(context.world.rank, size)
            joined.communicator.all_reduce(buf)
            digest.update(buf.tobytes())
        found[asked] = {
            "backend": joined.plan.backend,
            "host_of": list(joined.plan.layout.host_of),
            "algorithm": joined.plan.choose(1 << 20),
            "sums": digest.hexdigest(),
        }
        joined.communicator.barrier()
        joined.communicator.close()
    return found
