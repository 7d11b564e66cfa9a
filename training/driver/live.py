"""What a person sees while a run trains: a bar or lines on a terminal, a line and curves in the cell of a notebook."""

from __future__ import annotations

import io
import math
import time
from base64 import b64encode
from collections.abc import Mapping
from datetime import timedelta
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.storage.errors import LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.progress import Pace, Progress, in_notebook
from lockstep.training.config import TrainConfig
from lockstep.training.rules import VALIDATION
from lockstep.training.run.epochs import epochs_trained, steps_in_epoch
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.run_json import read_run

if TYPE_CHECKING:
    from IPython.display import DisplayHandle
    from matplotlib.figure import Figure

LINE_EVERY_S, CURVES_EVERY_S = 0.5, 2.0  # to draw the curves takes about 0.1 s of the driver
POINTS = 200  # of the loss over the whole run, each the mean of its steps
COLUMNS = 3
TRAINING = "training"
COLOURS = {"each step": "#b9cbe0", "training": "#1f4e89", "validation": "#d97706"}


class RunProgress(Protocol):
    """Shows a run; a context manager. One thread at a time calls it."""

    def __enter__(self) -> RunProgress: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None: ...

    def set(self, done: int, note: str | None = None) -> None:
        """Show that `done` steps are done, fewer than before after a restart; `note` is a text such as the loss."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row of the run's metrics (lockstep.training.rank.metrics)."""


class OnTerminal(Progress):
    """A bar on a terminal, lines in a log; it shows no metrics but the loss."""

    def __init__(self, config: TrainConfig, steps: int, label: str = "training") -> None:
        super().__init__(label, steps, "steps")
        self._batch, self._epochs, self._epoch = config.data.global_batch, config.data.epochs, 0

    def __enter__(self) -> OnTerminal:
        return self

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the epoch from a row of steps."""
        if row["kind"] == "step":
            self._epoch = row["epoch"] + 1

    def _more(self) -> list[str]:
        rate = self._pace.rate
        epoch = [f"epoch {self._epoch} of {self._epochs}"] if self._epoch else []
        return [*epoch, *([f"{rate * self._batch:,.0f} samples/s"] if rate > 0 else [])]


class InNotebook:
    """A line of progress and the curves so far, also of earlier calls, in one output of a cell, updated in place."""

    def __init__(self, config: TrainConfig, steps: int) -> None:
        self._run, self._batch = config.run, config.data.global_batch
        self._curves = Curves(steps, config.data.epochs)
        self._done, self._note, self._picture = 0, "", ""
        self._pace = Pace()  # ranks take seconds to start, which is no part of it
        self._shown_at = self._drawn_at = time.monotonic()
        self._output = CellOutput()

    def __enter__(self) -> InNotebook:
        try:
            history = read_history(self._run)
            of_epoch = steps_in_epoch(read_run(filesystem(self._run), RunPaths(self._run))["plan"])
        except LockstepError:
            pass  # the run's earlier curves are missing; a damaged file must not keep it from training
        else:
            if of_epoch is not None:  # --max-steps may end the run before the epochs that were asked for
                steps, asked = self._curves.steps, self._curves.epochs
                self._curves = Curves(steps, epochs_trained(steps, of_epoch, int(asked)))
            for row in [*history.steps, *history.epochs]:
                self._curves.add(row)
                self._done = max(self._done, row["step"])
            self._pace.add(self._done)
        self._show("starting", draw=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._show("done", draw=True)
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self._show("interrupted; the same call resumes the run", draw=True)
        else:
            self._show(f"ended by {type(error).__name__}", draw=True)

    def set(self, done: int, note: str | None = None) -> None:
        """Show the steps done, at most every LINE_EVERY_S; after a restart, drop the curves from there on."""
        now = time.monotonic()
        if done < self._done:
            self._curves.cut(done)
        self._pace.add(done)
        self._done, self._note = done, self._note if note is None else note
        if now - self._shown_at >= LINE_EVERY_S:
            self._show(TRAINING, draw=now - self._drawn_at >= CURVES_EVERY_S)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row for the curves; the end of an epoch is drawn at once."""
        self._curves.add(row)
        if row["kind"] == "epoch":
            self._show(TRAINING, draw=True)

    def _show(self, state: str, *, draw: bool) -> None:
        self._shown_at = time.monotonic()
        if draw:
            self._picture, self._drawn_at = self._curves.png(), self._shown_at
        rate = self._pace.rate
        line = progress_line(state, self._done, self._curves.steps, self._note, rate, self._batch)
        self._output.show(line, picture=self._picture)


class CellOutput:
    """One output of a notebook's cell, updated in place. Used by the thread that runs the cell."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

    def show(self, line: str, *, more_text: str = "", more_html: str = "", picture: str = "") -> None:
        """Show a line, what follows it as text or as HTML, and a picture (`png`) unless it is empty."""
        from IPython.display import display

        image = f'<img alt="curves" src="data:image/png;base64,{picture}">' if picture else ""
        html = f"<div><code>{escape(line)}</code></div>{more_html}{image}"
        bundle = {"text/plain": f"{line}{more_text}", "text/html": html}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def png(figure: Figure) -> str:
    """A figure as a picture in base64."""
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return b64encode(target.getvalue()).decode()


def progress_line(state: str, done: int, steps: int, note: str, rate: float, batch: int) -> str:
    """One line on a run; `rate` is steps in a second, 0 if unknown, `batch` the samples of a step."""
    words = [f"{state}: step {done} of {steps}", *([note] if note else [])]
    if rate > 0:
        words.append(f"{rate * batch:,.0f} samples/s")
        if state == TRAINING:
            words.append(f"about {timedelta(seconds=math.ceil((steps - done) / rate))} left")
    return ", ".join(words)


class Curves:
    """The curves of a run of `steps` steps in `epochs` epochs: its loss, and each metric at the end of an epoch."""

    def __init__(self, steps: int, epochs: float) -> None:
        self.steps, self.epochs = steps, epochs
        self._points = max(1, min(POINTS, steps))
        self._losses: dict[int, tuple[float, int]] = {}  # by point: the sum of its steps' losses, and their number
        self._metrics: dict[int, tuple[int, dict[str, float]]] = {}  # by epoch: its last step, and its metrics

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row of the run's metrics; values that are no finite numbers are left out."""
        if row["kind"] == "step" and _finite(row["loss"]):
            point = self._point(row["step"])
            total, number = self._losses.get(point, (0.0, 0))
            self._losses[point] = total + row["loss"], number + 1
        elif row["kind"] == "epoch":
            metrics = {name: value for name, value in row["metrics"].items() if _finite(value)}
            self._metrics[row["epoch"]] = row["step"], metrics  # in place of where --max-steps had cut it

    def cut(self, step: int) -> None:
        """Forget what follows `step`: the run repeats it."""
        self._losses = {point: loss for point, loss in self._losses.items() if point < self._point(step + 1)}
        self._metrics = {epoch: row for epoch, row in self._metrics.items() if row[0] <= step}

    def panels(self) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """The lines of each panel by the metric's name: `each step` (only the loss), `training`, `validation`.

        A line is its points (epochs done, value), in order.
        """
        found: dict[str, dict[str, list[tuple[float, float]]]] = {}
        if self._losses:
            width = self.epochs / self._points
            line = [((point + 1) * width, total / n) for point, (total, n) in sorted(self._losses.items())]
            found["loss"] = {"each step": line}
        for _, (last, metrics) in sorted(self._metrics.items()):
            for name, value in metrics.items():
                line_name = "validation" if name.startswith(VALIDATION) else "training"
                lines = found.setdefault(name.removeprefix(VALIDATION), {})
                lines.setdefault(line_name, []).append((last * self.epochs / self.steps, value))
        return found

    def png(self) -> str:
        """A picture of the panels, in base64; an empty text without any."""
        from matplotlib.figure import Figure

        panels = self.panels()
        if not panels:
            return ""
        columns = min(COLUMNS, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(4 * columns, 2.6 * rows), dpi=72, layout="constrained")
        for index, (name, lines) in enumerate(panels.items()):
            axes = figure.add_subplot(rows, columns, index + 1)
            for line_name, points in lines.items():
                marker = None if line_name == "each step" else "o"
                axes.plot(*zip(*points, strict=True), label=line_name, color=COLOURS[line_name], marker=marker)
            axes.set_title(name, parse_math=False)
            axes.set_xlim(0, self.epochs * 1.03)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
        figure.supxlabel("epochs")
        return png(figure)

    def _point(self, step: int) -> int:
        return (step - 1) * self._points // self.steps


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def progress_here() -> type[OnTerminal] | type[InNotebook]:
    """How the process that calls can show a run."""
    return InNotebook if in_notebook() else OnTerminal
