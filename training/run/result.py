"""The result of a finished run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.storage import documents
from lockstep.storage.documents import unseal_as
from lockstep.storage.errors import CorruptionError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.shown import counted
from lockstep.training.rules import metric_in
from lockstep.training.run.epochs import epochs_words
from lockstep.training.run.lineage import CheckpointRef, read_claims
from lockstep.training.run.paths import RunPaths

FORMAT_VERSION = 1
IN_PLACE, NEW_SUPERVISORS = 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The content of results/gNNNN.json."""

    run: str
    generation: int
    steps: int
    epochs: float
    """Epochs that were trained, by `lockstep.training.run.epochs.epochs_trained`; a whole number unless one was cut."""
    epochs_asked: int
    metrics: dict[str, Any]
    """The metrics of the last epoch."""
    samples: int
    """Samples that this generation trained on."""
    seconds: float
    """Training time of this generation."""
    samples_per_s: float | None
    """Samples a second from the end of this generation's first step to the end of its last one, without validations and
    the stalls of checkpoints; None for a single step."""
    restarts: int
    """How often this driver has started the ranks again."""
    checkpoint: str | None
    """The chain's tip: a name in checkpoints/."""
    model: str | None
    """URL of the final export: with `best` its weights, else those of the last step."""
    left_over: list[str]
    """Sample ids (hex) that fill no global batch."""
    keep_best: str | None = None
    """The --keep-best that was asked for."""
    best: dict[str, Any] | None = None
    """{checkpoint, step, value, metrics} of the checkpoint that is the best by it; None if none has its metric."""
    watching: list[str] = field(default_factory=list)
    """The model's own callbacks that watch the validation, such as `EarlyStopping of val_loss`."""
    class_counts: list[int] | None = None
    """Rows of each class that this generation was fed in the last epoch; None if labels are not classes."""
    restart_log: list[dict[str, Any]] = field(default_factory=list)
    """An entry for each of these restarts: {generation, level, seconds, parts} (lockstep.training.launch.session)."""
    max_steps: int | None = None
    """The --max-steps that was asked for."""
    stopped_by: str | None = None
    """Why the run ended before its last epoch did; None if it did not."""
    privacy: dict[str, Any] | None = None
    """{epsilon, delta, unit, noise_multiplier, client_fraction, rounds, not_covered} of a run with noise on clients."""
    validation_s: float = 0.0
    """Time of this generation's validations, which is no part of `seconds`."""
    first_step_s: float | None = None
    """The part of `seconds` up to the end of the first step: compilation and the first batches. None without a step."""
    bad_records: dict[str, Any] = field(default_factory=lambda: {"samples": 0, "first": []})
    """{samples, first} of those that this driver's ranks skipped: their number, and the first 20 by file and record."""

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object, the form of the result's file (unsealed)."""
        return {
            "format_version": FORMAT_VERSION,
            "kind": "result",
            **{name: getattr(self, name) for name in RunResult.__dataclass_fields__},
            "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def summary(self) -> str:
        """The result in a few lines."""
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items() if isinstance(value, float))
        epochs = counted(epochs_words(self.epochs, self.epochs_asked), "epoch")
        # A run that was cut will see its last samples when it is resumed: they are not left over.
        left = f", {counted(len(self.left_over), 'sample')} left over" if self.epochs == self.epochs_asked else ""
        return (
            f"{self.run}: {counted(self.steps, 'step')}, {epochs}, {speed_words(self.first_step_s, self.samples_per_s)}"
            f"{counted(self.restarts, 'restart')}{left}\n"
            f"{self._early_words()}{self._skipped_words()}"
            f"{self._privacy_words()}last epoch: {numbers}\ncheckpoint {self.checkpoint}\nmodel {self.model}"
        )

    def _early_words(self) -> str:
        if self.stopped_by is None:
            return ""
        last = "; the model has the weights of the last step: --keep-best takes the best ones"
        late = self.stopped_by.startswith("--early-stop") and self.keep_best is None
        return f"ended early by {self.stopped_by}{last if late else ''}\n"

    def _skipped_words(self) -> str:
        if not self.bad_records["samples"]:
            return ""
        skipped = counted(self.bad_records["samples"], "record")
        return f"{skipped} skipped with weight 0; the first: {self.bad_records['first'][0]}\n"

    def best_words(self) -> str:
        """Say, with --keep-best, step and value of the best checkpoint and of the last one, and whose weights the model
        has; else nothing.
        """
        if self.keep_best is None:
            return ""
        name = metric_in(self.keep_best)
        if self.best is None:
            return f"no checkpoint has {name}: the model has the weights of the last step, {self.steps}"
        best = f"best {name} {self.best['value']:.6g} at step {self.best['step']}"
        if self.best["step"] == self.steps:
            return f"{best}, the last step: the model has these weights"
        value = self.metrics.get(name)
        last = f"{value:.6g} " if isinstance(value, int | float) else ""
        return f"{best}: the model has these weights; last {last}at step {self.steps}: --checkpoint last"

    def _privacy_words(self) -> str:
        if self.privacy is None:
            return ""
        epsilon, delta = self.privacy["epsilon"], self.privacy["delta"]
        always = "losses, metrics and class counts in the run directory"
        left = "; ".join([*self.privacy.get("not_covered", []), always])
        return f"differential privacy of each client: epsilon {epsilon:.4f} at delta {delta:g}; not covered: {left}\n"


def speed_words(first_step_s: float | None, samples_per_s: float | None) -> str:
    """The configured parts of `first step after 3.2 s, then 1204 samples/s, `; a single step has no rate."""
    first = "" if first_step_s is None else f"first step after {first_step_s:.1f} s, "
    then = "then " if first else ""
    return first + ("" if samples_per_s is None else f"{then}{samples_per_s:.0f} samples/s, ")


def restart_words(restart: Mapping[str, Any]) -> str:
    """An entry of the restart log in words, with the parts that took 0.05 s or more."""
    how = "in place (level 1)" if restart["level"] == IN_PLACE else "by new supervisors (level 2)"
    if restart["seconds"] is None:
        return f"{how} and made no step"
    words = ", ".join(f"{word} {seconds:.1f}" for word, seconds in restart["parts"].items() if seconds >= 0.05)
    return f"{how} and made its first step {restart['seconds']:.1f} s after the failure: {words}"


def checked_restarts(restarts: object, where: str) -> list[dict[str, Any]]:
    """A result's list of restarts; raises DataError naming a value of the wrong type."""
    found: list[dict[str, Any]] = []
    for number, value in enumerate(documents.items(restarts, where=where)):
        entry = f"{where}[{number}]"
        restart = documents.obj(value, ("generation", "level", "seconds", "parts"), where=entry)
        for name in ("generation", "level"):
            documents.count(restart[name], where=f"{entry}: {name}")
        if restart["seconds"] is not None:
            documents.number(restart["seconds"], where=f"{entry}: seconds")
        for word, seconds in documents.mapping(restart["parts"], where=f"{entry}: parts").items():
            documents.number(seconds, where=f"{entry}: {word}")
        found.append(restart)
    return found


def find_result(fs: FileSystem, paths: RunPaths) -> dict[str, Any] | None:
    """The result that counts: the newest claim's, else the newest one from whose checkpoint a later generation of the
    chain began. None before the first. Its `run` and `model` are URLs in the directory that was asked, wherever the
    run was when it ended.

    A late result of an older generation names a checkpoint after its successor's parent, and is ignored.
    """
    claims = read_claims(fs, paths)
    generation = max(claims, default=None)
    began: CheckpointRef | None = None
    while generation is not None and generation in claims:
        url = paths.result(generation)
        if fs.exists(url):
            stored = _checked(unseal_as("result", fs.read_bytes(url), url), generation, url)
            # The run may have been moved or copied since, and another one may be where it was.
            result = {**stored, "run": paths.root, "model": stored["model"] and paths.model(generation)}
            if began is None or result.get("checkpoint") == str(began):
                return result
        began = claims[generation].parent
        generation = began.generation if began else None
    return None


def _checked(result: dict[str, Any], generation: int, where: str) -> dict[str, Any]:
    """A result with each field of the right type. Raises DataError or CorruptionError naming file and field."""
    names = ("format_version", "kind", *RunResult.__dataclass_fields__, "finished_at")
    found = documents.obj(result, names, where=where)
    for name in ("generation", "steps", "epochs_asked", "samples", "restarts"):
        documents.count(found[name], where=f"{where}: {name}")
    if found["generation"] != generation:
        raise CorruptionError("a result that contradicts its name", file=where, got=f"generation {generation}")
    for name in ("epochs", "seconds", "validation_s"):
        documents.number(found[name], where=f"{where}: {name}")
    for name in ("samples_per_s", "first_step_s"):
        if found[name] is not None:
            documents.number(found[name], where=f"{where}: {name}")
    documents.string(found["run"], where=f"{where}: run")
    for name in ("checkpoint", "model", "stopped_by", "keep_best"):
        if found[name] is not None:
            documents.string(found[name], where=f"{where}: {name}")
    for name in ("metrics", "bad_records"):
        documents.mapping(found[name], where=f"{where}: {name}")
    for name in ("left_over", "watching"):
        for text in documents.items(found[name], where=f"{where}: {name}"):
            documents.string(text, where=f"{where}: {name}")
    if found["class_counts"] is not None:
        for rows in documents.items(found["class_counts"], where=f"{where}: class_counts"):
            documents.count(rows, where=f"{where}: class_counts")
    checked_restarts(found["restart_log"], where=f"{where}: restart_log")
    if found["max_steps"] is not None:
        documents.count(found["max_steps"], where=f"{where}: max_steps", least=1)
    if found["privacy"] is not None:
        for name in ("epsilon", "delta"):
            documents.number(documents.mapping(found["privacy"], where=f"{where}: privacy").get(name), where=where)
    if found["best"] is not None:
        best = documents.mapping(found["best"], where=f"{where}: best")
        documents.string(best.get("checkpoint"), where=f"{where}: best: checkpoint")
        documents.count(best.get("step"), where=f"{where}: best: step")
        documents.number(best.get("value"), where=f"{where}: best: value")
        documents.mapping(best.get("metrics"), where=f"{where}: best: metrics")
    return found


def find_model(fs: FileSystem, paths: RunPaths) -> str:
    """URL of the exported model that counts, by the same rule as `find_result`.

    Raises NotFoundError while the run has none.
    """
    result = find_result(fs, paths)
    url = None if result is None else paths.model(int(result["generation"]))
    if url is None or not fs.exists(url):
        raise NotFoundError(
            f"{paths.root} has no finished model",
            got="no result of its newest generation" if url is None else f"{url} is missing",
            allowed="a run that ended",
            next_step="Let the run end: `lockstep train` with the same flags resumes it; or export a checkpoint "
            "by `lockstep export`.",
        )
    return url
