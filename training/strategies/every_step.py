"""What a run does between its steps, by its way to exchange; the way by default is one sum in each step."""

from __future__ import annotations

from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.agreement import Agreement
from lockstep.training.run.checkpoint import Tensors


class EveryStep:
    """One sum of gradients in each step, applied in that step. Other ways change what they need to.

    Every rank makes the same calls after the same steps.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        """For collectives between steps."""

    def begin_epoch(self, epoch: int, last: int) -> None:
        """The next step is the first of epoch `epoch`, or of the rest of it that this process trains; `last` is the
        number of its last step.
        """

    def step_begins(self) -> None:
        """A step begins; callbacks have been called."""

    def step_ends(self, agreement: Agreement, *, epoch_ends: bool) -> Agreement:
        """What ranks agree on after a step, of which `agreement` is what its exchange found."""
        return agreement

    def state(self) -> Tensors:
        """What a checkpoint needs besides weights and optimizer, the same on all ranks; called by one of them."""
        return {}

    def load(self, tensors: Tensors, where: str) -> None:
        """Restore the `state` among the `tensors` of the checkpoint `where`, also on another number of ranks."""

    def end(self) -> None:
        """The last step is done; the last checkpoint follows."""

    def finish(self) -> None:
        """The last checkpoint is written; the weights are exported next."""
