"""How many ranks each generation of a run has: as many as there are slots for, between --min-ranks and --max-ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import LauncherError
from lockstep.training.launch.local import slots_in
from lockstep.training.launch.session import Launch, SessionLauncher

log = logging.getLogger(__name__)
LOOK_S = 1.0
LOST_S = 3.0
"""How long a slot that was lost may need to return before the run continues without it: an executor's replacement."""


class Slots:
    """Counts slots while it is open, and chooses numbers of ranks. `numbers` are those that can train the run."""

    def __init__(self, config: TrainConfig, numbers: list[int], launch: Launch) -> None:
        self._config, self._numbers, self._launch = config, numbers, launch
        self._fits = config.ranks.num_ranks
        """How many ranks the slots are enough for, by the last two looks."""
        self._in_file: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="slots", daemon=True)

    def __enter__(self) -> Slots:
        if self._config.ranks.elastic:
            self._count()  # a file that has no number is refused before anything starts
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_S)

    def differ(self, num_ranks: int) -> bool:
        """Whether the slots have been enough for another number of ranks for a while."""
        return self._config.ranks.elastic and self._fits != num_ranks

    def choose(self, before: int | None, ended: Callable[[], BaseException | None]) -> int:
        """The number of ranks of the next generation; `before`: of the last one, None for the first.

        A lost slot has LOST_S to return, and the least number of slots as long as all ranks have to start. Raises
        LauncherError after that, and what `ended` returns.
        """
        config = self._config
        if not config.ranks.elastic:
            return config.ranks.num_ranks
        most = config.ranks.num_ranks if before is None else config.ranks.possible[-1]
        wanted = config.ranks.num_ranks if before is None else before
        began = time.monotonic()
        while True:
            slots = self._count()
            fits = self._largest(min(slots, most))
            waited_s = time.monotonic() - began
            if fits is not None and (fits >= wanted or waited_s >= self._patience_s):
                self._fits = fits
                return fits
            if (error := ended()) is not None:
                raise error
            if waited_s > config.limits.start_limit_s:
                raise LauncherError(
                    f"there are too few slots for {self._numbers[0]} ranks",
                    got=f"{slots} slots, for {waited_s:.0f} s",
                    allowed=f"slots for {self._numbers[0]} ranks or more (--min-ranks)",
                    next_step="Start the run again when executors are back: it resumes from its last checkpoint.",
                )
            self._ended.wait(0.2)

    @property
    def _patience_s(self) -> float:
        return 0.0 if self._config.ranks.slots_file else LOST_S

    def _largest(self, slots: int) -> int | None:
        return max((number for number in self._numbers if number <= slots), default=None)

    def _count(self) -> int:
        if self._config.ranks.slots_file:
            try:
                self._in_file = slots_in(self._config.ranks.slots_file)
            except ConfigError:
                if self._in_file is None:
                    raise
            return self._in_file  # the last number, while the file is being written
        assert isinstance(self._launch, SessionLauncher), "checked by the configuration"
        return self._launch.slots()

    def _look(self) -> None:
        before: int | None = None
        while not self._ended.wait(LOOK_S):
            try:
                fits = self._largest(min(self._count(), self._config.ranks.possible[-1]))
            except LockstepError as error:
                log.warning("slots were not counted: %s", error.what)
                continue
            if fits is not None and fits == before:
                self._fits = fits
            before = fits
