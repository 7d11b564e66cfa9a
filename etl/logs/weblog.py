"""What a web log becomes: page requests, their label and the features known at the moment of the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# What a browser fetches by itself while it shows a page, and what it downloads instead of one. Text, HTML, scripts
# on the server (.pl, no suffix) and mistyped suffixes are pages: a visitor asked for them.
ASSET_SUFFIXES = (
    "gif", "jpg", "jpeg", "png", "xbm", "bmp", "ico", "svg", "css", "js",
    "mpg", "mpeg", "avi", "mov", "wav", "au", "mp3", "mp4", "zip", "gz", "z", "tar", "exe", "woff", "woff2",
)  # fmt: skip
_ASSET = rf"(?i)\.(?:{'|'.join(ASSET_SUFFIXES)})$"
NOT_A_PAGE = "not_a_page"
CENSORED = "censored"

ID_COLUMNS = ("visitor", "page", "time", "query")
ID_SCHEMA = pa.schema([(name, pa.int64() if name == "time" else pa.string()) for name in ID_COLUMNS])
TOLD = ("referrer", "agent")  # what the combined format says besides
LABEL = "stays"
LABEL_TYPES = ("boolean",)
LABEL_ALLOWED = "a boolean SQL expression over visitor, page, query, time and log_end; NULL means censored"


def is_page(method: pa.Array, page: pa.Array, status: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which requests are for a page: GET, answered with 2xx or 304, no asset suffix. (n,) bool."""
    got = np.asarray(pc.equal(method, "GET"), dtype=bool)
    asset = np.asarray(pc.match_substring_regex(page, _ASSET), dtype=bool)
    named = np.asarray(pc.not_equal(page, ""), dtype=bool)
    return np.asarray(got & named & ~asset & (((status >= 200) & (status < 300)) | (status == 304)))


def _vocabulary(file: str, max_size: int, min_count: int) -> dict[str, object]:
    return {"kind": "vocabulary", "file": file, "max_size": max_size, "min_count": min_count, "oov_buckets": 1}


def _buckets(*boundaries: int) -> dict[str, object]:
    return {"kind": "bucketise", "boundaries": list(boundaries)}


_SECONDS = _buckets(1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 900, 1800, 3600, 7200, 14400)


def _tokens(name: str, max_size: int) -> Field:
    return Field(name=name, dtype="string", shape=(None,), encoding=_vocabulary(f"{name}.json", max_size, 5))


def label_columns(told: bool) -> str:
    """What a label may ask of a request, in Spark's notation; `told` as for `schema`."""
    texts = ", ".join(f"{name} string" for name in ("visitor", "page", "query", *(TOLD if told else ())))
    return f"{texts}, time bigint, log_end bigint"


def schema(told: bool = False) -> Schema:
    """The fields of a web log's dataset; `told`: the log names referrer and user agent (the combined format).

    The visitor is in none of them: a host's name is no business of a model.
    """
    more = tuple(_tokens(f"{name}_tokens", 500) for name in TOLD) if told else ()
    return Schema(
        (
            sample_id_field(),
            Field(name=LABEL, dtype="bool", kind="label"),
            Field(name="page", dtype="string", encoding=_vocabulary("page.json", 2000, 3)),
            _tokens("page_tokens", 1000),
            _tokens("query_tokens", 500),
            Field(name="prev_page", dtype="string", nullable=True, encoding=_vocabulary("prev_page.json", 1000, 5)),
            Field(name="hour", dtype="int64", encoding=_buckets(*range(1, 24))),
            Field(
                name="requests_so_far", dtype="int64", encoding=_buckets(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
            ),
            Field(name="seconds_since_prev", dtype="int64", nullable=True, encoding=_SECONDS),
            Field(name="mean_gap_s", dtype="int64", nullable=True, encoding=_SECONDS),
            *more,
        )
    )


# Order among requests of one second follows the log. Every window ends at the row itself, so nothing later enters.
_PAST = "(PARTITION BY visitor ORDER BY time, _source, _position ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
_ORDER = "(PARTITION BY visitor ORDER BY time, _source, _position)"
_SAME = "(PARTITION BY visitor, page, time, query ORDER BY _source, _position)"
_WORDS = "filter(split(lower({0}), '[^a-z0-9]+'), w -> length(w) BETWEEN 1 AND 40)"
_PARTS = "filter(slice(split(lower(page), '/'), 1, 16), p -> p <> '')"

_WINDOWS = (
    "*",
    f"lag(page) OVER {_ORDER} AS prev_page",
    f"CAST(row_number() OVER {_ORDER} - 1 AS BIGINT) AS requests_so_far",
    f"time - lag(time) OVER {_ORDER} AS seconds_since_prev",
    f"time - min(time) OVER {_PAST} AS _seconds_so_far",
    f"CAST(row_number() OVER {_SAME} - 1 AS BIGINT) AS _occurrence",
)
_COLUMNS = (
    "page",
    # "/a/", "/a/b/", ... for each leading part of the path, and the words of the whole path
    f"array_distinct(slice(concat(transform({_PARTS},"
    f" (p, i) -> concat('/', array_join(slice({_PARTS}, 1, i + 1), '/'), '/')),"
    f" {_WORDS.format('page')}), 1, 64)) AS page_tokens",
    f"array_distinct(slice({_WORDS.format('query')}, 1, 64)) AS query_tokens",
    "prev_page",
    "CAST(pmod(time, 86400) DIV 3600 AS BIGINT) AS hour",
    "requests_so_far",
    "seconds_since_prev",
    "IF(requests_so_far = 0, NULL, _seconds_so_far DIV requests_so_far) AS mean_gap_s",
    f"{LABEL}",
    "visitor",
    "time",
    "query",
    "_source",
    "_position",
    "_occurrence",
    f"IF({LABEL} IS NULL, '{CENSORED}', NULL) AS _dropped",
)


def rows_of(pages: DataFrame, label: str, log_end: int, told: bool = False) -> DataFrame:
    """Page requests (visitor, page, query, time, _source, _position; with `told` referrer and agent) with label,
    features and the writer's columns.
    """
    more = TOLD if told else ()
    seen = pages.select("visitor", "page", "query", "time", *more, "_source", "_position")
    labelled = seen.selectExpr("*", f"{log_end}L AS log_end").selectExpr("*", f"({label}) AS {LABEL}")
    words = [f"array_distinct(slice({_WORDS.format(name)}, 1, 64)) AS {name}_tokens" for name in more]
    return labelled.selectExpr(*_WINDOWS).selectExpr(*_COLUMNS, *words)
