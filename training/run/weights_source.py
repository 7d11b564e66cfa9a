"""Sources of a model's first weights: a run, a checkpoint, an exported model, or a Keras file."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.storage import documents
from lockstep.storage.documents import sha256_hex, unseal
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import join
from lockstep.training.config import options_in
from lockstep.training.rules import Keep
from lockstep.training.run.best import find_best
from lockstep.training.run.lineage import chain_of, find_tip
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.published import published_model
from lockstep.training.run.result import find_model
from lockstep.training.run.run_json import read_run

MODEL_FILE, SCHEMA_FILE = "model.keras", "schema.json"
SIGNATURE_FILE, FITTED_PREFIX = "signature.json", "fitted-"
PICTURES_FILE = "pictures.json"  # lockstep.features.images.intake.Pixels, if the dataset was made of pictures
FISHER_FILE = "fisher.safetensors"  # of a run with --ewc: lockstep.training.steps.ewc
FILES = (".keras", ".weights.h5")
KINDS = "a run, a folder of lockstep publish, a checkpoint, an exported model, NAME.keras or NAME.weights.h5"


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Weights that were found; exactly one field is set."""

    checkpoint: str | None = None
    """URL of a checkpoint directory."""
    file: bytes | None = None
    """The content of a .keras or .weights.h5."""


def newest_of(run: str) -> tuple[str | None, str | None]:
    """A run's (model, checkpoint), one of them None: its newest claim's model, else the best checkpoint of a run with
    --keep-best, else the chain's tip.

    Raises DataError if it has neither.
    """
    fs, paths = filesystem(run), RunPaths(run)
    try:
        return find_model(fs, paths), None
    except NotFoundError:
        keep = Keep(best=options_in(read_run(fs, paths)["config"]).get("keep_best"))
        if (best := find_best(fs, paths, keep)) is not None:
            return None, best.url
        tip = find_tip(fs, paths)
    if tip is None:
        raise _no_checkpoint(run)
    return None, tip.url


def _no_checkpoint(run: str) -> DataError:
    return DataError(
        f"{run} has neither a model nor a checkpoint",
        got="an unfinished run before its first checkpoint",
        allowed="a run that has written a checkpoint",
        next_step="Continue the run: `lockstep train` with the same flags.",
    )


def located(url: str) -> str:
    """The URL of the weights of `url`: for a run its model or newest checkpoint, for a folder of lockstep publish the
    model that is published there, else `url` itself.

    The driver looks it up once: the newest checkpoint of a run that still trains changes, and ranks would start apart.
    """
    if not url.endswith(FILES) and (current := published_model(filesystem(url), url)) is not None:
        return current
    if url.endswith(FILES) or not filesystem(url).exists(RunPaths(url).run_json):
        return url
    model, checkpoint = newest_of(url)
    return model or checkpoint or url


def check_weights(url: str) -> None:
    """Raise ConfigError or DataError where `url` holds no weights, without reading them: the ranks check each byte."""
    if not url.endswith(FILES) and (current := published_model(filesystem(url), url)) is not None:
        url = current
    fs, paths = filesystem(url), RunPaths(url)
    if url.endswith(FILES):
        if not fs.exists(url):
            raise _none(url, "nothing there")
    elif not fs.exists(paths.run_json):
        _kind_at(url)
    else:
        try:
            find_model(fs, paths)
        except NotFoundError:
            if not chain_of(fs, paths)[0]:
                raise _no_checkpoint(url) from None


def weights_at(url: str) -> WeightsSource:
    """The weights at `url`; the file of an exported model is checked by its digest.

    Raises ConfigError for anything that holds no weights, CorruptionError for a changed file.
    """
    if url.endswith(FILES):
        try:
            return WeightsSource(file=filesystem(url).read_bytes(url))
        except NotFoundError:
            raise _none(url, "nothing there") from None
    url = located(url)
    return WeightsSource(url) if _kind_at(url) == "checkpoint" else WeightsSource(file=checked_model(url))


def _kind_at(url: str) -> str:
    """Return `checkpoint` or `model`, by the manifest at `url`; raises ConfigError for anything else."""
    where = join(url, MANIFEST_NAME)
    try:
        kind = unseal(filesystem(url).read_bytes(where), where).get("kind")
    except NotFoundError:
        raise _none(url, "no manifest there") from None
    if kind not in ("checkpoint", "model"):
        raise _none(url, f"a manifest of kind {kind!r}")
    return str(kind)


def checked_model(url: str) -> bytes:
    """The model.keras of an exported model. Raises CorruptionError if it does not match its manifest."""
    return checked_file(url, MODEL_FILE)


def checked_file(url: str, name: str) -> bytes:
    """A file of an exported model, checked by its digest. Raises CorruptionError for a changed one."""
    fs, where = filesystem(url), join(url, MANIFEST_NAME)
    files = documents.mapping(unseal(fs.read_bytes(where), where).get("files"), where=f"{where}: files")
    listed = documents.mapping(files.get(name, {}), where=f"{where}: {name}")
    data = fs.read_bytes(join(url, name))
    if sha256_hex(data) != listed.get("sha256"):
        raise CorruptionError("a file of a model was changed", file=join(url, name), got=sha256_hex(data))
    return data


def fisher_at(url: str) -> tuple[bytes, str]:
    """How much each weight of the model at `url` matters, as a run with --ewc stored it, and the file's URL.

    Raises ConfigError where it did not, CorruptionError for a changed file.
    """
    model = check_fisher(url)
    return checked_file(model, FISHER_FILE), join(model, FISHER_FILE)


def check_fisher(url: str) -> str:
    """The URL of the exported model at `url`. Raises ConfigError unless a run with --ewc has exported it."""
    url = located(url)
    where = join(url, MANIFEST_NAME)
    kind = "file" if url.endswith(FILES) else _kind_at(url)
    if kind != "model" or FISHER_FILE not in unseal(filesystem(url).read_bytes(where), where)["files"]:
        raise ConfigError(
            "--ewc has nothing to hold on to: the first weights do not say how much each of them matters",
            got=f"{url}, {f'a {kind}' if kind != 'model' else f'a model without {FISHER_FILE}'}",
            allowed="the model of a finished run with --ewc",
            next_step="Train the earlier run with --ewc 0, which only stores that; or this one, as the first.",
        )
    return url


def _none(url: str, got: str) -> ConfigError:
    return ConfigError(
        f"{url} holds no weights", got=got, allowed=KINDS, next_step="Correct the path; `ls` shows what a run holds."
    )
