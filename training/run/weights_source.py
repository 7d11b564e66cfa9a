"""Where a model's weights may come from: a finished run, a checkpoint, an exported model, a file of Keras' own."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.storage.documents import sha256_hex, unseal
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import join
from training.run.lineage import find_tip
from training.run.paths import RunPaths
from training.run.result import find_model

MODEL_FILE, SCHEMA_FILE = "model.keras", "schema.json"
FILES = (".keras", ".weights.h5")
KINDS = "a run, a checkpoint, an exported model, NAME.keras or NAME.weights.h5"


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """One of the two is set."""

    checkpoint: str | None = None
    """URL of a checkpoint directory."""
    file: bytes | None = None
    """The content of a .keras or .weights.h5."""


def newest_of(run: str) -> tuple[str | None, str | None]:
    """A run's (model, checkpoint), one of them None: its newest claim's model, else the chain's tip.

    Raises DataError where it has neither.
    """
    fs, paths = filesystem(run), RunPaths(run)
    try:
        return find_model(fs, paths), None
    except NotFoundError:
        tip = find_tip(fs, paths)
    if tip is None:
        raise DataError(
            f"{run} has neither a model nor a checkpoint",
            got="an unfinished run before its first checkpoint",
            allowed="a run that has written a checkpoint",
            next_step="Let the run go on: `python -m jobs.train` with the same flags.",
        )
    return None, tip.url


def located(url: str) -> str:
    """Where the weights that `url` names lie now: of a run its model or newest checkpoint, else `url` itself.

    A run that still trains has another newest checkpoint soon, and ranks that each looked it up would begin apart.
    """
    if url.endswith(FILES) or not filesystem(url).exists(RunPaths(url).run_json):
        return url
    model, checkpoint = newest_of(url)
    return model or checkpoint or url


def weights_at(url: str) -> WeightsSource:
    """What lies at `url`; a model's file is held against its digest where a manifest tells it.

    Raises ConfigError for anything that holds no weights, CorruptionError for a changed file.
    """
    fs = filesystem(url)
    if url.endswith(FILES):
        try:
            return WeightsSource(file=fs.read_bytes(url))
        except NotFoundError:
            raise _none(url, "nothing there") from None
    url = located(url)
    where = join(url, MANIFEST_NAME)
    try:
        kind = unseal(fs.read_bytes(where), where).get("kind")
    except NotFoundError:
        raise _none(url, "no manifest there") from None
    if kind == "checkpoint":
        return WeightsSource(url)
    if kind == "model":
        return WeightsSource(file=checked_model(url))
    raise _none(url, f"a manifest of kind {kind!r}")


def checked_model(url: str) -> bytes:
    """The model.keras of an exported model. Raises CorruptionError where it is not what its manifest says."""
    return checked_file(url, MODEL_FILE)


def checked_file(url: str, name: str) -> bytes:
    """A file of an exported model, by its digest. Raises CorruptionError for a changed one."""
    fs, where = filesystem(url), join(url, MANIFEST_NAME)
    files = unseal(fs.read_bytes(where), where)["files"]
    data = fs.read_bytes(join(url, name))
    if sha256_hex(data) != files.get(name, {}).get("sha256"):
        raise CorruptionError("a file of a model was changed", file=join(url, name), got=sha256_hex(data))
    return data


def _none(url: str, got: str) -> ConfigError:
    return ConfigError(
        f"{url} holds no weights", got=got, allowed=KINDS, next_step="Correct the path; `ls` shows what a run holds."
    )
