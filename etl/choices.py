"""The words and numbers that flags of the ETL jobs take: what a command line needs of ETL, without NumPy or Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

DEFAULT_SHARD_BYTES = 128 << 20
Weights = Literal["none", "balanced"]
WEIGHTS = get_args(Weights)
DEFAULT_SPLIT = "80/20"
SPLITS = (
    "A/B or A/B/C such as 80/20 or 8/1/1 (train, validation, test), group:COLUMN:A/B,"
    " stratified:COLUMN:A/B, time:A/B or time:COLUMN:A/B, kfold:K, kfold:K:COLUMN or kfold:K:COLUMN:balanced,"
    " subset:COLUMN=VALUE,VALUE (these values are test), or given"
)
"""The forms of --split."""

LOG_FORMAT_NAMES = ("common", "combined", "tsv", "csv", "json", "w3c", "alb")
"""The names in `lockstep.etl.logs.formats.LOG_FORMATS`, in the same order."""
LABEL_WINDOW_S = 1800
"""How far the default label of web requests looks ahead."""
ROLES_ASKED: Mapping[str, str] = {
    "visitor": "the visitor",
    "time": "the time",
    "status": "the answer's status",
    "method": "the method",
    "target": "the path asked for",
    "query": "the query, if the target has none",
    "request": "the request line",
}
"""The roles of columns of web requests that a flag decides, in words."""

Source = Literal["idx", "cifar10", "cifar100", "npz", "folder", "tar", "parquet"]
SOURCES = get_args(Source)
"""The forms of image sets."""
Store = Literal["pixels", "encoded"]
STORES = get_args(Store)

LAKES: Mapping[str, str] = {"delta": "deltalake", "iceberg": "pyiceberg"}
"""The formats of tables with versions, and the package that reads each."""

MAX_DESCRIBED_RECORDS = 100_000
"""The number of records whose values lockstep describe reads, if it is not given."""


def role_flag(role: str) -> str:
    """The flag that decides a role."""
    return f"--{role}-column"
