"""No input file is taken twice, and no two files give their records the same ids: within a job, and between an append
and the datasets that it continues.

Decision record: docs/decisions/010-sizes-blocks-and-ids.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.etl.input.files import Source, digest_of
from lockstep.etl.write.append import Parent
from lockstep.storage.dataset.manifest_entries import SourceInfo
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.urls import parent

LEAST_RECORDS = 10
"""Files of fewer records, such as a header alone, may be equal by chance."""


def check_paths(sources: Sequence[Source], above: Parent | None, other_way: str = "") -> None:
    """Raise ConfigError if two files, or a file and one of a dataset that is continued, have the same path, which
    would give their records the same ids. `other_way` is what a user can do besides --input-root.
    """
    known: dict[str, Source] = {}
    for source in sources:
        first = known.setdefault(source.path, source)
        if first is not source:
            raise _same_path(first, source, other_way)
    for url, manifest in () if above is None else above.chain:
        for info in manifest.source:
            if info.path is not None and info.path in known:
                raise _path_there(known[info.path], info, url, other_way)


def check_contents(infos: Sequence[SourceInfo], records: Mapping[int, int], above: Parent | None) -> None:
    """Raise DataError if two files, or a file and one of a dataset that is continued, hold the same bytes, packed or
    not. `records` are those of files by their number, where they are known; files of fewer than LEAST_RECORDS are not
    compared.
    """
    seen: dict[object, tuple[SourceInfo, str]] = {}
    for url, manifest in () if above is None else above.chain[::-1]:
        for info in manifest.source:
            for mark in _marks(info):
                seen.setdefault(mark, (info, url))
    for number, info in enumerate(infos):
        if not info.bytes or records.get(number, LEAST_RECORDS) < LEAST_RECORDS:
            continue
        for mark in _marks(info):
            other, dataset = seen.setdefault(mark, (info, ""))
            if other is not info and not _differ(info, other):
                raise _same_content(info, other, dataset)


def _marks(info: SourceInfo) -> tuple[object, ...]:
    """What files of the same content share."""
    stored = (info.bytes, info.sha256)
    return (stored,) if info.content_crc32c is None else (stored, (info.content_bytes, info.content_crc32c))


def _differ(one: SourceInfo, two: SourceInfo) -> bool:
    """Whether two files, neither of them packed, have other digests."""
    plain = one.bytes == one.content_bytes and two.bytes == two.content_bytes
    return plain and one.sha256 != two.sha256


def _same_path(one: Source, two: Source, other_way: str) -> ConfigError:
    way = "Give --input the folder that holds the folders of both, or give --input-root a folder above both"
    if parent(one.url) == parent(two.url):
        way = "Remove one of them if it is the other one, packed; else rename one"
    return ConfigError(
        f"{one.url} and {two.url} would give their records the same ids",
        got=f"the path {one.path} of both, below what --input or --input-root names",
        allowed="a path of its own for each file (without .gz, .bz2 or .zst)",
        next_step=f"{way}{other_way}.",
    )


def _path_there(source: Source, there: SourceInfo, dataset: str, other_way: str) -> ConfigError:
    same = there.bytes == source.size_bytes and there.sha256 == digest_of(0, source.url, source.size_bytes)["sha256"]
    if same:
        return ConfigError(
            f"{source.url} is in {dataset} already",
            got=f"the path and the content of {there.url}",
            allowed="files that are new",
            next_step="Remove it from --input.",
        )
    return ConfigError(
        f"{source.url} would give its records ids that {dataset} has",
        got=f"the path {there.path}, which is that of {there.url}, a file of other bytes",
        allowed="a path of its own for each file (without .gz, .bz2 or .zst)",
        next_step=f"Give --input-root a folder above both, for all datasets from the first one on{other_way}.",
    )


def _same_content(info: SourceInfo, other: SourceInfo, dataset: str) -> DataError:
    where = f", which is in {dataset} already" if dataset else ""
    how = "SHA-256" if info.sha256 == other.sha256 else "length and CRC-32C once unpacked"
    return DataError(
        f"{info.url} has the same content as {other.url}{where}",
        got=f"equal {how}: each of its records would count twice",
        allowed=f"each file once; files of fewer than {LEAST_RECORDS} records may be equal",
        next_step="Remove one of them, such as a rotated log's second copy." if not dataset else "Remove it.",
    )
