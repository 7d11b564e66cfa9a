"""Follows the requests in RUN/control: a checkpoint, a stop, the stacks of all ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from lockstep.storage.errors import LockstepError
from lockstep.storage.files.interface import FileSystem
from lockstep.training.control.protocol import Tag
from lockstep.training.driver.stop import StopRequest
from lockstep.training.run import requests, status
from lockstep.training.run.lineage import CheckpointRef
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import RunStatus

log = logging.getLogger(__name__)
STACKS_WITHIN_S = 20.0
REQUESTED = "lockstep control"
"""The words for a stop that a request brought."""


class Requests:
    """The open requests to a run. One thread calls `follow` and `end`; any thread may call the others."""

    def __init__(self, fs: FileSystem, paths: RunPaths, stop: StopRequest) -> None:
        self.open: dict[str, tuple[requests.Request, float, int]] = {}
        """The requests by nonce: each with when it was seen (seconds of the monotonic clock), and at which step."""
        self._fs, self._paths, self._stop = fs, paths, stop
        self._orders: list[Tag] = []
        self._stacks: dict[int, str] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Delete what an earlier driver has left."""
        requests.clear(self._fs, self._paths)

    def orders(self) -> Sequence[Tag]:
        """What all ranks are to be asked now; each order is returned once."""
        with self._lock:
            taken, self._orders = self._orders, []
        return taken

    def stacks(self, rank: int, text: str) -> None:
        """Take the stacks of a rank's threads, which its supervisor has sent."""
        with self._lock:
            self._stacks[rank] = text

    def begun(self) -> None:
        """A generation takes its first step: ask its ranks for the checkpoint that those before did not write."""
        if any(request.kind == requests.CHECKPOINT for request, *_ in list(self.open.values())):
            self._order(Tag.SAVE)

    def follow(self, now: RunStatus, tip: CheckpointRef | None) -> None:
        """Take new requests, and answer those whose work is done; `tip` is the newest checkpoint."""
        try:
            found = requests.open_requests(self._fs, self._paths)
            for nonce in self.open.keys() - {request.nonce for request in found}:
                del self.open[nonce]  # withdrawn: no process would remove its answer
            for request in found:
                if request.nonce not in self.open:
                    self._begin(request, now)
            for nonce, (request, at, step) in list(self.open.items()):
                text = self._done(request, time.monotonic() - at, step, now, tip)
                if text is not None:
                    requests.answer(self._fs, self._paths, request, text)
                    del self.open[nonce]
        except LockstepError as error:  # a storage that is away for a while: the next look follows
            log.warning("requests to the run cannot be read or answered: %s", error.what)

    def end(self, state: str) -> None:
        """Answer what is still open when the run has ended in this state."""
        for request, *_ in self.open.values():
            try:
                requests.answer(self._fs, self._paths, request, f"the run is {state}", done=False)
            except LockstepError as lost:
                log.warning("a request was not answered: %s", lost.what)

    def _order(self, tag: Tag) -> None:
        with self._lock:
            self._orders.append(tag)

    def _begin(self, request: requests.Request, now: RunStatus) -> None:
        log.info("%s asks for `%s`", request.by, request.kind)
        trains = now.state == status.TRAINING
        if request.kind == requests.CHECKPOINT and trains:
            self._order(Tag.SAVE)
        elif request.kind == requests.STACKS and now.num_ranks:
            with self._lock:
                self._stacks.clear()
            self._order(Tag.STACKS)
        if request.kind == requests.STOP:
            self._stop.by = self._stop.by or f"{REQUESTED} on {request.by}"
        elif request.kind not in requests.KINDS or (request.kind == requests.CHECKPOINT and not trains):
            why = f"`{request.kind}` cannot be followed while the run is {now.state}"
            requests.answer(self._fs, self._paths, request, why, done=False)
            return
        self.open[request.nonce] = request, time.monotonic(), now.step

    def _done(
        self, request: requests.Request, age_s: float, step: int, now: RunStatus, tip: CheckpointRef | None
    ) -> str | None:
        """The answer to a request whose work is done; None before."""
        if request.kind == requests.STOP:
            return "the ranks write a checkpoint after their next step, and leave"
        if request.kind == requests.CHECKPOINT:
            return f"checkpoint {tip}" if tip is not None and tip.step > step else None
        with self._lock:
            stacks = dict(self._stacks)
        if len(stacks) < now.num_ranks and age_s < STACKS_WITHIN_S:
            return None
        missing = f"no answer within {STACKS_WITHIN_S:.0f} s: its supervisor or host is gone, or it has ended"
        return "\n".join(f"rank {rank}:\n{stacks.get(rank, missing).rstrip()}\n" for rank in range(now.num_ranks))
