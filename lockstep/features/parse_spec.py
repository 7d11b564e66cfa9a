"""Reading our TFRecords with TensorFlow only: the specification for tf.io.parse_example, and the last step after it.

    schema = dataset_schema(url)
    dataset = tf.data.TFRecordDataset(paths).batch(1024)
    dataset = dataset.map(lambda records: decode_parsed(schema, tf.io.parse_example(records, parse_spec(schema))))

lockstep/features/examples/example.py defines how values are stored. TensorFlow is imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.features.examples.example import BYTES_LIST, FLOAT_LIST, INT64_LIST, list_tag
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Schema
from lockstep.storage.dataset.manifest import load_dataset

# TensorFlow's type for each list of a Feature; float64 and uint64 values, text and tensors are bytes.
_LIST_TYPES = {BYTES_LIST: "string", FLOAT_LIST: "float32", INT64_LIST: "int64"}


def dataset_schema(url: str) -> Schema:
    """The schema of a published dataset, from its manifest. Raises NotFoundError or DataError as `read_manifest`.

    >>> from lockstep import data
    >>> [field.name for field in data.dataset_schema("data")]
    ['sample_id', 'a', 'b', 'label']
    """
    return Schema.from_json(load_dataset(url).schema)


def parse_spec(schema: Schema) -> dict[str, Any]:
    """Return the specification for tf.io.parse_example. Scalars that are never null have fixed length (n,); lists and
    nullable fields are ragged (n, None), where a null is an empty row.

    >>> from lockstep import data
    >>> spec = data.parse_spec(data.dataset_schema("data"))
    >>> spec["a"].shape, spec["a"].dtype.name
    ([], 'float32')
    """
    return {field.name: _feature(field) for field in schema}


def parse_sequence_spec(schema: Schema) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what tf.io.parse_sequence_example needs for a schema of SequenceExamples: (context features, sequence
    features).

    TensorFlow returns lists as ragged tensors (n, None, None) with one value in each innermost row. Merge the two
    dictionaries that it returns and pass them to `decode_parsed`, which makes these (n, None).

    >>> from lockstep import data
    >>> context, lists = data.parse_sequence_spec(data.dataset_schema("data"))
    >>> sorted(context), sorted(lists)
    (['a', 'b', 'label', 'sample_id'], [])
    """
    import tensorflow as tf

    context = {field.name: _feature(field) for field in schema if not field.is_list}
    lists = {
        field.name: tf.io.RaggedFeature(_list_type(field), row_splits_dtype=tf.int64)
        for field in schema
        if field.is_list
    }
    return context, lists


def decode_parsed(schema: Schema, parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Convert what tf.io.parse_example returns to the schema's types.

    Converts bool, float64, uint64 (n,) and tensors (n, *shape) from the int64 and bytes in which records store them;
    ragged tensors stay ragged. Strings remain tf.string in UTF-8.

    >>> import glob
    >>> import tensorflow as tf
    >>> from lockstep import data
    >>> schema = data.dataset_schema("data")
    >>> records = tf.data.TFRecordDataset(sorted(glob.glob("data/split=test/*.tfrecord"))).batch(30)
    >>> rows = data.decode_parsed(schema, tf.io.parse_example(next(iter(records)), data.parse_spec(schema)))
    >>> rows["label"].dtype.name, tuple(rows["a"].shape)
    ('bool', (30,))
    """
    import tensorflow as tf

    decoded = {}
    for field in schema:
        value = parsed[field.name]
        if field.is_list and schema.record == SEQUENCE_EXAMPLE:
            value = value.merge_dims(1, 2)
        if isinstance(value, tf.RaggedTensor):
            decoded[field.name] = value.with_flat_values(_decoded(field, value.flat_values))
        else:
            decoded[field.name] = _decoded(field, value)
    return decoded


def _feature(field: Field) -> Any:
    import tensorflow as tf

    dtype = _list_type(field)
    if field.is_list or field.nullable:
        return tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)
    return tf.io.FixedLenFeature([], dtype)


def _list_type(field: Field) -> Any:
    import tensorflow as tf

    return tf.as_dtype(_LIST_TYPES[list_tag(field)])


def _decoded(field: Field, values: Any) -> Any:
    """Parsed values (m,) -> (m,) or (m, *shape) in the field's dtype."""
    import tensorflow as tf

    if field.dtype == "bool":
        return tf.cast(values, tf.bool)
    if field.dtype == "uint64":  # which decode_raw does not know
        return tf.reshape(tf.bitcast(tf.io.decode_raw(values, tf.int64, little_endian=True), tf.uint64), [-1])
    if field.is_tensor or field.dtype == "float64":
        raw = tf.io.decode_raw(values, tf.as_dtype(field.dtype), little_endian=True)  # (m, items)
        return tf.reshape(raw, [-1, *field.shape] if field.is_tensor else [-1])
    return values
