"""The encoder of a dataset: its schema and what was fitted, for all of it or without a fold."""

from __future__ import annotations

import json

from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.fitted import Fitted, held_out_file, read_fitted
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import fitted_path
from lockstep.storage.dataset.manifest import DatasetManifest, read_checked
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.fs import filesystem


def load_encoder(dataset_url: str, manifest: DatasetManifest, held_out: str | None = None) -> Encoder:
    """The encoder of a dataset; its fitted files are checked by digest.

    `held_out` names the fold that is kept for testing in a dataset of folds, which has a fitted file for each; None
    takes the file that is there in one form only. Raises ConfigError for a fold that has none, CorruptionError,
    DataError.
    """
    schema = Schema.from_json(manifest.schema)
    fs = filesystem(dataset_url)
    fitted: dict[str, Fitted] = {}
    for field in schema.fitted_fields:
        assert field.fitted_file is not None
        path = _fitted_path(field.fitted_file, manifest, held_out)
        data = read_checked(fs, dataset_url, path, manifest.files[path])
        fitted[field.name] = read_fitted(json.loads(data))
    return Encoder(schema, fitted)


def _fitted_path(file: str, manifest: DatasetManifest, held_out: str | None) -> str:
    """The path of a fitted file in the dataset: the one of all training data, or the one without a fold."""
    whole = fitted_path(file)
    if whole in manifest.files:
        return whole
    folds = [name for name in manifest.splits if fitted_path(held_out_file(file, name)) in manifest.files]
    if not folds:
        raise DataError(
            f"the fitted file of {whole} is not in the dataset",
            got=f"no {whole} in the manifest",
            allowed="each fitted file that the schema names",
            next_step="Build the dataset anew.",
        )
    if held_out not in folds:
        raise ConfigError(
            "this dataset was fitted once for each fold that is held out",
            got="no fold that is held out" if held_out is None else f"`{held_out}` held out",
            allowed=", ".join(folds),
            next_step="Train on all folds but one: their names in --split, with `,` between them.",
        )
    return fitted_path(held_out_file(file, held_out))
