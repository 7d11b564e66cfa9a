"""Raw rows in, predictions out: an exported model with the encoder of its training data, in any process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.features.encode.bake import raw_schema
from lockstep.features.encode.encoder import Encoder
from lockstep.features.images.decode import FORMATS
from lockstep.features.images.decode_many import BadImageError
from lockstep.features.images.intake import Pixels
from lockstep.features.schema.fields import SAMPLE_ID, Field, sample_id_field
from lockstep.features.schema.fitted import Fitted, held_out_file, read_fitted
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature
from lockstep.storage.documents import parse_canonical, sha256_hex, unseal_as
from lockstep.storage.errors import ConfigError, DataError, nearest, require
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import absolute, join
from lockstep.training.config import TrainConfig
from lockstep.training.rank import runtime
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_model
from lockstep.training.run.run_json import read_run
from lockstep.training.run.weights_source import FITTED_PREFIX, PICTURES_FILE, SCHEMA_FILE, SIGNATURE_FILE, checked_file

BATCH = 512
ENCODED_BYTES = 4 << 20  # encoded at a time
MOST_LOADED = 4  # models in a process


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """What an exported model says about its inputs; `at` reads it without TensorFlow, `predictor` loads the model."""

    url: str
    digest: str
    """The digest of the model's manifest."""
    files: tuple[str, ...]
    model: str
    """The run's --model; empty if unknown."""
    split: str
    """The run's --split; empty if unknown."""
    schema: Schema
    """The schema of raw rows."""
    signature: Signature
    pixels: Pixels | None = None
    """How pictures became the pixels that it was trained on; None if lockstep etl_images made none."""

    @classmethod
    def at(cls, url: str) -> ExportedModel:
        """The newest model of a run, or an exported model. Raises NotFoundError for neither, CorruptionError."""
        url = absolute(url)
        fs, paths = filesystem(url), RunPaths(url)
        config = None
        if fs.exists(paths.run_json):
            config = TrainConfig.from_json(read_run(fs, paths)["config"])
            url = find_model(fs, paths)
        data = fs.read_bytes(where := join(url, MANIFEST_NAME))
        manifest = unseal_as("model", data, where)
        schema = Schema.from_json(_document(url, SCHEMA_FILE))
        signature = Signature.from_json(_document(url, SIGNATURE_FILE))
        refuse_tasks(signature, url)
        return cls(
            url=url,
            digest=sha256_hex(data),
            files=tuple(manifest["files"]),
            model=config.model.model if config else str(manifest.get("model", "")),
            split=config.data.split if config else str(manifest.get("split", "")),
            schema=raw_schema(schema),
            signature=signature,
            pixels=Pixels.from_json(_document(url, PICTURES_FILE), join(url, PICTURES_FILE))
            if PICTURES_FILE in manifest["files"]
            else None,
        )

    @property
    def columns(self) -> tuple[Field, ...]:
        """The fields of a raw row that the model needs."""
        return tuple(field for field in self.schema.features if (field.encoding or {}).get("kind") != "ignore")

    def predictor(self) -> Predictor:
        """The model in this process, loaded once as long as it does not change."""
        key = self.url, self.digest
        if key not in _loaded:
            runtime.import_tensorflow()
            from lockstep.training.models.on_disk import load_model

            while len(_loaded) >= MOST_LOADED:
                del _loaded[next(iter(_loaded))]
            _loaded[key] = Predictor(load_model(self.url, self.model), self.columns, self._encoder())
        return _loaded[key]

    def fitted(self) -> dict[str, Fitted]:
        """The statistics of each field that needs some, by its name."""
        found: dict[str, Fitted] = {}
        for field in self.schema.fitted_fields:
            assert field.fitted_file is not None
            name = FITTED_PREFIX + self.fitted_name(field.fitted_file)
            found[field.name] = read_fitted(_document(self.url, name))
        return found

    def _encoder(self) -> Encoder:
        """The encoder of raw rows, without label and weight; its sample ids are numbers of rows."""
        return Encoder(Schema((sample_id_field(), *self.schema.features)), self.fitted())

    def fitted_name(self, file: str) -> str:
        """The fitted file that the run's encoder used: `file`, or the one of the fold that it left out."""
        if FITTED_PREFIX + file in self.files:
            return file
        stem = FITTED_PREFIX + file.removesuffix(".json") + "."
        folds = [name.removeprefix(stem).removesuffix(".json") for name in self.files if name.startswith(stem)]
        left = [fold for fold in folds if fold not in self.split.split(",")]
        if len(left) != 1:
            raise DataError(
                f"the model {self.url} has several fitted files of {file}",
                got=f"folds {', '.join(folds)}, trained on {self.split or 'unknown ones'}",
                allowed="a run that left out one fold",
                next_step="Name the run, or export the model again with `lockstep export`.",
            )
        return held_out_file(file, left[0])


def refuse_tasks(signature: Signature, url: str) -> None:
    """Raise ConfigError for a model of several tasks, which a raw row does not choose among."""
    if signature.tasks is not None:
        raise ConfigError(
            "a model of several tasks takes no raw rows",
            got=f"{url}, of --tasks",
            allowed="a model with one output layer",
            next_step="Predict a dataset (lockstep predict), or load model.keras and give it the input `_dataset`.",
        )


def _document(url: str, name: str) -> Any:
    """A JSON file of an exported model."""
    return parse_canonical(checked_file(url, name), file=join(url, name))


class Predictor:
    """A loaded model that takes raw rows."""

    def __init__(self, model: Any, columns: tuple[Field, ...], encoder: Encoder) -> None:
        self.model, self._columns, self._encoder = model, columns, encoder

    def __call__(self, rows: Any, batch: int = BATCH) -> Any:
        """The model's outputs for all rows, as `model.predict(x, batch_size=batch)` returns them for encoded ones."""
        whole = isinstance(batch, int) and batch >= 1
        require(whole, "a batch", repr(batch), "a whole number of rows, 1 or more", "Correct batch.")
        import keras

        table = raw_batch(rows, self._columns)
        parts = list(self._parts(table, min(batch, max(1, len(table)))))
        return keras.tree.map_structure(lambda *each: np.concatenate(each), *parts)

    def _parts(self, table: pa.RecordBatch, batch: int) -> Iterator[Any]:
        import tensorflow as tf

        specs = self._encoder.signature.features.values()
        row_bytes = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs)
        group = batch * max(1, ENCODED_BYTES // (batch * row_bytes))  # a call costs more than the rows of a batch
        for start in range(0, max(1, len(table)), group):
            try:
                x = self._encoder.encode(table.slice(start, group)).x
            except BadImageError as error:
                raise DataError(
                    f"the image of row {start + error.row} cannot be decoded",
                    got=error.detail,
                    allowed=FORMATS,
                    next_step="Drop or replace the row.",
                ) from None
            for at in range(0, max(1, min(group, len(table) - start)), batch):
                # Tensors: for a small model, conversions of arrays by a TensorFlow function are a sixth of the time.
                given = {name: tf.constant(values[at : at + batch]) for name, values in x.items()}
                yield self.model.predict_on_batch(given)


_loaded: dict[tuple[str, str], Predictor] = {}


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


_KINDS = (_is_number, _is_text, _is_bytes, pa.types.is_boolean)


def raw_batch(rows: Any, fields: tuple[Field, ...]) -> pa.RecordBatch:
    """Raw rows as the columns of `fields` in their Arrow types, with the number of each row as its sample id.

    `rows` are a pandas DataFrame, a pyarrow Table, RecordBatch or StructArray, or a mapping of columns by name; further
    columns are ignored. In a nullable field a NaN of pandas or NumPy is null. Raises ConfigError for columns that are
    missing, there twice or of other types, DataError for a null where the schema has none.
    """
    names, column = _reader(rows)
    if missing := [field.name for field in fields if field.name not in names]:
        raise ConfigError(
            "the rows lack columns that the model needs",
            got=f"no {', '.join(name + nearest(name, names) for name in missing)}",
            allowed=f"the columns {', '.join(field.name for field in fields)}; others are ignored",
            next_step="Add or rename the columns.",
        )
    if twice := [field.name for field in fields if names.count(field.name) > 1]:
        raise ConfigError(
            "the rows have columns of the same name",
            got=f"{', '.join(twice)} more than once",
            allowed="each column that the model needs once",
            next_step="Rename or drop the others.",
        )
    arrays = [_arrow(field, column(field.name)) for field in fields]
    if len({len(array) for array in arrays}) > 1:
        lengths = ", ".join(f"{field.name} {len(array)}" for field, array in zip(fields, arrays, strict=True))
        raise ConfigError(
            "the columns differ in length", got=lengths, allowed="one value a row", next_step="Correct the rows."
        )
    numbers = pa.array(np.arange(len(arrays[0])))
    return pa.RecordBatch.from_arrays([numbers, *arrays], names=[SAMPLE_ID, *(field.name for field in fields)])


def _reader(rows: Any) -> tuple[list[str], Any]:
    """The names of the columns of `rows`, and a function from a name to the column."""
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return rows.column_names, rows.column
    if isinstance(rows, pa.StructArray):
        parts = dict(zip((field.name for field in rows.type), rows.flatten(), strict=True))
        return [field.name for field in rows.type], parts.__getitem__
    if isinstance(rows, Mapping):
        given, columns = [str(name) for name in rows], list(rows.values())
        return given, lambda name: columns[given.index(name)]
    import pandas as pd

    if not isinstance(rows, pd.DataFrame):
        raise ConfigError(
            "these are no rows",
            got=type(rows).__name__,
            allowed="a pandas DataFrame, a pyarrow Table or RecordBatch, or a dict of columns",
            next_step="Pass the rows in one of these forms.",
        )
    names = [str(name) for name in rows.columns]
    return names, lambda name: rows.iloc[:, names.index(name)]


def _arrow(field: Field, values: Any) -> pa.Array:
    """A column of the field's Arrow type. Raises ConfigError and DataError."""
    try:
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if field.is_tensor:
            values = _tensors(field, values)
        elif not isinstance(values, pa.Array):
            values = _from_python(field, values)
        if not _alike(values.type, field.arrow_type):  # Arrow casts moments to numbers and texts to anything
            raise TypeError(f"a column of {values.type}")
        if field.dtype == "uint64":
            values = values.cast(field.record_type)  # the decimals of the next cast hold other numbers too
        array = values if values.type == field.arrow_type else values.cast(field.arrow_type)
        if (
            field.dtype == "float32" and array is not values and _infinities(array) > _infinities(values)
        ):  # Arrow casts 1e300 to infinity
            raise ValueError("a number beyond float32")
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the column `{field.name}` cannot be read as the model's training data",
            got=str(error).splitlines()[0][:300],
            allowed=f"{field.dtype}, shape {field.shape}",
            next_step="Cast the column.",
        ) from None
    if (field.encoding or {}).get("kind") == "standardise" and _infinities(array):
        raise DataError(
            f"the column `{field.name}` holds a value that is infinite",
            got=f"{_infinities(array)} infinite values",
            allowed="finite numbers, NaN and null (which count as missing), where a mean was fitted",
            next_step="Drop or cap such values, as the dataset that the model was trained on needed it.",
        )
    if not field.nullable and (array.null_count or (field.is_list and array.flatten().null_count)):
        raise DataError(
            f"the column `{field.name}` is null",
            got="null, or a list that holds one",
            allowed="a value in each row: the schema of the training data has no null there",
            next_step="Drop or fill those rows; an empty list stands for nothing.",
        )
    return array


def _from_python(field: Field, values: Any) -> pa.Array:
    """A column of Python's values, NumPy's or pandas'. Raises what Arrow raises."""
    try:
        return pa.array(values, from_pandas=field.nullable)
    except OverflowError:  # Arrow takes whole numbers for int64
        if field.dtype != "uint64":
            raise
        return pa.array(values, field.record_type, from_pandas=field.nullable)


def _infinities(values: pa.Array) -> int:
    flat = values.flatten() if hasattr(values, "flatten") else values
    return pc.sum(pc.is_inf(flat)).as_py() or 0 if pa.types.is_floating(flat.type) else 0


def _alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of a type are numbers, texts, bytes, booleans or lists, like those of another one."""
    if pa.types.is_dictionary(found):
        return _alike(found.value_type, wanted)
    if pa.types.is_list(wanted):
        return pa.types.is_null(found) or (hasattr(found, "value_type") and _alike(found.value_type, wanted.value_type))
    return pa.types.is_null(found) or any(is_kind(found) and is_kind(wanted) for is_kind in _KINDS)


def _tensors(field: Field, values: Any) -> pa.Array:
    """A column of tensors as their bytes: from bytes, arrays or nested lists. Raises ValueError for another shape."""
    if not (isinstance(values, pa.Array) and pa.types.is_binary(values.type)):
        rows = values.to_pylist() if isinstance(values, pa.Array) else list(values)
        if not all(row is None or isinstance(row, bytes) for row in rows):
            return _tensors_of_arrays(field, rows)
        values = pa.array(rows, pa.binary())
    sizes = pc.unique(pc.binary_length(values).drop_null()).to_pylist()
    if wrong := set(sizes) - {field.tensor_bytes}:
        raise ValueError(f"a tensor of {min(wrong)} bytes, not {field.tensor_bytes}")
    return values


def _tensors_of_arrays(field: Field, rows: list[Any]) -> pa.Array:
    found = np.stack([np.asarray(row) for row in rows])
    numbers = found.dtype.kind in "biufO" and not (found.dtype.kind == "O" and None in found.ravel().tolist())
    if found.shape[1:] != field.shape or not numbers:
        raise ValueError(f"arrays of {found.dtype}, shape {found.shape[1:]}")
    with np.errstate(over="ignore", invalid="ignore"):  # compared below
        stored = found.astype(np.dtype(field.dtype).newbyteorder("<"))
    if stored.dtype.kind in "iu" and not np.array_equal(stored, found):
        raise ValueError(f"arrays of {found.dtype}, which do not fit")
    if np.isinf(stored).sum() > np.isinf(found.astype(np.float64)).sum():
        raise ValueError(f"a number beyond {field.dtype}")
    return pa.array([row.tobytes() for row in stored], pa.binary())


def prediction_column(outputs: Any, *, several: bool) -> pa.Array:
    """A model's outputs (n,) or (n, k) as doubles, or with `several` as lists of float32.

    Raises ConfigError for nested outputs, more dimensions, and several numbers a row without `several`.
    """
    rows = outputs.reshape(len(outputs), -1) if isinstance(outputs, np.ndarray) and outputs.ndim <= 2 else None
    if rows is None or (rows.shape[1] > 1 and not several):
        raise ConfigError(
            "the model's outputs do not fit the column of predictions",
            got=f"{rows.shape[1]} numbers a row" if rows is not None else "several outputs, or more dimensions",
            allowed="one output of one or several numbers a row" if several else "one number a row",
            next_step='For several numbers pass returns="array<float>" to lockstep.predict_udf; lockstep.predict(run, '
            "rows) returns any outputs.",
        )
    if not several:
        return pa.array(rows[:, 0].astype(np.float64))
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.astype(np.float32).ravel()))
