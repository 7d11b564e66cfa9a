"""How much bad input a job may leave out before it is no success any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from etl.logs.combined import NOT_COMBINED_LOG
from etl.logs.server_log import NOT_COMMON_LOG
from etl.write.beside import REFUSED_RECORDS, keep_refused
from etl.write.config import OutputConfig
from lockstep.storage.errors import DataError
from lockstep.storage.urls import join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def check_bad(config: OutputConfig, bad_rows: DataFrame, urls: Sequence[str], bad: int, read: int) -> None:
    """Raise DataError where more of the records than --max-bad is bad, naming the first three places, and where the
    first of these records are kept.

    `bad_rows` has source (an index into `urls`), position, reason, raw, length and sha256, and where a source is a
    folder `place`, the path of the file below it.
    """
    if bad == 0 or Fraction(bad, read) <= config.max_bad_share:
        return
    named = [name for name in ("source", "place", "position") if name in bad_rows.columns]
    first = bad_rows.orderBy(*named).select(*named, "reason").limit(3).collect()
    places = "; ".join(_place(urls, row.asDict()) for row in first)
    step = way_out({row["reason"] for row in first}, all_bad=bad == read)
    kept = keep_refused(config, bad_rows, urls, bad)
    if kept is not None:
        which = "the bad records" if bad <= REFUSED_RECORDS else f"the first {REFUSED_RECORDS} bad records"
        step = f"{step} {kept} holds {which} until this output is written again."
    raise DataError(
        f"{bad} of {read} records are bad, more than --max-bad allows",
        got=f"{100 * bad / read:.2f} %, first {places}",
        allowed=config.max_bad,
        next_step=step,
    )


def way_out(reasons: Set[str], *, all_bad: bool) -> str:
    """What to do about records that are bad for `reasons`. Where no line has its format, the format is not theirs."""
    if all_bad and reasons <= {NOT_COMMON_LOG, NOT_COMBINED_LOG}:
        return "Say by --log-format what the input is (common is what it is read as by itself), or check --input."
    return "Check that the input is what the job reads; raise --max-bad to go on with the rest."


def _place(urls: Sequence[str], row: Mapping[str, Any]) -> str:
    url = urls[row["source"]]
    below = row.get("place")
    return f"{url if below is None else join(url, below)} at byte {row['position']}: {row['reason']}"
