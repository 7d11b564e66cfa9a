"""The model that is published under a name: `MODELS/NAME/_current.json`."""

from __future__ import annotations

from typing import Any

from lockstep.storage.documents import unseal_as
from lockstep.storage.errors import DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import read_replaced
from lockstep.storage.urls import join, parent
from lockstep.training.run.moved import manifest_digest, where_now

CURRENT = "_current.json"
REFUSED = "_refused"
KIND = "published"


class OtherModelError(DataError):
    """Another model is where the published one was."""


def read_published(fs: FileSystem, models: str) -> dict[str, Any] | None:
    """What is published in the folder `models` (lockstep.training.results.better_model); None before the first.

    Its `run` and `model` are those that were moved or copied together with the folder, if they were.
    Raises CorruptionError or DataError for a file that was changed.
    """
    where = join(models, CURRENT)
    try:
        found = unseal_as(KIND, read_replaced(fs, where), where)
    except NotFoundError:
        return None
    if isinstance(was := found.get("models"), str):
        model = where_now(found["model"], was, models, found["model_sha256"])
        if model != found["model"]:
            found |= {"model": model, "run": parent(parent(model)), "models": models}
    return found


def published_model(fs: FileSystem, models: str) -> str | None:
    """The URL of the model that is published in the folder `models`; None before the first.

    Raises OtherModelError if another model is there now.
    """
    found = read_published(fs, models)
    if found is None:
        return None
    model, wanted = str(found["model"]), found["model_sha256"]
    if (there := manifest_digest(model)) not in (None, wanted):  # a missing one is an error when it is read
        raise OtherModelError(
            f"the model that {models} names is another one now",
            got=f"{model}, whose manifest has SHA-256 {there}",
            allowed=f"SHA-256 {wanted}, as when it was published",
            next_step="Restore that run, or publish a model again: lockstep publish.",
        )
    return model
