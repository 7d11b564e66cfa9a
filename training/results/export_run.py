"""Exports a checkpoint of a run as a model directory: model.keras, schema, fitted files and signature, and on request
a TensorFlow SavedModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from lockstep.features.encode.bake import raw_schema
from lockstep.features.schema.schema import Schema
from lockstep.process.signals import ended_in_order
from lockstep.storage.documents import seal
from lockstep.storage.errors import ConfigError, require
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, publish_directory, refuse_occupied, write_file
from lockstep.storage.urls import absolute, join, parent, several
from lockstep.training.batches.augmenting import labels_of
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.protocol import Message
from lockstep.training.driver.ownership import staging_folder
from lockstep.training.driver.preflight import open_dataset
from lockstep.training.launch.session import Launch
from lockstep.training.plan.datasets import held_out
from lockstep.training.rank import runtime
from lockstep.training.reading.open import load_fitted
from lockstep.training.results.predictor import refuse_tasks
from lockstep.training.results.stored_model import StoredModel, Which, choose_checkpoint, task_of
from lockstep.training.run.lineage import CheckpointRef, checkpoints, read_checkpoint
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.run_json import read_run
from lockstep.training.run.weights_source import PICTURES_FILE

ENTRY = "lockstep.training.results.export_run:main"
FORMAT_VERSION = 1
Format = Literal["keras", "savedmodel"]


@dataclass(frozen=True, kw_only=True)
class ExportOrder(Message):
    """What a rank is asked to export."""

    members: list[StoredModel]
    """The checkpoint; several make one model of their mean."""
    directory: str
    """The URL of the folder for the model's files."""
    form: Format


@dataclass(frozen=True, kw_only=True)
class MadeModel(Message):
    """What a rank has exported."""

    files: list[dict[str, Any]]
    """{name, bytes, sha256} of each file."""
    not_raw: dict[str, str]
    """The columns without a signature of raw columns, each with the reason."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model."""

    output: str
    checkpoint: CheckpointRef
    """The checkpoint that was exported; of a mean of runs, the first run's."""
    not_raw: dict[str, str] = field(default_factory=dict)
    """The columns for which a SavedModel has no signature of raw columns, each with the reason."""
    others: tuple[CheckpointRef, ...] = ()
    """The checkpoints of all runs but the first, of a mean of runs."""
    takes_pixels: bool = False
    """Whether the model takes pixels that lockstep etl_images made of pictures, not their files."""


def export_run(
    run: str | Sequence[str],
    output: str,
    launch: Launch,
    *,
    checkpoint: Which | None = None,
    form: Format = "keras",
) -> Exported:
    """Export a checkpoint of the run's chain as a model to `output`, which must not exist; of several runs one model
    that computes the mean of their probabilities, without a loss.

    `checkpoint` is `last`, `best` (by the run's --keep-best) or a step; None is the best of a run that keeps it, else
    the last. The whole checkpoint is read and checked first.
    With the form `savedmodel`, the directory is a SavedModel too (lockstep.training.models.saved_model).
    Raises ConfigError for a missing checkpoint or an output within the run, CorruptionError for a changed checkpoint,
    ExistsError if the output exists.
    """
    runs, output = tuple(map(absolute, several(run))), absolute(output)
    require(bool(runs), "--run", "no run", "one run, or several whose models are averaged")
    out = filesystem(output)
    for one in runs:
        check_output(out, RunPaths(one), output)
    members = [_Member.of(one, checkpoint) for one in runs]
    first = members[0]
    _check_alike(members)
    staging = staging_folder(out, parent(output), "export")
    try:
        with ended_in_order():  # so that the staging directory is removed on SIGTERM too
            order = ExportOrder(members=[one.stored for one in members], directory=staging, form=form)
            made = MadeModel.from_json(launch(task_of(ENTRY, order, order.members), 1)[0])
            document = {
                "format_version": FORMAT_VERSION,
                "kind": "model",
                "generation": first.ref.generation,
                "checkpoint": str(first.ref),
                "plan": first.plan,
                "model": first.stored.config.model.model,
                "split": first.stored.config.data.split,
                "files": {file["name"]: {"bytes": file["bytes"], "sha256": file["sha256"]} for file in made.files},
            }
            if len(members) > 1:
                document["mean_of"] = [{"run": one.stored.run, "checkpoint": str(one.ref)} for one in members]
            write_file(out, join(staging, MANIFEST_NAME), seal(document))
            publish_directory(out, staging, output)
    finally:
        if out.exists(staging):
            out.delete(staging, recursive=True)
    takes_pixels = any(file["name"] == PICTURES_FILE for file in made.files)
    return Exported(output, first.ref, made.not_raw, tuple(one.ref for one in members[1:]), takes_pixels)


@dataclass(frozen=True, slots=True)
class _Member:
    """A checkpoint of a run; `plan` is what it was trained by."""

    stored: StoredModel
    ref: CheckpointRef
    plan: dict[str, Any]

    @classmethod
    def of(cls, run: str, which: Which | None) -> Self:
        fs, paths = filesystem(run), RunPaths(run)
        config = TrainConfig.from_json(read_run(fs, paths)["config"])
        urls = checkpoints(fs, paths)
        ref = choose_checkpoint(fs, paths, config, urls, which)
        stored = StoredModel(run=run, config=config, checkpoint=urls[ref])
        return cls(stored, ref, read_checkpoint(fs, urls[ref], ref)["plan"])


def _check_alike(members: Sequence[_Member]) -> None:
    """Raise ConfigError for runs on other splits, or whose models are of several modules: who loads the mean imports
    one. That all have seen the same data is checked where the checkpoints are read.
    """
    configs = [one.stored.config for one in members]
    names = {config.model.model for config in configs if ":" in config.model.model}
    splits = {config.data.split for config in configs}
    if len(splits) > 1 or len(names) > 1:
        raise ConfigError(
            "these models cannot be exported as their mean",
            got="; ".join(f"{config.model.model} trained on {config.data.split}" for config in configs),
            allowed="runs with one --split, and one MODULE:FUNCTION or ready models",
            next_step="Leave the other runs out of --run.",
        )


def check_output(fs: FileSystem, paths: RunPaths, output: str) -> None:
    """Raise ConfigError for an output within the run or another published folder, ExistsError for one that exists."""
    if f"{output}/".startswith(f"{paths.root}/"):
        raise ConfigError(
            "results cannot be written into its run",
            got=output,
            allowed=f"a directory outside of {paths.root}, where later generations write",
            next_step="Choose another --output.",
        )
    refuse_occupied(fs, output)
    inner = output
    while (folder := parent(inner)) != inner:
        if fs.exists(join(folder, MANIFEST_NAME)) or fs.exists(RunPaths(folder).run_json):
            raise ConfigError(
                "results cannot be written into a dataset, a run or a model",
                got=f"{output}, within {folder}",
                allowed=f"a directory outside of {folder}, whose manifest lists all of its files",
                next_step="Choose another --output.",
            )
        inner = folder


def main(context: RankContext) -> dict[str, Any]:
    """Write the model of an ExportOrder; returns a MadeModel as JSON."""
    config = ExportOrder.from_json(context.payload).members[0].config
    runtime.configure(context.world, precision=config.step.precision, seed=config.data.seed)
    return run(context)


def run(context: RankContext) -> dict[str, Any]:
    """The part of `main` that uses TensorFlow, which is set up now."""
    from lockstep.training.models.on_disk import export

    order = ExportOrder.from_json(context.payload)
    config, directory = order.members[0].config, order.directory
    manifest, encoder = open_dataset(config)
    signature = labels_of(config, encoder.signature)
    if order.form == "savedmodel":
        refuse_tasks(signature, config.run)
    models = [member.load(manifest, encoder.signature) for member in order.members]
    if len(models) == 1:
        model = models[0]
        model.optimizer.build(model.trainable_variables)  # Keras warns when it loads one that was saved unbuilt
    else:
        from lockstep.training.models.inputs import inputs_of
        from lockstep.training.scoring.ensemble import saved_ensemble_of
        from lockstep.training.scoring.score_split import takes_logits

        logits = [takes_logits(one) for one in models]
        model = saved_ensemble_of(models, logits, signature, inputs_of(signature))
    files = export(model, directory, config.data.datasets[0], manifest, signature)
    not_raw: dict[str, str] = {}
    if order.form == "savedmodel":
        from lockstep.training.models.saved_model import export_saved_model

        schema = raw_schema(Schema.from_json(manifest.schema))
        fold = held_out(manifest, config.data.split, training=True)
        fitted = load_fitted(schema, config.data.datasets[0], manifest, fold)
        more, not_raw = export_saved_model(model, directory, signature, schema, fitted)
        files += more
    return MadeModel(files=files, not_raw=not_raw).to_json()
