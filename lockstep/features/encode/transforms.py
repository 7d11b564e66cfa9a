"""Turns a column into the arrays that a model is fed: one plan for each encoding, with shapes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.features.encode.hashing import TokenTable, buckets_of
from lockstep.features.images.decode_many import decode_files
from lockstep.features.schema.encodings import INDEX, Encoding, output_of
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Fitted, Moments, Vocabulary
from lockstep.features.schema.signature import TensorSpec
from lockstep.storage.errors import ConfigError, DataError

_LAST_BITS = 4  # values of a constant column may differ by so many neighbouring floats


@dataclass(frozen=True, slots=True)
class Lists:
    """n rows with any number of values: row i has values[offsets[i]:offsets[i + 1]]; offsets (n + 1,) int64."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of values in each row, (n,)."""
        return np.diff(self.offsets)


Early = Callable[[pa.Array], NDArray[Any] | Lists]
Late = Callable[[Any], NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayPlan:
    """How to make one array: a model is fed `late(early(column))`, or `early(column)` if `late` is None.

    Each row that `early` returns depends only on that row of the column, so that rows can be reordered in between.
    """

    spec: TensorSpec
    """A row of the model's input."""
    early: Early
    """Turns a column of n rows into an array (n, *row.shape) of row.dtype, or into Lists of such values."""
    row: TensorSpec
    """A row that `early` returns; for Lists, one value."""
    lists: bool = False
    """Whether `early` returns Lists."""
    late: Late | None = None
    """Turns rows in any order, an array or Lists, into the model's input."""
    stored: str | None = None
    """The stored dtype, if a row of `early` equals the stored bytes or is a stored int64 as float32; else None."""
    borrowed: bool = False
    """Whether `early` returns a view of the column's memory."""

    def whole(self, column: pa.Array) -> NDArray[Any]:
        """Do both steps: make the model's input from a column, in a new array."""
        rows = self.early(column)
        if self.late is not None:
            return self.late(rows)
        assert isinstance(rows, np.ndarray)
        return rows.copy() if self.borrowed else rows


def at_once(spec: TensorSpec, early: Callable[[pa.Array], NDArray[Any]], stored: str | None = None) -> ArrayPlan:
    """The plan of an array that is small enough to be made completely in the first step."""
    return ArrayPlan(spec=spec, early=early, row=TensorSpec(shape=spec.shape, dtype=spec.dtype), stored=stored)


def lists_of(column: pa.Array, values: NDArray[Any]) -> Lists:
    """Group `values`, one for each of a column's flattened values, by rows of the column; a null row has none."""
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    if not len(column):
        return Lists(values, np.zeros(1, dtype=np.int64))
    if column.null_count:
        counts = np.where(np.asarray(column.is_valid()), np.diff(offsets), 0)
        return Lists(values, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    return Lists(values, offsets.astype(np.int64) - int(offsets[0]))


# From the values of a scalar field or of flattened lists to categories 0..size-1; -1 is none of them.
Columns = Callable[[pa.Array], NDArray[np.int64]]
Plan = dict[str, ArrayPlan]  # by the name of the array


def categorical(field: Field, encoding: Encoding, fitted: Fitted | None) -> Plan:
    """A vocabulary, a hash or buckets as one-hot, multi-hot or index."""
    return as_columns(field, output_of(encoding, is_list=field.is_list), *columns_of(field, encoding, fitted))


def as_columns(field: Field, output: str, columns: Columns, size: int) -> Plan:
    """Turn categories into one-hot or multi-hot columns, or into an index."""
    if output == INDEX:
        spec = TensorSpec(shape=(1,), dtype="int64", ids=size + 1)
        return {field.name: at_once(spec, lambda column: (columns(column) + 1).reshape(-1, 1))}

    def hot(found: NDArray[np.int64] | Lists) -> NDArray[Any]:
        out = np.zeros((len(found), size), dtype=np.float32)
        rows = np.arange(len(found))
        if isinstance(found, Lists):
            rows, found = np.repeat(rows, found.counts), found.values
        used = found >= 0
        out[rows[used], found[used]] = 1.0
        return out

    def early(column: pa.Array) -> NDArray[np.int64] | Lists:
        return lists_of(column, columns(column.flatten())) if field.is_list else columns(column)

    spec, one = TensorSpec(shape=(size,), dtype="float32"), TensorSpec(shape=(), dtype="int64")
    return {field.name: ArrayPlan(spec=spec, early=early, row=one, lists=field.is_list, late=hot)}


def columns_of(field: Field, encoding: Encoding, fitted: Fitted | None) -> tuple[Columns, int]:
    """The function from values to categories, and the number of categories."""
    if encoding["kind"] == "hash":
        buckets, seed = int(encoding["buckets"]), int(encoding["seed"])
        return lambda column: _where_valid(column, buckets_of(column, buckets, seed)), buckets
    if encoding["kind"] == "bucketise":
        return _buckets(field, encoding["boundaries"]), len(encoding["boundaries"]) + 1
    if not isinstance(fitted, Vocabulary) or len(fitted.tokens) > encoding["max_size"]:
        raise DataError(
            f"the vocabulary of field `{field.name}` does not fit the schema",
            got="none" if not isinstance(fitted, Vocabulary) else f"{len(fitted.tokens)} tokens",
            allowed=f"at most {encoding['max_size']} tokens, from _fitted/{encoding['file']}",
            next_step="Run `lockstep verify URL`.",
        )
    return _vocabulary(fitted, int(encoding["oov_buckets"])), vocabulary_size(encoding, fitted)


def vocabulary_size(encoding: Encoding, vocabulary: Vocabulary) -> int:
    """The number of categories of a vocabulary: one for each token, then the buckets of unknown tokens."""
    return len(vocabulary.tokens) + int(encoding["oov_buckets"])


def _vocabulary(vocabulary: Vocabulary, buckets: int) -> Columns:
    table, known = TokenTable(vocabulary.tokens), len(vocabulary.tokens)

    def columns(column: pa.Array) -> NDArray[np.int64]:
        found, hashes = table.find(column.cast(pa.string()))  # int64 as decimal digits
        if buckets:
            found = np.where(found < 0, known + hashes % buckets, found)
        return _where_valid(column, found)

    return columns


def _buckets(field: Field, boundaries: Sequence[float]) -> Columns:
    """Bucket i has boundaries[i-1] <= value < boundaries[i]; null and NaN are in none."""
    if field.dtype in ("int64", "uint64"):
        # Integer boundaries, since float64 is not exact beyond 2^53; one above the type's range separates nothing.
        limits = np.iinfo(field.dtype)
        whole = [max(math.ceil(bound), limits.min) for bound in boundaries if math.ceil(bound) <= limits.max]
        exact = np.array(whole, dtype=field.dtype)
        return lambda column: _where_valid(column, _place(exact, plain_values(column)))
    bounds = np.array(boundaries, dtype=np.float64)

    def columns(column: pa.Array) -> NDArray[np.int64]:
        values = np.array(column.cast(pa.float64()).fill_null(np.nan), dtype=np.float64)
        return np.where(np.isnan(values), -1, _place(bounds, values))

    return columns


def _place(bounds: NDArray[Any], values: NDArray[Any]) -> NDArray[np.int64]:
    return np.searchsorted(bounds, values, side="right").astype(np.int64)


def _where_valid(column: pa.Array, found: NDArray[np.int64]) -> NDArray[np.int64]:
    return found if not column.null_count else np.where(np.asarray(column.is_valid()), found, -1)


def standardised(field: Field, fitted: Fitted | None) -> Plan:
    """Compute (value - mean) / deviation; null and NaN are replaced by the mean, so they become 0.

    A constant column becomes value - mean, so 0 everywhere. A column counts as constant if its deviation is at most the
    distance between neighbouring floats at its mean: then its values differ only in their last bit, like one sum taken
    in several orders, and rounding the exact mean to a float shifts it by as much.
    """
    if not isinstance(fitted, Moments):
        raise DataError(
            f"the mean and variance of field `{field.name}` are missing",
            got="none" if fitted is None else "a vocabulary",
            allowed=f"moments, from _fitted/{field.fitted_file}",
            next_step="Run `lockstep verify URL`.",
        )
    mean, deviation = fitted.mean, float(np.sqrt(fitted.variance))
    limit = constant_within(field, mean, deviation)

    def transform(column: pa.Array) -> NDArray[Any]:
        values = np.array(_unsigned(column).cast(pa.float64(), safe=False).fill_null(mean), dtype=np.float64)
        scaled = np.where(np.isnan(values), mean, values) - mean
        if limit is not None:
            scaled[np.abs(scaled) <= limit] = 0.0
        else:
            scaled /= deviation
        return narrowed(field, scaled, np.dtype(np.float32)).reshape(-1, 1)

    return {field.name: at_once(TensorSpec(shape=(1,), dtype="float32"), transform)}


def constant_within(field: Field, mean: float, deviation: float) -> float | None:
    """Return the distance from the mean that becomes 0 if `standardised` counts the field as constant; else None."""
    noise = float(np.spacing(np.array(abs(mean), dtype=np.float32 if field.dtype == "float32" else np.float64)))
    return _LAST_BITS * noise if deviation <= noise else None


def number(field: Field, encoding: Encoding | None) -> Plan:
    """The value, by default as float32."""
    dtype = np.dtype((encoding or {}).get("dtype", "float32"))
    null = None if encoding is None else encoding.get("null_value")

    def transform(column: pa.Array) -> NDArray[Any]:
        if column.null_count and null is None:
            raise null_error(field)
        values = narrowed(field, plain_values(column), dtype, rounds=encoding is not None)
        if column.null_count:
            values[~np.asarray(column.is_valid())] = null
        return values.reshape(-1, 1)  # (n,) -> (n, 1): one input column

    # A number unchanged, or an int64 that float32 represents exactly: code that copies it refuses what `narrowed` does.
    plain = field.dtype in ("int64", "float32") and not field.nullable and encoding is None
    return {field.name: at_once(TensorSpec(shape=(1,), dtype=dtype.name), transform, field.dtype if plain else None)}


def logarithm(field: Field, encoding: Encoding) -> Plan:
    """Compute log(1 + value), and -log(1 - value) below 0, so that order and sign stay; null and NaN become
    `null_value`.
    """
    return _bent(field, encoding, lambda values: np.copysign(np.log1p(np.abs(values)), values))


def clipped(field: Field, encoding: Encoding) -> Plan:
    """The value, or the nearest bound outside of `least` to `most`; null and NaN become `null_value`."""
    least, most = float(encoding["least"]), float(encoding["most"])
    return _bent(field, encoding, lambda values: np.clip(values, least, most))


def _bent(field: Field, encoding: Encoding, bend: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Plan:
    """A function of each number, computed as float64 and fed as float32."""
    null = float(encoding.get("null_value", 0))

    def transform(column: pa.Array) -> NDArray[Any]:
        values = np.array(_unsigned(column).cast(pa.float64(), safe=False).fill_null(np.nan), dtype=np.float64)
        found = np.where(np.isnan(values), null, bend(values))
        return narrowed(field, found, np.dtype(np.float32)).reshape(-1, 1)

    return {field.name: at_once(TensorSpec(shape=(1,), dtype="float32"), transform)}


def sequence(field: Field, encoding: Encoding, fitted: Fitted | None) -> Plan:
    """The first or last `length` values of each list, then padding; with a mask or the number of values."""
    of = encoding.get("of")
    return as_sequence(field, encoding, *((None, 0) if of is None else columns_of(field, of, fitted)))


def as_sequence(field: Field, encoding: Encoding, columns: Columns | None, size: int) -> Plan:
    """A sequence of the values, or, with `columns`, of ids 0..size."""
    length = int(encoding["length"])
    at, pad = np.arange(length), encoding.get("pad_value", 0)
    spec = TensorSpec(shape=(length,), dtype="float32")
    if columns is not None:
        spec = TensorSpec(shape=(length,), dtype="int64", ids=size + 1)

    def padded(lists: Lists) -> NDArray[Any]:
        starts, counts = _kept(encoding, lists.counts)
        out = np.full((len(lists), length), pad, dtype=spec.dtype)
        rows, places = np.nonzero(at < counts[:, None])
        out[rows, places] = lists.values[starts[rows] + places]
        return out

    def early(column: pa.Array) -> Lists:
        return lists_of(column, sequence_values(field, columns, column))

    def counted(column: pa.Array) -> NDArray[np.int64]:
        return kept_of(encoding, column)[1]

    value, one = TensorSpec(shape=(), dtype=spec.dtype), TensorSpec(shape=(), dtype="int64")
    plan: Plan = {field.name: ArrayPlan(spec=spec, early=early, row=value, lists=True, late=padded)}
    if encoding.get("with", "mask") == "mask":
        mask = TensorSpec(shape=(length,), dtype="float32")
        plan[f"{field.name}_mask"] = ArrayPlan(
            spec=mask, early=counted, row=one, late=lambda counts: (at < counts[:, None]).astype(np.float32)
        )
    elif encoding["with"] == "length":
        spec_of_length = TensorSpec(shape=(1,), dtype="int64")
        plan[f"{field.name}_length"] = at_once(spec_of_length, lambda column: counted(column).reshape(-1, 1))
    return plan


def kept_of(encoding: Encoding, column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each row's sequence begins in the flattened column, and its number of values: (n,) each."""
    return _kept(encoding, np.asarray(pc.list_value_length(column)).astype(np.int64))


def _kept(encoding: Encoding, sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    counts, ends = np.minimum(sizes, int(encoding["length"])), np.cumsum(sizes)
    return (ends - counts if encoding.get("keep") == "last" else ends - sizes), counts


def sequence_values(field: Field, columns: Columns | None, column: pa.Array) -> NDArray[Any]:
    """All values of a column of lists end to end, as float32, or as ids with `columns`."""
    flat = column.flatten()
    return narrowed(field, plain_values(flat), np.dtype(np.float32)) if columns is None else columns(flat) + 1


def plain_values(column: pa.Array) -> NDArray[Any]:
    """The numbers of a column, 0 for null; bool as uint8, decimals as uint64."""
    plain = column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else _unsigned(column)
    return np.asarray(plain.fill_null(0) if plain.null_count else plain)


def _unsigned(column: pa.Array) -> pa.Array:
    return column.cast(pa.uint64()) if pa.types.is_decimal(column.type) else column


def narrowed(field: Field, values: NDArray[Any], dtype: np.dtype[Any], *, rounds: bool = False) -> NDArray[Any]:
    """A copy as `dtype`, with fractions rounded to nearest.

    Raises DataError for a value that would become infinite, one outside int64, and an integer that a float does not
    represent exactly, unless the schema asks for rounding (`rounds`).
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if (dtype.kind != "f" and values.dtype != np.uint64) or not len(values):
        return narrow
    whole = dtype.kind != "f" or (values.dtype.kind in "iu" and not rounds)
    # All integers up to this limit are floats, or int64.
    limit = 1 << np.finfo(dtype).nmant + 1 if dtype.kind == "f" else (1 << 63) - 1
    wrong = (values > limit) | (values < -limit) if whole else np.isinf(narrow) & np.isfinite(values)
    if wrong.any():
        raise DataError(
            f"a value of field `{field.name}` would become another number as {dtype.name}",
            got=str(values[np.flatnonzero(wrong)[0]]),
            allowed=f"integers from -{limit} to {limit}" if whole else f"up to {np.finfo(dtype).max}",
            next_step="Declare an encoding: hash or vocabulary for ids, bucketise or standardise for amounts, number to"
            " round or to feed another dtype.",
        )
    return narrow


def null_error(field: Field) -> DataError:
    """The error for a null in a column that has none by its schema."""
    return DataError(
        f"field `{field.name}` is null",
        got="null",
        allowed="a value in each row",
        next_step="Run `lockstep verify URL`.",
    )


def unfit(
    field: Field, got: str, allowed: str, next_step: str = "Give the field an encoding in its schema."
) -> ConfigError:
    """The error for a field that cannot be fed to a model as declared."""
    return ConfigError(
        f"field `{field.name}` cannot be fed to a model",
        got=got,
        allowed=allowed,
        next_step=next_step,
    )


def refused_row(attempt: Callable[[int, int], object], rows: int) -> tuple[int, DataError]:
    """The first of `rows` rows for which `attempt(start, stop)` raises DataError, and the error for only that row.

    `attempt` must judge each row separately, and raise for all rows together. Bisection: about the cost of one attempt
    over all rows.
    """
    start, stop = 0, rows  # the first refused row is in start..stop-1
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            attempt(start, middle)
            start = middle
        except DataError:
            stop = middle
    try:
        attempt(start, stop)
    except DataError as error:
        return start, error
    raise AssertionError(f"{rows} rows are refused together and none of them separately")


def span(low: object, high: object) -> str:
    """A range of values as text."""
    return str(low) if low == high else f"{low} to {high}"


def tensor(field: Field) -> Plan:
    """The stored tensor; with `normalise`, as float32."""
    shape = tuple(size for size in field.shape if size is not None)
    row = TensorSpec(shape=shape, dtype=field.dtype)
    made = ArrayPlan(spec=row, early=_stored(field, shape), row=row, stored=field.dtype, borrowed=True)
    return {field.name: _scaled(field, made)}


def image(field: Field, encoding: Encoding) -> Plan:
    """The pixels of encoded image files, decoded when read: uint8, or float32 if they are normalised."""
    height, width, channels = (int(encoding[key]) for key in ("height", "width", "channels"))
    fit = str(encoding.get("fit", "resize"))

    def files(column: pa.Array) -> Lists:
        if column.null_count:
            raise null_error(field)
        if not len(column):
            return Lists(np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64))
        offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
        data = column.buffers()[2]
        return Lists(np.frombuffer(b"" if data is None else data, dtype=np.uint8), offsets.astype(np.int64))

    def decoded(lists: Lists) -> NDArray[Any]:
        return decode_files(lists.values, lists.offsets, (height, width), channels, fit)

    pixels = TensorSpec(shape=(height, width, channels), dtype="uint8")
    byte = TensorSpec(shape=(), dtype="uint8")
    return {field.name: _scaled(field, ArrayPlan(spec=pixels, early=files, row=byte, lists=True, late=decoded))}


def _scaled(field: Field, made: ArrayPlan) -> ArrayPlan:
    """The plan with the field's normalisation to a mean and a deviation, if it declares one."""
    encoding, shape, dtype = field.encoding or {}, made.spec.shape, made.spec.dtype
    if "mean" not in encoding:
        return made
    # float32 is exact enough for pixels and float32 values; other types are computed in float64 and rounded at the end.
    work = np.dtype(np.float32 if dtype in ("uint8", "float32") else np.float64)
    deviation = np.array(encoding["deviation"], dtype=np.float64)
    scale = (1.0 / (float(encoding.get("divide_by", 1)) * deviation)).astype(work)
    shift = (-np.array(encoding["mean"], dtype=np.float64) / deviation).astype(work)

    def normalised(rows: Any) -> NDArray[Any]:
        # (n, *shape) * (1,) or (channels,): the last axis has the channels
        values = (rows if made.late is None else made.late(rows)).astype(work)
        values *= scale
        values += shift
        return values if work == np.float32 else narrowed(field, values, np.dtype(np.float32))

    return replace(made, spec=TensorSpec(shape=shape, dtype="float32"), late=normalised)


def _stored(field: Field, shape: tuple[int, ...]) -> Early:
    dtype = np.dtype(field.dtype).newbyteorder("<")
    wanted = field.tensor_bytes

    def transform(column: pa.Array) -> NDArray[Any]:
        if column.null_count:
            raise null_error(field)
        offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
        if len(column) and not bool((np.diff(offsets) == wanted).all()):
            raise DataError(
                f"a tensor of field `{field.name}` has the wrong length",
                got=f"{span(np.diff(offsets).min(), np.diff(offsets).max())} bytes",
                allowed=f"{wanted} bytes",
                next_step="Run `lockstep verify URL`.",
            )
        if not len(column):
            return np.zeros((0, *shape), dtype=field.dtype)
        data = np.frombuffer(column.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
        # (n * bytes,) uint8 -> (n, *shape): rows are contiguous; a view of Arrow's memory
        return data.view(dtype).reshape(len(column), *shape)

    return transform


def baked(field: Field) -> Plan:
    """The arrays that the declared encoding would give, from baked values."""
    assert field.encoding is not None
    encoding, ids = field.encoding["raw"]["encoding"] or {}, field.encoding.get("ids")
    columns, size = (None, 0) if ids is None else (_columns(field, ids), ids - 1)
    if encoding.get("kind") == "sequence":
        return as_sequence(field, encoding, columns, size)
    if columns is not None:
        return as_columns(field, output_of(encoding, is_list=field.is_list), columns, size)
    return tensor(field) if field.is_tensor else number(field, {"dtype": field.dtype})


def _columns(field: Field, ids: int) -> Columns:
    def columns(column: pa.Array) -> NDArray[np.int64]:
        if column.null_count:
            raise null_error(field)
        found: NDArray[Any] = np.asarray(column)
        if len(found) and not (found.min() >= 0 and found.max() < ids):
            raise DataError(
                f"field `{field.name}` has an id out of range",
                got=span(found.min(), found.max()),
                allowed=f"0 to {ids - 1}",
                next_step="Run `lockstep verify URL`.",
            )
        return found - 1

    return columns
