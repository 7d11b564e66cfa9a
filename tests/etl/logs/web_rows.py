"""What the tests of web logs share: the rows that a plan's parser keeps, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from lockstep.etl.choices import LABEL_WINDOW_S
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.parse import BAD, ROW, parse_ranges
from lockstep.etl.logs.plan import Plan, plan_of

CASES = Path(__file__).parent / "cases"


def plan(log_format: str, *paths: Path, **more: Any) -> Plan:
    """The plan of a job over files."""
    return plan_of(LogsConfig(log_format=log_format, inputs=tuple(map(str, paths)), output="nowhere", **more))


def parsed(found: Plan) -> list[dict[str, Any]]:
    """All rows of the first pass."""
    return pa.Table.from_batches(list(parse_ranges(found.work, found.parser))).to_pylist()


def kept(found: Plan, rows: list[dict[str, Any]] | None = None) -> pd.DataFrame:
    """The requests for pages, in order; fails if a line is refused. `rows` are those of `parsed`, if they are known."""
    rows = parsed(found) if rows is None else rows
    assert not [row["_reason"] for row in rows if row["_kind"] == BAD]
    names = found.parser.schema.names
    return pd.DataFrame([{name: row[name] for name in names} for row in rows if row["_kind"] == ROW], columns=names)


def stays(pages: pd.DataFrame, log_end: int) -> list[bool]:
    """The default label by its definition, for requests whose window the log covers."""
    labels = []
    for _, visits in pages.groupby("visitor"):
        times = visits["time"].tolist()
        known = [time for time in times if time + LABEL_WINDOW_S <= log_end]
        labels += [any(time < later <= time + LABEL_WINDOW_S for later in times) for time in known]
    return labels
