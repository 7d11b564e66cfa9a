"""The model that is published under a name: `MODELS/NAME/_current.json`."""

from __future__ import annotations

from typing import Any

from lockstep.storage.documents import unseal_as
from lockstep.storage.errors import NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import read_replaced
from lockstep.storage.urls import join

CURRENT = "_current.json"
REFUSED = "_refused"
KIND = "published"


def read_published(fs: FileSystem, models: str) -> dict[str, Any] | None:
    """What is published in the folder `models` (lockstep.training.results.better_model); None before the first.

    Raises CorruptionError or DataError for a file that was changed.
    """
    where = join(models, CURRENT)
    try:
        return unseal_as(KIND, read_replaced(fs, where), where)
    except NotFoundError:
        return None
