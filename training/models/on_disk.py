"""Models on disk: the export as plain Keras, which loads without Lockstep, and loading of exports and weights."""

from __future__ import annotations

import io
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from lockstep.features.encode.bake import raw_schema
from lockstep.features.images.intake import Pixels
from lockstep.features.schema.sampled import sampled_of
from lockstep.features.schema.schema import Schema, class_names_of, other_classes
from lockstep.features.schema.signature import Signature
from lockstep.storage.dataset.layout import fitted_path
from lockstep.storage.dataset.manifest import DatasetManifest, read_checked
from lockstep.storage.documents import canonical_bytes, parse_canonical, unseal
from lockstep.storage.errors import ConfigError, CorruptionError, LockstepError
from lockstep.storage.files.interface import Writer
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, file_digest, lost_write, read_back, write_stream
from lockstep.storage.urls import join, parent
from lockstep.training import models
from lockstep.training.config import TrainConfig
from lockstep.training.embeddings.sharded_embedding import TABLES, check_fits, plain_tables, plain_weights, with_base
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.models import ModelOptions
from lockstep.training.models.lora import adapters_of, enable_lora, merged_model, plain_variables
from lockstep.training.models.tasks import TaskModel
from lockstep.training.models.two_tower import InBatch
from lockstep.training.plan.datasets import fitted_differences, open_data, what_differs, without_label
from lockstep.training.run.checkpoint import Tensors, TensorSpec, base_url, read_manifest, write_bytes
from lockstep.training.run.checkpoint_division import read_whole
from lockstep.training.run.weights_source import (
    FITTED_PREFIX,
    MODEL_FILE,
    PICTURES_FILE,
    SCHEMA_FILE,
    SIGNATURE_FILE,
    checked_file,
    checked_model,
    weights_at,
)
from lockstep.training.steps import model_state
from lockstep.training.steps.batchnorm import GhostBatchNormalization
from lockstep.training.steps.distribute import own_class
from lockstep.training.steps.optimizers import CorrectedSGD, WarmUp, without_loss_scale
from lockstep.training.steps.patching import swapped

RAW_SCHEMA_FILE = "raw_schema.json"
PIECE_BYTES = 4 << 20
WEIGHTS_FILE = "model.weights.h5"  # its name in a .keras archive; Keras requires this ending
MOST_EXPANSION = 100  # as in Keras' own check
HDF5 = b"\x89HDF\r\n\x1a\n"


def export(
    model: keras.Model, directory: str, dataset_url: str, manifest: DatasetManifest, signature: Signature
) -> list[dict[str, Any]]:
    """Write model.keras, the feature schema, the fitted files and the signature; returns {name, bytes, sha256} each.

    If --sample left out training records, schema.json has the share of each class that was kept. For a dataset with
    baked features, schema.json describes how each input was made, and raw_schema.json is the declared schema: its
    Encoder, with the fitted files, makes those inputs from raw rows. For a dataset that lockstep etl_images made of
    pictures, pictures.json says how they became pixels. Ghost batch normalisation is saved as Keras'
    BatchNormalization, which computes the same in inference, and an optimizer whose rate warmed up as Keras' own at
    the last rate, with new state. Other optimizers keep their state, since Keras' format cannot leave it out.
    """
    with tempfile.TemporaryDirectory() as folder, plain_layers(model), _plain_optimizer(model):
        path = Path(folder, MODEL_FILE)
        model.save(path)
        files = [upload(path, directory, MODEL_FILE)]
    schema = replace(Schema.from_json(manifest.schema), sampled=sampled_of(manifest))
    files.append(write_bytes(directory, SCHEMA_FILE, canonical_bytes(schema.to_json())))
    if any(field.is_baked for field in schema):
        files.append(write_bytes(directory, RAW_SCHEMA_FILE, canonical_bytes(raw_schema(schema).to_json())))
    pixels = Pixels.of(manifest.created_by["config"], {field.name: field.shape for field in schema})
    if pixels is not None:
        files.append(write_bytes(directory, PICTURES_FILE, canonical_bytes(pixels.to_json())))
    named = replace(signature, class_names=class_names_of(manifest))
    files.append(write_bytes(directory, SIGNATURE_FILE, canonical_bytes(named.to_json())))
    fs = filesystem(dataset_url)
    for path_of_file, info in sorted(manifest.files.items()):
        name = path_of_file.rpartition("/")[2]
        if name.endswith(".json") and path_of_file == fitted_path(name):
            data = read_checked(fs, dataset_url, path_of_file, info)
            files.append(write_bytes(directory, FITTED_PREFIX + name, data))
    return files


def upload(path: Path, directory: str, name: str, *, exclusive: bool = True) -> dict[str, Any]:
    """Write a file of this host durably as `name` in `directory`, in pieces; returns {name, bytes, sha256}.

    A model with its optimizer's state may be larger than the container's free memory.
    """
    fs, url = filesystem(directory), join(directory, name)
    fs.mkdirs(parent(url))

    def produce(writer: Writer) -> None:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                writer.write(piece)

    write_stream(fs, url, produce, exclusive=exclusive)
    size, digest = file_digest(filesystem(str(path)), str(path))
    with read_back(url):
        written = file_digest(fs, url)
    if written != (size, digest):
        raise lost_write(url, f"{written[0]} bytes, sha256 {written[1]}", f"{size} bytes, sha256 {digest}")
    return {"name": name, "bytes": size, "sha256": digest}


@contextmanager
def plain_layers(model: keras.Model) -> Iterator[None]:
    """While the model is saved, layers that only train otherwise have Keras' class: same variables, same inference."""
    plain = {GhostBatchNormalization: keras.layers.BatchNormalization, InBatch: keras.layers.Dot}
    changed = [(layer, type(layer)) for layer in model._flatten_layers() if type(layer) in plain]
    try:
        for layer, own in changed:
            object.__setattr__(layer, "__class__", plain[own])
        yield
    finally:
        for layer, own in changed:
            object.__setattr__(layer, "__class__", own)


@contextmanager
def _plain_optimizer(model: keras.Model) -> Iterator[None]:
    """While the model is saved, its optimizer has no class of `lockstep.training.steps.optimizers`."""
    optimizer = getattr(model, "optimizer", None)  # the mean of several models was never compiled
    inner = without_loss_scale(optimizer)
    own = own_class(inner)
    corrected = issubclass(own, CorrectedSGD) or isinstance(getattr(inner, "_learning_rate", None), WarmUp)
    if inner is None or not corrected:
        yield
        return
    kind = keras.optimizers.SGD if issubclass(own, CorrectedSGD) else own
    rate = float(str(np.asarray(inner.learning_rate)))  # 0.05, not its float32 value
    plain = kind.from_config({**inner.get_config(), "learning_rate": rate})
    plain.build(model.trainable_variables)
    compiled = {**model.get_compile_config(), "optimizer": keras.saving.serialize_keras_object(plain)}
    with swapped(model, "optimizer", plain), swapped(model, "get_compile_config", lambda: compiled):
        yield


def load_export(
    url: str, config: TrainConfig, dataset: DatasetManifest, *, may_lack_label: bool = False
) -> keras.Model:
    """The model of an export; with `may_lack_label`, for a dataset without label and weights too.

    Raises ConfigError for a dataset with another schema, other classes or other fitted files, CorruptionError for a
    file that does not match its digest, LockstepError for a model that Keras cannot make.
    """
    where = join(url, MANIFEST_NAME)
    files = unseal(filesystem(url).read_bytes(where), where)["files"]
    trained = Schema.from_json(parse_canonical(checked_file(url, SCHEMA_FILE), file=join(url, SCHEMA_FILE)))
    signature = Signature.from_json(parse_canonical(checked_file(url, SIGNATURE_FILE), file=join(url, SIGNATURE_FILE)))
    _check_columns(dataset, trained, signature.class_names, config, may_lack_label=may_lack_label)
    for name in sorted(files):
        if name.startswith(FITTED_PREFIX):
            path = fitted_path(name.removeprefix(FITTED_PREFIX))
            if path not in dataset.files:
                raise _other_data("set of fitted files", f"no {path}")
            if dataset.files[path].sha256 != files[name]["sha256"]:
                raise _other_data("set of fitted files", f"{path} of other content")
    return load_model(url, config.model.model)


def load_model(url: str, name: str) -> keras.Model:
    """The model of an export of a run whose --model was `name`. Raises CorruptionError for a file that does not match
    its digest, LockstepError for a model that Keras cannot make, or does not: it refuses layers that hold code, unless
    this process has called `keras.config.enable_unsafe_deserialization`, and archives that unpack to very much more.
    """
    if ":" in name and not name.startswith(f"{models.SENT}:"):
        models.function_of(name)  # importing it registers its layers and metrics
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # A column's name is the key of its input, but not always the name of the layer (inputs.py).
        warnings.filterwarnings("ignore", message="When providing `inputs` as a dict")
        path_of_model = Path(folder, MODEL_FILE)
        path_of_model.write_bytes(checked_model(url))
        try:
            return keras.models.load_model(path_of_model)
        except Exception as error:  # a file that was made to do harm may raise anything
            raise LockstepError(
                f"the model {url} cannot be loaded",
                got=(str(error).strip() or repr(error)).splitlines()[0][:500],
                allowed="layers and metrics that Keras knows, or that the model's module registers; no Lambda layers, "
                "which hold code",
                next_step="Decorate own classes with keras.saving.register_keras_serializable().",
            ) from error


def load_checkpoint(url: str, config: TrainConfig, dataset: DatasetManifest, signature: Signature) -> keras.Model:
    """The model of `config` with a checkpoint's weights. Raises ConfigError for a dataset with another schema, other
    classes or other fitted files than those that the run has trained on.
    """
    manifest = read_manifest(url)
    plan = manifest["plan"]
    if dataset.digest not in (plan["dataset_digest"], *(part["dataset_digest"] for part in plan.get("parts", ()))):
        _check_like(dataset, config, plan["dataset_digest"])
    base = base_url(url, manifest)
    whole = manifest if base is None else read_manifest(base)
    specs = {
        name: TensorSpec(tuple(entry["shape"]), entry["dtype"])
        for name, entry in whole.get("tensors", {}).items()
        if name.startswith(f"{TABLES}/")
    }
    check_fits(specs, f"the tables of {url}")
    tensors = read_whole(url, manifest, (model_state.WEIGHTS, TABLES))
    if base is not None:
        tensors = with_base(tensors, read_whole(base, whole, (TABLES,)))
    return plain_model(config, signature, tensors, url)


def _check_columns(
    dataset: DatasetManifest,
    trained: Schema,
    class_names: Sequence[str] | None,
    config: TrainConfig,
    *,
    may_lack_label: bool = False,
) -> None:
    """Raise ConfigError unless a dataset has the columns of the schema `trained`, and a label of these classes."""
    # Baked or not, the same declared schema and fitted files give the same inputs.
    mine, wanted = raw_schema(Schema.from_json(dataset.schema)), raw_schema(trained)
    several = config.data.tasks is not None
    if several:  # each task has a label for itself
        mine, wanted = without_label(mine), without_label(wanted)
    if may_lack_label and mine.label is None:
        fields = tuple(field for field in wanted if field.kind not in ("label", "weight"))
        wanted = Schema(fields, wanted.record)
    if found := mine.differences(wanted):
        raise _other_data("schema", found)
    if not several and (found := other_classes(class_names_of(dataset), class_names)):
        raise _other_data("list of classes", found)


def _check_like(dataset: DatasetManifest, config: TrainConfig, digest: str) -> None:
    """Raise ConfigError unless a dataset has the schema, classes and fitted files of those that a run has trained on,
    which had this digest.
    """
    try:
        data = config.data
        was = open_data(data.datasets, data.split, data.mix, tasks=data.tasks is not None)[1]
    except LockstepError as error:
        raise _other_data("digest", f"another digest; the difference is unknown: {error.what}") from error
    if was.digest != digest:
        raise _other_data("digest", what_differs([dataset], config.data.datasets, digest))
    _check_columns(dataset, Schema.from_json(was.schema), class_names_of(was), config)
    if found := fitted_differences(dataset, was):
        raise _other_data("set of fitted files", found)


def plain_model(config: TrainConfig, signature: Signature, tensors: Tensors, where: str) -> keras.Model:
    """The model of `config` with the whole weights in `tensors`, and plain layers in place of tables in shards.

    Raises DataError naming `where` for tensors of another model.
    """
    groups = config.step.lane_groups
    rows = config.data.global_batch // groups if groups else None
    options = ModelOptions(seed=config.data.seed, group_rows=rows, tasks=config.data.tasks, extra=config.model.extra)
    with plain_tables(tensors):
        model = models.build(config.model.model, signature, options).model
    kinds = (model_state.WEIGHTS,)
    if config.model.lora_rank:
        enable_lora(model, config.model.lora_rank, config.data.seed)
        model_state.load(model, tensors, kinds, where)
        return merged_model(model, config, signature)
    model_state.load(model, plain_weights(tensors, model_state.specs_of(model, *kinds)), kinds, where)
    return model.deployed() if isinstance(model, TaskModel) else model


def _other_data(what: str, got: str) -> ConfigError:
    return ConfigError(
        f"the model was trained on data with another {what}",
        got=got,
        allowed="a dataset of the run, or one with the same schema, classes and fitted files",
        next_step="Correct --dataset.",
    )


def _assign(values: Sequence[tuple[keras.Variable, NDArray[Any]]]) -> None:
    for variable, value in values:
        variable.assign(value)


def load_initial(model: keras.Model, url: str) -> None:
    """Load the weights at `url` (lockstep.training.run.weights_source) into a built model; all of them or none.

    This runs no code from the model's file: layers are the model's own. Raises ConfigError for weights of another
    model, CorruptionError for a file that cannot be read.
    """
    source = weights_at(url)
    if source.checkpoint is not None:
        manifest = read_manifest(source.checkpoint)
        tensors = read_whole(source.checkpoint, manifest, (model_state.WEIGHTS,))
        model_state.load_weights(plain_variables(model), tensors, source.checkpoint)
        return
    assert source.file is not None
    # What --zero divides takes its part of an assigned value by itself.
    if any(not isinstance(getattr(one, model_state.PART, None), model_state.Part | None) for one in model.weights):
        raise ConfigError(
            "the weights of a file cannot be loaded into parts of layers",
            got=f"--init-from {url} with --tensor-parallel",
            allowed="a checkpoint, RUN/checkpoints/NAME, whose tensors each rank reads its part of",
            next_step="Name a checkpoint, or train a step without --tensor-parallel and resume that run with it.",
        )
    before = [(one, np.array(view_of(one))) for one in model.weights]
    adapters = [(one, one.numpy()) for one in adapters_of(model)]
    with tempfile.TemporaryDirectory() as folder, plain_layers(model):
        path = Path(folder, WEIGHTS_FILE)
        try:
            path.write_bytes(_weights_in(source.file, url))
            model.load_weights(path, objects_to_skip=[model.optimizer])
            for one, value in adapters:
                one.assign(value)  # Keras has set them to zero
        # No archive, or a damaged one. RuntimeError: HDF5's names are broken, or an archive has a later version.
        except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            _assign(before)
            got = (str(error) or repr(error)).splitlines()[0]
            raise CorruptionError("a model's file cannot be read", file=url, got=got) from error
        except ValueError as error:
            _assign(before)  # Keras may have loaded some of them
            raise ConfigError(
                f"the weights in {url} are another model's",
                got=" ".join(str(error).split())[:500],
                allowed="the weights of the model that --model builds, by layer, name and shape",
                next_step="Give the --model that those weights come from, or leave out --init-from.",
            ) from error


def _weights_in(data: bytes, url: str) -> bytes:
    """The HDF5 file in a .keras archive; a file that already is HDF5 is returned unchanged."""
    if data.startswith(HDF5):
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entry = archive.getinfo(WEIGHTS_FILE)
        if entry.file_size > MOST_EXPANSION * entry.compress_size:
            raise CorruptionError(
                "a model's file unpacks to too much",
                file=url,
                got=f"{entry.file_size} bytes of {entry.compress_size}",
                allowed=f"up to {MOST_EXPANSION} times as much; Keras compresses nothing",
            )
        return archive.read(WEIGHTS_FILE)
