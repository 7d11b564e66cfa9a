"""A driver's right to its run, by the lease and by the claims, and what a new driver takes away from older ones.

HDFS has no compare-and-swap: a driver that is stopped between its last look and a rename renames when it wakes. So
whoever publishes writes under a temporary name (or into its generation's staging directory) first, looks then, and
renames last; and whoever takes over claims first and removes those sources then. A rename that is still to come finds
nothing, one that came before the removal also came before the new driver looked at the run.
"""

from __future__ import annotations

import logging
from types import TracebackType

from lockstep.storage.errors import LockstepError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import sweep_temporaries
from lockstep.storage.urls import join
from training.driver.lease import REWRITE_EVERY_S, WATCH_S, Lease
from training.run.lineage import CheckpointRef, Claim, SupersededError, check_newest, claim_next, newest_claimed
from training.run.paths import RunPaths, generation_of

log = logging.getLogger(__name__)


class Standing:
    """Held from `with` to its end. Entering raises what Lease raises; leaving with an error of which a newer driver is
    the cause raises SupersededError in its place.
    """

    def __init__(
        self,
        fs: FileSystem,
        paths: RunPaths,
        watch_s: float = WATCH_S,
        every_s: float = REWRITE_EVERY_S,
        *,
        take_over: bool = False,
    ) -> None:
        self._fs, self._paths = fs, paths
        self._lease = Lease(fs, paths.lease, watch_s, every_s, take_over=take_over, look=self._check_claims)
        self._newest: int | None = None
        self._claiming = False

    def __enter__(self) -> Standing:
        self._lease.__enter__()
        self._newest = newest_claimed(self._fs, self._paths)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, LockstepError) and not isinstance(error, SupersededError | StorageError):
                self.confirm()  # what a newer driver has swept away is missing here, which is no fault of its own
        except StorageError as away:  # the run ends by its own error, which may well be the storage's too
            log.warning("whether another driver has taken the run over was not told: %s", away.what)
        finally:
            self._lease.__exit__(kind, error, trace)

    def overtaken(self) -> SupersededError | None:
        """The error with which this driver must end, once its lease has told of a newer one."""
        return self._lease.lost

    def confirm(self) -> None:
        """Read lease and claims; raises SupersededError where either tells of a newer driver."""
        self._lease.stand()
        self._check_claims()

    def claim(self, parent: CheckpointRef | None, *, epochs: int, num_ranks: int) -> Claim | None:
        """Claim the next generation, which starts from `parent`.

        None where a driver that this one has overtaken has just claimed it: what to start from is then to be looked
        up again. Raises SupersededError where this driver is the one that was overtaken.
        """
        self._lease.stand()  # after the newest claim was looked up: whoever claims later is told by its number
        self._claiming = True
        try:
            claim = claim_next(self._fs, self._paths, parent, epochs=epochs, num_ranks=num_ranks, after=self._newest)
            self._newest = claim.generation
        except SupersededError:
            if not self._fs.exists(self._paths.lease):
                raise  # nothing tells which of the two came later
            self._lease.stand()
            self._newest = newest_claimed(self._fs, self._paths)
            return None
        finally:
            self._claiming = False
        return claim

    def sweep(self) -> None:
        """Remove what drivers of older generations have prepared and not published. To be called after the claim."""
        self._lease.sweep()
        for directory in (self._paths.results, self._paths.comm_plans):
            sweep_temporaries(self._fs, directory)
        for name in self._names(self._paths.all_metrics):
            generation = generation_of(name)
            if generation is not None and self._newest is not None and generation < self._newest:
                sweep_temporaries(self._fs, join(self._paths.all_metrics, name))

    def _check_claims(self) -> None:
        known = self._newest
        if known is None or self._claiming:
            return
        try:
            check_newest(self._fs, self._paths, known)
        except SupersededError:
            # The lease's thread may look while this driver claims: then the newer claim may be its own.
            if not self._claiming and self._newest == known:
                raise

    def _names(self, url: str) -> list[str]:
        try:
            return [entry.name for entry in self._fs.list(url) if entry.is_dir]
        except NotFoundError:
            return []
