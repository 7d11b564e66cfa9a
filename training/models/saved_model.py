"""A model as a TensorFlow SavedModel, which loads without Keras and Lockstep.

Signatures: `serving_default` takes the encoded features by name, as signature.json lists them. `raw` takes the declared
columns, (n,) each, and does in TensorFlow what the encoder of lockstep.features.encode does; a nullable column NAME has
a second input NAME_is_null (n,) bool. It is left out if a column's encoding cannot be computed there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.features.encode.transforms import constant_within
from lockstep.features.schema.encodings import INDEX, output_of
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Fitted, Moments, Vocabulary
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import LockstepError
from training.models.on_disk import plain_layers, upload
from training.steps.patching import swapped

Encode = Callable[[tf.Tensor, tf.Tensor | None], tf.Tensor]
"""From values (n, ...) and whether each is null (n,), or None, to the model's input."""
_PRIMES = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261)


class _NotRawError(LockstepError):
    """TensorFlow cannot encode a column; the text is the reason."""


def export_saved_model(
    model: keras.Model, directory: str, signature: Signature, schema: Schema, fitted: Mapping[str, Fitted]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Write the SavedModel's files to `directory`; `schema` declares the raw columns.

    Returns {name, bytes, sha256} of each file, and the reason for each column that keeps it from a signature `raw`.
    """
    specs = {
        name: tf.TensorSpec((None, *spec.shape), spec.dtype, name=name) for name, spec in signature.features.items()
    }
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serving_default", lambda x: _named(model(x, training=False)), input_signature=[specs])
    columns: dict[str, tf.TensorSpec] = {}
    encodes: dict[str, tuple[Field, Encode]] = {}
    reasons: dict[str, str] = {}
    for field in schema.features:
        if (field.encoding or {}).get("kind") == "ignore":
            continue
        try:
            encodes[field.name] = field, _encode(field, fitted.get(field.name), archive)
        except _NotRawError as error:
            reasons[field.name] = error.what
        kind = "string" if field.dtype in ("string", "bytes") else field.dtype
        columns[field.name] = tf.TensorSpec((None, *(field.shape if field.is_tensor else ())), kind, name=field.name)
        if field.nullable:
            columns[_null(field)] = tf.TensorSpec((None,), "bool", name=_null(field))
    if not reasons:

        def raw(x: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            fed = {name: encode(x[name], x.get(_null(field))) for name, (field, encode) in encodes.items()}
            return _named(model(fed, training=False))

        archive.add_endpoint("raw", raw, input_signature=[columns])
    with tempfile.TemporaryDirectory() as folder, plain_layers(model), ExitStack() as stack:
        for tensor in (variable.value for variable in model.variables):
            if tensor._handle_name.startswith("_"):  # such as the layers of `logistic`; TensorFlow cannot copy these
                stack.enter_context(swapped(tensor, "_handle_name", f"variable{tensor._handle_name}"))
        archive.write_out(folder, verbose=False)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return [upload(path, directory, path.relative_to(folder).as_posix()) for path in paths], reasons


def _null(field: Field) -> str:
    return f"{field.name}_is_null"


def _named(outputs: Any) -> dict[str, tf.Tensor]:
    """A model's outputs by name: `prediction` for a single one."""
    flat = keras.tree.flatten(outputs)
    if len(flat) == 1:
        return {"prediction": flat[0]}
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return {f"prediction_{number}": output for number, output in enumerate(flat)}


def _encode(field: Field, fitted: Fitted | None, archive: keras.export.ExportArchive) -> Encode:
    """The field's encoding in TensorFlow. Raises _NotRawError."""
    encoding = field.encoding or {}
    kind = encoding.get("kind", "number")
    if field.is_list or field.dtype == "uint64" or kind == "image":
        kind_of = "a list" if field.is_list else "uint64" if field.dtype == "uint64" else "an encoded image"
        raise _NotRawError(f"a TensorFlow signature cannot take {kind_of}")
    if field.is_tensor:
        return _tensor(field)
    if kind == "number":
        return _number(field)
    if kind == "standardise":
        assert isinstance(fitted, Moments)
        return _standardised(field, fitted)
    found: Callable[[tf.Tensor], tf.Tensor]
    if kind == "hash":
        size = int(encoding["buckets"])
        found = partial(_bucket, size=size, seed=int(encoding["seed"]))
    elif kind == "vocabulary":
        assert isinstance(fitted, Vocabulary)
        found, size = _vocabulary(fitted, int(encoding["oov_buckets"]), archive)
    elif kind == "bucketise":
        found, size = _buckets(field, encoding["boundaries"]), len(encoding["boundaries"]) + 1
    else:
        raise _NotRawError(f"the encoding {kind} is not written in TensorFlow")
    is_index = output_of(encoding, is_list=False) == INDEX

    def encode(values: tf.Tensor, null: tf.Tensor | None) -> tf.Tensor:
        ids = found(values)  # -1: none of them
        if null is not None:
            ids = tf.where(null, tf.constant(-1, tf.int64), ids)
        return tf.reshape(ids + 1, (-1, 1)) if is_index else tf.one_hot(ids, size, dtype=tf.float32)

    return encode


def _bucket(values: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    return tf.math.floormod(xxh64(values, seed), tf.constant(size, tf.int64))


def _tensor(field: Field) -> Encode:
    encoding = field.encoding or {}
    if "mean" not in encoding:
        return lambda values, null: values
    work = np.dtype(np.float32 if field.dtype in ("uint8", "float32") else np.float64)
    deviation = np.array(encoding["deviation"], np.float64)
    scale = (1.0 / (float(encoding.get("divide_by", 1)) * deviation)).astype(work)
    shift = (-np.array(encoding["mean"], np.float64) / deviation).astype(work)
    return lambda values, null: tf.cast(tf.cast(values, work) * scale + shift, tf.float32)


def _number(field: Field) -> Encode:
    encoding = field.encoding or {}
    dtype, replaced = tf.as_dtype(encoding.get("dtype", "float32")), encoding.get("null_value")

    def encode(values: tf.Tensor, null: tf.Tensor | None) -> tf.Tensor:
        numbers = tf.cast(values, dtype)
        if null is not None:
            numbers = tf.where(null, tf.constant(replaced, dtype), numbers)
        return tf.reshape(numbers, (-1, 1))

    return encode


def _standardised(field: Field, fitted: Moments) -> Encode:
    mean, deviation = fitted.mean, float(np.sqrt(fitted.variance))
    limit = constant_within(field, mean, deviation)

    def encode(values: tf.Tensor, null: tf.Tensor | None) -> tf.Tensor:
        wide = tf.cast(values, tf.float64)
        missing = tf.math.is_nan(wide) if null is None else tf.math.is_nan(wide) | null
        scaled = tf.where(missing, tf.constant(mean, tf.float64), wide) - mean
        if limit is None:
            scaled = scaled / deviation
        else:
            scaled = tf.where(tf.abs(scaled) <= limit, tf.zeros_like(scaled), scaled)
        return tf.reshape(tf.cast(scaled, tf.float32), (-1, 1))

    return encode


def _buckets(field: Field, boundaries: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    exact = field.dtype == "int64"
    limits = np.iinfo(np.int64)
    whole = [max(int(np.ceil(bound)), limits.min) for bound in boundaries if np.ceil(bound) <= limits.max]
    bounds = tf.constant(whole if exact else boundaries, tf.int64 if exact else tf.float64)

    def found(values: tf.Tensor) -> tf.Tensor:
        cells = tf.cast(values, bounds.dtype)
        place = tf.cast(tf.searchsorted(bounds, cells, side="right"), tf.int64)
        return place if exact else tf.where(tf.math.is_nan(cells), tf.constant(-1, tf.int64), place)

    return found


def _vocabulary(
    fitted: Vocabulary, buckets: int, archive: keras.export.ExportArchive
) -> tuple[Callable[[tf.Tensor], tf.Tensor], int]:
    known = len(fitted.tokens)
    ids = tf.lookup.KeyValueTensorInitializer(tf.constant(fitted.tokens, tf.string), tf.range(known, dtype=tf.int64))
    table = tf.lookup.StaticHashTable(ids, default_value=-1)
    archive.track(table)

    def found(values: tf.Tensor) -> tf.Tensor:
        tokens = values if values.dtype == tf.string else tf.strings.as_string(values)  # int64 as decimal digits
        places = table.lookup(tokens)
        if buckets:
            places = tf.where(places < 0, known + _bucket(tokens, buckets, 0), places)
        return places

    return found, known + buckets


def xxh64(values: tf.Tensor, seed: int) -> tf.Tensor:
    """XXH64 of strings, or of int64 as 8 little-endian bytes: (n,) -> (n,) int64, as encode.hashing has it."""
    one, two, three, four, five = (tf.constant(prime, tf.uint64) for prime in _PRIMES)

    def left(x: tf.Tensor, bits: int) -> tf.Tensor:
        right = tf.bitwise.right_shift(x, tf.constant(64 - bits, tf.uint64))
        return tf.bitwise.left_shift(x, tf.constant(bits, tf.uint64)) | right

    def mixed(lane: tf.Tensor, word: tf.Tensor) -> tf.Tensor:
        return left(lane + word * two, 31) * one

    if values.dtype == tf.string:
        sizes = tf.strings.length(values, unit="BYTE")
        padded = (tf.reduce_max(tf.concat([sizes, [0]], 0)) // 32 + 1) * 32
        words = tf.bitcast(tf.io.decode_raw(values, tf.int64, fixed_length=padded), tf.uint64)  # (n, padded / 8)
    else:
        words = tf.pad(tf.bitcast(values, tf.uint64)[:, None], [[0, 0], [0, 3]])
        sizes = tf.fill(tf.shape(values), 8)
    stripes, start = sizes // 32, tf.fill(tf.shape(sizes), tf.constant(seed, tf.uint64))

    def stripe(number: tf.Tensor, *lanes: tf.Tensor) -> tuple[tf.Tensor, ...]:
        inside = number < stripes
        four_words = words[:, number * 4 : number * 4 + 4]
        return number + 1, *(tf.where(inside, mixed(lane, four_words[:, at]), lane) for at, lane in enumerate(lanes))

    first = (start + one + two, start + two, start, start - one)
    most = tf.reduce_max(tf.concat([stripes, [0]], 0))
    lanes = tf.while_loop(lambda number, *_: number < most, stripe, (0, *first))[1:]
    joined = left(lanes[0], 1) + left(lanes[1], 7) + left(lanes[2], 12) + left(lanes[3], 18)
    for lane in lanes:
        joined = (joined ^ mixed(tf.zeros_like(lane), lane)) * one + four
    found = tf.where(stripes > 0, joined, start + five) + tf.cast(sizes, tf.uint64)
    for at in range(3):  # the words after the last stripe
        word = tf.gather(words, tf.minimum(stripes * 4 + at, tf.shape(words)[1] - 1), batch_dims=1)
        after = left(found ^ mixed(tf.zeros_like(word), word), 27) * one + four
        found = tf.where(at < sizes % 32 // 8, after, found)
    rest = tf.gather(words, sizes // 8, batch_dims=1)  # the bytes after the last word; there is always one more
    has_four = sizes % 8 >= 4
    low = rest & tf.constant(0xFFFFFFFF, tf.uint64)
    found = tf.where(has_four, left(found ^ (low * one), 23) * two + three, found)
    rest = tf.where(has_four, tf.bitwise.right_shift(rest, tf.constant(32, tf.uint64)), rest)
    for at in range(3):
        byte = tf.bitwise.right_shift(rest, tf.constant(8 * at, tf.uint64)) & tf.constant(0xFF, tf.uint64)
        found = tf.where(at < sizes % 4, left(found ^ (byte * five), 11) * one, found)
    for bits, prime in ((33, two), (29, three), (32, None)):
        found = found ^ tf.bitwise.right_shift(found, tf.constant(bits, tf.uint64))
        found = found if prime is None else found * prime
    return tf.bitcast(found, tf.int64)
