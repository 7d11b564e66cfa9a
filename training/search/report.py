"""Writes a search's report: one HTML file with its trials, the importance of parameters, and parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import basename
from training.results import evaluate
from training.results.pages import DARK, LIGHT, Section, figures, page, svg, table
from training.search.config import SearchConfig
from training.search.space import Parameter
from training.search.study import DONE, Study, Trial


def write_search_report(
    fs: FileSystem, config: SearchConfig, study: Study, tested: Mapping[str, Any] | None = None
) -> str:
    """Write TUNE/report.html, also over an older one; returns its URL. `tested` is the best trial's evaluation on the
    split that no trial has seen.
    """
    url = f"{config.root}/report.html"
    write_file(
        fs, url, render(config, study.trials, study.best(), study.importances(), tested).encode(), exclusive=False
    )
    return url


def parameter_words(parameters: Mapping[str, Any]) -> str:
    """`learning_rate 0.1, set.width 32`."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in parameters.items())


def tested_words(tested: Mapping[str, Any]) -> str:
    """The metrics of the best trial on the split that no trial has seen, with their 95 % intervals."""
    names = sorted(tested["metrics"], key=lambda name: (name not in tested["intervals"], name))
    said = []
    for name in names:
        value, interval = evaluate.number(tested["metrics"][name]), tested["intervals"].get(name)
        said.append(f"{name} {value} ({evaluate.span(interval)})" if interval else f"{name} {value}")
    return f"{', '.join(said)}; {tested['samples']} samples"


def render(
    config: SearchConfig,
    trials: Sequence[Trial],
    best: Trial,
    importances: Mapping[str, float],
    tested: Mapping[str, Any] | None = None,
) -> str:
    """The page's HTML."""
    names = [parameter.name for parameter in config.space]
    about = [
        ("metric", config.metric),
        ("best trial", f"{best.number}: {value_text(best.value)} with {parameter_words(best.parameters)}"),
        ("its value", f"chosen on split {config.chosen_on}: optimistic"),
        *([] if tested is None else [(f"on split {tested['split']}, which no trial has seen", tested_words(tested))]),
        ("its run", config.run_of(best.number)),
        ("its model", best.model or "none"),
        ("trials", ", ".join(f"{count} {state}" for state, count in _counts(trials).items())),
        ("sampler, pruner, seed", f"{config.sampler}, {config.pruner}, {config.base.seed}"),
        ("base", f"{config.base.model} on {', '.join(config.base.datasets)}, {config.base.epochs} epochs"),
    ]
    head = ("trial", "state", config.metric_name, "epochs", *names, "reason")
    rows = [
        (each.number, each.state, value_text(each.value), each.epochs, *(value_text(each.parameters[n]) for n in names),
         each.reason)
        for each in trials
    ]  # fmt: skip
    shares = [(name, f"{share:.1%}") for name, share in importances.items()]
    done = [each for each in trials if each.state == DONE]
    lines = parallel_coordinates(config.space, done, config.metric_name, maximize=config.maximize)
    sections = [
        Section("Search", table(about)),
        Section("Importance: each parameter's share in the variance of the metric (PED-ANOVA)", table(shares)),
        Section(
            "Parallel coordinates",
            figures([(f"one line a trial that is done; more contrast is better ({config.metric})", lines)]),
        ),
        Section("Trials", table([head, *rows], head=True)),
    ]
    return page(f"{basename(config.root)}: report of a search", config.root, sections, "tune")


def parallel_coordinates(space: Sequence[Parameter], done: Sequence[Trial], metric: str, *, maximize: bool) -> Markup:
    """A vertical axis for each parameter and one for the metric, and a line through them for each trial."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    values = [float(each.value or 0.0) for each in done]
    ranks = {each.number: place for place, each in enumerate(sorted(done, key=lambda one: one.value or 0.0))}
    columns = [_heights(parameter, [each.parameters[parameter.name] for each in done]) for parameter in space]
    columns.append(_scaled(values))
    colours = LinearSegmentedColormap.from_list("trials", [LIGHT, DARK])
    figure = Figure(figsize=(max(4.0, 1.6 * len(columns)), 3.5))
    axes = figure.add_subplot()
    for number, each in enumerate(done):
        better = ranks[each.number] / max(1, len(done) - 1)
        shade = better if maximize else 1 - better
        heights = [column[number] for column in columns]
        axes.plot(range(len(columns)), heights, color=colours(shade), linewidth=1 + shade, zorder=1 + shade)
    for place in range(len(columns)):
        axes.axvline(place, color="#888", linewidth=0.8)
    labels = [f"{p.name}\n{value_text(p.ends()[0])} to {value_text(p.ends()[-1])}{', log' * p.log}" for p in space]
    labels.append(f"{metric}\n{value_text(min(values))} to {value_text(max(values))}")
    axes.set_xticks(range(len(columns)), labels, fontsize=8)
    axes.set_yticks([])
    axes.set_frame_on(False)
    return svg(figure)


def _heights(parameter: Parameter, values: Sequence[Any]) -> list[float]:
    """Each value's place between the ends of its axis, 0 to 1."""
    if parameter.choices:
        last = max(1, len(parameter.choices) - 1)
        return [parameter.choices.index(value) / last for value in values]
    scale = math.log if parameter.log else float
    low, high = (scale(float(end)) for end in parameter.ends())
    return [(scale(value) - low) / (high - low) for value in values]


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.5 for value in values]


def _counts(trials: Sequence[Trial]) -> dict[str, int]:
    states = [each.state for each in trials]
    return {state: states.count(state) for state in dict.fromkeys(states)}


def value_text(value: Any) -> str:
    """A number with six digits, nothing for None."""
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
