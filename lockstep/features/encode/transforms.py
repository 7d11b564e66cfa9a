"""What each encoding makes of a column: the arrays that a model is fed, and their shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.features.encode.hashing import TokenTable, buckets_of
from lockstep.features.encode.making import Lists, Made, at_once, lists_of
from lockstep.features.schema.encodings import INDEX, Encoding, output_of
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Fitted, Moments, Vocabulary
from lockstep.features.schema.signature import TensorSpec
from lockstep.storage.errors import ConfigError, DataError

# The values of a column, of a scalar field or of a list's flattened rows, as columns 0..size-1; -1 is none of them.
Columns = Callable[[pa.Array], NDArray[np.int64]]
Plan = dict[str, Made]  # by the name of the array
_LAST_BITS = 4  # neighbouring floats that values of a constant column may lie apart


def categorical(field: Field, encoding: Encoding, fitted: Fitted | None) -> Plan:
    """A vocabulary, a hash or buckets as one-hot, multi-hot or index."""
    return as_columns(field, output_of(encoding, is_list=field.is_list), *columns_of(field, encoding, fitted))


def as_columns(field: Field, output: str, columns: Columns, size: int) -> Plan:
    """Values that lie in columns as one-hot, multi-hot or index."""
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
    return {field.name: Made(spec=spec, early=early, row=one, lists=field.is_list, late=hot)}


def columns_of(field: Field, encoding: Encoding, fitted: Fitted | None) -> tuple[Columns, int]:
    """How values become columns, and how many columns there are."""
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
            next_step="Run `python -m jobs.verify URL`.",
        )
    return _vocabulary(fitted, int(encoding["oov_buckets"])), vocabulary_size(encoding, fitted)


def vocabulary_size(encoding: Encoding, vocabulary: Vocabulary) -> int:
    """The columns of a vocabulary: one a token, then the buckets of unknown tokens."""
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
    """Bucket i holds boundaries[i-1] <= value < boundaries[i]; null and NaN are in none."""
    if field.dtype in ("int64", "uint64"):
        # As whole numbers, since a float64 is not exact beyond 2^53; what no such number reaches is no boundary.
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
    """(value - mean) / deviation; null and NaN are the mean, so 0.

    Of a constant column it is value - mean, so 0 throughout. A column counts as constant if its deviation is at most
    the distance between neighbouring floats at its mean: then values differ in their last bit, as one sum in several
    orders does, and rounding the exact mean to a float moves it as far as they lie apart.
    """
    if not isinstance(fitted, Moments):
        raise DataError(
            f"the mean and variance of field `{field.name}` are missing",
            got="none" if fitted is None else "a vocabulary",
            allowed=f"moments, from _fitted/{field.fitted_file}",
            next_step="Run `python -m jobs.verify URL`.",
        )
    mean, deviation = fitted.mean, float(np.sqrt(fitted.variance))
    noise = float(np.spacing(np.array(abs(mean), dtype=np.float32 if field.dtype == "float32" else np.float64)))
    constant = deviation <= noise

    def transform(column: pa.Array) -> NDArray[Any]:
        values = np.array(_unsigned(column).cast(pa.float64(), safe=False).fill_null(mean), dtype=np.float64)
        scaled = np.where(np.isnan(values), mean, values) - mean
        if constant:
            scaled[np.abs(scaled) <= _LAST_BITS * noise] = 0.0
        else:
            scaled /= deviation
        return narrowed(field, scaled, np.dtype(np.float32)).reshape(-1, 1)

    return {field.name: at_once(TensorSpec(shape=(1,), dtype="float32"), transform)}


def number(field: Field, encoding: Encoding | None) -> Plan:
    """The value itself, by default as float32."""
    dtype = np.dtype((encoding or {}).get("dtype", "float32"))
    null = None if encoding is None else encoding.get("null_value")

    def transform(column: pa.Array) -> NDArray[Any]:
        if column.null_count and null is None:
            raise null_error(field)
        values = narrowed(field, plain_values(column), dtype, rounds=encoding is not None)
        if column.null_count:
            values[~np.asarray(column.is_valid())] = null
        return values.reshape(-1, 1)  # (n,) -> (n, 1): one input column

    # A number as it is, or a whole one that float32 holds (what `narrowed` refuses, who copies it finds).
    plain = field.dtype in ("int64", "float32") and not field.nullable and encoding is None
    return {field.name: at_once(TensorSpec(shape=(1,), dtype=dtype.name), transform, field.dtype if plain else None)}


def sequence(field: Field, encoding: Encoding, fitted: Fitted | None) -> Plan:
    """The first or last `length` values of each list, then padding; beside them a mask or the number of values."""
    of = encoding.get("of")
    return as_sequence(field, encoding, *((None, 0) if of is None else columns_of(field, of, fitted)))


def as_sequence(field: Field, encoding: Encoding, columns: Columns | None, size: int) -> Plan:
    """A sequence of the values themselves, or, with `columns`, of ids 0..size."""
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
    plan: Plan = {field.name: Made(spec=spec, early=early, row=value, lists=True, late=padded)}
    if encoding.get("with", "mask") == "mask":
        mask = TensorSpec(shape=(length,), dtype="float32")
        plan[f"{field.name}_mask"] = Made(
            spec=mask, early=counted, row=one, late=lambda counts: (at < counts[:, None]).astype(np.float32)
        )
    elif encoding["with"] == "length":
        spec_of_length = TensorSpec(shape=(1,), dtype="int64")
        plan[f"{field.name}_length"] = at_once(spec_of_length, lambda column: counted(column).reshape(-1, 1))
    return plan


def kept_of(encoding: Encoding, column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the values of each row's sequence begin in the flattened column, and how many they are: (n,) each."""
    return _kept(encoding, np.asarray(pc.list_value_length(column)).astype(np.int64))


def _kept(encoding: Encoding, sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    counts, ends = np.minimum(sizes, int(encoding["length"])), np.cumsum(sizes)
    return (ends - counts if encoding.get("keep") == "last" else ends - sizes), counts


def sequence_values(field: Field, columns: Columns | None, column: pa.Array) -> NDArray[Any]:
    """All values of a column of lists end to end, as float32, or as ids with `columns`."""
    flat = column.flatten()
    return narrowed(field, plain_values(flat), np.dtype(np.float32)) if columns is None else columns(flat) + 1


def plain_values(column: pa.Array) -> NDArray[Any]:
    """The numbers of a column, 0 for null; bool as uint8, decimals as the uint64 that they stand for."""
    plain = column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else _unsigned(column)
    return np.asarray(plain.fill_null(0) if plain.null_count else plain)


def _unsigned(column: pa.Array) -> pa.Array:
    return column.cast(pa.uint64()) if pa.types.is_decimal(column.type) else column


def narrowed(field: Field, values: NDArray[Any], dtype: np.dtype[Any], *, rounds: bool = False) -> NDArray[Any]:
    """A copy as `dtype`: fractions are rounded to nearest. Raises DataError for what would become another number.

    That is a number that would become infinite or has no place in int64, and a whole number that is not the same as a
    float, unless the schema asks for it (`rounds`).
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if (dtype.kind != "f" and values.dtype != np.uint64) or not len(values):
        return narrow
    whole = dtype.kind != "f" or (values.dtype.kind in "iu" and not rounds)
    # Up to there each whole number is a float, or an int64.
    limit = 1 << np.finfo(dtype).nmant + 1 if dtype.kind == "f" else (1 << 63) - 1
    wrong = (values > limit) | (values < -limit) if whole else np.isinf(narrow) & np.isfinite(values)
    if wrong.any():
        raise DataError(
            f"a value of field `{field.name}` would become another number as {dtype.name}",
            got=str(values[np.flatnonzero(wrong)[0]]),
            allowed=f"whole numbers up to {limit} either way" if whole else f"up to {np.finfo(dtype).max}",
            next_step="Declare an encoding: hash or vocabulary for ids, bucketise or standardise for amounts, number to"
            " round or to feed another dtype.",
        )
    return narrow


def null_error(field: Field) -> DataError:
    """A null where none may be."""
    return DataError(
        f"field `{field.name}` is null",
        got="null",
        allowed="a value in each row",
        next_step="Run `python -m jobs.verify URL`.",
    )


def unfit(
    field: Field, got: str, allowed: str, next_step: str = "Give the field an encoding in its schema."
) -> ConfigError:
    """A field that no model can be fed with as it is declared."""
    return ConfigError(
        f"field `{field.name}` cannot be fed to a model",
        got=got,
        allowed=allowed,
        next_step=next_step,
    )
