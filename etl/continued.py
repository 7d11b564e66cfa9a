"""Settings that an append has from its parent: what a call leaves out is taken from there, what differs is refused."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lockstep.etl.logs.config import DEFAULT_LABEL
from lockstep.etl.split.splits import SplitSpec
from lockstep.features.encode.bake import raw_schema
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ConfigError
from lockstep.storage.urls import absolute

# By the job of the parent, the fields of its configuration that decide the content of rows or how shards are written.
OF_ALL = ("fmt", "compression", "split", "shard_bytes", "row_group_bytes", "sample", "weights", "petastorm", "bake")
OF_INPUT = ("columns", "null_texts", "delimiter", "quoted_newlines")  # of one log format
OF_SOURCE = ("image_column", "label_column", "image_arrays", "label_arrays")  # of one source of images
OF_JOBS: dict[str, tuple[str, ...]] = {
    "etl_logs": ("label", "id_columns", "time_columns", "page_suffixes", "asset_suffixes", "log_format"),
    "etl_images": (
        "source", "image_size", "fit", "rotate", "channels", "store", "num_classes", "max_pixels", "classes",
    ),
    "etl_table": ("id_columns",),
}  # fmt: skip
# Rows of other values do not go together. (lockstep.etl.write.append.open_parent compares split, sample, label and
# others.)
ALIKE = (
    "fmt", "id_columns", "time_columns", "page_suffixes", "asset_suffixes", "image_size", "fit", "rotate", "channels",
    "store",
)  # fmt: skip


def continued(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The fields of an ETL job's configuration: `values`, and from the dataset at its `append_to` all but those in
    `given`. Prints what was taken.

    Raises ConfigError for a given field of another value than the dataset's, where rows then do not go together, and
    what reading the manifest raises. Without `append_to`, returns `values`.
    """
    if values.get("append_to") is None:
        return dict(values)
    if "split" in given:
        SplitSpec.parse(str(values["split"])).check_append(str(values["output"]))
    url = absolute(str(values["append_to"]))
    theirs = _settings_of(load_dataset(url), values, given)
    for name in (name for name in ALIKE if name in given and name in theirs):
        ours, flag = _typed(values[name]), "--format" if name == "fmt" else f"--{name.replace('_', '-')}"
        if ours != theirs[name]:
            raise ConfigError(
                f"{url} cannot be continued: its {flag} is another one",
                got=f"{flag} {_text(ours)}",
                allowed=f"{flag} {_text(theirs[name])}",
                next_step=f"Leave out {flag}, which is taken from there, or make a dataset without --append-to.",
            )
    taken = {name: value for name, value in theirs.items() if name not in given}
    said = ", ".join(f"{name} {_text(value)}" for name, value in taken.items() if value != values.get(name))
    if said:
        print(f"as in {url}: {said}", file=sys.stderr, flush=True)
    return {**values, **taken}


def _settings_of(manifest: DatasetManifest, values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The dataset's own values of these fields, in the types of the configurations."""
    stored = dict(manifest.created_by["config"])
    job, schema = str(stored.get("job")), Schema.from_json(manifest.schema)
    stored["fmt"] = manifest.format
    names = [*OF_ALL, *OF_JOBS.get(job, ())]
    one_format = (
        job == "etl_logs" and stored["log_format"] == (values if "log_format" in given else stored)["log_format"]
    )
    names += OF_INPUT if one_format else ()
    if job == "etl_images" and stored["source"] == (values if "source" in given else stored)["source"]:
        names += OF_SOURCE
    found = {name: _typed(stored[name]) for name in names if name in stored}
    found["seed"] = manifest.created_by["seed"]
    if job == "etl_logs":
        found["label"] = None if stored.get("label") == DEFAULT_LABEL else stored.get("label")
        if one_format:
            found |= {f"{role}_column": column for role, column in stored.get("role_columns", {}).items()}
        if "id_columns" in stored:
            found["schema"] = _declared(schema, weighted=stored.get("weights") == "balanced")
    if job == "etl_table" and schema.label is not None and "schema" not in given:
        found["label"] = schema.label.name
    return found


def _declared(schema: Schema, *, weighted: bool) -> Schema:
    """The schema that a dataset was declared by: without the field that --weights adds."""
    declared = raw_schema(schema)
    fields = tuple(field for field in declared.fields if not (weighted and field.kind == "weight"))
    return replace(declared, fields=fields)


def _typed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, Schema):
        return f"of {len(value.fields)} fields"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
