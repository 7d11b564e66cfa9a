"""Verification of an indexed directory: the files of others and our indexes of them, each by its digest."""

from __future__ import annotations

from lockstep.storage.dataset.indexed import INDEX_FOLDER, index_name, read_indexed
from lockstep.storage.dataset.layout import MANIFEST_NAME
from lockstep.storage.verify.check import Check


def check_indexed(check: Check) -> None:
    """Hold every file that was indexed, and every index, against the manifest; files that came later are not ours to
    judge. Raises DataError or NotFoundError where the manifest is unusable.
    """
    url = check.url(MANIFEST_NAME)
    manifest = read_indexed(check.fs.read_bytes(url), url)
    check.on_ok(MANIFEST_NAME, f"{len(manifest.files)} files")
    for file in manifest.files:
        if check.file(file.path, file.bytes, file.sha256, crc32c=file.crc32c):
            check.on_ok(file.path, f"{file.records} records, {file.bytes} bytes")
        index = manifest.indexes.get(file.path)
        if index is not None:
            path = f"{INDEX_FOLDER}/{index_name(file.path)}"
            if check.file(path, index.bytes, index.sha256):
                check.on_ok(path, f"{file.records} offsets")
    check.extra_files({f"{INDEX_FOLDER}/{index_name(path)}" for path in manifest.indexes}, INDEX_FOLDER)
