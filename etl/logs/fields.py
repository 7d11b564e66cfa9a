"""Lines of fields with a delimiter, taken apart by arithmetic over whole blocks of bytes: TSV, and CSV after RFC 4180.

In TSV a quote is a character like any other. In CSV a field that begins with a quote ends with one, quotes inside it
are doubled, and no other field holds one. Fields too many are passed over where all of them are empty, as some writers
end each line with delimiters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etl.logs.text import flat
from etl.logs.values import Reasons

DELIMITERS = {"csv": ",", "tsv": "\t"}
TOO_FEW, TOO_MANY = "too_few_fields", "too_many_fields"
OPEN_QUOTE, BAD_QUOTES = "open_quote", "bad_quotes"
_QUOTE = ord('"')


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of the g good lines among n: `values` holds them line after line, `width` each, without quotes.

    `line` (n,) is each line's place among the good ones, -1 where refused; `empty` (g, width) says which fields hold
    nothing, `quoted` (g, width) which stand in quotes, or None where none does.
    """

    width: int
    values: pa.Array
    line: NDArray[np.int64]
    empty: NDArray[np.bool_]
    quoted: NDArray[np.bool_] | None

    def column(self, number: int) -> pa.Array:
        """One column as strings (g,)."""
        return self.values.take(pa.array(np.arange(number, len(self.values), self.width)))


def split_fields(lines: pa.Array, log_format: str, width: int, reasons: Reasons) -> Fields:
    """Take lines (n,) of UTF-8 strings apart into `width` fields each; adds to `reasons` for those that are ragged or
    whose quotes are wrong.
    """
    offsets, data = flat(lines)
    starts, stops = offsets[:-1], offsets[1:]
    cut = data == ord(DELIMITERS[log_format])
    kept = ~cut
    quotes = data == _QUOTE if log_format == "csv" else None
    if quotes is not None and quotes.any():
        inside, dropped = _quotes(data, quotes, offsets, ord(DELIMITERS[log_format]), reasons)
        cut &= ~inside
        kept = ~cut & ~dropped
    places = np.flatnonzero(cut)
    first = np.searchsorted(places, starts)
    extra = np.searchsorted(places, stops) - first - (width - 1)
    reasons.add(extra < 0, TOO_FEW)
    # The delimiter behind the last wanted field is followed by delimiters alone where the fields too many are empty.
    behind = places[np.minimum(first + width - 1, len(places) - 1)] if len(places) else np.zeros_like(first)
    reasons.add((extra > 0) & (behind != stops - extra), TOO_MANY)
    good = reasons.good
    ends = np.empty((int(good.sum()), width), dtype=np.int64)
    ends[:, :-1] = places[first[good][:, None] + np.arange(width - 1)]
    ends[:, -1] = np.where(extra > 0, behind, stops)[good]
    begins = np.empty_like(ends)
    begins[:, 0] = starts[good]
    begins[:, 1:] = ends[:, :-1] + 1
    kept &= np.repeat(good, stops - starts)
    quoted = None
    if quotes is not None and quotes.any():
        before = _before(kept)
        lengths = before[ends] - before[begins]
        quoted = (ends > begins) & quotes[np.minimum(begins, len(quotes) - 1)]
    else:
        lengths = ends - begins
    line = np.where(good, np.cumsum(good) - 1, -1)
    return Fields(width, _strings(lengths.ravel(), data[kept]), line, lengths == 0, quoted)


def _quotes(
    data: NDArray[np.uint8], quotes: NDArray[np.bool_], offsets: NDArray[np.int64], delimiter: int, reasons: Reasons
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which bytes stand inside quotes, and which quotes are no part of a field's text; refuses lines with wrong ones.

    Quotes of a line open and close in turn. One that opens stands behind a delimiter, or behind one that closes: the
    two are then one quote of the text. One that closes stands before a delimiter or one that opens.
    """
    starts, stops = offsets[:-1], offsets[1:]
    before = _before(quotes)
    inside = ((before[1:] - np.repeat(before[starts], stops - starts)) & 1).astype(bool)
    reasons.add((before[stops] - before[starts]) % 2 == 1, OPEN_QUOTE)
    full = stops > starts
    left, right = np.empty_like(data), np.empty_like(data)
    left[1:], right[:-1] = data[:-1], data[1:]
    left[starts[full]], right[stops[full] - 1] = delimiter, delimiter
    paired = quotes & inside & (left == _QUOTE)
    wrong = quotes & inside & ~paired & (left != delimiter)
    wrong |= quotes & ~inside & (right != delimiter) & (right != _QUOTE)
    if wrong.any():
        bad = np.zeros(len(starts), dtype=bool)
        bad[np.searchsorted(stops, np.flatnonzero(wrong), side="right")] = True
        reasons.add(bad, BAD_QUOTES)
    return inside, quotes & ~paired


def _before(marks: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many marks lie before each place: (n + 1,)."""
    counts = np.zeros(len(marks) + 1, dtype=np.int64)
    np.cumsum(marks, out=counts[1:])
    return counts


def _strings(lengths: NDArray[np.int64], data: NDArray[np.uint8]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    # Parts of UTF-8 text cut at ASCII characters are UTF-8 again.
    return pa.Array.from_buffers(pa.string(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
