"""Columns of TFRecord files that are no dataset: the same encoders and decoders, without the rules of a dataset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema

DATA_GLOB = "*.tfrecord*"  # the names of such files
SAMPLE_RECORDS = 1000  # what their columns are inferred from


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignField(Field):
    """A feature of such a file; any name goes."""

    def __post_init__(self) -> None:
        """Nothing to check: the dtype is one that was inferred, or that the caller has looked up."""


@dataclass(frozen=True)
class ForeignSchema(Schema):
    """The features of such a file: no sample id is needed."""

    def __post_init__(self) -> None:
        """Nothing to check: whoever names the columns gives each name once."""


def foreign_field(name: str, dtype: str, is_list: bool) -> Field:
    """A feature that is null where a record lacks it; a list is empty there."""
    return ForeignField(name=name, dtype=dtype, shape=(None,) if is_list else (), nullable=not is_list)


def foreign_schema(fields: Iterable[Field]) -> Schema:
    """Such features as a schema that an encoder or decoder takes."""
    return ForeignSchema(tuple(fields))
