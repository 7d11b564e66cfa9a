"""A trained model in memory again, out of an export or a checkpoint, for the data that it was trained on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras

from lockstep.features.encode.baked import raw_schema
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature
from lockstep.storage.dataset.layout import MANIFEST_NAME, fitted_path
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.documents import parse_canonical
from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.sealed import unseal
from lockstep.storage.urls import join
from training import models
from training.config import TrainConfig
from training.models import ModelOptions
from training.models.on_disk import FITTED_PREFIX
from training.plan.datasets import what_differs
from training.plan.planning import lane_groups
from training.run.checkpoint import read_manifest
from training.run.read_parts import read_whole
from training.run.weights_source import MODEL_FILE, SCHEMA_FILE, checked_file, checked_model
from training.steps import model_state


def load_export(url: str, config: TrainConfig, dataset: DatasetManifest) -> keras.Model:
    """The model of an export. Raises ConfigError for a dataset with another schema or other fitted files,
    CorruptionError for a file that does not match its digest, LockstepError for a model that Keras cannot make.
    """
    where = join(url, MANIFEST_NAME)
    files = unseal(filesystem(url).read_bytes(where), where)["files"]
    # Baked or not, the same declared schema and fitted files give the same inputs.
    trained = Schema.from_json(parse_canonical(checked_file(url, SCHEMA_FILE), file=join(url, SCHEMA_FILE)))
    if told := raw_schema(Schema.from_json(dataset.schema)).differences(raw_schema(trained)):
        raise _other_data("schema", told)
    for name in sorted(files):
        if name.startswith(FITTED_PREFIX):
            path = fitted_path(name.removeprefix(FITTED_PREFIX))
            if path not in dataset.files:
                raise _other_data("set of fitted files", f"no {path}")
            if dataset.files[path].sha256 != files[name]["sha256"]:
                raise _other_data("set of fitted files", f"{path} of other content")
    if ":" in config.model:
        models.function_of(config.model)  # importing it registers its layers and metrics
    with tempfile.TemporaryDirectory() as folder:
        path_of_model = Path(folder, MODEL_FILE)
        path_of_model.write_bytes(checked_model(url))
        try:
            return keras.models.load_model(path_of_model)
        except (TypeError, ValueError) as error:
            raise LockstepError(
                f"the model {url} cannot be loaded",
                got=str(error).splitlines()[0],
                allowed="layers and metrics that Keras knows, or that the model's module registers",
                next_step="Decorate own classes with keras.saving.register_keras_serializable().",
            ) from error


def load_checkpoint(url: str, config: TrainConfig, dataset: DatasetManifest, signature: Signature) -> keras.Model:
    """The model of `config` with a checkpoint's weights. Raises ConfigError for another dataset, as Encoder sees it."""
    manifest = read_manifest(url)
    plan = manifest["plan"]
    # Any dataset of a mixture has the schema and fitted files of all.
    if dataset.digest not in (plan["dataset_digest"], *(part["dataset_digest"] for part in plan.get("parts", ()))):
        raise _other_data("digest", what_differs([dataset], config.datasets, plan["dataset_digest"]))
    groups = lane_groups(config)
    options = ModelOptions(seed=config.seed, group_rows=config.global_batch // groups if groups else None)
    model = models.build(config.model, signature, options).model
    model_state.load(model, read_whole(url, manifest, (model_state.WEIGHTS,)), (model_state.WEIGHTS,), url)
    return model


def _other_data(what: str, got: str) -> ConfigError:
    return ConfigError(
        f"the model was trained on data with another {what}",
        got=got,
        allowed="the dataset of the run, or one with the same schema and fitted files",
        next_step="Correct --dataset.",
    )
