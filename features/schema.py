"""The declared schema of a dataset: what each field is on disk and how it becomes a model's input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import pyarrow as pa

from features.encodings import Encoding, check_encoding, fitted_part
from storage.errors import ConfigError

ARROW_TYPES: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "uint8": pa.uint8(),
}
KINDS = ("feature", "label", "id", "weight")
TENSOR_DTYPES = ("uint8", "float32", "float64", "int64")
_MAX_TENSOR_BYTES = (1 << 31) - 1  # what Arrow's offsets reach, and a forged manifest may name any number
SAMPLE_ID = "sample_id"
EXAMPLE, SEQUENCE_EXAMPLE = "example", "sequence_example"


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One column of a dataset.

    `shape` is () for a scalar, (None,) for a list of any length, and all positive numbers for a tensor, which lies
    on disk as its little-endian bytes in C order. `encoding` says what features.encode makes of it when read: None or
    an object of features/encodings.py. Raises ConfigError where these do not fit together.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    kind: str = "feature"
    nullable: bool = False
    encoding: Encoding | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        self._check(bool(self.name) and not self.name.startswith("_"), repr(self.name), "a name not starting with `_`")
        wider = "; string for whole numbers beyond int64 and for decimals, which no other dtype holds exactly"
        self._check(self.dtype in ARROW_TYPES, f"dtype {self.dtype!r}", ", ".join(ARROW_TYPES) + wider)
        self._check(self.kind in KINDS, f"kind {self.kind!r}", ", ".join(KINDS))
        fixed = all(isinstance(size, int) and size > 0 for size in self.shape)
        self._check(fixed or self.shape == (None,), f"shape {self.shape}", "(), (None,) or positive sizes")
        self._check(
            not self.is_tensor or self.dtype in TENSOR_DTYPES, f"a tensor of {self.dtype}", ", ".join(TENSOR_DTYPES)
        )
        if self.is_tensor:
            sizes = cast(tuple[int, ...], self.shape)
            small = math.prod(sizes) * (ARROW_TYPES[self.dtype].bit_width // 8) <= _MAX_TENSOR_BYTES
            self._check(small, f"shape {sizes} of {self.dtype}", f"tensors of at most {_MAX_TENSOR_BYTES} bytes")
        self._check(
            self.dtype != "uint8" or self.is_tensor,
            "uint8 outside a tensor",
            "uint8 in tensors only; int64 for numbers",
        )
        self._check(not (self.is_list and self.nullable), "a nullable list", "an empty list where there is nothing")
        self._check(not (self.nullable and self.kind != "feature"), f"a nullable {self.kind}", "null in features only")
        classes = self.num_classes
        self._check(
            classes is None or (self.kind == "label" and classes >= 2),
            f"num_classes {classes}",
            "2 or more, on a label",
        )
        plain = self.kind != "weight" or (self.dtype == "float32" and not self.shape)
        self._check(plain, f"a weight of {self.dtype}, shape {self.shape}", "a scalar float32")
        if self.encoding is not None:
            self._check(self.kind == "feature", f"an encoding of a {self.kind}", "encodings of features")
            check_encoding(self.name, self.dtype, shape=self.shape, nullable=self.nullable, encoding=self.encoding)

    @property
    def is_list(self) -> bool:
        """Whether a row holds any number of values."""
        return self.shape == (None,)

    @property
    def is_tensor(self) -> bool:
        """Whether a row holds an array of fixed shape, as bytes on disk."""
        return len(self.shape) > 0 and not self.is_list

    @property
    def fitted_file(self) -> str | None:
        """The NAME.json of what is fitted for this field; None where nothing is."""
        part = fitted_part(self.encoding)
        return None if part is None else str(part["file"])

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of the column in Arrow and Parquet."""
        if self.is_tensor:
            return pa.binary()
        item = ARROW_TYPES[self.dtype]
        # Spark and Parquet call a list's values so: with the same name, schemas compare equal everywhere.
        return pa.list_(pa.field("element", item)) if self.is_list else item

    def to_json(self) -> dict[str, Any]:
        """The field as the manifest holds it."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "kind": self.kind,
            "nullable": self.nullable,
            "encoding": None if self.encoding is None else dict(self.encoding),
            "num_classes": self.num_classes,
        }

    @classmethod
    def from_json(cls, document: object) -> Field:
        """Rebuild a field; raises ConfigError for missing or unknown keys and wrong types."""
        wanted = {
            "name": str,
            "dtype": str,
            "shape": list,
            "kind": str,
            "nullable": bool,
            "encoding": dict | None,
            "num_classes": int | None,
        }
        _check_keys(document, wanted, "a field")
        values = cast(dict[str, Any], document)
        if not all(size is None or (isinstance(size, int) and not isinstance(size, bool)) for size in values["shape"]):
            raise _bad("a field", f"shape {values['shape']!r}", "numbers or null")
        return cls(**{**values, "shape": tuple(values["shape"])})

    def _check(self, good: bool, got: str, allowed: str) -> None:
        if not good:
            raise _bad(f"field `{self.name}`", got, allowed)


@dataclass(frozen=True)
class Schema:
    """The fields of a dataset, in the order of its columns; exactly one `id` field, at most one label and one weight.

    `record` says what a TFRecord shard's records are: Examples, or SequenceExamples, in which lists are feature lists.
    """

    fields: tuple[Field, ...]
    record: str = EXAMPLE

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise _bad("the schema", f"fields {names}", "each name once")
        ids = [field for field in self.fields if field.kind == "id"]
        if len(ids) != 1 or ids[0].dtype != "int64" or ids[0].shape:
            raise _bad(
                "the schema", f"id fields {[field.name for field in ids]}", "exactly one scalar int64 field of kind id"
            )
        if sum(field.kind == "label" for field in self.fields) > 1:
            raise _bad("the schema", "several labels", "at most one")
        files = [field.fitted_file for field in self.fitted_fields]
        if len(set(files)) != len(files):
            raise _bad("the schema", f"fitted files {files}", "a file for each field")
        if sum(field.kind == "weight" for field in self.fields) > 1:
            raise _bad("the schema", "several weights", "at most one")
        if self.record not in (EXAMPLE, SEQUENCE_EXAMPLE):
            raise _bad("the schema", f"record {self.record!r}", f"{EXAMPLE}, {SEQUENCE_EXAMPLE}")
        if self.record == SEQUENCE_EXAMPLE and not any(field.is_list for field in self.fields):
            raise _bad("the schema", f"record {self.record} without a list", "a list field or more, or record example")

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise _bad("the schema", f"no field `{name}`", ", ".join(field.name for field in self.fields))

    @property
    def id_field(self) -> Field:
        """The field that holds the sample id."""
        return next(field for field in self.fields if field.kind == "id")

    @property
    def label(self) -> Field | None:
        """The field to predict, or None."""
        return next((field for field in self.fields if field.kind == "label"), None)

    @property
    def features(self) -> tuple[Field, ...]:
        """The fields that a model may see."""
        return tuple(field for field in self.fields if field.kind == "feature")

    @property
    def weight(self) -> Field | None:
        """The field that says how much a sample counts in training, or None."""
        return next((field for field in self.fields if field.kind == "weight"), None)

    @property
    def fitted_fields(self) -> tuple[Field, ...]:
        """The fields whose encoding needs statistics of the training split."""
        return tuple(field for field in self.fields if field.fitted_file is not None)

    @cached_property
    def in_byte_order(self) -> tuple[Field, ...]:
        """The fields in the byte order of their names: their order in a tf.Example."""
        return tuple(sorted(self.fields, key=lambda field: field.name.encode()))

    def arrow_schema(self) -> pa.Schema:
        """The columns as Arrow and Parquet hold them."""
        return pa.schema([pa.field(field.name, field.arrow_type, nullable=field.nullable) for field in self.fields])

    @classmethod
    def plain(cls, columns: Mapping[str, str], *, label: str | None = None, lists: Sequence[str] = ()) -> Schema:
        """Columns by name and dtype, stored as they are and without an encoding; `lists` names those that hold lists.

        All but the label may be null, lists excepted. The sample id comes first. A model can be fed with the numbers
        among them only; the others need an encoding. Raises ConfigError as Field and Schema do.
        """
        fields = [
            Field(
                name=name,
                dtype=dtype,
                shape=(None,) if name in lists else (),
                kind="label" if name == label else "feature",
                nullable=name != label and name not in lists,
            )
            for name, dtype in columns.items()
        ]
        return cls((sample_id_field(), *fields))

    def to_json(self) -> dict[str, Any]:
        """The schema as the manifest holds it."""
        record = {} if self.record == EXAMPLE else {"record": self.record}
        return {"fields": [field.to_json() for field in self.fields], **record}

    @classmethod
    def from_json(cls, document: object) -> Schema:
        """Rebuild a schema; raises ConfigError for anything but what to_json gives."""
        extra = {"record": str} if isinstance(document, Mapping) and "record" in document else {}
        _check_keys(document, {"fields": list, **extra}, "the schema")
        values = cast(dict[str, Any], document)
        return cls(tuple(Field.from_json(field) for field in values["fields"]), values.get("record", EXAMPLE))


def sample_id_field() -> Field:
    """The field that each dataset of ours has: the sample id, signed int64."""
    return Field(name=SAMPLE_ID, dtype="int64", kind="id")


def _bad(what: str, got: str, allowed: str) -> ConfigError:
    return ConfigError(f"{what} cannot be declared so", got=got, allowed=allowed, next_step="Correct the schema.")


def _check_keys(document: object, wanted: Mapping[str, Any], what: str) -> None:
    if not isinstance(document, Mapping) or set(document) != set(wanted):
        got: Sequence[str] | str = (
            sorted(map(str, document)) if isinstance(document, Mapping) else type(document).__name__
        )
        raise _bad(what, f"keys {got}", f"exactly {', '.join(wanted)}")
    for key, kind in wanted.items():
        value = document[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _bad(what, f"{key} = {value!r}", f"{key} of type {kind}")
