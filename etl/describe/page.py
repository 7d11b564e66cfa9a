"""A description as one self-contained HTML file: classes, pictures and columns first, what made the dataset last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import Environment
from markupsafe import Markup

from lockstep.etl.describe.by_split import SharedHistogram
from lockstep.etl.describe.dataset import CLASSES, LOOK_AT, QUARANTINE, Description, Table
from lockstep.etl.describe.text import MAX_LINES, shown
from lockstep.storage.page_style import HEAD, STYLE, page_start

WIDTH, HEIGHT, GAP, ROW = 360, 90, 1, 13  # pixels: of a histogram, between its bars, of a row
NAMES = 140  # pixels for the labels of bars that lie
MAX_LABEL = 40
FIT_SPLITS = 3  # next to each other in a card of a third of a page; more get a card of half a page
COLOURS = ("var(--light)", "var(--other)", "var(--third)", "var(--fourth)")
"""Colours of the splits, the one to train on first; a dataset with more splits is shown as one."""
_FIRST = (LOOK_AT, CLASSES)
"""How the titles of the tables begin that are above pictures and columns; the others are below."""
_OPEN = ("Splits", "Leakage", QUARANTINE, "Dataset", "Files")
"""How the titles of the other tables begin that are shown unfolded."""
_STYLE = """\
.roomy { grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)) }
.card table { font-size: .85rem; width: 100% } .card td, .card th { white-space: normal; padding: .15rem .4rem }
.card p { margin: .3rem 0 } summary { cursor: pointer; font-size: 1.15rem; font-weight: 600; margin: 1rem 0 .3rem }
"""
_TEMPLATE = """\
{% macro table(one) %}
<div class="wide"><table>
{% if one.head %}
<tr>{% for cell in one.head %}<th>{{ shown(cell, 200) }}</th>{% endfor %}</tr>
{% endif %}
{% for row in one.rows %}
<tr>{% for cell in row %}\
<td{% if cell|length > 24 %} class="long"{% endif %}>{{ shown(cell, 1000) }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endmacro %}
{{ head }}<title>{{ shown(name, 100) }}: a dataset</title>
<style>
{{ style }}
</style></head><body>
<h1>{{ shown(name, 100) }}: a dataset</h1>
<p class="dim">{{ url }}</p>
{% for one in first %}
<h2>{{ shown(one.title, 200) }}</h2>
{{ table(one) }}
{% endfor %}
{% if pictures %}
<h2>{{ pictures_title }}</h2>
<div class="sheet">
{% for picture in pictures %}
<figure><img src="{{ picture.url }}" alt=""><figcaption>{{ shown(picture.caption, 60) }}</figcaption></figure>
{% endfor %}
</div>
{% endif %}
<h2>Columns ({{ looked_at }})</h2>
<div class="grid{% if roomy %} roomy{% endif %}">
{% for column in columns %}
<div class="card">
<h3>{{ shown(column.name, 200) }}</h3>
<p class="dim">{{ column.type }}, {{ column.kind }}</p>
{% for histogram in column.histograms %}
<p>{{ shown(histogram.title, 80) }}{% if histogram.note %} ({{ shown(histogram.note, 200) }}){% endif %}</p>
<p class="dim">
{% for split in histogram.shares %}
<span class="key"><span style="color: {{ colours[loop.index0] }}">&#9632;</span> {{ shown(split, 60) }}</span>
{% endfor %}
</p>
{% if histogram.labels|length > max_lines %}
<svg viewBox="0 0 {{ width }} {{ height + 16 }}" width="{{ width }}" role="img">
{% for bar in standing(histogram) %}
<rect x="{{ bar.x }}" y="{{ bar.y }}" width="{{ bar.width }}" height="{{ bar.height }}" fill="{{ bar.colour }}">\
<title>{{ bar.label }}: {{ bar.share }}</title></rect>
{% endfor %}
{% set least, most = shown(histogram.labels[0], 26), shown(histogram.labels[-1], 26) %}
<text x="0" y="{{ height + 13 }}" font-size="11">{{ least }}</text>
<text x="{{ width }}" y="{{ height + 13 }}" font-size="11" text-anchor="end">{{ most }}</text>
</svg>
{% else %}
{% set bars = lying(histogram) %}
<svg viewBox="0 0 {{ width }} {{ bars.height }}" width="{{ width }}" role="img">
{% for bar in bars.found %}
<rect x="{{ names }}" y="{{ bar.y }}" width="{{ bar.width }}" height="{{ row - 2 }}" fill="{{ bar.colour }}"></rect>
{% if bar.label %}
<text x="{{ names - 4 }}" y="{{ bar.y + row - 3 }}" font-size="11" text-anchor="end">{{ bar.label }}</text>
{% endif %}
<text x="{{ names + bar.width + 4 }}" y="{{ bar.y + row - 3 }}" font-size="11">{{ bar.share }}</text>
{% endfor %}
</svg>
{% endif %}
{% endfor %}
<div class="wide"><table>
<tr><th></th>{% for split in column.splits %}<th>{{ shown(split, 60) }}</th>{% endfor %}</tr>
{% for fact, values in column.facts %}
<tr><th>{{ shown(fact, 60) }}</th>{% for value in values %}<td>{{ shown(value, 300) }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
</div>
{% endfor %}
</div>
{% if reports %}
<h2>Runs that were trained on it</h2>
<ul>
{% for link, words in reports %}
<li>{{ link }} <span class="dim">{{ shown(words, 200) }}</span></li>
{% endfor %}
</ul>
{% endif %}
{% for one in last %}
<details{% if one.title.startswith(open) %} open{% endif %}><summary>{{ shown(one.title, 200) }}</summary>
{{ table(one) }}
</details>
{% endfor %}
</body></html>
"""
_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_TEMPLATE)
_KINDS = {"label": 0, "feature": 1}  # then the others, such as ids


def as_page(found: Description, reports: Sequence[tuple[Markup, str]] = ()) -> str:
    """The page's HTML; `reports` are links to the reports of its runs, each with some words about the run."""
    first = sorted((one for one in found.tables if one.title.startswith(_FIRST)), key=_place)
    return page_start("describe") + _PAGE.render(
        name=found.url.rstrip("/").rpartition("/")[2] or found.url,
        url=shown(found.url, 500),
        head=Markup(HEAD),
        style=Markup(STYLE + _STYLE),
        first=first,
        last=sorted((one for one in found.tables if one not in first), key=lambda one: not one.title.startswith(_OPEN)),
        open=_OPEN,
        pictures=found.pictures,
        pictures_title=found.pictures_title,
        roomy=max((len(column.splits) for column in found.by_split), default=0) > FIT_SPLITS,
        columns=sorted(found.by_split, key=lambda column: _KINDS.get(column.kind, 2)),
        looked_at=found.looked_at,
        shown=shown,
        reports=reports,
        standing=_standing,
        lying=_lying,
        colours=COLOURS,
        max_lines=MAX_LINES,
        width=WIDTH,
        height=HEIGHT,
        names=NAMES,
        row=ROW,
    )


def _place(table: Table) -> int:
    return next(place for place, start in enumerate(_FIRST) if table.title.startswith(start))


def _standing(histogram: SharedHistogram) -> list[dict[str, object]]:
    """Bars of each split next to each other; the tallest is as high as the figure."""
    most = max((share for shares in histogram.shares.values() for share in shares), default=0) or 1
    step = WIDTH / len(histogram.labels)
    each = (step - GAP) / len(histogram.shares)
    bars: list[dict[str, object]] = []
    for place, (split, shares) in enumerate(histogram.shares.items()):
        for number, (label, share) in enumerate(zip(histogram.labels, shares, strict=True)):
            tall = round(HEIGHT * share / most, 1)
            at = {"x": round(number * step + place * each, 1), "y": round(HEIGHT - tall, 1), "width": round(each, 1)}
            text = f"{shown(split, MAX_LABEL)}, {shown(label, MAX_LABEL)}"
            bars.append({**at, "height": tall, "colour": COLOURS[place], "label": text, "share": _percent(share)})
    return bars


def _lying(histogram: SharedHistogram) -> Mapping[str, object]:
    """A group of bars for each label, a bar for each split."""
    most = max((share for shares in histogram.shares.values() for share in shares), default=0) or 1
    bars: list[dict[str, object]] = []
    group = ROW * len(histogram.shares) + 5
    for number, label in enumerate(histogram.labels):
        for place, shares in enumerate(histogram.shares.values()):
            bars.append(
                {
                    "y": group * number + ROW * place,
                    "width": round((WIDTH - NAMES - 50) * shares[number] / most, 1),
                    "label": "" if place else shown(label, 22),
                    "share": _percent(shares[number]),
                    "colour": COLOURS[place],
                }
            )
    return {"found": bars, "height": group * len(histogram.labels)}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
