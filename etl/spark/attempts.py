"""Files that tasks write: under names that no other attempt has, in a folder of the driver's, which moves them."""

from __future__ import annotations

import secrets
from typing import IO

from lockstep.storage.errors import StorageError
from lockstep.storage.files.interface import Writer
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_stream
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import join

COPY_BYTES = 4 << 20


def partition_of_task(settings: dict[str, str]) -> int:
    """The number of the partition that this task works on; the Hadoop `settings` are in force from now on."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    set_hadoop_settings(settings)
    return context.partitionId()


def upload(folder: str, name: str, file: IO[bytes]) -> str:
    """Copy a local file into the attempts' folder under a name that no other attempt has; returns its URL."""

    def produce(writer: Writer) -> None:
        file.seek(0)
        while data := file.read(COPY_BYTES):
            writer.write(data)

    fs, url = filesystem(folder), join(folder, f"{name}-{secrets.token_hex(8)}")
    if not fs.exists(folder):  # a task that outlives its job must not bring a removed staging folder back
        raise StorageError(
            f"{folder} is gone",
            got="no folder",
            allowed="the folder that the driver made",
            next_step="Run the job again.",
        )
    write_stream(fs, url, produce)
    return url
