"""What a rank's entry is given."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lockstep.storage.errors import ConfigError
from lockstep.training.control.client import ControlClient
from lockstep.training.control.messages import MadePlan
from lockstep.training.control.task import CommOrder
from lockstep.training.world import World

if TYPE_CHECKING:
    from lockstep.training.comm import CommOptions, Joined
    from lockstep.training.comm.base import Communicator
    from lockstep.training.comm.tls import Credentials

JOIN_S = 120.0  # ranks start at the same time; only the import of their modules takes longer on some
NUM_RANKS = "LOCKSTEP_NUM_RANKS"


class RankContext(AbstractContextManager["RankContext"]):
    """World, control channel and payload of one rank: its order as JSON, whose `comm`, if it has one, is a CommOrder.

    `host` is the address at which other ranks reach it.
    """

    def __init__(
        self,
        world: World,
        control: ControlClient,
        payload: dict[str, Any],
        key: bytes,
        host: str,
        stall_s: float,
        tls: Credentials | None = None,
    ) -> None:
        self.world, self.control, self.payload, self.host = world, control, payload, host
        self._key, self._stall_s, self._tls = key, stall_s, tls
        self._communicator: Communicator | None = None

    @property
    def comm(self) -> CommOrder:
        """How the ranks connect."""
        return CommOrder.from_json(self.payload.get("comm", {}))

    def communicator(self, join_s: float = JOIN_S, arena_bytes: int | None = None) -> Communicator:
        """The ranks' communicator, connected at the first call and closed when the entry returns.

        Its collectives wait as long as the launch's stall limit, since a rank may trace or write a checkpoint while
        others wait. `arena_bytes` is the most that each rank of a host will allocate in shared memory, the same on all
        of them (None: unknown). Raises CommunicationError naming the rank that did not join within `join_s`.
        """
        if self._communicator is None:
            joined = self.join(self.comm.options, join_s, arena_bytes)
            self._communicator = joined.communicator
            if joined.calibrated and self.comm.freeze and self.world.is_leader:
                assert joined.plan is not None
                # The driver answers before this rank makes a step, so before any checkpoint depends on the plan.
                self.control.request("comm_plan", self._stall_s, **MadePlan(plan=joined.plan.to_json()).to_json())
        return self._communicator

    def join(self, options: CommOptions, join_s: float = JOIN_S, arena_bytes: int | None = None) -> Joined:
        """Another communicator of all ranks, configured by `options`; the caller closes it. A collective."""
        from lockstep.training.comm import join

        return join(
            self.world, self.control, self._key, join_s, self._stall_s, options, self._tls, arena_bytes=arena_bytes
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._communicator is not None:
            if error is None:
                self._communicator.close()
            else:
                self._communicator.abort(str(error))


_context: RankContext | None = None
_alone: Communicator | None = None
_faults: list[Callable[[], BaseException | None]] = []


def set_context(context: RankContext) -> None:
    """Mark this process as a rank; called before its script runs."""
    global _context
    _context = context


def context() -> RankContext | None:
    """This process' rank; None for a script that was started without a launcher.

    Raises ConfigError in a child process of a rank: it has the rank's environment, but is no rank.
    """
    if _context is None and NUM_RANKS in os.environ:
        raise ConfigError(
            "this process is not a rank, but a child of one",
            got=f"{NUM_RANKS}={os.environ[NUM_RANKS]} and no connection to the driver",
            allowed="calls to other ranks from the process that lockstep launch started",
            next_step=f"Make these calls in the script itself, or unset {NUM_RANKS} for a child that trains by itself.",
        )
    return _context


def communicator() -> Communicator:
    """The communicator of all ranks, the same at every call; a script started without a launcher is a single rank.

    A collective at the first call. Raises what `context` does, and CommunicationError for a rank that does not join.

    >>> import numpy as np
    >>> from lockstep import on_ranks
    >>> comm = on_ranks.communicator()
    >>> total = np.ones(3, np.float32)
    >>> comm.all_reduce(total)  # in place: the sum over ranks
    >>> comm.rank, comm.num_ranks, total.tolist()
    (0, 1, [1.0, 1.0, 1.0])
    """
    global _alone
    launched = context()
    if launched is not None:
        return launched.communicator()
    if _alone is None:
        from lockstep.training.comm.base import SoloCommunicator

        _alone = SoloCommunicator()
    return _alone


def report_faults_of(look: Callable[[], BaseException | None]) -> None:
    """Register `look()`, called when the script fails: TensorFlow keeps only the text of an error in its graph."""
    _faults.append(look)


def fault() -> BaseException | None:
    """The original error of another library that caused the script's failure."""
    return next((found for look in _faults if (found := look()) is not None), None)
