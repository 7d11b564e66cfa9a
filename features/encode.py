"""From columns on disk to the arrays that a model is fed: vocabularies and buckets are applied here, when read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from features.encodings import Encoding
from features.example import tensor_bytes
from features.fitted import Vocabulary
from features.schema import Field, Schema
from features.signature import Signature, TensorSpec
from storage.errors import ConfigError, DataError

Transform = Callable[[pa.Array], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of n rows.

    `x` by feature name: one-hot, multi-hot (n, size) float32, numbers (n, 1) float32, tensors (n, *shape) as declared.
    `y` (n,): float32 for bool and float labels, int64 for integers, or None. `sample_id` (n,) int64.
    """

    x: dict[str, NDArray[Any]]
    y: NDArray[Any] | None
    sample_id: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sample_id)


class Encoder:
    """Applies a schema's encodings to record batches.

    `fitted` holds the vocabulary of each field that has one, by field name. Raises ConfigError for a feature that
    cannot be fed to a model as declared, DataError for a vocabulary that is missing or larger than the schema allows.
    """

    def __init__(self, schema: Schema, fitted: Mapping[str, Vocabulary]) -> None:
        self.schema = schema
        self._transforms: dict[str, Transform] = {}
        specs: dict[str, TensorSpec] = {}
        for field in schema.in_byte_order:
            if field.kind == "weight":
                raise _unfit(
                    field,
                    "a weight field",
                    "features, a label and the sample id; sample weights are not applied in training",
                )
            if field.kind == "feature":
                specs[field.name], self._transforms[field.name] = _plan(field, fitted)
        label = schema.label
        if label is not None and (label.shape or label.dtype not in ("int64", "bool", "float32")):
            raise _unfit(label, f"a label of {label.dtype}, shape {label.shape}", "a scalar int64, bool or float32")
        self._label = label
        spec = None if label is None else TensorSpec(shape=(), dtype="int64" if label.dtype == "int64" else "float32")
        classes = None if label is None else label.num_classes
        self.signature = Signature(features=specs, label=spec, num_classes=classes)

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """Encode rows. Raises DataError for a null where none may be and for a label outside its classes."""
        x = {name: transform(batch.column(name)) for name, transform in self._transforms.items()}
        ids = _numbers(self.schema.id_field, batch.column(self.schema.id_field.name), np.int64)
        return Encoded(
            x, None if self._label is None else self._labels(self._label, batch.column(self._label.name)), ids
        )

    def _labels(self, field: Field, column: pa.Array) -> NDArray[Any]:
        if field.dtype == "bool":
            column = column.cast(pa.uint8())
        labels = _numbers(field, column, np.int64 if field.dtype == "int64" else np.float32)
        if (
            field.num_classes is not None
            and len(labels)
            and not (labels.min() >= 0 and labels.max() < field.num_classes)
        ):
            raise DataError(
                f"label `{field.name}` lies outside its classes",
                got=f"{labels.min()} to {labels.max()}",
                allowed=f"0 to {field.num_classes - 1}",
                next_step="Build the dataset anew with the right --num-classes.",
            )
        return labels


def vocabulary_size(encoding: Encoding, vocabulary: Vocabulary) -> int:
    """The columns of a vocabulary feature: one a token, then the buckets of unknown tokens."""
    return len(vocabulary.tokens) + int(encoding["oov_buckets"])


def _plan(field: Field, fitted: Mapping[str, Vocabulary]) -> tuple[TensorSpec, Transform]:
    if field.encoding is not None and field.encoding["kind"] == "vocabulary":
        vocabulary = fitted.get(field.name)
        if vocabulary is None or len(vocabulary.tokens) > field.encoding["max_size"]:
            raise DataError(
                f"the vocabulary of field `{field.name}` does not fit the schema",
                got="none" if vocabulary is None else f"{len(vocabulary.tokens)} tokens",
                allowed=f"at most {field.encoding['max_size']} tokens, from _fitted/{field.encoding['file']}",
                next_step="Run `python -m jobs.verify URL`.",
            )
        size = vocabulary_size(field.encoding, vocabulary)
        if size == 0:
            raise _unfit(field, "an empty vocabulary without an oov bucket", "at least one column")
        return TensorSpec(shape=(size,), dtype="float32"), _vocabulary_transform(
            field, field.encoding, vocabulary, size
        )
    if field.encoding is not None:
        boundaries = np.array(field.encoding["boundaries"], dtype=np.float64)
        return TensorSpec(shape=(len(boundaries) + 1,), dtype="float32"), _bucket_transform(boundaries)
    if field.is_tensor:
        shape = tuple(size for size in field.shape if size is not None)
        return TensorSpec(shape=shape, dtype=field.dtype), _tensor_transform(field, shape)
    if field.is_list or field.nullable or field.dtype in ("string", "bytes"):
        raise _unfit(
            field,
            f"{field.dtype}, shape {field.shape}, nullable={field.nullable}, no encoding",
            "an encoding, or a plain number",
        )

    def number(column: pa.Array) -> NDArray[Any]:
        plain = column.cast(pa.uint8()) if field.dtype == "bool" else column
        return _numbers(field, plain, np.float32).reshape(-1, 1)  # (n,) -> (n, 1): one input column

    return TensorSpec(shape=(1,), dtype="float32"), number


def _vocabulary_transform(field: Field, encoding: Encoding, vocabulary: Vocabulary, size: int) -> Transform:
    known = pa.array(vocabulary.tokens, type=pa.string())
    buckets = int(encoding["oov_buckets"])

    def transform(column: pa.Array) -> NDArray[Any]:
        out = np.zeros((len(column), size), dtype=np.float32)
        rows = np.arange(len(column))
        tokens = column
        if field.is_list:
            rows = np.repeat(rows, np.asarray(pc.list_value_length(column)))
            tokens = column.flatten()
        valid = np.asarray(tokens.is_valid())
        found = np.array(pc.fill_null(pc.index_in(tokens, value_set=known), -1))
        unknown = np.flatnonzero(valid & (found < 0))
        if buckets and len(unknown):
            names = tokens.take(pa.array(unknown)).to_pylist()
            found[unknown] = [len(known) + zlib.crc32(name.encode()) % buckets for name in names]
        used = valid & (found >= 0)
        out[rows[used], found[used]] = 1.0
        return out

    return transform


def _bucket_transform(boundaries: NDArray[np.float64]) -> Transform:
    """One-hot: bucket i holds boundaries[i-1] <= value < boundaries[i]; a null or NaN row is all zeros."""

    def transform(column: pa.Array) -> NDArray[Any]:
        values = np.array(column.cast(pa.float64(), safe=False).fill_null(np.nan), dtype=np.float64)
        out = np.zeros((len(values), len(boundaries) + 1), dtype=np.float32)
        rows = np.flatnonzero(~np.isnan(values))
        out[rows, np.searchsorted(boundaries, values[rows], side="right")] = 1.0
        return out

    return transform


def _tensor_transform(field: Field, shape: tuple[int, ...]) -> Transform:
    dtype = np.dtype(field.dtype).newbyteorder("<")
    wanted = tensor_bytes(field)

    def transform(column: pa.Array) -> NDArray[Any]:
        if column.null_count:
            raise _null(field)
        offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
        if len(column) and not bool((np.diff(offsets) == wanted).all()):
            raise DataError(
                f"a tensor of field `{field.name}` has the wrong length",
                got=f"{int(np.diff(offsets).min())} to {int(np.diff(offsets).max())} bytes",
                allowed=f"{wanted} bytes",
                next_step="Run `python -m jobs.verify URL`.",
            )
        if not len(column):
            return np.zeros((0, *shape), dtype=field.dtype)
        data = np.frombuffer(column.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
        # (n * bytes,) uint8 -> (n, *shape): rows lie one after another; a copy, so that Arrow's memory can go
        return data.view(dtype).reshape(len(column), *shape).astype(field.dtype, copy=True)

    return transform


def _numbers(field: Field, column: pa.Array, dtype: Any) -> NDArray[Any]:
    if column.null_count:
        raise _null(field)
    return np.asarray(column).astype(dtype)


def _null(field: Field) -> DataError:
    return DataError(
        f"field `{field.name}` is null",
        got="null",
        allowed="a value in each row",
        next_step="Run `python -m jobs.verify URL`.",
    )


def _unfit(field: Field, got: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"field `{field.name}` cannot be fed to a model",
        got=got,
        allowed=allowed,
        next_step="Give the field an encoding in its schema.",
    )
