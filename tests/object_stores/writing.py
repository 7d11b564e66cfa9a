"""Publishes a directory in a process of its own, which kills itself at a stated request.

python -m tests.object_stores.writing ROOT NAME KILL_AT
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import ExistsError
from lockstep.storage.files.object_store import ObjectStore
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, publish_directory, write_file
from lockstep.storage.urls import join

PARTS = ("split=test/part-00000.tfrecord", "split=train/part-00000.tfrecord", "split=train/part-00001.tfrecord")


def content(name: str) -> dict[str, bytes]:
    """The files of the directory that the writer `name` publishes."""
    files = {part: f"{part} of {name}".encode() for part in PARTS}
    return files | {MANIFEST_NAME: canonical_bytes({part: data.decode() for part, data in files.items()})}


def build(root: str, name: str) -> str:
    """Write the directory; returns its URL."""
    fs, staging = filesystem(root), join(root, f"_staging-{name}")
    for path, data in content(name).items():
        write_file(fs, join(staging, path), data)
    return staging


def die_at(request: int) -> None:
    """Kill this process before the request of this number, from now on."""
    once, count = ObjectStore._once, 0

    def counted(self: ObjectStore, *call: Any) -> Any:
        nonlocal count
        count += 1
        if count == request:
            os.kill(os.getpid(), signal.SIGKILL)
        return once(self, *call)

    setattr(ObjectStore, "_once", counted)  # noqa: B010


def main() -> int:
    """Publish; returns 0, or 3 if the name is taken."""
    root, name, kill_at = sys.argv[1:]
    staging = build(root, name)
    die_at(int(kill_at))
    try:
        publish_directory(filesystem(root), staging, join(root, "out"))
    except ExistsError:
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
