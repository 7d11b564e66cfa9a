"""Increments: which input files are new to a chain of datasets. The manifests say what was read; there is no other log.

Decision record: docs/decisions/013-increments.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, cast

from lockstep.etl.input.files import Content, HashedFile, Source, place_of
from lockstep.etl.input.unpack import PLAIN, unpacked
from lockstep.etl.write.append import Parent
from lockstep.storage.dataset.increments import newest_in, next_in
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest_entries import SourceInfo
from lockstep.storage.errors import DataError, require
from lockstep.storage.files.interface import FileStat
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute

_READ_BYTES = 4 << 20


def as_increment(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration whose `output` is a folder of increments: output and parent are the next and the
    newest dataset there, and the inputs are absolute, so that they have the same names from any working folder.

    Raises ConfigError for a parent that is given, and for an output that is no such folder.
    """
    require(
        values["append_to"] is None,
        "--append-to",
        f"{values['append_to']} with --increment",
        "--increment alone, which continues the newest dataset in --output",
        "Leave out one of the two.",
    )
    folder = absolute(values["output"])
    newest = newest_in(folder)
    inputs = tuple(map(absolute, values["inputs"]))
    return {**values, "inputs": inputs, "output": next_in(folder, newest), "append_to": newest}


class ReadBefore:
    """The files that a chain of datasets has read. Each of them accounts for one file of the input.

    A file is known by its place and length, unless it was modified since. Where names are reused, as log rotation does,
    all files are compared by their content, packed or not.
    """

    def __init__(self, parent: Parent) -> None:
        self._read = [(info, url) for url, manifest in parent.chain for info in manifest.source]
        self._at: dict[str, int] = {}
        for number, (info, _) in enumerate(self._read):
            self._at.setdefault(place_of(absolute(info.url)), number)
        self._trusted: set[int] = set()
        self._published: dict[str, int] = {}
        self._digests: dict[str, SourceInfo] = {}

    def new(self, find: Callable[[Callable[[FileStat], bool]], list[Source]]) -> list[Source]:
        """The input files that no dataset has read; `find` gives all but those for which its argument is true.

        Raises DataError for a file that has grown since it was read, and for one that has another content while no file
        has moved.
        """
        sources = find(self._trust)
        if self._names_are_reused(sources):
            self._trusted.clear()
            sources = find(lambda _: False)
        left, moved = set(range(len(self._read))) - self._trusted, False
        found = []
        # The file's own place comes first: of two files of equal content, each stays what it was.
        for source in sorted(sources, key=lambda source: not self._same(source, self._number(source))):
            own = self._number(source)
            same = [number for number in left if self._same(source, number)]
            if own in same:
                left.remove(own)
            elif same:
                left.remove(same[0])
                moved = True
            else:
                found.append(source)
        for source in found:
            if (own := self._number(source)) in left:
                info, dataset = self._read[own]
                if _begins_with(source, info):
                    raise _changed(source, info, dataset, "grown")
                if not moved:
                    raise _changed(source, info, dataset, "changed")
        return [source for source in sources if source in found]

    def _trust(self, file: FileStat) -> bool:
        """Whether the file is where a dataset read it, with this length, and was not modified since."""
        number = self._at.get(place_of(absolute(file.url)))
        if number is None:
            return False
        info, dataset = self._read[number]
        if info.bytes != file.size_bytes or file.mtime_ms > self._published_ms(dataset):
            return False
        self._trusted.add(number)
        return True

    def _names_are_reused(self, sources: Sequence[Source]) -> bool:
        """Whether one of `sources`, which are not trusted, was read with another content, or has that of a trusted
        file.
        """
        at = [(source, number) for source in sources if (number := self._number(source)) >= 0]
        return any(not self._same(source, number) for source, number in at) or any(
            self._same(source, number) for source in sources for number in self._trusted
        )

    def _number(self, source: Source) -> int:
        """The number of the file that was last read at this place, -1 if there is none."""
        return self._at.get(place_of(absolute(source.url)), -1)

    def _same(self, source: Source, number: int) -> bool:
        """Whether a file has the content of the one with this number; reads it only where lengths allow that."""
        if number < 0:
            return False
        info, _ = self._read[number]
        packed_since = source.codec != PLAIN and info.bytes == info.content_bytes
        if source.size_bytes != info.bytes and not packed_since and source.size_bytes != info.content_bytes:
            return False
        mine = self._digests.get(source.url) or self._digests.setdefault(source.url, _digest_of(source))
        content = mine.content_bytes is not None and mine.content_bytes == info.content_bytes
        return mine.sha256 == info.sha256 or (content and mine.content_crc32c == info.content_crc32c)

    def _published_ms(self, dataset: str) -> int:
        if dataset not in self._published:
            self._published[dataset] = filesystem(dataset).stat(DatasetPaths(dataset).manifest).mtime_ms
        return self._published[dataset]


def _digest_of(source: Source) -> SourceInfo:
    """The file with the digests of its bytes and of its content, unpacked."""
    content = Content()
    with filesystem(source.url).open_read(source.url) as file, HashedFile(file) as hashed:
        if source.codec != PLAIN:
            for _ in content.through(unpacked(source.url, cast(BinaryIO, hashed), source.codec, _READ_BYTES)):
                pass  # the digests grow as the content is read; the content itself is not needed
        sha256 = hashed.whole(source.url, source.size_bytes)
        row = hashed.content.row if source.codec == PLAIN else content.row
    return SourceInfo(url=source.url, bytes=source.size_bytes, sha256=sha256, **row)


def _begins_with(source: Source, info: SourceInfo) -> bool:
    """Whether a file begins with all bytes of the one that was read at its place."""
    if source.size_bytes < info.bytes:
        return False
    left, digest = info.bytes, hashlib.sha256()
    with filesystem(source.url).open_read(source.url) as file:
        while left and (data := file.read(min(_READ_BYTES, left))):
            digest.update(data)
            left -= len(data)
    return digest.hexdigest() == info.sha256


def _changed(source: Source, info: SourceInfo, dataset: str, how: str) -> DataError:
    return DataError(
        f"{source.url} has {how} since {dataset} read it",
        got=f"{source.size_bytes} bytes",
        allowed=f"the {info.bytes} bytes that were read",
        next_step="Name only closed files in --input, such as 'access.log-*.gz'; put new lines into a file of their"
        " own.",
    )
