"""Writes a search's report: one HTML file with its trials, the importance of parameters, and parallel coordinates."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from lockstep.storage.errors import NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import basename, join
from lockstep.training.results import evaluate
from lockstep.training.results.pages import DARK, LIGHT, OTHER, Section, link, page, printable, svg, table
from lockstep.training.run.command import command_of
from lockstep.training.search.config import SearchConfig
from lockstep.training.search.space import SETTING, Parameter, config_of_trial
from lockstep.training.search.study import DONE, Study, Trial

PAGE = "report.html"
PAGE_INCHES = 11.5  # of a chart as wide as a page


def write_search_report(
    fs: FileSystem, config: SearchConfig, study: Study, tested: Mapping[str, Any] | None = None
) -> str:
    """Write TUNE/report.html, also over an older one; returns its URL. `tested` is the best trial's evaluation on the
    split that no trial has seen.
    """
    url = f"{config.root}/{PAGE}"
    write_file(
        fs, url, render(config, study.trials, study.best(), study.importances(), tested).encode(), exclusive=False
    )
    return url


def search_page(fs: FileSystem, root: str, copy: str | None = None) -> str:
    """The URL of the page of the search at `root`, or of its `copy`, which is written there. A copy has no links to
    runs, which are relative to the search. Raises NotFoundError for a search that has no page yet.
    """
    url = join(root, PAGE)
    try:
        content = fs.read_bytes(url)
    except NotFoundError:
        raise NotFoundError(
            f"the search {root} has no report yet",
            got=f"no {PAGE} in it",
            allowed="a search that has ended",
            next_step=f"See how far it is: lockstep status {shlex.quote(root)}. The same lockstep tune ends it.",
        ) from None
    if copy is None:
        return url
    plain = re.sub(rb'<a href="[^"]*">(.*?)</a>', rb"\1", content)  # ours: all that comes from data is escaped
    write_file(filesystem(copy), copy, plain, exclusive=False)
    return copy


def parameter_words(parameters: Mapping[str, Any]) -> str:
    """Write parameters in words: `learning_rate 0.1, set.width 32`."""
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
        ("its run", _trial_link(config, best, config.run_of(best.number))),
        ("its model", best.model or "none"),
        ("trials", ", ".join(f"{count} {state}" for state, count in _counts(trials).items())),
        ("sampler, pruner, seed", f"{config.sampler}, {config.pruner}, {config.base.data.seed}"),
        (
            "base",
            f"{config.base.model.model} on {', '.join(config.base.data.datasets)}, {config.base.data.epochs} epochs",
        ),
    ]
    head = ("trial", "state", config.metric_name, "epochs", *names, "reason")
    rows = []
    for each in trials:
        state = f"{each.state}, the best" if each is best else each.state
        row = [_trial_link(config, each), state, value_text(each.value), each.epochs]
        row += [*(value_text(each.parameters[name]) for name in names), each.reason]
        rows.append([Markup("<strong>{}</strong>").format(cell) for cell in row] if each is best else row)
    shares = [(name, f"{share:.1%}") for name, share in importances.items()]
    done = [each for each in trials if each.state == DONE]
    lines = parallel_coordinates(config.space, done, best, config.metric_name, maximize=config.maximize)
    caption = f"a line for each trial that is done; more contrast is better ({config.metric}), trial {best.number} best"
    sections = [
        Section("Search", table(about)),
        Section("Importance: each parameter's share in the variance of the metric (PED-ANOVA)", table(shares)),
        Section(
            "Parallel coordinates",
            Markup('<figure class="card whole"><figcaption>{}</figcaption>\n{}</figure>\n').format(caption, lines),
        ),
        Section("Trials", table([head, *rows], head=True)),
        Section("What to do next", _next_calls(config, best)),
    ]
    return page(f"{basename(config.root)}: report of a search", config.root, sections, "tune")


def _trial_link(config: SearchConfig, trial: Trial, text: str = "") -> Markup:
    """A link to the run of a trial, below the search; by default its number."""
    return link(f"{config.root}/{PAGE}", config.run_of(trial.number), text or str(trial.number))


def _next_calls(config: SearchConfig, best: Trial) -> Markup:
    """The call that trains the best trial again for longer, and the one that continues the search."""
    longer = config_of_trial(config.base, best.parameters, f"{config.root}-best")
    trained = command_of(longer.but(epochs=2 * longer.data.epochs).to_json())
    searched = {parameter.name for parameter in config.space}
    settings = {name: value for name, value in config.base.model.extra.items() if f"{SETTING}{name}" not in searched}
    words = shlex.split(command_of(config.base.but(extra=settings).to_json()))
    words[1] = "tune"
    words += ["--metric", config.metric, "--trials", str(2 * config.number), "--parallel", str(config.parallel)]
    words += ["--sampler", config.sampler, "--pruner", config.pruner, "--space", "space.toml"]
    words += [] if config.test is None else ["--test", config.test]
    space = "\n".join(map(_as_toml, config.space))
    more = f"cat > space.toml <<'EOF'\n{space}\nEOF\n{shlex.join(words)}"
    parts = [("Train the best trial's model for twice as long, as a run of its own:", trained)]
    if config.sampler != "grid":
        parts.append((f"Continue this search up to {2 * config.number} trials; those that are done are kept:", more))
    return Markup("").join(Markup("<p>{}</p>\n<pre><code>{}</code></pre>\n").format(*each) for each in parts)


def _as_toml(parameter: Parameter) -> str:
    """The line of a space's file that declares a parameter: JSON's texts, numbers and lists are TOML's."""
    spec = [f"{key} = {json.dumps(value)}" for key, value in parameter.to_json().items() if key != "name"]
    return f"{json.dumps(parameter.name)} = {{{', '.join(spec)}}}"


def parallel_coordinates(
    space: Sequence[Parameter], done: Sequence[Trial], best: Trial, metric: str, *, maximize: bool
) -> Markup:
    """A vertical axis for each parameter and one for the metric, and a line through them for each trial; that of the
    best one has a colour, marks and a name of its own. As wide as a page.
    """
    from matplotlib import rc_context
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    values = [float(each.value or 0.0) for each in done]
    ranks = {each.number: place for place, each in enumerate(sorted(done, key=lambda one: one.value or 0.0))}
    columns = [_heights(parameter, [each.parameters[parameter.name] for each in done]) for parameter in space]
    columns.append(_scaled(values))
    colours = LinearSegmentedColormap.from_list("trials", [LIGHT, DARK])
    figure = Figure(figsize=(max(PAGE_INCHES, 1.4 * len(columns)), 4.2))
    axes = figure.add_subplot()
    places = range(len(columns))
    for number, each in enumerate(done):
        heights = [column[number] for column in columns]
        if each is best:
            axes.plot(places, heights, color=OTHER, linewidth=3, marker="o", zorder=3)
            axes.annotate(f"best: trial {best.number}", (places[-1], heights[-1]), xytext=(8, 0), color=OTHER,
                          textcoords="offset points", va="center", annotation_clip=False)  # fmt: skip
            continue
        better = ranks[each.number] / max(1, len(done) - 1)
        shade = better if maximize else 1 - better
        axes.plot(places, heights, color=colours(shade), linewidth=1 + shade, zorder=1 + shade)
    for place in places:
        axes.axvline(place, color="#888", linewidth=0.8)
    labels = [f"{p.name}\n{value_text(p.ends()[0])} to {value_text(p.ends()[-1])}{', log' * p.log}" for p in space]
    labels.append(f"{metric}\n{value_text(min(values))} to {value_text(max(values))}")
    axes.set_xticks(places, ["\n".join(map(printable, label.split("\n"))) for label in labels], fontsize=9)
    axes.set_yticks([])
    axes.set_frame_on(False)
    with rc_context({"text.parse_math": False}):
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
