"""The schema of a dataset whose encodings are baked into its shards, and the declared one behind it.

The encoding of such a field says all that was done, and the dataset's digest covers it:

    {"kind": "baked",
     "raw": {"dtype": "string", "shape": [], "nullable": true, "encoding": {"kind": "vocabulary", ...}},
     "ids": 1002,                                             values lie in 0..1001: the size of an embedding
     "fitted": {"file": "page.json", "splits": ["train"]}}    below _fitted/, and what it was counted on

`ids` stands there where ids are stored, `fitted` where something was fitted; lockstep/features/schema/baked_form.py
has the forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.features.schema.baked_form import BAKED, RAW_KEYS, stored_form
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Fitted
from lockstep.features.schema.schema import Schema


def is_baked(field: Field) -> bool:
    """Whether the field's stored values are a model's inputs."""
    return field.encoding is not None and field.encoding["kind"] == BAKED


def baked_field(field: Field, ids: int | None, fitted: Fitted | None) -> Field:
    """The field as it is stored with its encoding baked in; itself where nothing changes.

    `ids` is how many ids there are, where it has some; `fitted` what its encoding was fitted to.
    """
    form = stored_form(field.dtype, field.shape, field.encoding)
    if field.kind != "feature" or form is None:
        return field
    declared = field.to_json()
    encoding: dict[str, Any] = {"kind": BAKED, "raw": {key: declared[key] for key in RAW_KEYS}}
    if ids is not None:
        encoding["ids"] = ids
    if fitted is not None:
        encoding["fitted"] = {"file": field.fitted_file, "splits": list(fitted.fitted_on)}
    return Field(name=field.name, dtype=form[0], shape=form[1], encoding=encoding)


def raw_field(field: Field) -> Field:
    """The field as it was declared before its encoding was baked in."""
    if not is_baked(field):
        return field
    assert field.encoding is not None
    raw: Mapping[str, Any] = field.encoding["raw"]
    return Field(**{**raw, "name": field.name, "shape": tuple(raw["shape"])})


def raw_schema(schema: Schema) -> Schema:
    """The declared schema: with the fitted files, its Encoder makes of raw rows what the baked shards hold."""
    return replace(schema, fields=tuple(map(raw_field, schema)))
