"""What a person sees while a search runs: lines on a terminal, a table of trials and a curve in a notebook's cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from itertools import accumulate
from typing import Any, Protocol

from lockstep.storage.progress import in_notebook
from lockstep.training.config import TrainConfig
from lockstep.training.driver.live import CellOutput, OnTerminal, RunProgress, png
from lockstep.training.results.pages import DARK, LIGHT
from lockstep.training.search.config import SearchConfig
from lockstep.training.search.report import parameter_words, value_text
from lockstep.training.search.study import DONE, OPEN, Study, Trial

SHOW_EVERY_S = 0.5


class SearchProgress(Protocol):
    """Shows a search; a context manager. One thread calls it; the progress of each trial has a thread of its own."""

    def __enter__(self) -> SearchProgress: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None: ...

    def of_trial(self, number: int) -> Callable[[TrainConfig, int], RunProgress]:
        """What shows the run of a trial (lockstep.training.driver.train.Hooks.progress)."""

    def ended(self, trial: Trial, words: str) -> None:
        """A trial has ended; `words` says how."""

    def look(self) -> None:
        """Show the trials' progress; called every 0.5 s or more often."""


class AsLines:
    """A line for each trial that has ended, among the lines of its run."""

    def __init__(self, config: SearchConfig, study: Study) -> None:
        self._config, self._study = config, study

    def __enter__(self) -> AsLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Do nothing."""

    def of_trial(self, number: int) -> Callable[[TrainConfig, int], RunProgress]:
        """Return a trial's display: that of a run, with the trial's number."""
        return partial(OnTerminal, label=f"trial {number}")

    def ended(self, trial: Trial, words: str) -> None:
        """Print the line."""
        line = f"trial {trial.number}: {words}; {parameter_words(trial.parameters)}"
        print(f"{line}; {counts(self._config, self._study)}", file=sys.stderr, flush=True)

    def look(self) -> None:
        """Do nothing."""


class InNotebook:
    """A line, a table of all trials and the curve of the best value, in one output of a cell, updated in place."""

    def __init__(self, config: SearchConfig, study: Study) -> None:
        self._config, self._study = config, study
        self._output = CellOutput()
        self._steps: dict[int, str] = {}
        self._picture, self._drawn = "", -1
        self._shown_at = 0.0

    def __enter__(self) -> InNotebook:
        self._show("search")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._show("done")
        elif isinstance(error, KeyboardInterrupt):
            self._show("interrupted; the same call resumes the search")
        else:
            self._show(f"ended by {type(error).__name__}")

    def of_trial(self, number: int) -> Callable[[TrainConfig, int], RunProgress]:
        """The steps of the trial's run are shown in its row."""
        return partial(_InRow, self._steps, number)

    def ended(self, trial: Trial, words: str) -> None:
        """Show the trial's end at once."""
        self._show("search")

    def look(self) -> None:
        """Show the steps done."""
        if time.monotonic() - self._shown_at >= SHOW_EVERY_S:
            self._show("search")

    def _show(self, state: str) -> None:
        trials, best = self._study.trials, self._study.best_so_far()
        ended = sum(trial.state != OPEN for trial in trials)
        if ended != self._drawn:
            self._picture, self._drawn = curve(self._config, trials), ended
        rows = table(self._config, trials, best, dict(self._steps))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        html = "".join(f"<tr>{each}</tr>" for each in cells)
        self._output.show(
            f"{state}: {counts(self._config, self._study)}",
            more_text="".join(f"\n{line}" for line in lines),
            more_html=f'<div style="max-height: 30em; overflow: auto"><table>{html}</table></div>',
            picture=self._picture,
        )
        self._shown_at = time.monotonic()


class _InRow:
    """The progress of a trial's run, as text for its row."""

    def __init__(self, steps: dict[int, str], number: int, config: TrainConfig, total: int) -> None:
        self._steps, self._number, self._total = steps, number, total

    def __enter__(self) -> _InRow:
        self._steps[self._number] = "starting"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Do nothing: the trial's state follows."""

    def set(self, done: int, note: str | None = None) -> None:
        """Note the steps done."""
        self._steps[self._number] = f"step {done} of {self._total}"

    def add(self, row: Any) -> None:
        """Do nothing."""


def search_progress_here() -> Callable[[SearchConfig, Study], SearchProgress]:
    """How the process that calls can show a search."""
    return InNotebook if in_notebook() else AsLines


def counts(config: SearchConfig, study: Study) -> str:
    """Say how far the search is: `3 of 12, best 0.71 (trial 2)`."""
    best = study.best_so_far()
    words = f"{sum(trial.state != OPEN for trial in study.trials)} of {config.number}"
    return words if best is None else f"{words}, best {best.value:.6g} (trial {best.number})"


def table(
    config: SearchConfig, trials: Sequence[Trial], best: Trial | None, steps: dict[int, str]
) -> list[tuple[str, ...]]:
    """The head and a row for each trial; `steps` has the progress of open ones, whose metric is that of an epoch."""
    names = [parameter.name for parameter in config.space]
    rows = [("trial", "state", "epochs", config.metric_name, *names)]
    for trial in trials:
        state = steps.get(trial.number, OPEN) if trial.state == OPEN else trial.state
        state += f": {trial.reason}" if trial.reason else ""
        state += " (best)" if best is not None and trial.number == best.number else ""
        value = trial.last if trial.value is None else trial.value
        given = (value_text(trial.parameters[name]) for name in names)
        rows.append((str(trial.number), state, str(trial.epochs), value_text(value), *given))
    return rows


def best_so_far(trials: Sequence[Trial], *, maximize: bool) -> list[tuple[int, float]]:
    """The best value of the trials that are done up to each of them: points (trial, value), in their order."""
    done = [(trial.number, trial.value) for trial in trials if trial.state == DONE and trial.value is not None]
    best = accumulate((value for _, value in done), max if maximize else min)
    return [(number, value) for (number, _), value in zip(done, best, strict=True)]


def curve(config: SearchConfig, trials: Sequence[Trial]) -> str:
    """A picture of the metric of the trials that are done and of the best so far, in base64; empty without any."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    points = [(trial.number, trial.value) for trial in trials if trial.state == DONE]
    if not points:
        return ""
    figure = Figure(figsize=(6, 2.6), dpi=72, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), "o", color=LIGHT, label="trial")
    best = best_so_far(trials, maximize=config.maximize)
    axes.plot(*zip(*best, strict=True), color=DARK, drawstyle="steps-post", label="best so far")
    axes.set_title(config.metric, parse_math=False)
    axes.set_xlabel("trial")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return png(figure)
