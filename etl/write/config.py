"""The configurations of the ETL jobs, checked before anything is read."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from lockstep.etl.input.files import DEFAULT_SPLIT_BYTES
from lockstep.etl.input.log_formats import DELIMITERS, LOG_FORMATS, TABLE_FORMATS
from lockstep.etl.split.sampling import Sampling, parse_share
from lockstep.etl.split.splits import TIME_COLUMN, SplitSpec
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import COMPRESSIONS, FORMATS, Compression, Format
from lockstep.storage.errors import require
from lockstep.storage.urls import absolute, several, split_url

DEFAULT_SHARD_BYTES = 128 << 20
Weights = Literal["none", "balanced"]
WEIGHTS = get_args(Weights)
NOT_KEPT = "none"
"""The value of --quarantine with which rejected input is not kept."""
_SIDE = re.compile(r"[0-9]{1,9}")
_SUFFIX = re.compile(r"[a-z0-9]{1,16}")
LABEL_WINDOW_S = 1800
"""Seconds after a request in which the default label looks for another one."""
DEFAULT_LABEL = (
    f"CASE WHEN time + {LABEL_WINDOW_S} > log_end THEN NULL ELSE count(*) OVER"
    f" (PARTITION BY visitor ORDER BY time RANGE BETWEEN 1 FOLLOWING AND {LABEL_WINDOW_S} FOLLOWING) > 0 END"
)
"""NULL for each request whose window the log does not cover. That a visit continues can be seen at once, that it ended
only after the whole window: without the NULLs, nearly all labels of the last window would be true.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteConfig:
    """How a dataset is written, for any input. Raises ConfigError for invalid values."""

    output: str
    """URL of the dataset; must not exist."""
    fmt: Format = "tfrecord"
    """tfrecord or parquet."""
    compression: Compression = "none"
    """none or gzip, for TFRecord shards; pages of Parquet shards are always compressed (zstd)."""
    split: str = "80/20"
    """See SplitSpec."""
    shard_bytes: int = DEFAULT_SHARD_BYTES
    """Maximum of the encoded bytes of a shard, on average over a split; before compression."""
    row_group_bytes: int | None = None
    """Bytes of a Parquet row group on average, uncompressed; None for 2 MiB and at least 64 row groups a split."""
    seed: int = 0
    """Seed of the split and of the order of records."""
    sample: str | None = None
    """See Sampling: the share of records of common classes to keep for training; None keeps all."""
    weights: Weights = "none"
    """`balanced` adds a field `weight` that gives all classes of the label equal weight in training (1 for a class that
    is not in training); `none` adds none."""
    quarantine: str | None = None
    """Where rejected input goes: None for the dataset's folder, `none` for nowhere, or a URL that does not exist."""
    append_to: str | None = None
    """URL of the dataset that this one continues; None for a separate dataset."""
    clean: bool = False
    """Whether to remove first what killed jobs left next to the output."""
    petastorm: bool = False
    """Whether to write also the metadata for Petastorm's make_reader (Parquet; docs/reading-elsewhere.md)."""
    bake: bool = False
    """Whether shards hold the inputs of a model instead of the features (docs/schema.md)."""
    label_window: int | None = None
    """With a time split: how far a label looks ahead of its record, in seconds, or in the unit of a column of whole
    numbers. Records whose label looks into the next split are left out; with None no record is."""

    def __post_init__(self) -> None:
        require(self.fmt in FORMATS, "--format", self.fmt, ", ".join(FORMATS))
        require(self.compression in COMPRESSIONS, "--compression", self.compression, " or ".join(COMPRESSIONS))
        if self.compression != "none":
            require(self.fmt == "tfrecord", "--compression", f"--format {self.fmt}", "--format tfrecord")
        require(self.shard_bytes >= 1, "--shard-bytes", str(self.shard_bytes), "1 or more")
        require(0 <= self.seed < 1 << 63, "--seed", str(self.seed), "0 to 2^63 - 1")
        require(self.weights in WEIGHTS, "--weights", self.weights, " or ".join(WEIGHTS))
        if self.row_group_bytes is not None:
            require(self.row_group_bytes >= 1, "--row-group-bytes", str(self.row_group_bytes), "1 or more")
            require(self.fmt == "parquet", "--row-group-bytes", f"--format {self.fmt}", "--format parquet")
        if self.petastorm:
            require(self.fmt == "parquet", "--petastorm", f"--format {self.fmt}", "--format parquet")
        require(self.quarantine is None or bool(self.quarantine), "--quarantine", "nothing", "a URL or none")
        if self.quarantine not in (None, NOT_KEPT):
            apart = not _nested(self.output, str(self.quarantine))
            require(apart, "--quarantine", str(self.quarantine), f"a place outside of {self.output}")
        spec = SplitSpec.parse(self.split)
        if self.label_window is not None:
            require(self.label_window >= 0, "--label-window", str(self.label_window), "0 or more")
            require(spec.kind == "time", "--label-window", f"--split {self.split}", "--split time:...")
        if self.append_to is not None:
            spec.check_append(self.output)
        if self.sample is not None:
            Sampling.parse(self.sample)

    @property
    def split_spec(self) -> SplitSpec:
        """The split, parsed."""
        return SplitSpec.parse(self.split)

    @property
    def sampling(self) -> Sampling | None:
        """`sample`, parsed."""
        return None if self.sample is None else Sampling.parse(self.sample)

    @property
    def window(self) -> int | None:
        """`label_window`, or its default."""
        return self.label_window

    @property
    def stored_window(self) -> int | None:
        """`window` for the column that decides the split as it is stored."""
        return self.window

    def to_json(self) -> dict[str, Any]:
        """The settings that decide the content of the dataset, in addition to input and seed."""
        return {
            "format": self.fmt,
            "compression": self.compression,
            "split": self.split,
            "shard_bytes": self.shard_bytes,
            "row_group_bytes": self.row_group_bytes,
            "sample": self.sample,
            "weights": self.weights,
            "quarantine": self.quarantine,
            "petastorm": self.petastorm,
            "bake": self.bake,
            **({} if self.window is None else {"label_window": self.window}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig(WriteConfig):
    """The configuration of the ETL jobs that read files. Raises ConfigError for invalid values."""

    inputs: tuple[str, ...]
    """Files or directories (read in order of file names, without those that begin with `_` or `.`)."""
    max_bad: str = "1%"
    """The largest share of rejected records with which the job still succeeds, as a percentage or a fraction."""
    input_root: str | None = None
    """The folder below which the paths of files are taken that ids hold; None for what each input names."""
    split_bytes: int = DEFAULT_SPLIT_BYTES
    """Bytes of input that one task reads; never changes the output."""

    def __post_init__(self) -> None:
        super(OutputConfig, self).__post_init__()
        object.__setattr__(self, "inputs", several(self.inputs))
        require(len(self.inputs) > 0, "--input", "nothing", "one URL or more")
        require(self.split_bytes >= 1, "split_bytes", str(self.split_bytes), "1 or more")
        parse_share(self.max_bad)

    @property
    def max_bad_share(self) -> Fraction:
        """The largest share of quarantined records, 0 to 1."""
        return parse_share(self.max_bad)

    def to_json(self) -> dict[str, Any]:
        """The settings that decide the content of the dataset, in addition to input and seed."""
        return {**super(OutputConfig, self).to_json(), "max_bad": self.max_bad}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsConfig(OutputConfig):
    """The configuration of `lockstep etl_logs`."""

    log_format: str = "common"
    """common or combined (Apache, Nginx), tsv, csv, json (an object a line), w3c (IIS, CloudFront) or alb (AWS)."""
    label: str | None = None
    """A SQL expression; NULL leaves the record out. For web requests over visitor, page, query, time and log_end
    (seconds since 1970, UTC), None for DEFAULT_LABEL; with a schema over the columns, None for its label column."""
    schema: str | Schema | None = None
    """A declared schema, or its text or URL (lockstep.features.schema.declare): the input is such records, not web
    requests.
    """
    id_columns: tuple[str, ...] = ()
    """With a schema: the columns that identify a record; none: the file's path and the byte position."""
    columns: tuple[str, ...] = ()
    """TSV and CSV: the names of a line's fields; none: each file's first line names them."""
    time_columns: tuple[str, ...] = ()
    """With a schema: columns in ISO 8601, which become int64 microseconds since 1970 UTC."""
    null_texts: tuple[str, ...] = ()
    """TSV and CSV: texts that mean null, besides an empty field."""
    quoted_newlines: bool = False
    """CSV: a newline inside quotes is part of a record. Then one task reads the whole file."""
    visitor_column: str | None = None
    """Web requests with named fields: the column of the visitor; None for one with a known name."""
    time_column: str | None = None
    """The column of the time, as for the visitor."""
    status_column: str | None = None
    """The column of the status, as for the visitor."""
    method_column: str | None = None
    """The column of the method, as for the visitor."""
    target_column: str | None = None
    """The column of the target, as for the visitor."""
    query_column: str | None = None
    """The column of the query of targets that have none, as for the visitor."""
    request_column: str | None = None
    """The column of the whole request line, as for the visitor."""
    page_suffixes: tuple[str, ...] = ()
    """Web requests: suffixes of pages that otherwise are none."""
    asset_suffixes: tuple[str, ...] = ()
    """Web requests: suffixes of what is no page."""

    def __post_init__(self) -> None:
        super(LogsConfig, self).__post_init__()
        for name in ("id_columns", "columns", "time_columns", "null_texts"):
            object.__setattr__(self, name, several(getattr(self, name)))
        require(self.log_format in LOG_FORMATS, "--log-format", self.log_format, ", ".join(LOG_FORMATS))
        table, delimited = self.log_format in TABLE_FORMATS, self.log_format in DELIMITERS
        only = (
            ("--schema", self.schema is not None, table, "tsv, csv or json"),
            *(
                (f"--{role}-column", True, LOG_FORMATS[self.log_format].has_columns, "tsv, csv, json or w3c")
                for role in self.role_columns
            ),
            ("--columns", bool(self.columns), delimited, "tsv or csv"),
            ("--null-text", bool(self.null_texts), delimited, "tsv or csv"),
            ("--quoted-newlines", self.quoted_newlines, self.log_format == "csv", "csv"),
        )
        for flag, given, fits, formats in only:
            require(fits or not given, flag, f"--log-format {self.log_format}", f"with --log-format {formats}")
        named = self.schema is None or bool(self.id_columns)
        require(
            self.input_root is None or not named,
            "--input-root",
            str(self.input_root),
            "with --schema and without --id-columns: no other ids name the file",
        )
        for flag, names in (("--id-columns", self.id_columns), ("--time-columns", self.time_columns)):
            require(len(set(names)) == len(names) and all(names), flag, " ".join(names), "each name once")
        require(len(set(self.columns)) == len(self.columns), "--columns", " ".join(self.columns), "each name once")
        self._check_web()
        require(
            not self.split_spec.given,
            "--split",
            self.split,
            "80/20 or group:COLUMN:80/20: a log does not name splits",
        )

    def _check_web(self) -> None:
        """Raise ConfigError for columns of roles and suffixes that contradict each other or the schema."""
        for name in ("page_suffixes", "asset_suffixes"):
            suffixes = tuple(suffix.lower().removeprefix(".") for suffix in several(getattr(self, name)))
            object.__setattr__(self, name, suffixes)
            good = all(_SUFFIX.fullmatch(suffix) for suffix in suffixes)
            require(good, _flag(name), " ".join(suffixes), "letters and digits, 16 at most, such as pdf,docx")
        both = set(self.page_suffixes) & set(self.asset_suffixes)
        require(not both, "--page-suffixes", " ".join(sorted(both)), "suffixes that --asset-suffixes does not name")
        columns = self.role_columns
        flags = [f"--{role}-column" for role in columns]
        flags += [_flag(name) for name in ("page_suffixes", "asset_suffixes") if getattr(self, name)]
        require(self.schema is None or not flags, ", ".join(flags), "--schema", "without --schema: for web requests")
        apart = len(set(columns.values())) == len(columns)
        require(apart, ", ".join(flags), " ".join(columns.values()), "another column for each role")
        whole = "request" in columns and bool({"target", "query"} & set(columns))
        require(not whole, "--request-column", ", ".join(flags), "the whole request line, or its target")

    @property
    def role_columns(self) -> dict[str, str]:
        """The columns that are given, by their roles."""
        roles = ("visitor", "time", "status", "method", "target", "query", "request")
        given = ((role, getattr(self, f"{role}_column")) for role in roles)
        return {role: name for role, name in given if name is not None}

    @property
    def has_header(self) -> bool:
        """Whether the first line of each file names its fields."""
        return self.log_format in ("tsv", "csv") and not self.columns

    @property
    def window(self) -> int | None:
        """`label_window`, by default that of the default label where web requests are split by their time."""
        spec = self.split_spec
        web = self.schema is None and self.label is None and (spec.kind, spec.column) == ("time", TIME_COLUMN)
        return LABEL_WINDOW_S if self.label_window is None and web else self.label_window

    @property
    def stored_window(self) -> int | None:
        """`window` for the column that decides the split as it is stored: a column of `time_columns` is in ISO 8601 in
        the input and in microseconds in the dataset.
        """
        if self.window is None:
            return None
        return self.window * (1_000_000 if self.split_spec.column in self.time_columns else 1)

    def to_json(self) -> dict[str, Any]:
        """The settings that decide the content of the dataset, in addition to input, seed and schema."""
        web = {
            "label": self.label or DEFAULT_LABEL,
            "role_columns": self.role_columns,
            "page_suffixes": list(self.page_suffixes),
            "asset_suffixes": list(self.asset_suffixes),
        }
        table = {
            "label": self.label,
            "id_columns": list(self.id_columns),
            "time_columns": list(self.time_columns),
        }
        return {
            **super(LogsConfig, self).to_json(),
            "job": "etl_logs",
            "log_format": self.log_format,
            "columns": list(self.columns),
            "null_texts": list(self.null_texts),
            "quoted_newlines": self.quoted_newlines,
            **(web if self.schema is None else table),
        }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parse_size(text: str) -> tuple[int, int]:
    """Read "HxW". Raises ConfigError for another form."""
    height, _, width = text.partition("x")
    require(bool(_SIDE.fullmatch(height) and _SIDE.fullmatch(width)), "--image-size", text, "HxW such as 28x28")
    return int(height), int(width)


def _nested(one: str, other: str) -> bool:
    """Whether two URLs are equal, or one is inside the other."""
    first, second = (split_url(absolute(url)) for url in (one, other))
    paths = [posixpath.normpath("/" + path.lstrip("/")) for _, _, path in (first, second)]
    return first[:2] == second[:2] and posixpath.commonpath(paths) in paths
