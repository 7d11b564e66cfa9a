"""The final model as plain Keras: it loads without Lockstep."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lockstep.features.encode.baked import is_baked, raw_schema
from lockstep.features.schema.sampled import sampled_of
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature
from lockstep.storage.dataset.layout import fitted_path
from lockstep.storage.dataset.manifest import DatasetManifest, read_checked
from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import CorruptionError
from lockstep.storage.files.interface import Writer
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import file_digest, write_stream
from lockstep.storage.urls import join
from training.run.checkpoint import write_bytes
from training.run.weights_source import MODEL_FILE, SCHEMA_FILE
from training.steps.batchnorm import GhostBatchNormalization
from training.steps.distribute import own_class
from training.steps.optimizers import CorrectedSGD, WarmUp
from training.steps.patching import swapped

SIGNATURE_FILE, FITTED_PREFIX = "signature.json", "fitted-"
RAW_SCHEMA_FILE = "raw_schema.json"
PIECE_BYTES = 4 << 20


def export(
    model: keras.Model, directory: str, dataset_url: str, manifest: DatasetManifest, signature: Signature
) -> list[dict[str, Any]]:
    """Write model.keras, the feature schema, the fitted files and the signature; returns {name, bytes, sha256} each.

    Where --sample left out records for training, schema.json says which share of which classes was kept. Of a dataset
    whose features are baked, schema.json says how each input was made, and raw_schema.json is the declared schema
    behind it: its Encoder, with the fitted files, makes those inputs of raw rows. Ghost batch normalisation is
    saved as Keras' BatchNormalization, which computes the same in inference, and an optimizer whose rate warmed up as
    Keras' own at the last rate, its state anew. Other optimizers keep theirs: Keras' format cannot leave it out.
    """
    with tempfile.TemporaryDirectory() as folder, plain_layers(model), _plain_optimizer(model):
        path = Path(folder, MODEL_FILE)
        model.save(path)
        files = [_upload(path, directory)]
    schema = replace(Schema.from_json(manifest.schema), sampled=sampled_of(manifest))
    files.append(write_bytes(directory, SCHEMA_FILE, canonical_bytes(schema.to_json())))
    if any(map(is_baked, schema)):
        files.append(write_bytes(directory, RAW_SCHEMA_FILE, canonical_bytes(raw_schema(schema).to_json())))
    files.append(write_bytes(directory, SIGNATURE_FILE, canonical_bytes(signature.to_json())))
    fs = filesystem(dataset_url)
    for path_of_file, info in sorted(manifest.files.items()):
        name = path_of_file.rpartition("/")[2]
        if name.endswith(".json") and path_of_file == fitted_path(name):
            data = read_checked(fs, dataset_url, path_of_file, info)
            files.append(write_bytes(directory, FITTED_PREFIX + name, data))
    return files


def _upload(path: Path, directory: str) -> dict[str, Any]:
    """Write a file of this host durably, in pieces; returns {name, bytes, sha256}.

    A model with its optimizer's state may be larger than what a container has left.
    """
    fs, url = filesystem(directory), join(directory, path.name)
    fs.mkdirs(directory)

    def produce(writer: Writer) -> None:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                writer.write(piece)

    write_stream(fs, url, produce)
    size, digest = file_digest(filesystem(str(path)), str(path))
    if (written := file_digest(fs, url)) != (size, digest):
        raise CorruptionError(
            "a model reads back otherwise than it was written",
            file=url,
            got=f"{written[0]} bytes, sha256 {written[1]}",
            allowed=f"{size} bytes, sha256 {digest}",
        )
    return {"name": path.name, "bytes": size, "sha256": digest}


@contextmanager
def plain_layers(model: keras.Model) -> Iterator[None]:
    """Ghost layers take their base class while the model is saved: same variables, same inference."""
    ghosts = [layer for layer in model._flatten_layers() if isinstance(layer, GhostBatchNormalization)]
    try:
        for layer in ghosts:
            object.__setattr__(layer, "__class__", keras.layers.BatchNormalization)
        yield
    finally:
        for layer in ghosts:
            object.__setattr__(layer, "__class__", GhostBatchNormalization)


@contextmanager
def _plain_optimizer(model: keras.Model) -> Iterator[None]:
    """Nothing of `training.steps.optimizers` in the optimizer while the model is saved."""
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    own = own_class(inner)
    if not issubclass(own, CorrectedSGD) and not isinstance(getattr(inner, "_learning_rate", None), WarmUp):
        yield
        return
    kind = keras.optimizers.SGD if issubclass(own, CorrectedSGD) else own
    rate = float(str(np.asarray(inner.learning_rate)))  # 0.05, not what float32 makes of it
    plain = kind.from_config({**inner.get_config(), "learning_rate": rate})
    plain.build(model.trainable_variables)
    compiled = {**model.get_compile_config(), "optimizer": keras.saving.serialize_keras_object(plain)}
    with swapped(model, "optimizer", plain), swapped(model, "get_compile_config", lambda: compiled):
        yield
