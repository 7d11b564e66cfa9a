"""Collectives between ranks: one interface over one rank, shared memory, TCP and TensorFlow.

No TensorFlow here. `connect` picks the backend; everything else depends on `Communicator` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.process.faces import face

if TYPE_CHECKING:
    from lockstep.training.comm.backend import Joined, connect, join
    from lockstep.training.comm.base import Communicator, Op, SoloCommunicator
    from lockstep.training.comm.options import CommOptions
    from lockstep.training.comm.tcp.communicator import TcpCommunicator

__all__ = ["CommOptions", "Communicator", "Joined", "Op", "SoloCommunicator", "TcpCommunicator", "connect", "join"]

_MODULES = {
    "CommOptions": "lockstep.training.comm.options",
    "Communicator": "lockstep.training.comm.base",
    "Joined": "lockstep.training.comm.backend",
    "Op": "lockstep.training.comm.base",
    "SoloCommunicator": "lockstep.training.comm.base",
    "TcpCommunicator": "lockstep.training.comm.tcp.communicator",
    "connect": "lockstep.training.comm.backend",
    "join": "lockstep.training.comm.backend",
}

if not TYPE_CHECKING:  # the options are read where no rank runs, which needs none of the others
    __getattr__, __dir__ = face(__name__, _MODULES, __all__)
