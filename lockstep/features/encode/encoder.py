"""Turns columns on disk into the arrays that a model is fed: it applies encodings and fitted statistics when rows are
read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.encode.transforms import (
    ArrayPlan,
    Lists,
    Plan,
    at_once,
    baked,
    categorical,
    clipped,
    image,
    logarithm,
    narrowed,
    null_error,
    number,
    sequence,
    span,
    standardised,
    tensor,
    unfit,
)
from lockstep.features.images.decode_many import BadImageError, keeping_bad
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Fitted
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import DATASET, Signature, Task, TensorSpec
from lockstep.storage.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of n rows.

    `x` by feature name: one-hot and multi-hot (n, size) float32, ids (n, 1) int64, numbers (n, 1), sequences
    (n, length) with NAME_mask (n, length) float32 or NAME_length (n, 1) int64, tensors (n, *shape) as declared, or
    float32 if they are normalised.
    `y` (n,): float32 for bool and float labels, int64 for integers, or None. `sample_id` (n,) int64. `weight` (n,)
    float32: each sample's weight in training, None if the schema has no such field. `bad` are the images that an
    encoder that skips bad images could not decode: their pixels are zeros, their weight is 0.
    """

    x: dict[str, NDArray[Any]]
    y: NDArray[Any] | None
    sample_id: NDArray[np.int64]
    weight: NDArray[np.float32] | None = None
    bad: tuple[BadImageError, ...] = ()

    def __len__(self) -> int:
        return len(self.sample_id)


class Encoder:
    """Applies a schema's encodings to record batches.

    `fitted` has the vocabulary or the moments of each field that needs one, by field name. Raises ConfigError for a
    feature that cannot be fed to a model as declared, DataError for statistics that are missing or do not fit.
    """

    def __init__(self, schema: Schema, fitted: Mapping[str, Fitted]) -> None:
        self.schema = schema
        fed: dict[str, tuple[str, ArrayPlan]] = {}  # by the array's name: its column and how to make it
        for field in schema.features:
            for name, made in plan_of(field, fitted.get(field.name)).items():
                if name in fed:
                    raise unfit(field, f"two inputs named `{name}`", "names other than those of masks and lengths")
                fed[name] = field.name, made
        label = schema.label
        if label is not None and (label.shape or label.dtype not in ("int64", "bool", "float32", "float64")):
            got, allowed = f"a label of {label.dtype}, shape {label.shape}", "a scalar int64, bool, float32 or float64"
            raise unfit(label, got, allowed, "Build the dataset again with such a label.")
        self._label, self._weight = label, schema.weight
        if self._weight is not None and label is None:
            raise unfit(self._weight, "a weight without a label", "a label, whose loss it weights", "Declare a label.")
        target = None if label is None else TensorSpec(shape=(), dtype="int64" if label.dtype == "int64" else "float32")
        self.signature = Signature(
            features={name: fed[name][1].spec for name in sorted(fed, key=str.encode)},
            label=target,
            num_classes=None if label is None else label.num_classes,
            weight=None if self._weight is None else TensorSpec(shape=(), dtype="float32"),
            label_is_number=label is not None and label.num_classes is None and label.dtype != "bool",
        )
        self._skips = False
        self._bad_ids: Collection[int] = ()
        self._task: int | None = None
        self._names = tuple(fed)
        self.made: tuple[tuple[str, ArrayPlan], ...] = (*fed.values(), *self._other_arrays())
        """The column of each array and how to make it: the features, then label, sample id and weight."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read: those of fed features, the label, the sample id and the weight."""
        return tuple(dict.fromkeys(column for column, _ in self.made))

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """Encode rows. Raises DataError for a null in a column that has none by its schema, for a label outside its
        classes and for a weight that is negative or not finite.
        """
        ids = batch.column(self.schema.id_field.name)
        return self._decoded(ids, lambda: [made.whole(batch.column(column)) for column, made in self.made])

    def early(self, batch: pa.RecordBatch, skip: Container[int] = ()) -> list[NDArray[Any] | Lists | None]:
        """The first step of `encode`: for each of `made` an array or Lists; None for the indices in `skip`.

        Arrays are C-contiguous; some are views of the batch's memory. Raises as `encode` does.
        """
        return [
            None if number in skip else _laid_out(made.early(batch.column(column)), made)
            for number, (column, made) in enumerate(self.made)
        ]

    def late(self, rows: Sequence[NDArray[Any] | Lists]) -> Encoded:
        """The second step of `encode`, from rows that `early` returned, in any order."""
        pairs = [(one, made) for one, (_, made) in zip(rows, self.made, strict=True)]
        ids = rows[len(self._names) + (self._label is not None)]
        return self._decoded(ids, lambda: [one if made.late is None else made.late(one) for one, made in pairs])

    @property
    def can_skip_images(self) -> bool:
        """Whether it decodes images, of rows with a label: without one, a row has no weight."""
        kinds = {(field.encoding or {}).get("kind") for field in self.schema.features}
        return self._label is not None and "image" in kinds

    def skipping_bad_images(self) -> Encoder:
        """A copy of this encoder that replaces an image it cannot decode by zeros, with weight 0 for the sample."""
        if not self.can_skip_images:
            raise ConfigError(
                "there are no images to skip",
                got="a dataset without images to decode, or without a label",
                allowed="images of `lockstep etl_images --store encoded`",
                next_step="Leave --bad-images out.",
            )
        return self._skipping(())

    def skipping_bad_records(self, ids: Collection[int]) -> Encoder:
        """A copy that gives rows with these sample ids, more of which may come, weight 0, and skips bad images."""
        if self._label is None:
            raise ConfigError(
                "records of this dataset cannot be skipped",
                got="a dataset without a label, whose samples have no weight",
                allowed="a dataset with a label",
                next_step="Leave --on-bad-record out.",
            )
        return self._skipping(ids)

    def of_task(self, task: Task) -> Encoder:
        """A copy for one dataset of several: each row has its number as the input `_dataset`, (n,) int64."""
        other, mine = copy(self), self.signature
        other._task = task.number
        features = {**mine.features, DATASET: TensorSpec(shape=(), dtype="int64")}
        other.signature = replace(
            mine,
            features={name: features[name] for name in sorted(features, key=str.encode)},
            num_classes=None if mine.num_classes is None else max(task.widths),
            tasks=task.widths,
        )
        return other

    def _skipping(self, ids: Collection[int]) -> Encoder:
        other = copy(self)
        other._skips, other._bad_ids = True, ids
        other.signature = replace(self.signature, weight=TensorSpec(shape=(), dtype="float32"))
        return other

    def _decoded(self, ids: Any, make: Callable[[], list[Any]]) -> Encoded:
        """Encode the arrays of `make`; name the sample of a bad image in the error, or skip it."""
        if not self._skips:
            try:
                return self._encoded(make())
            except BadImageError as error:
                raise error.of(int(np.asarray(ids)[error.row])) from None
        with keeping_bad() as bad:
            encoded = self._encoded(make())
        weight = np.ones(len(encoded), np.float32) if encoded.weight is None else encoded.weight.copy()
        weight[[error.row for error in bad]] = 0
        if self._bad_ids:
            weight[[one in self._bad_ids for one in encoded.sample_id.tolist()]] = 0
        named = [error.of(int(encoded.sample_id[error.row])) for error in sorted(bad, key=lambda error: error.row)]
        return replace(encoded, weight=weight, bad=tuple(named))

    def _encoded(self, arrays: list[Any]) -> Encoded:
        x = dict(zip(self._names, arrays, strict=False))
        rest = arrays[len(x) :]
        y = None if self._label is None else rest.pop(0)
        if self._task is not None:
            x[DATASET] = np.full(len(rest[0]), self._task, np.int64)
        return Encoded(x, y, rest[0], rest[1] if self._weight is not None else None)

    def _other_arrays(self) -> Iterator[tuple[str, ArrayPlan]]:
        """The columns of label, sample id and weight, and how to make their arrays."""
        if self._label is not None:
            target = self.signature.label
            assert target is not None
            yield self._label.name, at_once(target, partial(self._labels, self._label))
        own = self.schema.id_field
        id_spec = TensorSpec(shape=(), dtype="int64")
        yield own.name, at_once(id_spec, lambda column: _numbers(own, column, np.int64), "int64")
        if self._weight is not None:
            weight = TensorSpec(shape=(), dtype="float32")
            yield self._weight.name, at_once(weight, partial(_weights, self._weight))

    def _labels(self, field: Field, column: pa.Array) -> NDArray[Any]:
        if field.dtype == "bool":
            column = column.cast(pa.uint8())
        if field.dtype == "float64":  # a value that would become infinite is refused
            return narrowed(field, _numbers(field, column, np.float64), np.dtype(np.float32))
        labels = _numbers(field, column, np.int64 if field.dtype == "int64" else np.float32)
        if (
            field.num_classes is not None
            and len(labels)
            and not (labels.min() >= 0 and labels.max() < field.num_classes)
        ):
            raise DataError(
                f"label `{field.name}` is outside its classes",
                got=span(labels.min(), labels.max()),
                allowed=f"0 to {field.num_classes - 1}",
                next_step="Correct the label, or build the dataset again with the right --num-classes.",
            )
        return labels


def plan_of(field: Field, fitted: Fitted | None) -> Plan:
    """The arrays that a model is fed from a feature; raises as Encoder does."""
    if field.encoding is not None:
        kind = field.encoding["kind"]
        if kind == "ignore":
            return {}
        if field.is_baked:
            return baked(field)
        if kind == "normalise":
            return tensor(field)
        if kind == "image":
            return image(field, field.encoding)
        if kind == "standardise":
            return standardised(field, fitted)
        if kind == "log":
            return logarithm(field, field.encoding)
        if kind == "clip":
            return clipped(field, field.encoding)
        if kind == "sequence":
            plan = sequence(field, field.encoding, fitted)
        elif kind == "number":
            plan = number(field, field.encoding)
        else:
            plan = categorical(field, field.encoding, fitted)
        if any(0 in made.spec.shape for made in plan.values()):
            raise unfit(field, "an empty vocabulary without an oov bucket", "at least one column")
        return plan
    if field.is_tensor:
        return tensor(field)
    if field.is_list or field.nullable or field.dtype in ("string", "bytes"):
        raise unfit(
            field,
            f"{field.dtype}, shape {field.shape}, nullable={field.nullable}, no encoding",
            "an encoding, or a plain number",
        )
    return number(field, None)


def _laid_out(rows: NDArray[Any] | Lists, made: ArrayPlan) -> NDArray[Any] | Lists:
    if isinstance(rows, Lists):
        return Lists(np.ascontiguousarray(rows.values, dtype=made.row.dtype), rows.offsets)
    return np.ascontiguousarray(rows, dtype=made.row.dtype)


def _numbers(field: Field, column: pa.Array, dtype: Any) -> NDArray[Any]:
    if column.null_count:
        raise null_error(field)
    return np.asarray(column).astype(dtype)


def _weights(field: Field, column: pa.Array) -> NDArray[np.float32]:
    weights: NDArray[np.float32] = _numbers(field, column, np.float32)
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        raise DataError(
            f"field `{field.name}` has an invalid weight",
            got=str(weights[np.flatnonzero(wrong)[0]]),
            allowed="a finite number from 0 up",
            next_step="Correct the weights and build the dataset again.",
        )
    return weights
