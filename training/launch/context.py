"""What a rank's entry is given."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from training.control.client import ControlClient
from training.world import World

if TYPE_CHECKING:
    from training.comm.base import Communicator

COMMUNICATOR_DEADLINE_S = 60.0  # all ranks are there when the first one asks, up to the import of their modules


class RankContext(AbstractContextManager["RankContext"]):
    """World, control channel and payload of one rank; `host` is the address other ranks reach it by."""

    def __init__(self, world: World, control: ControlClient, payload: dict[str, Any], key: bytes, host: str) -> None:
        self.world, self.control, self.payload, self.host = world, control, payload, host
        self._key = key
        self._communicator: Communicator | None = None

    def communicator(self, deadline_s: float = COMMUNICATOR_DEADLINE_S) -> Communicator:
        """The ranks' communicator, connected at the first call and closed when the entry returns.

        Raises CommunicationError naming the ranks that did not come within `deadline_s`.
        """
        if self._communicator is None:
            from training.comm import connect

            self._communicator = connect(self.world, self.control, self._key, deadline_s)
        return self._communicator

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._communicator is not None:
            if error is None:
                self._communicator.close()
            else:
                self._communicator.abort(str(error))
