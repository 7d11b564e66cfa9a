"""Keeps RUN/status.json: what the run is doing, from what the driver and the ranks report."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import median
from typing import Any

from lockstep.storage.errors import LockstepError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import write_file
from lockstep.training.config import TrainConfig
from lockstep.training.control.protocol import Tag
from lockstep.training.driver.live import RunProgress
from lockstep.training.driver.on_event import OnEvent
from lockstep.training.driver.open_requests import Requests
from lockstep.training.driver.stop import StopRequest
from lockstep.training.driver.stragglers import NETWORK, WELL, times_a_step
from lockstep.training.run import status
from lockstep.training.run.epochs import epochs_trained
from lockstep.training.run.lineage import CheckpointRef, Claim, SupersededError
from lockstep.training.run.metrics import BAD_RECORD, STRAGGLER, USAGE
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import RankStatus, RunStatus, now_utc

log = logging.getLogger(__name__)
WRITE_EVERY_S = 5.0
RATE_OVER_S = 30.0
ROWS = 20  # of a rank whose medians are shown
NETWORK_S = 60.0


class Board:
    """A RunProgress that passes everything on to another one, and keeps the run's status from it.

    Within `with` a thread replaces status.json and looks for requests every `every_s` seconds. The end writes how the
    run ended, except for a driver that was overtaken.
    """

    def __init__(
        self,
        inner: RunProgress,
        fs: FileSystem,
        paths: RunPaths,
        config: TrainConfig,
        steps: int,
        stop: StopRequest,
        *,
        confirm: Callable[[], None],
        of_epoch: Fraction | None = None,
        application: str | None = None,
        on_event: OnEvent | None = None,
        every_s: float = WRITE_EVERY_S,
    ) -> None:
        self._inner, self._fs, self._paths, self._stop, self._confirm = inner, fs, paths, stop, confirm
        self._batch, self._every_s, self._event = (
            config.data.global_batch,
            every_s,
            on_event or OnEvent(None, paths.root),
        )
        self._status = RunStatus(
            state=status.STARTING,
            started_at=now_utc().isoformat(timespec="seconds"),
            host=socket.gethostname(),
            pid=os.getpid(),
            application=application,
            model=config.model.model,
            datasets=list(config.data.datasets),
            steps=steps,
            epochs=config.data.epochs,
        )
        self._of_epoch = of_epoch
        self._tip: Callable[[], CheckpointRef | None] = lambda: None
        self._times: dict[int, deque[dict[str, float]]] = {}
        self._usage: dict[int, Mapping[str, Any]] = {}
        self._slow: Mapping[str, Any] | None = None
        self._slow_at = 0.0
        self._bad: dict[str, int] = {}
        self._rate: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self.quiet = threading.Lock()
        """Held while the status is written: hold it to remove temporary files of the run's folder."""
        self._ended = threading.Event()
        self._requests = Requests(fs, paths, stop)
        self._thread = threading.Thread(target=self._keep, name="status", daemon=True)

    def __enter__(self) -> Board:
        self._inner.__enter__()
        self._requests.clear()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            self._inner.__exit__(kind, error, trace)
        finally:
            self._ended.set()
            self._thread.join(0.0 if self._fs.away else None)
            if not isinstance(error, SupersededError):
                self._end(error)

    # What the driver reports

    def resumes_from(self, tip: CheckpointRef | None) -> None:
        """Show the checkpoint from which the next generation would start."""
        self._tip = lambda: tip

    def begin(self, claim: Claim, tip: Callable[[], CheckpointRef | None]) -> None:
        """A generation is launched; `tip` is asked for the newest checkpoint."""
        with self._lock:
            self._times, self._usage, self._slow, self._tip = {}, {}, None, tip
            self._rate.clear()
            self._status = replace(
                self._status, state=status.STARTING, generation=claim.generation, num_ranks=claim.num_ranks
            )

    def failed(self, error: LockstepError) -> None:
        """A generation has failed, and another one follows."""
        with self._lock:
            now = replace(self._status, state=status.WAITING, why=str(error), restarts=self._status.restarts + 1)
            self._status = now
        self._event("restart", generation=now.generation, step=now.step, restarts=now.restarts, error=str(error))

    def set(self, done: int, note: str | None = None) -> None:
        """Note that `done` steps are done, as RunProgress does, and rewrite the status."""
        self._inner.set(done, note)
        with self._lock:
            now, trains = time.monotonic(), done > self._status.step
            if done < self._status.step:
                self._rate.clear()
            state = status.TRAINING if trains else self._status.state
            if trains and self._status.state != status.TRAINING:
                self._requests.begun()
            self._status = replace(self._status, step=done, state=state)
            self._rate.append((now, done))
            while len(self._rate) > 2 and now - self._rate[1][0] > RATE_OVER_S:
                self._rate.popleft()

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row of the metrics, as RunProgress does, and show its figures in the status."""
        self._inner.add(row)
        with self._lock:
            kind = row["kind"]
            if kind == "time" and (a_step := times_a_step(row)) is not None:
                self._times.setdefault(row["rank"], deque(maxlen=ROWS)).append(a_step)
            elif kind == USAGE:
                self._usage[row["rank"]] = row
            elif kind == STRAGGLER:
                self._slow, self._slow_at = row, time.monotonic()
            elif kind == BAD_RECORD:
                self._bad[str(row["what"])] = int(row.get("records", 1))
            elif kind == "step" and isinstance(row["loss"], float) and math.isfinite(row["loss"]):
                self._status = replace(self._status, loss=row["loss"])
            elif kind == "epoch":
                metrics = {name: _number(value) for name, value in row["metrics"].items()}
                self._status = replace(self._status, metrics=metrics, epochs_done=row["epoch"] + 1)
        if row["kind"] == STRAGGLER:
            self._event("slow rank", **{name: row[name] for name in ("rank", "host", "what", "step")})

    # Requests

    def orders(self) -> Sequence[Tag]:
        """What all ranks are to be asked now; each order is returned once."""
        return self._requests.orders()

    def stacks(self, rank: int, text: str) -> None:
        """A rank's supervisor has sent the stacks of its threads."""
        self._requests.stacks(rank, text)

    def _keep(self) -> None:
        while True:
            self._follow()
            self._write()
            if self._ended.wait(min(1.0, self._every_s) if self._requests.open else self._every_s):
                return

    def _follow(self) -> None:
        """Take new requests, and answer those whose work is done."""
        with self._lock:
            now = self._status
        self._requests.follow(now, self._tip())

    # The file

    def _write(self) -> None:
        with self.quiet:
            try:
                write_file(self._fs, self._paths.status, self.now().to_bytes(), exclusive=False, confirm=self._confirm)
            except SupersededError:
                return  # the driver learns it by its lease
            except LockstepError as error:
                log.warning("the status was not written: %s", error.what)

    def now(self) -> RunStatus:
        """The status at this moment."""
        tip = self._tip()
        with self._lock:
            found = self._status
            rate, left_s = self._rate_now(), None
            if rate:
                left_s = max(0, found.steps - found.step) / rate
            return replace(
                found,
                written_at=now_utc().isoformat(timespec="milliseconds"),
                samples_per_s=round(rate * self._batch, 3) if rate else None,
                left_s=None if left_s is None else round(left_s, 1),
                epochs_trained=epochs_trained(found.step, self._of_epoch, found.epochs) if self._of_epoch else 0.0,
                checkpoint=str(tip) if tip else None,
                ranks=[self._of_rank(rank) for rank in range(found.num_ranks)],
                slow=self._slow_now(),
                bad_records=sum(self._bad.values()),
            )

    def _rate_now(self) -> float:
        """Steps a second over the last RATE_OVER_S; 0 while unknown."""
        if len(self._rate) < 2:
            return 0.0
        (began, first), (_, last) = self._rate[0], self._rate[-1]
        seconds = time.monotonic() - began  # to now, so that a stall shows
        return (last - first) / seconds if seconds > 0 else 0.0

    def _of_rank(self, rank: int) -> RankStatus:
        times, usage = self._times.get(rank), self._usage.get(rank)
        found = RankStatus(rank=rank)
        if usage is not None:
            found = replace(found, host=usage["host"], rss_bytes=usage["rss_bytes"], cores=usage["cores"])
        if times:
            usual = {name: round(median(row[name] for row in times), 6) for name in times[0]}
            found = replace(
                found,
                step_s=usual["step_s"],
                input_s=usual["data_s"],
                compute_s=usual["compute_s"],
                wait_s=round(usual["step_s"] - usual["own_s"], 6),
                other_s=usual["other_s"],
            )
        return found

    def _slow_now(self) -> dict[str, Any] | None:
        """The rank that was named as slow, while its own time is still above that of the others.

        A rank with a slow network, which its own time does not show, is shown for NETWORK_S.
        """
        if self._slow is None:
            return None
        rank = self._slow["rank"]
        if self._slow["what"] == NETWORK:
            recent = time.monotonic() - self._slow_at < NETWORK_S
            return {name: self._slow[name] for name in ("rank", "host", "what")} if recent else None
        own = {each: median(row["own_s"] for row in times) for each, times in self._times.items()}
        others = [seconds for each, seconds in own.items() if each != rank]
        if rank not in own or not others or own[rank] < WELL * min(others):
            return None
        return {name: self._slow[name] for name in ("rank", "host", "what")}

    def _end(self, error: BaseException | None) -> None:
        """Write how the run ended, and answer what is still open."""
        with self._lock:
            state, why = _ending(error, self._stop)
            self._status = replace(self._status, state=state, why=why, exit_code=_exit_code(error))
            self._rate.clear()
        if not self._fs.away:
            self._publish_end(state)
        now = self._status
        self._event(state, step=now.step, steps=now.steps, metrics=now.metrics, restarts=now.restarts, error=why)
        self._event.finish()

    def _publish_end(self, state: str) -> None:
        self._follow()
        self._requests.end(state)
        self._write()


def _ending(error: BaseException | None, stop: StopRequest) -> tuple[str, str | None]:
    """The state of a run whose driver ends with `error`, and why."""
    if error is None:
        return status.FINISHED, None
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return status.STOPPED, f"stopped by {stop.by or type(error).__name__}"
    return status.FAILED, str(error) or type(error).__name__


def _exit_code(error: BaseException | None) -> int:
    """The exit code of a command whose run ends with `error`, as lockstep.jobs has it."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return int(getattr(error, "exit_code", 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
