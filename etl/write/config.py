"""The configuration of a written dataset and of a job that reads files, checked before anything is read."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from lockstep.etl.choices import DEFAULT_SHARD_BYTES, DEFAULT_SPLIT, WEIGHTS, Weights
from lockstep.etl.input.files import DEFAULT_SPLIT_BYTES
from lockstep.etl.split.sampling import Sampling, parse_share
from lockstep.etl.split.splits import NO_SPLIT, ONE_SPLIT, SplitSpec
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import COMPRESSIONS, FORMATS, Compression, Format
from lockstep.storage.errors import require
from lockstep.storage.urls import absolute, several, split_url

NOT_KEPT = "none"
"""The value of --quarantine with which rejected input is not kept."""
TO_PREDICT = " Rows to predict, whose label is not known yet, need --unlabelled (docs/prediction.md)."
"""What to do about a missing label, after another step."""
_SIDE = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteConfig:
    """How a dataset is written, for any input. Raises ConfigError for invalid values."""

    output: str
    """URL of the dataset; must not exist."""
    fmt: Format = "tfrecord"
    """tfrecord or parquet."""
    compression: Compression = "none"
    """none or gzip, for TFRecord shards; pages of Parquet shards are always compressed (zstd)."""
    split: str = DEFAULT_SPLIT
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
    unlabelled: bool = False
    """Whether the rows' labels are not known yet: they are stored without label, weight and statistics, all in one
    split, `test`, for a model to predict (docs/prediction.md)."""

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
        if self.unlabelled:
            self._check_unlabelled()
            object.__setattr__(self, "split", NO_SPLIT)
        spec = self.split_spec
        if self.label_window is not None:
            require(self.label_window >= 0, "--label-window", str(self.label_window), "0 or more")
            require(spec.kind == "time", "--label-window", f"--split {self.split}", "--split time:...")
        if self.append_to is not None:
            spec.check_append(self.output)
        if self.sample is not None:
            Sampling.parse(self.sample)

    def _check_unlabelled(self) -> None:
        """Raise ConfigError for settings that need labels, statistics or splits."""
        idle = {
            "--split": self.split not in (DEFAULT_SPLIT, NO_SPLIT),
            "--sample": self.sample is not None,
            "--weights": self.weights != "none",
            "--bake": self.bake,
            "--append-to": self.append_to is not None,
        }
        given = ", ".join(flag for flag, is_given in idle.items() if is_given)
        allowed = "without: rows to predict are in one split, as they are, and in a dataset for themselves"
        require(not given, given, "with --unlabelled", allowed, f"Leave out {given}.")

    @property
    def split_spec(self) -> SplitSpec:
        """The split, parsed."""
        return ONE_SPLIT if self.unlabelled else SplitSpec.parse(self.split)

    def stored(self, schema: Schema) -> Schema:
        """The fields of `schema` as the dataset stores them: of rows without labels no label and no weight, and columns
        whose encoding needs statistics for storage alone, since a model brings its own.
        """
        if not self.unlabelled:
            return schema
        ignored = {field.name for field in schema.fitted_fields}
        kept = (field for field in schema if field.kind not in ("label", "weight"))
        fields = (replace(field, encoding={"kind": "ignore"}) if field.name in ignored else field for field in kept)
        return replace(schema, fields=tuple(fields))

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
            **({"unlabelled": True} if self.unlabelled else {}),
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
