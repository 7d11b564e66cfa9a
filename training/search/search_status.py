"""What a search is doing now, by its journal and its trials' runs: without Optuna, from any machine that reads it."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

from lockstep.storage.documents import unseal_as
from lockstep.storage.errors import LockstepError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.urls import join
from lockstep.training.driver.ownership import driver_lives, read_lease
from lockstep.training.results.evaluate import aligned
from lockstep.training.results.state import state_now
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import FINISHED, INTERRUPTED, STARTING, read_status
from lockstep.training.search.config import FORMAT_VERSION
from lockstep.training.search.journal import ASKED, ENDED, PRUNED, Journal

SEARCHING = "searching"
OPEN, DONE, FAILED = "open", "done", "failed"
SHOWN_TRIALS = 20


@dataclass(slots=True)
class TrialStatus:
    """One trial. `state` is open, done, pruned or failed; `value` its metric after `epochs` epochs, None before."""

    number: int
    parameters: dict[str, Any]
    state: str = OPEN
    epochs: int = 0
    value: float | None = None
    reason: str = ""
    """Why the trial failed."""
    run: str = ""
    """The state and the step of an open trial's run."""


@dataclass(frozen=True, slots=True)
class SearchStatus:
    """A search. `state` is searching (its driver lives, or has written within seconds), finished or interrupted."""

    url: str
    state: str
    metric: str
    """The metric and its direction: NAME:max or NAME:min."""
    sampler: str
    trials: list[TrialStatus] = field(default_factory=list)

    @property
    def best(self) -> TrialStatus | None:
        """The best trial that is done, the earliest of equal ones."""
        done = [trial for trial in self.trials if trial.state == DONE and trial.value is not None]
        sign = -1 if self.metric.endswith(":max") else 1
        return min(done, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def words(self) -> str:
        """A line, and a table of the trials: of many those that are open, the best one and the last."""
        counts = [(state, sum(t.state == state for t in self.trials)) for state in (DONE, PRUNED, FAILED, OPEN)]
        head = f"{self.url}: {self.state}, {len(self.trials)} trials"
        head += "".join(f", {number} {state}" for state, number in counts if number)
        name, best = self.metric.rpartition(":")[0], self.best
        if best is not None:
            head += f", best {name} {best.value:.6g} (trial {best.number})"
        open_ones = [trial for trial in self.trials if trial.state == OPEN]
        rest = [trial for trial in self.trials if trial.state != OPEN and trial is not best]
        room = max(0, SHOWN_TRIALS - len(open_ones) - (best is not None))
        shown = [*open_ones, *([best] if best is not None else []), *rest[len(rest) - room :]]
        names = list(self.trials[0].parameters) if self.trials else []
        rows = [["trial", "state", "epochs", name, *names]]
        for trial in sorted(shown, key=lambda one: one.number):
            state = trial.run or trial.state + (f": {trial.reason}" if trial.reason else "")
            state += " (best)" if trial is best else ""
            value = "-" if trial.value is None else f"{trial.value:.6g}"
            given = [_text(trial.parameters.get(each)) for each in names]
            rows.append([str(trial.number), state, str(trial.epochs), value, *given])
        left_out = len(self.trials) - len(shown)
        more = [f"  {left_out} more trials: lockstep runs {self.url}"] if left_out else []
        return "\n".join([head, *(f"  {line}" for line in aligned(rows)), *more])


def is_search(fs: FileSystem, url: str) -> bool:
    """Whether lockstep tune has begun a search there."""
    return fs.exists(join(url, "search.json"))


def read_search(fs: FileSystem, url: str, now: datetime.datetime) -> SearchStatus:
    """The search at `url` as its files say. Raises CorruptionError for damaged ones."""
    stored = unseal_as("search", fs.read_bytes(where := join(url, "search.json")), where, version=FORMAT_VERSION)
    trials: list[TrialStatus] = []
    for event in Journal(fs, url).read():
        if event["event"] == ASKED:
            trials.append(TrialStatus(int(event["trial"]), dict(event["parameters"])))
            continue
        trial = trials[int(event["trial"])]
        trial.epochs = int(event["epochs"])
        trial.value = None if event["value"] is None else float(event["value"])
        if event["event"] == ENDED:
            trial.state, trial.reason = (FAILED if trial.value is None else DONE), str(event["reason"] or "")
        elif event["event"] == PRUNED:
            trial.state = PRUNED
    states = []  # of the runs of open trials
    for trial in trials:
        if trial.state == OPEN:
            state, trial.run = _run_of(fs, join(url, "trials", f"{trial.number:04d}"), now)
            states.append(state)
    lives = driver_lives(read_lease(fs, join(url, "lease.json")))
    if lives is None:  # on another host
        lives = any(state != INTERRUPTED for state in states)
    ended = fs.exists(join(url, "best.json")) and not states
    state = SEARCHING if lives else FINISHED if ended else INTERRUPTED
    return SearchStatus(url, state, str(stored["metric"]), str(stored["sampler"]), trials)


def _run_of(fs: FileSystem, run: str, now: datetime.datetime) -> tuple[str, str]:
    """The state of an open trial's run, and that with its step in a few words."""
    paths = RunPaths(run)
    try:
        status = read_status(fs, paths)
    except LockstepError:
        return STARTING, STARTING
    state = state_now(status, fs, paths, now)
    return state, f"{state}, step {status.step} of {status.steps}"


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
