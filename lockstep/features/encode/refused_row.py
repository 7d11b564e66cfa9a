"""Which of many rows is refused: looked for once they were refused together, so that right rows cost nothing."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.storage.errors import DataError


def refused_row(attempt: Callable[[int, int], object], rows: int) -> tuple[int, DataError]:
    """The first of `rows` rows that `attempt(start, stop)` raises a DataError for, and the error for that row alone.

    `attempt` judges each row by itself, and raises for all rows together. Costs about as much as it does for them.
    """
    start, stop = 0, rows  # where the first one is
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            attempt(start, middle)
            start = middle
        except DataError:
            stop = middle
    try:
        attempt(start, stop)
    except DataError as error:
        return start, error
    raise AssertionError(f"{rows} rows are refused together and none of them alone")


def span(low: object, high: object) -> str:
    """A range of values in words."""
    return str(low) if low == high else f"{low} to {high}"
