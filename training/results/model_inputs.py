"""Rows of any dataset as the inputs of exported models: by the models' own encodings and statistics, whatever the
dataset has fitted.

Decision record: docs/decisions/101-rows-without-answers.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from lockstep.features.encode.encoder import Encoded, Encoder
from lockstep.features.images.intake import Pixels
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema, class_names_of, other_classes
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.results.predictor import ExportedModel
from lockstep.training.results.stored_model import StoredModel


class ModelEncoder(Encoder):
    """The encoder of a model for datasets whose columns may be null where those of its training data were not."""

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """Encode rows. Raises DataError as Encoder does, and for a null in a column that had none, which some encodings
        would take for the mean.
        """
        for field in self.schema.features:
            if not field.nullable and batch.column(field.name).null_count:
                raise DataError(
                    f"field `{field.name}` is null",
                    got="null",
                    allowed="a value in each row: the schema of the training data has no null there",
                    next_step="Drop or fill those rows, and make the dataset again.",
                )
        return super().encode(batch)


def model_encoder(members: Sequence[StoredModel], manifest: DatasetManifest) -> Encoder | None:
    """The encoder by which the models `members` were trained, for the columns that a dataset stores.

    None where only the dataset's own encoder can be the model's: its rows are baked, a member is a checkpoint, or one
    has several tasks. Raises ConfigError if the dataset lacks a column that the models are fed, has one of another type
    or a label of other classes, or if the models were trained by different encodings or statistics.
    """
    schema = Schema.from_json(manifest.schema)
    if any(field.is_baked for field in schema) or any(one.config.data.tasks is not None for one in members):
        return None
    found = [_exported(one) for one in members if one.model is not None]
    if len(found) < len(members):
        return None
    first, fitted = found[0], found[0].fitted()
    if any((one.columns, one.fitted()) != (first.columns, fitted) for one in found[1:]):
        raise ConfigError(
            "these models cannot be averaged",
            got="different encodings or statistics of their columns",
            allowed="runs of one dataset, or of datasets with the same schema and fitted files",
            next_step="Predict with each run for itself.",
        )
    names = [one.signature.class_names for one in found]
    if classes := next(filter(None, (other_classes(one, names[0]) for one in names[1:])), ""):
        raise ConfigError(
            "these models cannot be averaged",
            got=classes,
            allowed="runs on the same classes, in one order",
            next_step="Predict with each run for itself.",
        )
    if faults := list(_faults(first, schema, manifest)):
        raise ConfigError(
            "the dataset does not store what the model is fed",
            got="; ".join(faults)[:1000],
            allowed="the columns of the model's training data, of the same types; more columns are ignored",
            next_step="Make the dataset by the schema of the training data (docs/prediction.md#new-rows).",
        )
    return ModelEncoder(Schema((schema.id_field, *first.columns, *_answers(schema))), fitted)


def other_pixels(model: StoredModel, manifest: DatasetManifest) -> str | None:
    """How the pixels of a dataset were made otherwise than those that an exported model was trained on; None if they
    were not, or if one of both does not say.
    """
    theirs = None if model.model is None or model.config.data.tasks is not None else _exported(model).pixels
    shapes = {field.name: field.shape for field in Schema.from_json(manifest.schema)}
    mine = Pixels.of(manifest.created_by["config"], shapes)
    if mine is None or theirs is None:
        return None
    pairs = (("--fit", mine.fit, theirs.fit), ("--rotate", mine.rotate, theirs.rotate))
    found = [f"{flag} {one}, the model's with {flag} {other}" for flag, one, other in pairs if one != other]
    return "; ".join(found) or None


def _exported(member: StoredModel) -> ExportedModel:
    """What the export of a member says of its inputs; of folds, those that its run was trained on."""
    return replace(ExportedModel.at(str(member.model)), split=member.config.data.split)


def _answers(schema: Schema) -> Iterator[Field]:
    """The label and the weight of a dataset, as far as it has them."""
    if schema.label is not None:
        yield schema.label
        if schema.weight is not None:
            yield schema.weight


def _faults(model: ExportedModel, schema: Schema, manifest: DatasetManifest) -> Iterator[str]:
    """What of a dataset is not as in the model's training data, in words."""
    there = {field.name: field for field in schema.features}
    for wanted in model.columns:
        found = there.get(wanted.name)
        if found is None:
            yield f"no column `{wanted.name}`"
        elif (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            yield f"column `{wanted.name}` of {_type(found)} (not {_type(wanted)})"
    mine, other = schema.label, model.schema.label
    if mine is None or other is None:
        return
    if (mine.name, mine.dtype, mine.num_classes) != (other.name, other.dtype, other.num_classes):
        yield f"label `{mine.name}` of {_classes(mine)} (not `{other.name}` of {_classes(other)})"
    if classes := other_classes(class_names_of(manifest), model.signature.class_names):
        yield classes


def _type(field: Field) -> str:
    return f"{field.dtype}, shape {field.shape}" if field.shape else field.dtype


def _classes(label: Field) -> str:
    return label.dtype if label.num_classes is None else f"{label.dtype}, {label.num_classes} classes"
