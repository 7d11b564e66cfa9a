"""What a rank's entry is given."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from training.control.client import ControlClient
from training.world import World

if TYPE_CHECKING:
    from training.comm import CommOptions, Joined
    from training.comm.base import Communicator
    from training.comm.tls import Credentials

JOIN_S = 120.0  # ranks start at the same time; what differs is the import of their modules


class RankContext(AbstractContextManager["RankContext"]):
    """World, control channel and payload of one rank; `host` is the address other ranks reach it by.

    `payload["comm"]`, where there is one, says how the ranks shall talk: `options` (training.comm.CommOptions as JSON)
    and `freeze`, whether rank 0 tells the driver a plan that was made now, by the request `comm_plan`.
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

    def communicator(self, join_s: float = JOIN_S, arena_bytes: int | None = None) -> Communicator:
        """The ranks' communicator, connected at the first call and closed when the entry returns.

        Its collectives wait as long as the launch's stall limit, since a rank may trace or write a checkpoint while
        others wait. `arena_bytes` is what each rank of a host will allocate in shared memory at most, the same on all
        of them (None: unknown). Raises CommunicationError naming the rank that did not join within `join_s`.
        """
        if self._communicator is None:
            from training.comm import CommOptions

            comm = self.payload.get("comm", {})
            joined = self.join(CommOptions.from_json(comm.get("options", {})), join_s, arena_bytes)
            self._communicator = joined.communicator
            if joined.calibrated and comm.get("freeze", False) and self.world.is_leader:
                assert joined.plan is not None
                # Answered before this rank takes a step, so before there can be a checkpoint that rests on the plan.
                self.control.request("comm_plan", self._stall_s, plan=joined.plan.to_json())
        return self._communicator

    def join(self, options: CommOptions, join_s: float = JOIN_S, arena_bytes: int | None = None) -> Joined:
        """One more communicator of all ranks, by `options`, which the caller closes. A collective."""
        from training.comm import join

        place = (self.world, self.control, self._key)
        return join(*place, join_s, self._stall_s, options, self._tls, arena_bytes=arena_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._communicator is not None:
            if error is None:
                self._communicator.close()
            else:
                self._communicator.abort(str(error))
