"""A description as text, and as one self-contained HTML file: tables, histograms as SVG, pictures as data URLs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jinja2 import Environment

from etl.describe.dataset import Description, Table
from etl.describe.statistics import ColumnSummary, Histogram

MAX_CELL = 60
BAR_CELLS = 30
MAX_LINES = 12  # a histogram of more bars takes one line
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SPARKS = "▁▂▃▄▅▆▇█"


def as_text(found: Description) -> str:
    """Tables, then each column with its facts and a row of bars."""
    lines = [shown(found.url, 500)]
    for table in found.tables:
        lines += ["", shown(table.title, 200), *_table(table)]
    lines += ["", f"Columns ({found.looked_at})"]
    for column in found.columns:
        lines += _column(column)
    return "\n".join(lines)


def shown(text: str, limit: int = MAX_CELL) -> str:
    """`text` cut to `limit` characters, with control characters escaped, since a terminal would obey some of them."""
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in short)


def _table(table: Table) -> Iterator[str]:
    rows = [tuple(shown(cell, MAX_CELL if table.head else 200) for cell in row) for row in table.rows]
    all_rows: Sequence[tuple[str, ...]] = [tuple(map(shown, table.head)), *rows] if table.head else rows
    if not all_rows:
        return
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    for row in all_rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _column(column: ColumnSummary) -> Iterator[str]:
    nulls = f", {column.nulls} null" if column.nulls else ""
    yield f"  {shown(column.name)}: {column.type}, {column.kind}{nulls}"
    for name, value in column.facts:
        yield f"    {shown(name)}: {shown(value, 200)}"
    for histogram in column.histograms:
        yield from _bars(histogram)


def _bars(histogram: Histogram) -> Iterator[str]:
    most = max(count for _, count in histogram.bars)
    labels = [shown(label) for label, _ in histogram.bars]
    title = shown(histogram.title)
    if len(labels) > MAX_LINES:
        marks = "".join(_SPARKS[-(-7 * count // most)] if count else " " for _, count in histogram.bars)
        yield f"    {title}: {labels[0]} |{marks}| {labels[-1]}"
        return
    yield f"    {title}:"
    width = max(map(len, labels))
    for label, (_, count) in zip(labels, histogram.bars, strict=True):
        eighths = -(-8 * BAR_CELLS * count // most)
        bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
        yield f"      {label.ljust(width)}  {count:>9}  {bar}"


# The beginning of each page, by which jobs.describe recognises its own pages.
PAGE_START = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="Lockstep jobs.describe">
"""
WIDTH, HEIGHT, GAP = 360, 90, 1
MAX_LABEL = 40
# Names, values and reasons come from untrusted data. The template engine escapes every text, and if one got past it,
# the policy in the head would keep the browser from running or fetching anything.
_TEMPLATE = """\
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 } h1 { overflow-wrap: anywhere }
td, th { border: 1px solid #ccc; padding: .2rem .6rem; text-align: left; vertical-align: top }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.columns { display: grid; grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); gap: 1rem }
.column { border: 1px solid #ddd; padding: .5rem 1rem; overflow: hidden }
.column h3 { margin: .2rem 0; font-size: 1rem }
.column p { margin: .1rem 0; color: #555; overflow-wrap: anywhere } svg { max-width: 100%; height: auto }
.sheet { display: flex; flex-wrap: wrap; gap: .7rem } figure { margin: 0; text-align: center }
figure img { width: 6rem; height: 6rem; object-fit: contain; image-rendering: pixelated; background: #eee }
figcaption { font-size: .8rem; max-width: 6rem; overflow-wrap: anywhere }
</style></head><body>
<h1>{{ url }}</h1>
{% for table in tables %}
<h2>{{ shown(table.title, 200) }}</h2>
<table>
{% if table.head %}
<tr>{% for cell in table.head %}<th>{{ shown(cell, 200) }}</th>{% endfor %}</tr>
{% endif %}
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ shown(cell, 1000) }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
{% if pictures %}
<h2>Sample pictures</h2>
<div class="sheet">
{% for picture in pictures %}
<figure><img src="{{ picture.url }}" alt=""><figcaption>{{ shown(picture.caption, 60) }}</figcaption></figure>
{% endfor %}
</div>
{% endif %}
<h2>Columns ({{ looked_at }})</h2>
<div class="columns">
{% for column in columns %}
<div class="column">
<h3>{{ shown(column.name, 200) }}</h3>
<p>{{ column.type }}, {{ column.kind }}{% if column.nulls %}, {{ column.nulls }} null{% endif %}</p>
{% for name, value in column.facts %}
<p>{{ shown(name, 60) }}: {{ shown(value, 300) }}</p>
{% endfor %}
{% for histogram in column.histograms %}
<p>{{ shown(histogram.title, 60) }}</p>
{% if histogram.bars|length > max_lines %}
<svg viewBox="0 0 {{ width }} {{ height + 16 }}" width="{{ width }}" role="img">
{% for bar in standing(histogram) %}
<rect x="{{ bar.x }}" y="{{ bar.y }}" width="{{ bar.width }}" height="{{ bar.height }}" fill="#1f4e89">\
<title>{{ bar.label }}: {{ bar.count }}</title></rect>
{% endfor %}
{% set first, last = shown(histogram.bars[0][0], 26), shown(histogram.bars[-1][0], 26) %}
<text x="0" y="{{ height + 13 }}" font-size="11">{{ first }}</text>
<text x="{{ width }}" y="{{ height + 13 }}" font-size="11" text-anchor="end">{{ last }}</text>
</svg>
{% else %}
<svg viewBox="0 0 {{ width }} {{ 17 * histogram.bars|length }}" width="{{ width }}" role="img">
{% for bar in lying(histogram) %}
<rect x="150" y="{{ bar.y }}" width="{{ bar.width }}" height="13" fill="#b9cbe0"></rect>
<text x="146" y="{{ bar.y + 11 }}" font-size="11" text-anchor="end">{{ bar.label }}</text>
<text x="154" y="{{ bar.y + 11 }}" font-size="11">{{ bar.count }}</text>
{% endfor %}
</svg>
{% endif %}
{% endfor %}
</div>
{% endfor %}
</div>
</body></html>
"""
_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE_START + _TEMPLATE)


def as_page(found: Description) -> str:
    """The page's HTML."""
    return _PAGE.render(
        title="Lockstep: a dataset",
        url=shown(found.url, 500),
        tables=found.tables,
        pictures=found.pictures,
        columns=found.columns,
        looked_at=found.looked_at,
        shown=shown,
        standing=_standing,
        lying=_lying,
        max_lines=MAX_LINES,
        width=WIDTH,
        height=HEIGHT,
    )


def _standing(histogram: Histogram) -> list[dict[str, object]]:
    most = max(count for _, count in histogram.bars)
    step = WIDTH / len(histogram.bars)
    bars: list[dict[str, object]] = []
    for number, (label, count) in enumerate(histogram.bars):
        tall = round(HEIGHT * count / most, 1)
        place = {"x": round(number * step, 1), "y": HEIGHT - tall, "width": round(step - GAP, 1), "height": tall}
        bars.append({**place, "label": shown(label, MAX_LABEL), "count": count})
    return bars


def _lying(histogram: Histogram) -> list[dict[str, object]]:
    most = max(count for _, count in histogram.bars)
    room = WIDTH - 210
    return [
        {"y": 17 * i + 2, "width": round(room * count / most, 1), "label": shown(label, 24), "count": count}
        for i, (label, count) in enumerate(histogram.bars)
    ]
