"""Hive partitions of files: folders NAME=VALUE, as columns and as splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.etl.table_files import Partition, partition_of, text_of_partition
from lockstep.features.shards.foreign_files import ForeignFile
from lockstep.storage.dataset.layout import split_name
from lockstep.storage.errors import ConfigError


def partitions_of(files: Sequence[ForeignFile]) -> list[Partition]:
    """The partition of each file. Raises ConfigError for files whose folders name other partitions."""
    found = [partition_of(file.path) for file in files]
    for file, partition in zip(files, found, strict=True):
        names = [name for name, _ in partition]
        if names != [name for name, _ in found[0]] or len(set(names)) < len(names):
            raise ConfigError(
                f"{file.url} is in other partitions than {files[0].url}",
                got=", ".join(names) or "no partition",
                allowed="the same partitions, folders NAME=VALUE, on the same levels, each name once",
                next_step="Index a folder below, or move the files.",
            )
    return found


def kinds_of(partitions: Sequence[Partition]) -> dict[str, str]:
    """The type of each partition column in Spark's notation: a number or a date if every value is the text of one.
    These are the rules of `lockstep etl_table`.
    """
    kinds = {}
    for place, (name, _) in enumerate(partitions[0] if partitions else ()):
        known = [text for partition in partitions if (text := partition[place][1]) is not None]
        fitting = (kind for kind in ("bigint", "double", "date") if all(text_of_partition(kind, t) for t in known))
        kinds[name] = next(fitting, "string") if known else "string"
    return kinds


def splits_of(files: Sequence[ForeignFile], partitions: Sequence[Partition], column: str | None) -> list[str]:
    """The split of each file: the value of the partition `column`, or `train` if there is none.

    Raises ConfigError for a column that is no partition, and for values that cannot be the name of a split.
    """
    if column is None:
        return ["train"] * len(files)
    found = []
    for file, partition in zip(files, partitions, strict=True):
        values: Mapping[str, str | None] = dict(partition)
        if column not in values:
            raise ConfigError(
                f"--split-by: `{column}` is no partition",
                got=", ".join(values) or f"no folder NAME=VALUE in {file.path}",
                allowed=f"a folder {column}=SPLIT above each file",
                next_step="Name one of the partitions, or leave --split-by out: then all files are in the split train.",
            )
        name = values[column]
        if name is None:
            raise ConfigError(
                f"{file.url} is in no split",
                got=f"{column} = null",
                allowed="the name of a split",
                next_step="Move these files, or leave --split-by out.",
            )
        found.append(split_name(name))
    return found
