"""The refusal of input with too many bad records: the error that ends the job, and the folder that keeps them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from lockstep.etl import columns as c
from lockstep.etl.reasons import NO_CLASS
from lockstep.etl.write.config import NOT_KEPT, OutputConfig, WriteConfig
from lockstep.etl.write.quarantine import PART_BYTES, Origin, file_of, place_quarantine
from lockstep.etl.write.staging import Staging, remove_refused
from lockstep.storage.errors import DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, basename, join, parent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

log = logging.getLogger(__name__)
CLASS_FOLDERS = (
    "a folder called train, val, test, ... is a split, which holds class folders: if it is a class, name all classes by"
    " --classes"
)
SHOWN_RECORDS = 20  # to look at for a cause
REFUSED_RECORDS = 1000  # enough to see the cause; with RAW_BYTES each they fit one file


def keep_refused(config: WriteConfig, bad_rows: DataFrame, urls: Sequence[str], bad: int) -> str | None:
    """Keep the first REFUSED_RECORDS of the `bad` records, for which a job fails, as a quarantine next to its output,
    or next to the URL of --quarantine; returns the URL.

    One rename publishes the folder, only its owner may read it (mode 0700), and it replaces the one of an earlier job
    for the same output; `forget_refused` removes it. Returns None if rejected input is not kept, or if this fails,
    which is logged: the job then still ends with the error about its input.
    """
    if config.quarantine == NOT_KEPT:
        return None
    url = _refused(config)
    rows = bad_rows.orderBy(c.SOURCE, c.PLACE, c.POSITION).limit(REFUSED_RECORDS)
    try:
        with Staging(url, mode=0o700, part_of=config.output) as staging:
            origin = Origin(quarantine=rows, quarantined=min(bad, REFUSED_RECORDS), quarantined_raw_bytes=PART_BYTES)
            place_quarantine(staging, staging.root, origin, tuple(urls))
            remove_refused(staging.fs, url, config.output)
            staging.publish(None)
    except Exception as error:  # of storage or Spark; the error about the input comes next
        log.warning("the rejected records were not kept in %s: %s", url, error)
        return None
    return url


def forget_refused(config: WriteConfig) -> None:
    """Remove what an earlier, failed job kept for this output, which is published now."""
    url = _refused(config)
    remove_refused(filesystem(url), url, config.output)


def _refused(config: WriteConfig) -> str:
    place = absolute(config.output if config.quarantine in (None, NOT_KEPT) else str(config.quarantine))
    return join(parent(place), f"_quarantine-{basename(place)}")


@dataclass(frozen=True, slots=True)
class Look:
    """What a job sees in the first rejected records: more words for the error, and what to do, "" if it knows none."""

    words: str = ""
    next_step: str = ""


def check_bad(
    config: OutputConfig,
    bad_rows: DataFrame,
    urls: Sequence[str],
    bad: int,
    read: int,
    *,
    lines: tuple[int, int] | None = None,
    look: Callable[[Sequence[Row]], Look] = lambda rows: Look(),
) -> None:
    """Raise DataError if a larger share of the records is bad than --max-bad allows. The error names the first three
    and where the first REFUSED_RECORDS are kept.

    `bad_rows` has the columns lockstep.etl.columns.REJECTED; a source is an index into `urls`. Where a record may be
    several `lines`, the share is that of the lines in the bad records: a bad record may have swallowed good ones.
    `look` is called with the first bad records.
    """
    lost, of = lines or (bad, read)
    if bad == 0 or Fraction(lost, of) <= config.max_bad_share:
        return
    order = (c.SOURCE, c.PLACE, c.POSITION)
    first = bad_rows.orderBy(*order).select(*order, c.REASON, c.RAW).limit(SHOWN_RECORDS).collect()
    places = "; ".join(f"{file_of(urls, row)} at byte {row[c.POSITION]}: {row[c.REASON]}" for row in first[:3])
    seen = look(first)
    step = seen.next_step or _way_out({row[c.REASON] for row in first})
    kept = keep_refused(config, bad_rows, urls, bad)
    if kept is not None:
        which = "the bad records" if bad <= REFUSED_RECORDS else f"the first {REFUSED_RECORDS} bad records"
        step = f"{step} {kept} holds {which} until this output is written again."
    counted = "" if (lost, of) == (bad, read) else f" ({lost} of {of} lines)"
    raise DataError(
        f"{bad} of {read} records are bad{counted}, more than --max-bad allows",
        got=f"{100 * lost / of:.2f} %, first {places}{seen.words}",
        allowed=config.max_bad,
        next_step=step,
    )


def _way_out(reasons: Set[str]) -> str:
    """What to do about records that are bad for `reasons`."""
    if NO_CLASS in reasons:
        return f"Put each image into a folder of its class; {CLASS_FOLDERS}. Images to predict need --unlabelled."
    return "Check that the input is what the job reads; raise --max-bad to continue with the rest."
