"""A report's curves: SVG drawings of losses and metrics, the same bytes for the same history."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from training.run.history import History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHED_STEPS = 20  # the curve's dark line: a single batch's loss says little
MARKED_POINTS = 30  # of so few one wants to see where each lies
LIGHT, DARK = "#b9cbe0", "#1f4e89"


def loss_curve(history: History) -> Markup:
    """The loss of each step, and its mean over the last ones."""
    rows = [row for row in history.steps if isinstance(row["loss"], (int, float))]  # not "nan", of a skipped step
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    smooth = [_mean(losses[max(0, i - SMOOTHED_STEPS + 1) : i + 1]) for i in range(len(losses))]
    return _curve(steps, [("one step", losses, LIGHT), (f"mean of {SMOOTHED_STEPS} steps", smooth, DARK)], "step")


def epoch_curve(history: History, name: str) -> Markup:
    """A metric at the end of each epoch."""
    rows = [row for row in history.epochs if isinstance(row["metrics"].get(name), (int, float))]
    return _curve([row["epoch"] + 1 for row in rows], [(name, [row["metrics"][name] for row in rows], DARK)], "epoch")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _curve(x: Sequence[int], lines: Sequence[tuple[str, Sequence[float], str]], x_label: str) -> Markup:
    from matplotlib.figure import Figure  # half a second that only a report needs
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 3))
    axes = figure.add_subplot()
    for name, y, colour in lines:
        axes.plot(x, y, color=colour, label=name, marker="o" if len(x) <= MARKED_POINTS else None)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _svg(figure)


def _svg(figure: Figure) -> Markup:
    from matplotlib import rc_context

    target = io.StringIO()
    with rc_context({"svg.hashsalt": "lockstep", "svg.fonttype": "none"}):
        figure.savefig(target, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = target.getvalue()
    # Made by matplotlib from numbers and the metric names, which it escapes; the XML head has no place inside HTML.
    return Markup(text[text.index("<svg") :])
