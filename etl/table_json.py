"""Lines of JSON tables that Spark reads without an error but not whole: text behind the first value, values it changes.

Spark's reader stops at the end of the first value of a line, makes a number that is too large infinite, and replaces
half of a surrogate pair by a question mark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from lockstep.storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark sorts out the lines that need a look: a line whose only closing brace is at its end holds one object.
_ONE_FLAT_OBJECT = r"^[ \t]*(\{[^}]*\}[ \t]*)?$"
_DOUBTFUL = r"\\u[dD][89a-fA-F]|[eE]\+?[0-9]{3}|[0-9]{200}"
_SHOWN = 100  # characters of a line in an error
_READER = json.JSONDecoder(parse_constant=lambda _: None)  # an infinity by its name is no number that was too large


def check_json(spark: SparkSession, roots: list[str]) -> None:
    """Read the lines of all files below `roots` (which hold no patterns) as text.

    Raises DataError with file and line for the first line that `why_refused` names.
    """
    from pyspark.sql import functions as f

    literal = {"recursiveFileLookup": "true", "__globPaths__": "false"}
    lines = spark.read.options(**literal).text(roots)
    doubtful = ~f.col("value").rlike(_ONE_FLAT_OBJECT) | f.col("value").rlike(_DOUBTFUL)
    # Read bytes, since a line need not be UTF-8.
    doubted = lines.where(doubtful).select("_metadata.file_path", f.col("value").cast("binary").alias("line"))
    reason = f.udf(why_refused, "string", useArrow=False)
    refused = doubted.withColumn("reason", reason("line")).where("reason IS NOT NULL")
    first = refused.orderBy("file_path", "line").limit(1).collect()
    if first:
        raise DataError(
            f"input {unquote(first[0].file_path)} has a line that is not one JSON value that can be kept",
            got=f"{first[0].reason}: {bytes(first[0].line).decode(errors='replace').strip()[:_SHOWN]}",
            allowed="one object a line, numbers that fit a double, text of whole characters",
            next_step="Write each object as a line of its own, or correct the line.",
        )


def why_refused(line: bytes) -> str | None:
    """Why a line of a JSON table would not be read whole, None if it is."""
    text = line.decode(errors="replace").strip(" \t\r\n")
    try:
        value, end = _READER.raw_decode(text)
    except (ValueError, RecursionError):
        return "not JSON"
    if end < len(text):
        return "text behind the first value"
    for one in _scalars(value):
        if isinstance(one, str) and any("\ud800" <= character <= "\udfff" for character in one):
            return "half of a surrogate pair"
        if isinstance(one, int | float) and _is_too_large(one):
            return "a number too large"
    return None


def _scalars(value: Any) -> Iterator[Any]:
    """The texts and numbers in a value, names of fields among them."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield from one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        else:
            yield one


def _is_too_large(number: float) -> bool:
    try:
        return math.isinf(float(number))
    except OverflowError:
        return True
