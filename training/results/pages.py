"""HTML pages about runs: tables, figures in a grid, lines as SVG, one file that a browser shows without a network."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from jinja2 import Environment
from markupsafe import Markup, escape

from lockstep.storage.page_style import COLOURS, STYLE, page_head, page_start
from lockstep.storage.urls import parent, split_url

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT, DARK, OTHER = (COLOURS[name][0] for name in ("light", "dark", "other"))
FOLLOWED = tuple(COLOURS[name][0] for name in ("third", "fourth", "grey"))
WIDTH, HEIGHT = 5.2, 3.0  # inches: a narrow screen shows the letters at about their size
MARKED_POINTS = 30  # up to this number each point is marked
FEW_MARKS = 8  # of a line with more points that is one of a group
GROUP = "run-of-"
LONG = 32  # characters of a cell; a longer one may be broken anywhere
STYLE_TAG = Markup("<style>\n{}</style>").format(Markup(STYLE))
# The template engine escapes everything that comes from data.
_ENGINE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_TABLE = _ENGINE.from_string("""\
<div class="wide"><table>
{% if head %}
<thead><tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
{% endif %}
{% for row in rows %}
<tr><th{% if long(row[0]) %} class="long"{% endif %}>{{ row[0] }}</th>{% for cell in row[1:] %}\
<td{% if long(cell) %} class="long"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
""")
_PAGE = _ENGINE.from_string("""\
{{ head }}<title>{{ title }}</title>
{{ style }}
</head><body>
<h1>{{ title }}</h1>
<p class="dim">{{ where }}</p>
{% for section in sections %}
<h2>{{ section.name }}</h2>
{{ section.body }}
{% endfor %}
{{ script }}</body></html>
""")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a figure; `dashes` is a line style of matplotlib, a point alone has `marker` only."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    style: str = "-"
    marker: str = "o"
    group: int | None = None
    """The number of what several figures have a line of: a page's script finds them by it."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page; a section without a body is left out."""

    name: str
    body: Markup


def page(title: str, where: str, sections: Sequence[Section], job: str = "report", script: str = "") -> str:
    """The HTML of a page; `where` is the line below its title, `job` the one that writes it. `script` is ours: nothing
    in it comes from data, and it is the only one that a browser runs.
    """
    shown = [section for section in sections if section.body]
    head, tag = Markup(page_head(script)), Markup(f"<script>{script}</script>\n" if script else "")
    return page_start(job) + _PAGE.render(
        title=title, where=where, sections=shown, head=head, style=STYLE_TAG, script=tag
    )


def table(rows: Sequence[Sequence[object]], *, head: bool = False) -> Markup:
    """A table whose first column (with `head` also its first row) are headings; a cell of Markup stays as it is."""
    if not rows:
        return Markup()
    return Markup(_TABLE.render(head=rows[0] if head else None, rows=rows[1:] if head else rows, long=_is_long))


def figures(found: Sequence[tuple[str, Markup]]) -> Markup:
    """Figures (caption, content) side by side where there is room."""
    parts = [
        Markup('<figure class="card"><figcaption>{}</figcaption>\n{}</figure>\n').format(name, body)
        for name, body in found
    ]
    return Markup('<div class="grid">\n{}</div>\n').format(Markup("").join(parts)) if parts else Markup()


def picture_sheet(found: Sequence[tuple[str, str]]) -> Markup:
    """Pictures (data URL, caption) side by side."""
    part = Markup('<figure><img src="{}" alt="{}"><figcaption>{}</figcaption></figure>\n')
    parts = Markup("").join(part.format(url, caption, caption) for url, caption in found)
    return Markup('<div class="sheet">\n{}</div>\n').format(parts) if found else Markup()


def paragraph(text: object) -> Markup:
    """A paragraph of text."""
    return Markup("<p>{}</p>\n").format(text)


def estimate(value: str, interval: str) -> Markup:
    """A cell: a value, and below it its interval, unless that is `-`."""
    below = Markup() if interval == "-" else Markup('<br><span class="dim">{}</span>').format(interval)
    return escape(value) + below


def link(page_url: str | None, target: str, text: str) -> Markup:
    """Return `text` as a link from the page at `page_url` to `target`; only text if they are on different storages.

    The link is relative, so that the page and what it links to may be moved together.
    """
    if page_url is None:
        return escape(text)
    (scheme, host, here), (other, other_host, there) = split_url(parent(page_url)), split_url(target)
    if (scheme, host) != (other, other_host) or not here.startswith("/") or not there.startswith("/"):
        return escape(text)
    return Markup('<a href="{}">{}</a>').format(quote(os.path.relpath(there, here)), text)


def axes_of(x_label: str, *, width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    from matplotlib.figure import Figure  # half a second of import that only a page needs

    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.3)
    return figure, axes


def lines_of(
    lines: Sequence[Line], x_label: str, *, x_end: float | None = None, level: tuple[str, float] | None = None,
    legend: bool = True, log: bool = False,
) -> Markup:  # fmt: skip
    """Lines over whole numbers from 0 or, with `log`, over the logarithm of positive ones, up to `x_end`; `level` is a
    labelled horizontal line.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import MaxNLocator

    figure, axes = axes_of(x_label)
    for line in lines:
        many, label = len(line.x) > MARKED_POINTS, printable(line.label)
        marker = None if many and line.group is None else line.marker
        (drawn,) = axes.plot(line.x, line.y, color=line.colour, label=label, linestyle=line.style, marker=marker,
                             markersize=5 if line.group is not None else 4,
                             markevery=len(line.x) // FEW_MARKS if many else None)  # fmt: skip
        drawn.set_gid(None if line.group is None else f"{GROUP}{line.group}")
    if level is not None:
        axes.axhline(level[1], color=FOLLOWED[2], linestyle=":", label=printable(level[0]))
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if x_end is not None:
        least = 0.9 * min([1.0, *(value for line in lines for value in line.x)])
        axes.set_xlim(least if log else 0, x_end * (1.2 if log else 1.03))
    if legend:
        with rc_context({"text.parse_math": False}):  # a dataset's name may have `$`, and be no formula
            axes.legend(frameon=False)
    drawn_lines = re.sub(f'id="{GROUP}([0-9]+)"', r'class="run" data-run="\1"', str(svg(figure)))
    return Markup(drawn_lines)  # still what matplotlib made


def printable(text: str) -> str:
    """Return `text` with each character that a terminal may obey, or a font lacks, replaced by `?`."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def svg(figure: Figure) -> Markup:
    """A figure as part of a page, the same bytes each time; its colours follow the page's, light or dark."""
    from matplotlib import rc_context

    target = io.StringIO()
    with rc_context({"svg.hashsalt": "lockstep", "svg.fonttype": "none"}):
        figure.savefig(target, format="svg", metadata={"Date": None}, bbox_inches="tight", transparent=True)
    text = target.getvalue()
    for name, (light, _) in COLOURS.items():
        for what in ("fill", "stroke"):
            text = text.replace(f"{what}: {light};", f"{what}: var(--{name});")
            text = text.replace(f'{what}: {light}"', f'{what}: var(--{name})"')
    text = text.replace("stroke: #000000", "stroke: currentColor")  # axes and ticks
    # Made by matplotlib from numbers and names, which it escapes; HTML takes no XML head.
    return Markup(text[text.index("<svg") :])


def _is_long(cell: object) -> bool:
    return len(Markup(cell).striptags() if isinstance(cell, Markup) else str(cell)) > LONG
