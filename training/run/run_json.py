"""run.json: what a run was begun with, and whether a later call may resume it."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from lockstep.process.installed import ROOT
from lockstep.storage import documents
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import write_file
from lockstep.storage.run_layout import CHECKPOINTS, MODELS
from lockstep.storage.urls import absolute, basename, parent
from lockstep.training.config import TrainConfig, flag_of, options_in
from lockstep.training.plan.client_plan import RunPlan
from lockstep.training.plan.datasets import what_differs
from lockstep.training.plan.selection import Selection
from lockstep.training.run.lineage import chain_of, checkpoints, epochs_asked, read_claims
from lockstep.training.run.moved import data_now, manifest_digest, where_now
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from lockstep.training.run.status import no_run

FORMAT_VERSION = 2
RECORDED_PACKAGES = ("lockstep", "pyspark", "numpy", "pyarrow", "keras", "tensorflow", "hdfs-native")
# With the plan, these fields determine every weight, and none may change.
FIXED = (
    "model", "batchnorm", "precision", "learning_rate",
    "audit",  # changes no weight, but one with gaps proves nothing, which would show only at the end
    "learning_rate_scaling", "base_batch", "warm_up_epochs", "delay", "staleness", "gradient_noise",
    "tasks", "clients", "client_fraction", "local_epochs", "update_clip", "noise_multiplier", "privacy_delta",
    "sync_every", "sync_until_epoch", "outer_learning_rate", "outer_momentum", "compression", "canonical", "augment",
    "bad_images", "init_from", "lora_rank", "ewc", "extra", "shard_embeddings",
    "backend",  # others add in another order; `tls` and `trust_network` change no sum, so they may differ
)  # fmt: skip
# A later call may have others, which change no weight of a step. run.json has those of the newest call, by which the
# best checkpoint is found.
JUDGING = ("validate", "validate_every", "early_stop", "keep_best")
MENDABLE = (
    *JUDGING, "keep_checkpoints", "keep_every", "checkpoint_every", "max_steps", "start_limit_s", "stall_limit_s",
    "stop_grace_s", "heartbeat_limit_s", "max_restarts", "max_restarts_per_hour",
)  # fmt: skip
# With these the model is another, which the run's weights may not fit.
OF_THE_MODEL = ("model", "extra", "init_from", "shard_embeddings")
PLAN_FIELDS = {
    "dataset_digest": "datasets",
    "records": "datasets",
    "block_records": "datasets",
    "window_records": "window_bytes",
    "ratios": "mix",
    "parts": "datasets",
    "each": "noise_multiplier",
}


def check_run(fs: FileSystem, paths: RunPaths, config: TrainConfig, plan: RunPlan) -> bool:
    """Whether there is a run to resume; changes nothing.

    Raises ConfigError naming the first field that contradicts the run, and for a directory that is not a run. A run
    without a checkpoint contradicts no call: the first call may have been wrong (a model's name), and the corrected one
    must not be refused for it.
    """
    try:
        found = read_run(fs, paths)
    except NotFoundError:
        refuse_strange_directory(fs, paths.root, "run", "run.json")
        return False
    try:
        _check_same(fs, paths, found, config, plan)
    except ConfigError:
        if checkpoints(fs, paths) or find_result(fs, paths) is not None:
            raise
        return False
    return True


def _check_same(fs: FileSystem, paths: RunPaths, found: dict[str, Any], config: TrainConfig, plan: RunPlan) -> None:
    identity, stored, begun = plan.identity(), found["plan"], TrainConfig.from_json(found["config"])
    _same(paths, "strategy", "strategy", begun.step.strategy, config.step.strategy)  # the plan depends on it
    _same(paths, "where", "where", begun.data.where, config.data.where)
    names = sorted(identity.keys() | stored.keys())
    for name in ("split", "ratios"):  # first: with another split or mix, the records differ too
        _same(paths, PLAN_FIELDS.get(name, name), name, stored.get(name), identity.get(name))
    if stored.get("dataset_digest") != identity["dataset_digest"]:
        digest = str(stored.get("dataset_digest"))
        difference = what_differs([load_dataset(url) for url in config.data.datasets], begun.data.datasets, digest)
        got = f"dataset_digest = {identity['dataset_digest']!r}: {difference}"
        _differ(paths, "dataset_digest", got, f"dataset_digest = {stored.get('dataset_digest')!r}", "datasets")
    for name in names:
        _same(paths, PLAN_FIELDS.get(name, name), name, stored.get(name), identity.get(name))
    # A pipeline's micro-batches are as free as its stages: they leave no trace in the optimizer.
    _same(paths, "micro_batches", "micro_batches", begun.accumulated, config.accumulated)
    for name in FIXED:
        _same(paths, name, name, begun.options()[name], config.options()[name])
    if config.data.epochs < epochs_asked(read_claims(fs, paths)):
        _check_not_past(fs, paths, config.data.epochs, plan)


def _check_not_past(fs: FileSystem, paths: RunPaths, epochs: int, plan: RunPlan) -> None:
    """Raise ConfigError if the newest checkpoint is past the end of epoch number `epochs`, counted from 1."""
    chain, _ = chain_of(fs, paths)
    step = chain[0].step if chain else 0
    if step <= plan.steps(epochs):
        return
    begun = plan.epoch_of_step(step - 1) + 1
    done = begun if step == plan.steps(begun) else begun - 1
    under_way = "" if done == begun else f", and epoch {begun} is under way"
    raise ConfigError(
        f"{paths.root} cannot end after {epochs} epochs: it has trained more",
        got=f"epochs = {epochs}; {done} epochs are done{under_way} (step {step})",
        allowed=f"epochs = {begun} or more",
        next_step="Give --epochs that the run has not passed, or another --run; lockstep export takes a kept "
        "checkpoint of an earlier step.",
    )


def read_run(fs: FileSystem, paths: RunPaths) -> dict[str, Any]:
    """Read run.json, with its objects `plan` and `config`. Raises NotFoundError, CorruptionError or DataError naming
    it. The configuration's `run` is the directory that was asked; its `datasets` and `first_weights` are those that
    were moved with it.
    """
    try:
        data = fs.read_bytes(paths.run_json)
    except NotFoundError:
        if fs.exists(paths.agent_json):
            raise no_run(fs, paths) from None
        raise
    found = unseal_as("run", data, paths.run_json, version=FORMAT_VERSION)
    for name in ("plan", "config"):
        documents.mapping(found.get(name), where=f"{paths.run_json}: {name}")
    was, source = found["config"].get("run"), found.get("first_weights")
    found["config"] = {**found["config"], "run": paths.root}
    if isinstance(was, str) and was != paths.root:
        moved = data_now(options_in(found["config"]), was, paths.root, found.get("dataset_digest"))
        if moved is not None:
            data = found["config"]["data"]
            found["config"]["data"], found["datasets_were"] = {**data, "datasets": moved}, data["datasets"]
    if isinstance(was, str) and isinstance(source, str):
        found["first_weights"] = where_now(source, was, paths.root, found.get("first_weights_sha256"))
    return found


def names_of_datasets(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The URLs of each dataset of a run.json: where it is now, and where it was when the run had not been moved."""
    now, were = options_in(document["config"])["datasets"], document.get("datasets_were")
    if not isinstance(were, list) or len(were) != len(now):
        were = now
    return list(zip(now, were, strict=True))


def open_run(
    fs: FileSystem,
    paths: RunPaths,
    config: TrainConfig,
    manifest: DatasetManifest,
    plan: RunPlan,
    confirm: Callable[[], None] | None = None,
    search_metric: str | None = None,
) -> None:
    """Write run.json for a new run, or for one without a checkpoint; else check it as `check_run` does, and write it
    again if this call has other `MENDABLE` fields, with a note of what it is judged by.

    `search_metric` is the --metric of the search whose trial this is; `confirm` is called just before the rename
    (lockstep.storage.publish.write_stream).
    """
    if not check_run(fs, paths, config, plan):
        fs.mkdirs(paths.root)
        again = fs.exists(paths.run_json)
        document = seal({**_document(config, manifest, plan), "search_metric": search_metric})
        write_file(fs, paths.run_json, document, exclusive=not again, confirm=confirm)
        return
    found = read_run(fs, paths)
    given, begun = config.options(), TrainConfig.from_json(found["config"])
    before = begun.options()
    changed = {name: given[name] for name in MENDABLE if given[name] != before[name]}
    if changed:
        for name in (name for name in JUDGING if name in changed):
            words = f"{flag_of(name)} is {given[name] or 'unset'} from here on; it was {before[name] or 'unset'}"
            print(f"note: {words}", file=sys.stderr, flush=True)
        mended = seal({**found, "config": begun.but(**changed).to_json()})
        write_file(fs, paths.run_json, mended, exclusive=False, confirm=confirm)


def note_first_weights(fs: FileSystem, paths: RunPaths, url: str, confirm: Callable[[], None] | None = None) -> None:
    """Write in run.json where the first weights were found: what is published under a name changes later."""
    document = read_run(fs, paths)
    if document.get("first_weights") != url:
        noted = {"first_weights": url, "first_weights_sha256": manifest_digest(url)}
        write_file(fs, paths.run_json, seal({**document, **noted}), exclusive=False, confirm=confirm)


def begun_from(document: Mapping[str, Any]) -> str | None:
    """The run, or the file, that the first weights of a run are of, from its run.json; None if they were drawn."""
    source = document.get("first_weights") or options_in(document["config"]).get("init_from")
    if not isinstance(source, str) or not source:
        return None
    source = absolute(source).rstrip("/")
    return parent(parent(source)) if basename(parent(source)) in (CHECKPOINTS, MODELS) else source


def keep_selection(
    fs: FileSystem, paths: RunPaths, selection: Selection | None, confirm: Callable[[], None] | None = None
) -> None:
    """Write which samples meet the run's --where, from which each rank makes the same plan; does nothing without it, or
    where that is written already.
    """
    if selection is None:
        return
    document = seal({"format_version": 1, "kind": "selection", **selection.to_json()})
    if not fs.exists(paths.selection) or fs.read_bytes(paths.selection) != document:
        write_file(fs, paths.selection, document, exclusive=False, confirm=confirm)


def _same(paths: RunPaths, field: str, name: str, stored: Any, given: Any) -> None:
    if stored != given:
        _differ(paths, name, f"{name} = {given!r}", f"{name} = {stored!r}", field)


def _differ(paths: RunPaths, name: str, got: str, allowed: str, field: str) -> None:
    new = "a --run that does not exist yet"
    if field not in OF_THE_MODEL:
        new += f", which may begin with the weights of this one: --init-from {paths.root}"
    raise ConfigError(
        f"{paths.root} was begun with another `{name}`",
        got=got,
        allowed=allowed,
        next_step=f"Give the run's own {flag_of(field)}, or {new}.",
    )


def refuse_strange_directory(fs: FileSystem, root: str, what: str, document: str) -> None:
    """Raise ConfigError unless `root` may begin `what` (a run, a search), whose file `document` it does not have: it is
    absent, or a directory that is empty but for what a killed driver leaves.
    """
    allowed = f"a directory with {document}, an empty one or none"
    try:
        is_dir = fs.stat(root).is_dir
        names = [entry.name for entry in fs.list(root)] if is_dir else []
    except NotFoundError:
        return
    if not is_dir:
        raise ConfigError(
            f"{root} is not a directory", got="a file", allowed=allowed, next_step="Choose another --run."
        )
    # A driver that died between its first lease and the document leaves only a lease and temporary files.
    strange = [name for name in names if name != "lease.json" and not name.startswith(".")]
    if strange:
        raise ConfigError(
            f"{root} exists and is not a {what}",
            got=f"a directory with {', '.join(strange[:5])}",
            allowed=allowed,
            next_step="Choose another --run.",
        )


def _document(config: TrainConfig, manifest: DatasetManifest, plan: RunPlan) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "kind": "run",
        "config": config.to_json(),
        "dataset_digest": manifest.digest,
        "plan": plan.identity(),
        "versions": {"python": platform.python_version(), **_versions()},
        "git_revision": _git_revision(),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # not installed here
    return found


def _git_revision() -> str | None:
    if not (ROOT / ".git").exists():  # installed, maybe into a folder of another repository
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
