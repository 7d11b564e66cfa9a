"""One declared field: its type on disk and how it becomes a model's input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa

from lockstep.features.schema.encodings import (
    BAKED,
    INDEX,
    MAX_COLUMNS,
    MAX_IDS,
    RAW_KEYS,
    Encoding,
    check_encoding,
    declaration_error,
    declared_ids,
    fitted_part,
    has_ids,
    output_of,
    stored_form,
)
from lockstep.storage.errors import nearest

ARROW_TYPES: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    # Spark has no unsigned 64-bit type and Petastorm skips such columns; both read decimals without loss.
    "uint64": pa.decimal128(20, 0),
    "bool": pa.bool_(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "uint8": pa.uint8(),
}
KINDS = ("feature", "label", "id", "weight")
TENSOR_DTYPES = ("uint8", "float32", "float64", "int64")
_MAX_TENSOR_BYTES = (1 << 31) - 1  # the limit of Arrow's offsets; a forged manifest may declare any size
SAMPLE_ID = "sample_id"
_VALUE = bool | int | float | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One column of a dataset.

    `shape` is () for a scalar, (None,) for a list of any length, and all positive numbers for a tensor, which is stored
    as its little-endian bytes in C order. `encoding` is None or an object of lockstep/features/schema/encodings.py,
    which lockstep/features/encode/encoder.py applies when the column is read. Raises ConfigError for attributes that do
    not fit together.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    kind: str = "feature"
    nullable: bool = False
    encoding: Encoding | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    """The names of a label's values 0, 1 ..., or of no and yes; None for other fields and numbers."""
    default: bool | int | float | str | None = None
    """The value of records of an earlier dataset that does not have the field; None: it must have it."""

    def __post_init__(self) -> None:
        wider = "; string for integers beyond uint64 and for decimals, which no other dtype holds exactly"
        self._check(self.dtype in ARROW_TYPES, f"dtype {self.dtype!r}", ", ".join(ARROW_TYPES) + wider)
        self._check(self.kind in KINDS, f"kind {self.kind!r}", ", ".join(KINDS))
        fixed = all(isinstance(size, int) and size > 0 for size in self.shape)
        flat = "(), (None,) for a list, or positive sizes"
        if len(self.shape) > 1 and None in self.shape:
            flat += "; for a list of lists one list of all values, and a second one of the lengths of its parts"
        self._check(fixed or self.shape == (None,), f"shape {self.shape}", flat)
        self._check(
            not self.is_tensor or self.dtype in TENSOR_DTYPES, f"a tensor of {self.dtype}", ", ".join(TENSOR_DTYPES)
        )
        if self.is_tensor:
            small = self.tensor_bytes <= _MAX_TENSOR_BYTES
            self._check(small, f"shape {self.shape} of {self.dtype}", f"tensors of at most {_MAX_TENSOR_BYTES} bytes")
        self._check(
            self.dtype != "uint8" or self.is_tensor,
            "uint8 outside a tensor",
            "uint8 in tensors only; int64 for numbers",
        )
        self._check(not (self.is_list and self.nullable), "a nullable list", "an empty list in place of null")
        self._check(not (self.nullable and self.kind != "feature"), f"a nullable {self.kind}", "null in features only")
        classes = self.num_classes
        self._check(
            classes is None or (self.kind == "label" and classes >= 2),
            f"num_classes {classes}",
            "2 or more, on a label",
        )
        if self.class_names is not None:
            self._check_class_names(self.class_names)
        plain = self.kind != "weight" or (self.dtype == "float32" and not self.shape)
        self._check(plain, f"a weight of {self.dtype}, shape {self.shape}", "a scalar float32")
        if self.encoding is not None:
            self._check(self.kind == "feature", f"an encoding of a {self.kind}", "encodings of features")
            check_encoding(self.name, self.dtype, shape=self.shape, nullable=self.nullable, encoding=self.encoding)
        if self.default is not None:
            self._check_default(self.default)
        if self.is_baked:
            self._check_baked()

    @property
    def is_list(self) -> bool:
        """Whether each row has any number of values."""
        return self.shape == (None,)

    @property
    def is_tensor(self) -> bool:
        """Whether each row has an array of a fixed shape, stored as bytes."""
        return len(self.shape) > 0 and not self.is_list

    @property
    def is_baked(self) -> bool:
        """Whether the stored values are a model's inputs: lockstep/features/encode/bake.py."""
        return self.encoding is not None and self.encoding["kind"] == BAKED

    @property
    def declared(self) -> Field:
        """The field as it was declared before its encoding was baked in; itself where it is not baked."""
        if self.encoding is None or not self.is_baked:
            return self
        raw: Mapping[str, Any] = self.encoding["raw"]
        return Field(**{**raw, "name": self.name, "shape": tuple(raw["shape"])})

    @property
    def tensor_bytes(self) -> int:
        """The bytes that a tensor of this field takes."""
        return math.prod(cast(tuple[int, ...], self.shape)) * (ARROW_TYPES[self.dtype].bit_width // 8)

    @property
    def fitted_file(self) -> str | None:
        """The NAME.json with the statistics fitted for this field; None if its encoding needs none."""
        part = fitted_part(self.encoding)
        return None if part is None else str(part["file"])

    @property
    def arrow_type(self) -> pa.DataType:
        """The type of the column in Arrow and Parquet."""
        return self._column_of(ARROW_TYPES[self.dtype])

    @property
    def record_type(self) -> pa.DataType:
        """The type of the column with values as records store them: uint64 in place of decimals."""
        return self._column_of(pa.uint64() if self.dtype == "uint64" else ARROW_TYPES[self.dtype])

    def _column_of(self, item: pa.DataType) -> pa.DataType:
        if self.is_tensor:
            return pa.binary()
        # The name that Spark and Parquet give to a list's values: so schemas compare equal everywhere.
        return pa.list_(pa.field("element", item)) if self.is_list else item

    def to_json(self) -> dict[str, Any]:
        """The field as a manifest stores it; `class_names` and `default` only where they are set."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "kind": self.kind,
            "nullable": self.nullable,
            "encoding": None if self.encoding is None else dict(self.encoding),
            "num_classes": self.num_classes,
            **({} if self.class_names is None else {"class_names": list(self.class_names)}),
            **({} if self.default is None else {"default": self.default}),
        }

    @classmethod
    def from_json(cls, document: object) -> Field:
        """Rebuild a field; raises ConfigError for missing or unknown keys and wrong types."""
        wanted: dict[str, Any] = {
            "name": str,
            "dtype": str,
            "shape": list,
            "kind": str,
            "nullable": bool,
            "encoding": dict | None,
            "num_classes": int | None,
        }
        more: dict[str, Any] = {"class_names": list, "default": _VALUE}
        wanted |= {key: kind for key, kind in more.items() if isinstance(document, Mapping) and key in document}
        check_keys(document, wanted, "a field")
        values = cast(dict[str, Any], document)
        if not all(size is None or (isinstance(size, int) and not isinstance(size, bool)) for size in values["shape"]):
            raise declaration_error("a field", f"shape {values['shape']!r}", "numbers or null")
        names = {"class_names": tuple(values["class_names"])} if "class_names" in values else {}
        return cls(**{**values, "shape": tuple(values["shape"]), **names})

    def _check_class_names(self, names: tuple[str, ...]) -> None:
        texts = all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names)
        wanted = 2 if self.dtype == "bool" else self.num_classes
        good = self.kind == "label" and self.dtype in ("bool", "int64") and len(names) == wanted
        allowed = "of a label, a different text for each class: of a bool no and yes, of an int64 num_classes"
        self._check(texts and good, f"class_names {list(names)}"[:200], allowed)

    def _check_default(self, value: object) -> None:
        """Raise ConfigError unless the field may be missing in an earlier dataset, and a record may hold this value."""
        plain = self.nullable and not self.shape and self.dtype != "bytes"
        what = f"a default of a {self.kind} of {self.dtype}, shape {self.shape}, nullable={self.nullable}"
        self._check(plain, what, "a default of a nullable feature that is one number, text or bool")
        kind = {"bool": bool, "string": str, "int64": int, "uint64": int}.get(self.dtype, int | float)
        fits = isinstance(value, kind) and isinstance(value, bool) == (self.dtype == "bool")
        if fits and self.dtype != "string":
            try:
                fits = math.isfinite(pa.scalar(value, self.record_type).as_py())
            except (pa.ArrowInvalid, OverflowError):
                fits = False
        self._check(fits, f"default {value!r}"[:200], "a text" if self.dtype == "string" else f"a finite {self.dtype}")

    def _check_baked(self) -> None:
        """Raise ConfigError unless baking some field that can be declared gives this one."""
        assert self.encoding is not None
        raw, ids, fitted = (self.encoding.get(key) for key in ("raw", "ids", "fitted"))
        types = (str, list, bool, Mapping | None)
        assert isinstance(raw, Mapping)
        good = set(raw) == set(RAW_KEYS) and all(map(isinstance, (raw[key] for key in RAW_KEYS), types))
        good = good and (raw["shape"] == [None] or all(type(size) is int and size > 0 for size in raw["shape"]))
        self._check(good, f"raw {dict(raw)!r}"[:200], f"a field's {', '.join(RAW_KEYS)}")
        inner = raw["encoding"]
        self._check(
            inner is None or inner.get("kind") != BAKED, "a field baked twice", "the encoding that was declared"
        )
        declared = self.declared  # refused if it could not be declared
        form = stored_form(declared.dtype, declared.shape, inner)
        stored = f"{self.dtype}, shape {self.shape}, nullable={self.nullable}"
        same = form == (self.dtype, self.shape) and not self.nullable
        self._check(same, stored, f"what is stored of it, never null: {form}")
        columns = has_ids(inner) and "of" not in inner and output_of(inner, is_list=self.is_list) != INDEX
        most, part = MAX_COLUMNS + 1 if columns else MAX_IDS, fitted_part(inner)
        self._check((ids is not None) == has_ids(inner), f"ids {ids!r}", "their number, where ids are stored")
        self._check(ids is None or 1 <= ids <= most, f"ids {ids!r}", f"1 to {most}")
        wanted = declared_ids(inner.get("of", inner)) if has_ids(inner) else None
        self._check(wanted is None or ids == wanted, f"ids {ids!r}", f"{wanted}, as follows from the encoding")
        self._check(
            (fitted is None) == (part is None), f"fitted {fitted!r}"[:200], "its file and splits, if one is fitted"
        )
        if part is not None:
            assert isinstance(fitted, Mapping)
            splits = fitted.get("splits")
            good = set(fitted) == {"file", "splits"} and fitted["file"] == part["file"]
            good = good and isinstance(splits, list) and all(isinstance(split, str) for split in splits)
            self._check(good, f"fitted {dict(fitted)!r}"[:200], f"file {part['file']} and a list of splits")

    def _check(self, good: bool, got: str, allowed: str) -> None:
        if not good:
            raise declaration_error(f"field `{self.name}`", got, allowed)


def sample_id_field() -> Field:
    """The field that every dataset has: the sample id, signed int64."""
    return Field(name=SAMPLE_ID, dtype="int64", kind="id")


def check_name(name: str) -> None:
    """Raise ConfigError for a name that no field of a dataset may have."""
    if not name or name.startswith("_"):
        raise declaration_error(f"field `{name}`", repr(name), "a name not starting with `_`")


def check_keys(document: object, wanted: Mapping[str, Any], what: str) -> None:
    """Raise ConfigError unless `document` has exactly the keys of `wanted`, each of its type there."""
    if not isinstance(document, Mapping) or set(document) != set(wanted):
        got: Sequence[str] | str = (
            sorted(map(str, document)) if isinstance(document, Mapping) else type(document).__name__
        )
        more = [key for key in got if key not in wanted] if isinstance(document, Mapping) else []
        unknown = f", unknown: {', '.join(key + nearest(key, wanted) for key in more)}" if more else ""
        raise declaration_error(what, f"keys {got}{unknown}", f"exactly {', '.join(wanted)}")
    for key, kind in wanted.items():
        value = document[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, _VALUE)):
            raise declaration_error(what, f"{key} = {value!r}", f"{key} of type {getattr(kind, '__name__', kind)}")
