"""The path of each file of a dataset; no other module builds these paths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import join, parent

Format = Literal["tfrecord", "parquet"]
FORMATS = get_args(Format)
CARRIED_FOLDER = "_carried"
FILES_FOLDER = "_files"
Compression = Literal["none", "gzip"]  # as options name them
COMPRESSIONS = get_args(Compression)
SUFFIXES = {None: "", "gzip": ".gz"}  # of shards, by the compression in the manifest
_SPLIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FITTED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.json")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,199}")


@dataclass(frozen=True, slots=True)
class DatasetPaths:
    """URLs of the files of the dataset at `root`."""

    root: str

    @property
    def manifest(self) -> str:
        """The manifest, written last."""
        return join(self.root, MANIFEST_NAME)

    @property
    def quarantine(self) -> str:
        """The directory of rejected input, mode 0700."""
        return join(self.root, "_quarantine")

    @property
    def carried(self) -> str:
        """The directory of what appends need, mode 0700."""
        return join(self.root, CARRIED_FOLDER)

    def shard(self, split: str, index: int, fmt: str, compression: str | None = None) -> str:
        """Shard `index` of a split."""
        return join(self.root, shard_path(split, index, fmt, compression))

    def index(self, split: str, index: int) -> str:
        """The offset index of a TFRecord shard."""
        return join(self.root, index_path(split, index))

    def files(self, split: str, index: int) -> str:
        """The names of the files that the records of a shard were."""
        return join(self.root, files_path(split, index))

    def fitted(self, name: str) -> str:
        """A fitted file, such as "page.json"."""
        return join(self.root, fitted_path(name))

    def staging(self, job: str) -> str:
        """The sibling directory in which the dataset is built."""
        return join(parent(self.root), f"_staging-{_named(_JOB, job, 'job id')}")


def shard_path(split: str, index: int, fmt: str, compression: str | None = None) -> str:
    """The path of a shard relative to the dataset, as its manifest names it; `compression` is one of SUFFIXES."""
    if fmt not in FORMATS:
        raise ConfigError(
            f"unknown shard format {fmt!r}", got=fmt, allowed=", ".join(FORMATS), next_step="Correct --format."
        )
    return f"split={split_name(split)}/part-{index:05d}.{fmt}{SUFFIXES[compression]}"


def index_path(split: str, index: int) -> str:
    """The path of a TFRecord shard's offset index relative to the dataset."""
    return f"_index/{split_name(split)}/part-{index:05d}.idx"


def files_path(split: str, index: int) -> str:
    """The path, relative to the dataset, of the names of the files that the records of a shard were: Parquet with a row
    for each record, in the order of the shard: `sample_id` int64, `file` string.
    """
    return f"{FILES_FOLDER}/{split_name(split)}/part-{index:05d}.parquet"


def files_of_shard(shard: str) -> str:
    """The files_path of the shard at a path that shard_path made."""
    split, name = shard.removeprefix("split=").split("/")
    return f"{FILES_FOLDER}/{split}/{name.partition('.')[0]}.parquet"


def fitted_path(name: str) -> str:
    """The path of a fitted file relative to the dataset."""
    return f"_fitted/{_named(_FITTED, name, 'fitted file name')}"


def split_name(split: str) -> str:
    """Return `split` if it can be a split's name, else raise ConfigError."""
    return _named(_SPLIT, split, "split name")


def safe_relative(path: object, *, where: str) -> str:
    """Return `path` if it stays below the directory that it is joined to, else raise DataError.

    Manifests are not trusted: a path may only have segments of letters, digits and ._=-, and no segment may begin with
    a dot. So absolute paths, escapes, percent signs, backslashes, newlines and hidden files are refused.
    """
    if isinstance(path, str) and 0 < len(path) <= 1000 and all(map(_SEGMENT.fullmatch, path.split("/"))):
        return path
    raise DataError(
        f"{where}: a path leads out of its directory, or has characters that Lockstep never writes",
        got=repr(path)[:200],
        allowed="relative segments of letters, digits, `.`, `_`, `=`, `-`, not starting with a dot",
        next_step="Do not use this directory; build it again.",
    )


def foreign_relative(path: object, *, where: str) -> str:
    """Return `path`, of a file of another program, if it stays below the directory that it is joined to, else raise
    DataError. Such names may have blanks, percent signs and letters of any language, but no control characters.
    """
    if isinstance(path, str) and 0 < len(path) <= 4000 and path.isprintable() and "\\" not in path:
        parts = path.split("/")
        if all(part and not part.startswith(".") for part in parts) and not parts[-1].startswith("_"):
            return path
    raise DataError(
        f"{where}: a path leads out of its directory, or has characters that no reader of Parquet takes",
        got=repr(path)[:200],
        allowed="relative, no control characters or backslashes, no part starting with a dot, no file with `_`",
        next_step="Rename the file, or index a directory without it.",
    )


def _named(pattern: re.Pattern[str], name: str, what: str) -> str:
    if pattern.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} is no {what}", got=repr(name), allowed=f"the form {pattern.pattern}", next_step="Rename it."
        )
    return name
