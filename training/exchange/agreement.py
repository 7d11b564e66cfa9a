"""What the ranks agree on at the end of a step, and the account of steps and micro-batches that leads to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.storage.errors import ConfigError, DataError

FLAGS = ("stop", "checkpoint", "busy")
CONTROL_WORDS = 2 + len(FLAGS)  # loss, whether a rank has what might not be finite, then the flags
MAX_SKIPS = 10  # in a row: such a run learns nothing more
# A loss scale is halved by each skip, and begins at some tens of thousands: this many have passed all it could mend.
MAX_SCALE_SKIPS = 60


class NonFiniteError(DataError):
    """A loss, gradient or statistic that is no finite number; a restart would meet it again."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know after a step."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the global batch (of an accumulation: over all its micro-batches), without any loss scale."""
    stop: bool
    checkpoint: bool
    busy: bool = False
    """On some rank a checkpoint was in flight when the step began."""
    skipped: bool = False
    """Something was not finite, and such a step is skipped: no rank has changed its weights."""
    batches: int = 1
    """Batches that went into the step: the micro-batches of gradient accumulation, else 1."""


class Steps:
    """The account of one rank. `step` counts optimizer steps done and is set by whoever restores a run."""

    def __init__(self, num_ranks: int) -> None:
        self.step = 0
        self.pending = 0
        """Micro-batches accumulated since the last optimizer step; 0 where the last batch ended one."""
        self.skips_non_finite = False
        """The loss is scaled: a gradient that is not finite skips the step instead of ending the run."""
        self.skips_any = False
        """Whatever is not finite skips the step: the caller puts back what the step has changed before its end."""
        self.skips_in_a_row = 0
        self.agreement: Agreement | None = None
        self._num_ranks = num_ranks
        self._wanted: set[str] = set()
        self._held_loss = 0.0

    def want(self, flag: str) -> None:
        """Ask all ranks for `stop` or `checkpoint`, or say that this one is `busy`; they agree with the next step."""
        if flag not in FLAGS:
            raise ConfigError(
                "ranks cannot agree on that", got=flag, allowed=", ".join(FLAGS), next_step="Ask for one of these."
            )
        self._wanted.add(flag)

    def withdraw(self, flag: str) -> None:
        """Take back a wish that no step has carried yet."""
        self._wanted.discard(flag)

    def hold(self, loss: np.ndarray) -> None:
        """Note a micro-batch whose gradients stay on this rank until the accumulation's last one; no collective."""
        self._held_loss += float(loss)
        self.pending += 1

    def _words(self, loss: np.ndarray) -> list[float]:
        """This rank's control words but for the second: its mean loss over the step's batches, and its wishes."""
        words = [(self._held_loss + float(loss)) / (self.pending + 1), 0.0, *(flag in self._wanted for flag in FLAGS)]
        self._wanted.clear()
        return words

    def _agree(
        self, words: Sequence[float], wrong: list[str], gradients: Collection[str], where: Callable[[bool], str]
    ) -> None:
        """Set the agreement of the step by the ranks' summed `words`.

        `wrong` names what is not finite, the same on all ranks. With a scaled loss a step is skipped if one of
        `gradients` is in it; statistics alone are not made good by that. `where(skipped)` is a collective that says
        which ranks and samples it was; it is asked for each step that ends the run, or is skipped without a scaled
        loss, which is no wonder. Raises NonFiniteError.
        """
        step, batches = self.step + 1, self.pending + 1
        self.pending, self._held_loss = 0, 0.0
        loss = float(words[0])
        scaled = self.skips_non_finite and any(name in gradients for name in wrong)
        if not scaled and not np.isfinite(loss):
            wrong = ["the loss", *wrong]
        skipped = bool(wrong) and (scaled or self.skips_any)
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        most = MAX_SCALE_SKIPS if scaled else MAX_SKIPS
        too_many = self.skips_in_a_row > most
        told = where(skipped and not too_many) if wrong and (too_many or not scaled) else ""
        if wrong and (too_many or not skipped):
            after = f", after {most} steps in a row that were skipped for it" if too_many else ""
            raise NonFiniteError(
                f"step {step}: {wrong[0]} is not finite{after}",
                got=f"loss {loss}, over {self._num_ranks} ranks: {told}",
                allowed="finite numbers; all ranks stop at this step, and none has applied it",
                next_step="Lower the learning rate, clip gradients (clipnorm) or look at the data of this step.",
            )
        flags = dict(zip(FLAGS, (bool(word > 0) for word in words[2:]), strict=True))
        self.step = step
        self.agreement = Agreement(step, loss, **flags, skipped=skipped, batches=batches)
