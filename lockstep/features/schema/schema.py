"""The declared schema of a dataset: its fields, one of which is the sample id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as declared
from functools import cached_property
from typing import Any, cast

import pyarrow as pa

from lockstep.features.schema.encodings import declaration_error
from lockstep.features.schema.fields import Field, check_keys, check_name, sample_id_field
from lockstep.features.schema.sampled import Sampled
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import differences
from lockstep.storage.shown import short
from lockstep.storage.urls import several

EXAMPLE, SEQUENCE_EXAMPLE = "example", "sequence_example"


@dataclass(frozen=True)
class Columns:
    """Fields in the order of their columns, as codecs take them; each name once.

    `record` says what a TFRecord shard's records are: Examples, or SequenceExamples, in which lists are feature lists.
    """

    fields: tuple[Field, ...]
    record: str = EXAMPLE

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise declaration_error("the schema", f"no field `{name}`", ", ".join(field.name for field in self.fields))

    @cached_property
    def in_byte_order(self) -> tuple[Field, ...]:
        """The fields in the byte order of their names: their order in a tf.Example."""
        return tuple(sorted(self.fields, key=lambda field: field.name.encode()))

    def arrow_schema(self) -> pa.Schema:
        """The columns as Arrow and Parquet hold them."""
        return pa.schema([pa.field(field.name, field.arrow_type, nullable=field.nullable) for field in self.fields])


@dataclass(frozen=True)
class Schema(Columns):
    """The fields of a dataset: exactly one is its `id`, at most one the label and one the weight.

    `sampled` is set in the schema of an exported model that was trained on sampled classes; it does not count when
    schemas are compared. Raises ConfigError for fields that make no dataset.
    """

    sampled: Sampled | None = declared(default=None, compare=False)

    def __repr__(self) -> str:
        kinds = [(field, (field.encoding or {}).get("kind", "")) for field in self.fields]
        lines = [f"  {field.name}: {field.dtype}, {field.kind}{f', {kind}' if kind else ''}" for field, kind in kinds]
        return short("\n".join([f"schema of {len(self.fields)} fields", *lines]))

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        for name in names:
            check_name(name)
        if len(set(names)) != len(names):
            raise declaration_error("the schema", f"fields {names}", "each name once")
        ids = [field for field in self.fields if field.kind == "id"]
        if len(ids) != 1 or ids[0].dtype != "int64" or ids[0].shape:
            raise declaration_error(
                "the schema", f"id fields {[field.name for field in ids]}", "exactly one scalar int64 field of kind id"
            )
        if sum(field.kind == "label" for field in self.fields) > 1:
            raise declaration_error("the schema", "several labels", "at most one")
        files = [field.fitted_file for field in self.fitted_fields]
        if len(set(files)) != len(files):
            raise declaration_error("the schema", f"fitted files {files}", "a file for each field")
        if sum(field.kind == "weight" for field in self.fields) > 1:
            raise declaration_error("the schema", "several weights", "at most one")
        if self.record not in (EXAMPLE, SEQUENCE_EXAMPLE):
            raise declaration_error("the schema", f"record {self.record!r}", f"{EXAMPLE}, {SEQUENCE_EXAMPLE}")
        if self.record == SEQUENCE_EXAMPLE and not any(field.is_list for field in self.fields):
            got = f"record {self.record} without a list"
            raise declaration_error("the schema", got, "a list field or more, or record example")

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
        """The field with the weight of each sample in training, or None."""
        return next((field for field in self.fields if field.kind == "weight"), None)

    @property
    def fitted_fields(self) -> tuple[Field, ...]:
        """The fields whose encoding is fitted on the training split."""
        return tuple(field for field in self.fields if field.fitted_file is not None)

    @classmethod
    def plain(cls, columns: Mapping[str, str], *, label: str | None = None, lists: str | Sequence[str] = ()) -> Schema:
        """A schema of columns by name and dtype, stored unchanged and without encodings; `lists` names those of lists.

        All but the label and lists may be null. The sample id comes first. Of these columns, a model takes only the
        numbers; others need an encoding. Raises ConfigError as Field and Schema do.
        """
        lists = several(lists)
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

    def differences(self, wanted: Schema) -> str:
        """How this schema differs from `wanted`, field by field, in at most 500 characters; "" if they are equal."""
        mine, other = ({field.name: field.to_json() for field in schema} for schema in (self, wanted))
        found = [f"no field `{name}`" for name in other if name not in mine]
        found += [f"field `{name}` (not there)" for name in mine if name not in other]
        for name in mine:
            if name in other and (changes := differences(mine[name], other[name])):
                found.append(f"field `{name}`: {', '.join(changes)}")
        if not found and list(mine) != list(other):
            found.append(f"fields in the order {', '.join(mine)} (not {', '.join(other)})")
        if self.record != wanted.record:
            found.append(f"record {self.record} (not {wanted.record})")
        return "; ".join(found)[:500]

    def added_to(self, earlier: Schema) -> tuple[Field, ...] | None:
        """The fields that `earlier` lacks, if each states a default and all others are equal; else None."""
        there = {field.name for field in earlier}
        added = tuple(field for field in self if field.name not in there)
        rest = tuple(field for field in self if field.name in there)
        same = (rest, self.record) == (earlier.fields, earlier.record)
        return added if same and all(field.default is not None for field in added) else None

    def to_json(self) -> dict[str, Any]:
        """The schema as a manifest stores it; `sampled` only in that of an exported model."""
        record = {} if self.record == EXAMPLE else {"record": self.record}
        sampled = {} if self.sampled is None else {"sampled": self.sampled.to_json()}
        return {"fields": [field.to_json() for field in self.fields], **record, **sampled}

    @classmethod
    def from_json(cls, document: object) -> Schema:
        """Rebuild a schema; raises ConfigError for anything but what to_json gives."""
        more = {"record": str, "sampled": dict}
        extra = {key: kind for key, kind in more.items() if isinstance(document, Mapping) and key in document}
        check_keys(document, {"fields": list, **extra}, "the schema")
        values = cast(dict[str, Any], document)
        sampled = Sampled.from_json(values["sampled"]) if "sampled" in values else None
        return cls(tuple(Field.from_json(field) for field in values["fields"]), values.get("record", EXAMPLE), sampled)


def class_names_of(manifest: DatasetManifest) -> tuple[str, ...] | None:
    """The names of the classes of a dataset's label: of its schema, or those that lockstep etl_images found; None if it
    has none.
    """
    label = Schema.from_json(manifest.schema).label
    if label is not None and label.class_names is not None:
        return label.class_names
    names = manifest.created_by.get("config", {}).get("class_names")
    return tuple(map(str, names)) if names else None


def other_classes(mine: Sequence[str] | None, wanted: Sequence[str] | None) -> str:
    """How the names of classes differ from those `wanted`, in at most 500 characters; "" if they are equal, or if one
    of both has none.
    """
    if mine is None or wanted is None or tuple(mine) == tuple(wanted):
        return ""
    return f"classes {', '.join(mine)} (not {', '.join(wanted)})"[:500]


def class_word(number: int, names: Sequence[str] | None) -> str:
    """Call a class by its name, or by its number where it has none."""
    return names[number] if names is not None and 0 <= number < len(names) else str(number)


def foreign_field(name: str, dtype: str, is_list: bool) -> Field:
    """A feature of such a file, of any name: null where a record lacks it; a list is empty there."""
    return Field(name=name, dtype=dtype, shape=(None,) if is_list else (), nullable=not is_list)
