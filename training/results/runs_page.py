"""A page of several runs: a table, what they differ in, their curves over each other, and where each came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from markupsafe import Markup

from lockstep.storage.errors import LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import basename
from training.results.curves import curve_names, numbers, smoothed
from training.results.pages import Line, Section, figures, lines_of, link, page, paragraph, table
from training.results.report import describe_page
from training.results.runs import DAMAGED, FINISHED, ListedRun, comparison, listing, short_digest
from training.rules import VALIDATION
from training.run.metrics import History
from training.run.paths import RunPaths
from training.run.summary import read_summary

MOST_CURVES = 10  # runs with a colour of their own; more would look alike
MUCH_LONGER = 8  # times the median run: then the others would be a few pixels at the left
# Readable on light and on dark paper.
PALETTE = (
    "#2f7fd0", "#d9722a", "#2f9e5b", "#9a6bd0", "#d64550", "#1f9aa5", "#a5714b", "#d467ab", "#8f9a2e", "#808890",
)  # fmt: skip


def runs_page(runs: Sequence[ListedRun], where: str, url: str, by: str = "") -> str:
    """The HTML of the page at `url` about these runs, which are ordered `by`; `where` says what was asked for."""
    histories, problems = _histories(runs)
    shown = list(histories)[:MOST_CURVES]
    colours = dict(zip(shown, PALETTE, strict=False))
    names = {run.url: run.name for run in runs}
    differing = comparison(runs)
    curves = _legend(colours, names) + figures(_curves({one: histories[one] for one in shown}, runs, names, colours))
    more = len(histories) - len(shown)
    notes = [f"{names[one]}: its metrics cannot be read: {problem}" for one, problem in problems.items()]
    if more > 0:
        notes.append(f"The curves are of the first {MOST_CURVES} runs of the table; {more} more have some.")
    sections = [
        Section(f"{len(runs)} runs", table(_linked(listing(runs, by), runs, url), head=True)),
        Section("What differs", table(differing, head=True) if len(differing) > 1 else Markup()),
        Section("Curves", curves + Markup("").join(map(paragraph, notes)) if shown or notes else Markup()),
        Section("Lineage: dataset, run, the runs that began with its weights, model", _lineage(runs, url)),
    ]
    return page("Runs compared", where, sections, "runs")


def _histories(runs: Sequence[ListedRun]) -> tuple[dict[str, History], dict[str, str]]:
    """The metrics of each run that has some, and what is wrong with those that cannot be read, by URL."""
    found, problems = {}, {}
    for run in runs:
        if run.state != DAMAGED:
            try:
                history = read_summary(run.url)
            except LockstepError as error:
                problems[run.url] = error.what
                continue
            if history.steps or history.epochs:
                found[run.url] = history
    return found, problems


def _legend(colours: Mapping[str, str], names: Mapping[str, str]) -> Markup:
    swatch = Markup('<span class="key"><span style="color: {}">&#9632;</span> {}</span> ')
    items = Markup("").join(swatch.format(colour, names[url]) for url, colour in colours.items())
    return Markup('<p>{} <span class="dim">solid: validation, dashed: training</span></p>\n').format(items)


def _curves(
    histories: Mapping[str, History], runs: Sequence[ListedRun], names: Mapping[str, str], colours: Mapping[str, str]
) -> list[tuple[str, Markup]]:
    """A figure for each metric, and one of the loss of the steps; all x axes end at the same epoch."""
    epochs = {run.url: run.steps_in_epoch for run in runs}
    ends = [history.epochs[-1]["epoch"] + 1 for history in histories.values() if history.epochs]
    log = bool(ends) and max(ends) > MUCH_LONGER * median(ends)
    by = "epoch, logarithmic" if log else "epoch"
    metrics = sorted({name for history in histories.values() for name in curve_names(history)})
    found = []
    for metric in metrics:
        lines = []
        for url, history in histories.items():
            for key, style in ((metric, "--"), (f"{VALIDATION}{metric}", "-")):
                points = [
                    (row["epoch"] + 1, row["metrics"][key]) for row in history.epochs if key in numbers(row["metrics"])
                ]
                if points:
                    x, y = zip(*points, strict=True)
                    lines.append(Line(names[url], x, y, colours[url], style))
        end = float(max(ends)) if ends else None
        found.append((f"{metric} by epoch", lines_of(lines, by, x_end=end, legend=False, log=log)))
    lines = []
    for url, history in histories.items():
        steps, _, means = smoothed(history)
        each = epochs[url]
        if steps and each:
            lines.append(Line(names[url], [step / each for step in steps], means, colours[url], "--", ""))
    if lines:
        last = max(max(line.x) for line in lines)
        caption = "loss over the global batch, smoothed, by epoch"
        found.append((caption, lines_of(lines, by, x_end=max([last, *ends]), legend=False, log=log)))
    return found


def _linked(rows: list[list[str]], runs: Sequence[ListedRun], url: str) -> list[Sequence[object]]:
    """The rows of `listing` with a link from each run's name to its report, where there is one."""
    linked = [[_report_link(run, url), *row[1:]] for run, row in zip(runs, rows[1:], strict=True)]
    return [rows[0], *linked]


def _report_link(run: ListedRun, url: str) -> Markup:
    report = RunPaths(run.url).report(run.generation)
    return link(url if _exists(report) else None, report, run.name)


def _exists(url: str) -> bool:
    try:
        return filesystem(url).exists(url)
    except LockstepError:
        return False


def _lineage(runs: Sequence[ListedRun], url: str) -> Markup:
    """Nested lists: a dataset, the runs that were trained on it, below each those that began with its weights."""
    known = {run.url: run for run in runs}
    children: dict[str | None, list[ListedRun]] = {}
    for run in runs:
        # A run that began with a run of another dataset is below its own dataset, which names where it began.
        source = known.get(run.begun_from or "")
        inside = source is not None and source.digest == run.digest and source.url != run.url
        children.setdefault(run.begun_from if inside else None, []).append(run)
    parts = []
    tops = [run for run in children.get(None, []) if run.state != DAMAGED]
    for digest in dict.fromkeys(run.digest for run in tops):
        mine = [run for run in tops if run.digest == digest]
        below = Markup("").join(_tree(run, children, url) for run in mine)
        parts.append(Markup("<li>{} <span class=\"dim\">{}</span>\n<ul>\n{}</ul></li>\n").format(
            _datasets(mine[0], url), f"digest {short_digest(digest)}", below
        ))  # fmt: skip
    return Markup("<ul>\n{}</ul>\n").format(Markup("").join(parts)) if parts else Markup()


def _datasets(run: ListedRun, url: str) -> Markup:
    """The datasets' names, each with a link to its page of jobs.describe or else to its folder."""
    links = [link(url, describe_page(one) or one, basename(one) or one) for one in run.datasets]
    return Markup("dataset ") + Markup(", ").join(links)


def _tree(run: ListedRun, children: Mapping[str | None, Sequence[ListedRun]], url: str) -> Markup:
    model = RunPaths(run.url).model(run.generation)
    parts = [Markup("run {} ({})").format(_report_link(run, url), run.state)]
    if run.begun_from is not None:
        source = run.begun_from
        parts.append(Markup("first weights of {}").format(link(url, source, basename(source))))
    if run.state == FINISHED and _exists(model):
        parts.append(Markup("model {}").format(link(url, model, basename(model))))
    below = Markup("").join(_tree(child, children, url) for child in children.get(run.url, []))
    nested = Markup("\n<ul>\n{}</ul>").format(below) if below else Markup()
    return Markup("<li>{}{}</li>\n").format(Markup(", ").join(parts), nested)
