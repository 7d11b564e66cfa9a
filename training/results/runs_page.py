"""A page of several runs: a table, what they differ in, their curves over each other, and where each came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from lockstep.storage.errors import LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import basename
from lockstep.training.results.curves import LOSS, distinct, numbers, smoothed
from lockstep.training.results.pages import Line, Section, figures, lines_of, link, page, paragraph, table
from lockstep.training.results.report import describe_page
from lockstep.training.results.runs import DAMAGED, FINISHED, ListedRun, comparison, listing, short_digest
from lockstep.training.rules import VALIDATION
from lockstep.training.run.metrics import History
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.summary import read_summary

MOST_CURVES = 20  # runs with a colour and a mark of their own; more would look alike
FIRST_SHOWN = 10  # of them, where a browser runs the script
MUCH_LONGER = 8  # times the median run: then the others would be a few pixels at the left
# Readable on light and on dark paper.
PALETTE = (
    "#2f7fd0", "#d9722a", "#2f9e5b", "#9a6bd0", "#d64550", "#1f9aa5", "#a5714b", "#d467ab", "#8f9a2e", "#808890",
)  # fmt: skip
MARKS = (
    ("o", "●"),
    ("s", "■"),
    ("^", "▲"),
    ("D", "◆"),
    ("v", "▼"),
    ("*", "★"),
    ("<", "◀"),
    (">", "▶"),
    ("P", "✚"),
    ("X", "✖"),
)
"""The mark of a run, for eyes that see two colours as one: matplotlib's name, and a letter that looks alike."""
SCRIPT = """
document.documentElement.classList.add('js');
const lines = run => document.querySelectorAll(`.run[data-run="${run}"]`);
const boxes = [...document.querySelectorAll('input[data-run]')];
const show = box => lines(box.dataset.run).forEach(line => line.classList.toggle('off', !box.checked));
boxes.forEach(box => {
  const label = box.closest('label');
  const light = on => {
    document.body.classList.toggle('lit', on);
    lines(box.dataset.run).forEach(line => line.classList.toggle('this', on));
  };
  box.checked = box.hasAttribute('checked');
  show(box);
  box.addEventListener('change', () => show(box));
  label.addEventListener('mouseenter', () => light(true));
  label.addEventListener('mouseleave', () => light(false));
  box.addEventListener('focus', () => light(box.matches(':focus-visible')));
  box.addEventListener('blur', () => light(false));
});
document.querySelectorAll('button[data-all]').forEach(button => button.addEventListener('click', () =>
  boxes.forEach(box => { box.checked = button.dataset.all === '1'; show(box); })));
document.querySelectorAll('.sortable table').forEach(table => [...table.tHead.rows[0].cells].forEach((head, column) => {
  const button = document.createElement('button');
  button.type = 'button';
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener('click', () => {
    const up = head.getAttribute('aria-sort') === 'descending' || !head.hasAttribute('aria-sort') && column === 0;
    const text = row => (row.cells[column] ? row.cells[column].textContent.trim() : '');
    const rows = [...table.rows].slice(1);
    const none = row => ['', '-'].includes(text(row));
    const plain = rows.every(row => none(row) || /^-?[0-9.]+(e[-+]?[0-9]+)?( of .*)?$/.test(text(row)));
    const key = row => (none(row) ? null : plain ? parseFloat(text(row)) : text(row));
    rows.sort((one, other) => {
      const a = key(one), b = key(other);
      if (a === null || b === null) return (a === null) - (b === null);
      return (plain ? a - b : a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
    });
    rows.forEach(row => row.parentNode.append(row));
    [...table.tHead.rows[0].cells].forEach(cell => cell.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  });
}));
"""
"""Sorts the tables by a click on a head, and shows, hides or stresses the lines of a run. All of it works by keyboard;
without scripts all lines are shown."""


@dataclass(frozen=True, slots=True)
class _Look:
    """How the lines of a run look, and their number on the page."""

    place: int
    colour: str
    marker: str
    letter: str

    @classmethod
    def of(cls, place: int) -> _Look:
        again = place // len(PALETTE)  # the second time a colour has another mark
        return cls(place, PALETTE[place % len(PALETTE)], *MARKS[(place + 3 * again) % len(MARKS)])

    def line(self, label: str, x: Sequence[float], y: Sequence[float], style: str) -> Line:
        """A line of the run."""
        return Line(label, x, y, self.colour, style, self.marker, self.place)


def runs_page(runs: Sequence[ListedRun], where: str, url: str, by: str = "") -> str:
    """The HTML of the page at `url` about these runs, which are ordered `by`; `where` says what was asked for."""
    histories, problems = _histories(runs)
    shown = list(histories)[:MOST_CURVES]
    looks = {one: _Look.of(place) for place, one in enumerate(shown)}
    names = {run.url: run.name for run in runs}
    differing = comparison(runs)
    curves = _legend(looks, names) + figures(_curves({one: histories[one] for one in shown}, runs, names, looks))
    more = len(histories) - len(shown)
    notes = [f"{names[one]}: its metrics cannot be read: {problem}" for one, problem in problems.items()]
    if more > 0:
        notes.append(f"The curves are of the first {MOST_CURVES} runs of the table; {more} more have some.")
    sections = [
        Section(f"{len(runs)} runs", _sortable(_linked(listing(runs, by), runs, url))),
        Section("What differs", _sortable(differing) if len(differing) > 1 else Markup()),
        Section("Curves", curves + Markup("").join(map(paragraph, notes)) if shown or notes else Markup()),
        Section("Lineage: dataset, run, the runs that began with its weights, model", _lineage(runs, url)),
    ]
    return page("Runs compared", where, sections, "runs", SCRIPT)


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


def _sortable(rows: Sequence[Sequence[object]]) -> Markup:
    return Markup('<div class="sortable">{}</div>\n').format(table(rows, head=True))


def _legend(looks: Mapping[str, _Look], names: Mapping[str, str]) -> Markup:
    key = Markup(
        '<label class="key"><input class="scripted" type="checkbox" data-run="{}"{}> '
        '<span style="color: {}">{}</span> {}</label> '
    )
    items = Markup("").join(
        key.format(
            look.place, Markup(" checked") if look.place < FIRST_SHOWN else "", look.colour, look.letter, names[url]
        )
        for url, look in looks.items()
    )
    buttons = Markup('<button type="button" data-all="1">all</button><button type="button" data-all="0">none</button>')
    return Markup(
        '<fieldset><legend>Lines</legend>{} <span class="scripted">{}</span>'
        '<span class="dim">solid: validation, dashed: training</span></fieldset>\n'
    ).format(items, buttons)


def _curves(
    histories: Mapping[str, History], runs: Sequence[ListedRun], names: Mapping[str, str], looks: Mapping[str, _Look]
) -> list[tuple[str, Markup]]:
    """A figure for each metric that says something of its own; all x axes end at the same epoch."""
    each = {run.url: run.steps_in_epoch for run in runs}
    trained = {url: _by_step(history, each[url]) for url, history in histories.items()}
    ends = [history.epochs[-1]["epoch"] + 1 for history in histories.values() if history.epochs]
    last = max([*ends, *(steps[-1] for steps, _ in trained.values() if steps)], default=None)
    log = bool(ends) and max(ends) > MUCH_LONGER * median(ends)
    by = "epoch, logarithmic" if log else "epoch"
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {LOSS: {}} if any(x for x, _ in trained.values()) else {}
    for url, history in histories.items():
        for row in history.epochs:
            for key, value in numbers(row["metrics"]).items():
                of_metric = curves.setdefault(key.removeprefix(VALIDATION), {})
                of_metric.setdefault(f"{VALIDATION if key.startswith(VALIDATION) else ''}{url}", []).append(
                    (row["epoch"] + 1, value)
                )
    found = []
    for metric, twins in distinct(curves).items():
        lines = []
        for url, look in looks.items():
            for key, style in ((url, "--"), (f"{VALIDATION}{url}", "-")):
                points = curves[metric].get(key, [])
                x, y = [point[0] for point in points], [point[1] for point in points]
                if metric == LOSS and key == url and trained[url][0]:
                    x, y = trained[url]
                if x:
                    lines.append(look.line(names[url], x, y, style))
        same = f" ({', '.join(twins)} is the same)" if twins else ""
        found.append((f"{metric}{same} by epoch", lines_of(lines, by, x_end=last, legend=False, log=log)))
    return found


def _by_step(history: History, steps_in_epoch: float | None) -> tuple[list[float], list[float]]:
    """Return (epochs, mean losses of the last steps), empty without steps."""
    steps, _, means = smoothed(history)
    return ([step / steps_in_epoch for step in steps], means) if steps_in_epoch else ([], [])


def _linked(rows: list[list[str]], runs: Sequence[ListedRun], url: str) -> list[Sequence[object]]:
    """The rows of `listing` with a link from each run's name to its report, where there is one."""
    linked = [[_report_link(run, url), *row[1:]] for run, row in zip(runs, rows[1:], strict=True)]
    return [rows[0], *linked]


def _report_link(run: ListedRun, url: str) -> Markup:
    report = RunPaths(run.url).report(run.generation)
    return link(url if _exists(report) else None, report, run.name)


def reports_of(dataset: str, runs: Sequence[ListedRun], url: str) -> list[tuple[Markup, str]]:
    """Return, for each run that was trained on `dataset`, a link from the page at `url` to its report (its name if it
    has none), and its model and state.
    """
    mine = [run for run in runs if dataset.rstrip("/") in (one.rstrip("/") for one in run.datasets)]
    return [(_report_link(run, url), f"{run.config.get('model')}, {run.state}") for run in mine]


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
    """The datasets' names, each with a link to its page of lockstep describe or else to its folder."""
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
