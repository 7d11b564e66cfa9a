"""A description as text: tables, and each column with its facts and rows of bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.etl.describe.dataset import Description, Table
from lockstep.etl.describe.statistics import ColumnSummary, Histogram

MAX_CELL = 60
MAX_LAST_CELL = 200  # nothing has to stand below each other there
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
    """Return `text` cut to `limit` characters, with control characters escaped, since a terminal would obey some of
    them.
    """
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in short)


def _table(table: Table) -> Iterator[str]:
    limit = MAX_CELL if table.head else MAX_LAST_CELL
    rows = [(*(shown(cell, limit) for cell in row[:-1]), shown(row[-1], MAX_LAST_CELL)) for row in table.rows]
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
