"""How much bad input a job may leave out before it is no success any more."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def check_bad(bad_rows: DataFrame, urls: Sequence[str], bad: int, read: int, allowed: Fraction, told: str) -> None:
    """Raise DataError where more than the share `allowed` of the records is bad, naming the first three places.

    `bad_rows` has source (an index into `urls`), position and reason.
    """
    if bad == 0 or Fraction(bad, read) <= allowed:
        return
    first = bad_rows.orderBy("source", "position").select("source", "position", "reason").limit(3).collect()
    places = "; ".join(f"{urls[row['source']]} at byte {row['position']}: {row['reason']}" for row in first)
    raise DataError(
        f"{bad} of {read} records are bad, more than --max-bad allows",
        got=f"{100 * bad / read:.2f} %, first {places}",
        allowed=told,
        next_step="Check that the input is what the job reads; raise --max-bad to go on with the rest.",
    )
