"""The figures of a run: curves of training and validation, ROC, calibration, confusion, and the time of its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from types import MappingProxyType
from typing import Any

from markupsafe import Markup

from lockstep.training.results.pages import DARK, FOLLOWED, LIGHT, OTHER, WIDTH, Line, axes_of, lines_of, svg
from lockstep.training.rules import VALIDATION
from lockstep.training.run.metrics import PARTS, History
from lockstep.training.run.summary import SMOOTHED_STEPS

TIME_WORDS = {
    "starting_s": "starting (tracing, compiling, the first batch)",
    "data_s": "waiting for data",
    "compute_s": "computing",
    "exchange_s": "waiting for the all-reduce",
    "checkpoint_s": "writing checkpoints",
    "validation_s": "validating",
    "other_s": "between steps: callbacks, ends of epochs",
}
_TIME_COLOURS = ("#9aa0a6", OTHER, DARK, LIGHT, *FOLLOWED)
LOSS = "loss"
SAME = 1e-5  # the relative difference of two curves that are one: metrics of a model are float32
Followed = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""The metrics of each evaluated checkpoint, by `SPLIT of DATASET` and step (lockstep.training.results.follow)."""


def smoothed(history: History) -> tuple[list[int], list[float], list[float]]:
    """Return (steps, losses, means of the last SMOOTHED_STEPS losses) of a summary's steps whose loss is a number."""
    rows = [row for row in history.steps if isinstance(row["loss"], (int, float))]  # not "nan", of a skipped step
    return [row["step"] for row in rows], [row["loss"] for row in rows], [row["mean"] for row in rows]


def epoch_steps(history: History) -> float | None:
    """The steps of an epoch; None before the first one has ended."""
    return history.epochs[-1]["step"] / (history.epochs[-1]["epoch"] + 1) if history.epochs else None


def end_of(history: History) -> float | None:
    """Where the x axis of each curve of a run ends, in epochs: they can be compared by eye. None before the first."""
    each = epoch_steps(history)
    return (
        None
        if each is None
        else max(history.epochs[-1]["epoch"] + 1, (history.steps or [{"step": 0}])[-1]["step"] / each)
    )


def _loss_lines(history: History) -> list[Line]:
    """The loss of each step, and its mean over the last ones, by epoch, before the end of the first one by step."""
    steps, losses, means = smoothed(history)
    each = epoch_steps(history)
    x = steps if each is None else [step / each for step in steps]
    return [
        Line("one step", x, losses, LIGHT, marker=""),
        Line(f"mean of {SMOOTHED_STEPS} steps", x, means, DARK, marker=""),
    ]


Curves = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
"""The points of each line, by the name of a metric and by what was scored."""


def curve_names(
    history: History, followed: Followed = MappingProxyType({}), evaluation: Mapping[str, Any] | None = None
) -> dict[str, list[str]]:
    """The metrics that get a curve, which training, validation, `followed` checkpoints and `evaluation` share; for each
    those that are left out, since their curve is the same.
    """
    found: dict[str, dict[str, list[tuple[float, float]]]] = {LOSS: {}} if history.steps else {}
    for row in history.epochs:
        for name, value in numbers(row["metrics"]).items():
            key = VALIDATION if name.startswith(VALIDATION) else ""
            found.setdefault(name.removeprefix(VALIDATION), {}).setdefault(key, []).append((row["step"], value))
    for label, by_step in followed.items():
        for step, metrics in by_step.items():
            for name, value in numbers(metrics).items():
                found.setdefault(name, {}).setdefault(label, []).append((step, value))
    if evaluation is not None:
        for name, value in numbers(evaluation["metrics"]).items():
            if name in found:
                found[name]["evaluation"] = [(0, value)]
    return distinct(found)


def distinct(curves: Curves) -> dict[str, list[str]]:
    """The names of the metrics that say something of their own, in order; for each the names of those whose lines are
    all among its lines: the loss of a model without regularisation is its log loss, computed in float32.
    """
    kept: dict[str, list[str]] = {}
    for name in sorted(curves, key=lambda one: (-len(curves[one]), one != LOSS, one)):
        lines = curves[name]
        twins = (one for one in kept if lines and all(_alike(lines[key], curves[one].get(key, ())) for key in lines))
        twin = next(twins, None)
        if twin is None:
            kept[name] = []
        else:
            kept[twin].append(name)
    return dict(sorted(kept.items()))


def _alike(points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    return len(points) == len(others) and all(
        x == other_x and math.isclose(y, other_y, rel_tol=SAME)
        for (x, y), (other_x, other_y) in zip(points, others, strict=True)
    )


def numbers(metrics: Mapping[str, Any]) -> Mapping[str, float]:
    """The metrics that are numbers: not "nan"."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def epoch_curve(
    history: History,
    name: str,
    followed: Followed = MappingProxyType({}),
    evaluation: Mapping[str, Any] | None = None,
) -> Markup:
    """A metric at the end of each epoch, of the training rows and of the validation split where there are any, and of
    each checkpoint that was `followed`; before the end of an epoch by step. The `evaluation` of the finished model is
    a point at the end, its baseline a level. The training loss is by step.
    """
    stepwise = name == LOSS and bool(history.steps)
    lines = _loss_lines(history) if stepwise else []
    parts = [(f"{VALIDATION}{name}", "validation", OTHER)]
    for key, label, colour in parts if stepwise else [(name, "training", DARK), *parts]:
        rows = [row for row in history.epochs if key in numbers(row["metrics"])]
        if rows:
            lines.append(Line(label, [row["epoch"] + 1 for row in rows], [row["metrics"][key] for row in rows], colour))
    steps = epoch_steps(history) or 1.0
    for (label, by_step), colour in zip(followed.items(), cycle(FOLLOWED), strict=False):
        scores = {step: row[name] for step, row in by_step.items() if name in numbers(row)}
        if scores:
            lines.append(Line(label, [step / steps for step in scores], list(scores.values()), colour))
    level = None
    if evaluation is not None and name in numbers(evaluation["metrics"]):
        end = end_of(history) or (history.steps[-1]["step"] if history.steps else 0)
        lines.append(Line(str(evaluation["split"]), [end], [evaluation["metrics"][name]], FOLLOWED[1], "", "D"))
        baseline = evaluation["baseline"]
        if baseline and name in numbers(baseline["metrics"]):
            level = f"{baseline['name']} on {evaluation['split']}", baseline["metrics"][name]
    return lines_of(lines, "epoch" if history.epochs else "step", x_end=end_of(history), level=level)


def of_each_task(metrics: Mapping[str, Any], tasks: int) -> list[str]:
    """The metrics NAME of an epoch that are there as NAME_0, NAME_1 ... for each task."""
    bases = [name.removesuffix("_0") for name in metrics if name.endswith("_0")]
    return [base for base in bases if all(f"{base}_{number}" in metrics for number in range(tasks))]


def without_tasks(history: History, tasks: int) -> History:
    """The history without the metrics of single tasks."""
    last = history.epochs[-1]["metrics"] if history.epochs else {}
    theirs = {f"{base}_{number}" for base in of_each_task(last, tasks) for number in range(tasks)}
    kept = [
        {**row, "metrics": {name: value for name, value in row["metrics"].items() if name not in theirs}}
        for row in history.epochs
    ]
    return replace(history, epochs=kept)


def task_curve(history: History, name: str, tasks: Sequence[str]) -> Markup:
    """A metric of each of these tasks at the end of each epoch that has it."""
    lines = []
    for number, (task, colour) in enumerate(zip(tasks, cycle((DARK, OTHER, *FOLLOWED, LIGHT)), strict=False)):
        key = f"{name}_{number}"
        rows = [row for row in history.epochs if key in numbers(row["metrics"])]
        if rows:
            lines.append(Line(task, [row["epoch"] + 1 for row in rows], [row["metrics"][key] for row in rows], colour))
    return lines_of(lines, "epoch", x_end=end_of(history))


def roc_plot(roc: Mapping[str, Sequence[Sequence[float]]]) -> Markup:
    """The share of yes above a threshold against the share of no above it; on the diagonal, scores say nothing."""
    figure, axes = axes_of("share of no above the threshold", width=4.2, height=4.2)
    axes.plot([0, 1], [0, 1], color=LIGHT)
    for name, colour, style in (("model", DARK, "-"), ("baseline", FOLLOWED[2], "--")):
        if name in roc:
            axes.plot(*zip(*roc[name], strict=True), color=colour, label=name, linestyle=style)
    axes.set_ylabel("share of yes above the threshold")
    axes.set_aspect("equal")
    axes.legend(frameon=False, loc="lower right")
    return svg(figure)


def calibration_plot(calibration: Mapping[str, Any]) -> Markup:
    """The observed rate of each bin against its mean prediction; on the diagonal, predictions are right."""
    figure, axes = axes_of("mean prediction of a bin", width=4.2, height=4.2)
    predicted, observed = ([one[name] for one in calibration["bins"]] for name in ("predicted", "observed"))
    most = max([*predicted, *observed]) or 1.0
    axes.plot([0, most], [0, most], color=LIGHT)
    axes.plot(predicted, observed, color=DARK, marker="o")
    axes.set_ylabel("observed rate")
    axes.set_aspect("equal")
    return svg(figure)


def confusion_table(confusion: Mapping[str, Any]) -> Markup:
    """Counts with the class names, true class by row; the darker a cell, the larger its share of the true class."""
    cells = Markup('<td style="background: color-mix(in srgb, var(--dark) {}%, transparent)">{}</td>')
    head = Markup("").join(Markup("<th>{}</th>").format(name) for name in confusion["classes"])
    rows = []
    for name, counts in zip(confusion["classes"], confusion["samples"], strict=True):
        total = sum(counts) or 1
        shown = Markup("").join(cells.format(round(45 * count / total), count) for count in counts)
        rows.append(Markup("<tr><th>{}</th>{}</tr>\n").format(name, shown))
    return Markup(
        '<div class="wide"><table>\n<thead><tr><th>true \\ predicted</th>{}</tr></thead>\n{}</table></div>\n'
    ).format(head, Markup("").join(rows))


def time_bars(history: History) -> Markup:
    """How each rank's time was spent over all generations, a bar for each rank; nothing without measurements."""
    ranks = sorted({row["rank"] for row in history.times})
    sums = {part: [sum(row[part] for row in history.times if row["rank"] == rank) for rank in ranks] for part in PARTS}
    if not any(map(sum, sums.values())):
        return Markup()
    figure, axes = axes_of("seconds", width=2 * WIDTH, height=1.0 + 0.32 * len(ranks))
    starts = [0.0] * len(ranks)
    for (part, seconds), colour in zip(sums.items(), _TIME_COLOURS, strict=True):
        if any(seconds):
            axes.barh(range(len(ranks)), seconds, left=starts, color=colour, label=TIME_WORDS[part], height=0.7)
        starts = [start + more for start, more in zip(starts, seconds, strict=True)]
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
    return svg(figure)
