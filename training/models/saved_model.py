"""A model as a TensorFlow SavedModel, which loads without Keras and Lockstep.

Signatures: `serving_default` takes the encoded features by name, as signature.json lists them. `raw` takes the declared
columns, (n,) each, and does in TensorFlow what the encoder of lockstep.features.encode does; a nullable column NAME has
a second input NAME_is_null (n,) bool; lists NAME are padded, (n, m), with a second input NAME_length (n,) int64. It is
left out if a column's encoding cannot be computed there.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
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
from lockstep.training.models.on_disk import plain_layers, upload
from lockstep.training.models.saved_images import decoded
from lockstep.training.steps.patching import swapped

Encode = Callable[[tf.Tensor, tf.Tensor | None], tf.Tensor]
"""Turns values (n, ...) and whether each is null (n,), or None, into the model's input."""
Inputs = Callable[[tf.Tensor, tf.Tensor | None], dict[str, tf.Tensor]]
"""Turns a column and its second input, if it has one, into the model's inputs by name."""
_PRIMES = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261)


class _NotRawError(LockstepError):
    """TensorFlow cannot encode a column; the text is the reason."""


def export_saved_model(
    model: keras.Model, directory: str, signature: Signature, schema: Schema, fitted: Mapping[str, Fitted]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Write the SavedModel's files to `directory`; `schema` declares the raw columns.

    Returns {name, bytes, sha256} of each file, and the reason for each column that keeps it from a signature `raw`.
    """
    archive = keras.export.ExportArchive()
    archive.track(model)

    def endpoint(name: str, specs: Mapping[str, tf.TensorSpec], outputs: Callable[[Any], Any]) -> None:
        names = input_names(specs)
        given = {safe: tf.TensorSpec(specs[own].shape, specs[own].dtype, name=safe) for own, safe in names.items()}

        def call(x: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return _named(outputs({own: x[safe] for own, safe in names.items()}))

        archive.add_endpoint(name, call, input_signature=[given])

    fed = {name: tf.TensorSpec((None, *spec.shape), spec.dtype) for name, spec in signature.features.items()}
    endpoint("serving_default", fed, lambda x: model(x, training=False))
    columns: dict[str, tf.TensorSpec] = {}
    encodes: dict[str, tuple[Field, Inputs]] = {}
    reasons: dict[str, str] = {}
    for field in schema.features:
        if (field.encoding or {}).get("kind") == "ignore":
            continue
        try:
            encodes[field.name] = field, _inputs(field, fitted.get(field.name), archive)
            if (second := _second(field)) in {other.name for other in schema.features}:
                raise _NotRawError(f"its second input would be called `{second}`, like another column")
        except _NotRawError as error:
            reasons[field.name] = error.what
        kind = "string" if field.dtype in ("string", "bytes") else field.dtype
        columns[field.name] = tf.TensorSpec((None, *field.shape), kind)
        if second := _second(field):
            columns[second] = tf.TensorSpec((None,), "int64" if field.is_list else "bool")
    if not reasons:

        def raw(x: dict[str, tf.Tensor]) -> Any:
            fed: dict[str, tf.Tensor] = {}
            for name, (field, inputs) in encodes.items():
                fed |= inputs(x[name], x.get(_second(field)))
            return model(fed, training=False)

        endpoint("raw", columns, raw)
    with tempfile.TemporaryDirectory() as folder, plain_layers(model), ExitStack() as stack:
        for tensor in (variable.value for variable in model.variables):
            if tensor._handle_name.startswith("_"):  # such as the layers of `logistic`; TensorFlow cannot copy these
                stack.enter_context(swapped(tensor, "_handle_name", f"variable{tensor._handle_name}"))
        archive.write_out(folder, verbose=False)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return [upload(path, directory, path.relative_to(folder).as_posix()) for path in paths], reasons


def input_names(names: Iterable[str]) -> dict[str, str]:
    """The name of each input in a signature: letters, digits and `_` of ASCII after a letter, and each once."""
    found: dict[str, str] = {}
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9_]", "_", name)
        safe = safe if safe[0].isalpha() and safe != "self" else f"arg_{safe}"
        while safe in found.values():
            safe += "_"
        found[name] = safe
    return found


def _second(field: Field) -> str:
    """The name of a column's second input, "" if it has none."""
    return f"{field.name}_length" if field.is_list else f"{field.name}_is_null" if field.nullable else ""


def _named(outputs: Any) -> dict[str, tf.Tensor]:
    """A model's outputs by name: `prediction` for a single one."""
    flat = keras.tree.flatten(outputs)
    if len(flat) == 1:
        return {"prediction": flat[0]}
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return {f"prediction_{number}": output for number, output in enumerate(flat)}


def _inputs(field: Field, fitted: Fitted | None, archive: keras.export.ExportArchive) -> Inputs:
    """The field's encoding in TensorFlow. Raises _NotRawError."""
    if field.dtype == "uint64":
        raise _NotRawError("a TensorFlow signature cannot take uint64")
    if field.is_list:
        return _lists(field, fitted, archive)
    encode = _encode(field, fitted, archive)
    return lambda values, null: {field.name: encode(values, null)}


def _encode(field: Field, fitted: Fitted | None, archive: keras.export.ExportArchive) -> Encode:
    encoding = field.encoding or {}
    kind = encoding.get("kind", "number")
    if kind == "image":
        height, width, channels = (int(encoding[key]) for key in ("height", "width", "channels"))
        fit, scaled = str(encoding.get("fit", "resize")), _tensor(field)
        return lambda files, null: scaled(decoded(files, height, width, channels, fit), null)
    if field.is_tensor:
        return _tensor(field)
    if kind == "number":
        return _number(field)
    if kind in ("log", "clip"):
        return _bent(encoding)
    if kind == "standardise":
        assert isinstance(fitted, Moments)
        return _standardised(field, fitted)
    found, size = _categories(field, encoding, fitted, archive)
    is_index = output_of(encoding, is_list=False) == INDEX

    def encode(values: tf.Tensor, null: tf.Tensor | None) -> tf.Tensor:
        ids = found(values)  # -1: none of them
        if null is not None:
            ids = tf.where(null, tf.constant(-1, tf.int64), ids)
        return tf.reshape(ids + 1, (-1, 1)) if is_index else tf.one_hot(ids, size, dtype=tf.float32)

    return encode


def _categories(
    field: Field, encoding: Mapping[str, Any], fitted: Fitted | None, archive: keras.export.ExportArchive
) -> tuple[Callable[[tf.Tensor], tf.Tensor], int]:
    """Return the function from values (n,) to categories (n,) int64, -1 for none of them, and how many there are."""
    if encoding["kind"] == "hash":
        size = int(encoding["buckets"])
        return partial(_bucket, size=size, seed=int(encoding["seed"])), size
    if encoding["kind"] == "vocabulary":
        assert isinstance(fitted, Vocabulary)
        return _vocabulary(fitted, int(encoding["oov_buckets"]), archive)
    if encoding["kind"] == "bucketise":
        return _buckets(field, encoding["boundaries"]), len(encoding["boundaries"]) + 1
    raise _NotRawError(f"the encoding {encoding['kind']} is not written in TensorFlow")


def _lists(field: Field, fitted: Fitted | None, archive: keras.export.ExportArchive) -> Inputs:
    """Multi-hot, or a sequence of values or ids with its mask or length, from padded lists (n, m) and lengths (n,)."""
    encoding = field.encoding or {}
    of = encoding if encoding["kind"] != "sequence" else encoding.get("of")
    found, size = (None, 0) if of is None else _categories(field, of, fitted, archive)

    def numbers(values: tf.Tensor) -> tf.Tensor:  # one column more, so that each row has a value to gather
        if found is None:
            table = tf.cast(values, tf.float32)
        else:
            table = tf.reshape(found(tf.reshape(values, (-1,))), tf.shape(values))  # (n * m,) -> (n, m)
        return tf.pad(table, [[0, 0], [0, 1]])

    def multi_hot(values: tf.Tensor, lengths: Any) -> dict[str, tf.Tensor]:
        ids = numbers(values)
        inside = (tf.range(tf.shape(ids)[1], dtype=tf.int64) < lengths[:, None]) & (ids >= 0)
        rows = tf.where(inside)[:, 0]
        hot = tf.zeros((tf.shape(ids)[0], size))
        places = tf.stack([rows, tf.boolean_mask(ids, inside)], axis=1)
        return {field.name: tf.tensor_scatter_nd_update(hot, places, tf.ones(tf.shape(rows)))}

    def sequence(values: tf.Tensor, lengths: Any) -> dict[str, tf.Tensor]:
        rows, length = numbers(values), int(encoding["length"])
        counts = tf.minimum(lengths, length)
        starts = lengths - counts if encoding.get("keep") == "last" else tf.zeros_like(counts)
        at = tf.range(length, dtype=tf.int64)
        inside = at < counts[:, None]
        kept = tf.gather(rows, tf.where(inside, starts[:, None] + at, 0), batch_dims=1)
        pad = tf.constant(encoding.get("pad_value", 0) if found is None else -1, kept.dtype)
        kept = tf.where(inside, kept, pad)
        extra = {"mask": tf.cast(inside, tf.float32), "length": counts[:, None]}
        fed = {field.name: kept if found is None else kept + 1}
        return fed | {f"{field.name}_{name}": extra[name] for name in [encoding.get("with", "mask")] if name in extra}

    return sequence if encoding["kind"] == "sequence" else multi_hot


def _bucket(values: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    return tf.math.floormod(xxh64(values, seed), tf.constant(size, tf.int64))


def _tensor(field: Field) -> Encode:
    encoding = field.encoding or {}
    if "mean" not in encoding:
        return lambda values, null: values
    work = np.dtype(np.float32 if field.dtype in ("uint8", "float32", "bytes") else np.float64)  # bytes: of pixels
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


def _bent(encoding: Mapping[str, Any]) -> Encode:
    """A log or a clip, as lockstep/features/encode/transforms.py computes them."""
    null_value = tf.constant(encoding.get("null_value", 0), tf.float64)

    def encode(values: tf.Tensor, null: tf.Tensor | None) -> tf.Tensor:
        wide = tf.cast(values, tf.float64)
        missing = tf.math.is_nan(wide) if null is None else tf.math.is_nan(wide) | null
        if encoding["kind"] == "log":
            bent = tf.sign(wide) * tf.math.log1p(tf.abs(wide))
        else:
            bent = tf.clip_by_value(wide, float(encoding["least"]), float(encoding["most"]))
        return tf.reshape(tf.cast(tf.where(missing, null_value, bent), tf.float32), (-1, 1))

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
