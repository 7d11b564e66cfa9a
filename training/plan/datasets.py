"""Joins splits of one or more datasets end to end, as if they were one split of one dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from lockstep.features.schema.sampled import sampled_of
from lockstep.features.schema.schema import Schema, class_names_of, other_classes
from lockstep.features.schema.signature import Task
from lockstep.storage.dataset.manifest import DatasetManifest, load_chain, load_dataset
from lockstep.storage.dataset.manifest_entries import SplitInfo
from lockstep.storage.documents import canonical_bytes, sha256_hex
from lockstep.storage.errors import ConfigError, LockstepError, differences
from lockstep.storage.urls import absolute, several
from lockstep.training.plan.selection import Selection

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig

SAME_INPUTS = "Build the datasets of tasks from the same columns, with the same encodings and fitted statistics."
SAME_CLASSES = (
    "Build the later ones with --append-to the first, or give lockstep etl_images all classes of each: --classes."
)


@dataclass(frozen=True, slots=True)
class Part:
    """One split of one dataset."""

    url: str
    manifest: DatasetManifest
    split: str


@dataclass(frozen=True, slots=True, repr=False)
class MixedManifest(DatasetManifest):
    """The first dataset's manifest with the digest of the list of all; `mixed` has the manifest of each."""

    mixed: tuple[DatasetManifest, ...] = ()


def groups_of(urls: Sequence[str], mix: Sequence[int]) -> list[tuple[str, ...]]:
    """The datasets that share each ratio of a mixture: all after the last but one ratio have the last one together."""
    alone = len(mix) - 1
    return [*((url,) for url in urls[:alone]), tuple(urls[alone:])]


def open_data(
    urls: str | Sequence[str],
    split: str,
    mix: Sequence[int] | None,
    selection: Selection | None = None,
    *,
    tasks: bool = False,
) -> tuple[tuple[Part, ...], DatasetManifest]:
    """Call `open_parts` or, for datasets with the ratios `mix`, `open_mixture` of their `groups_of`."""
    if mix is None:
        return open_parts(urls, split, selection)
    return open_mixture(urls, split, selection, mix, tasks=tasks)


def open_mixture(
    urls: str | Sequence[str],
    split: str,
    selection: Selection | None = None,
    mix: Sequence[int] | None = None,
    *,
    tasks: bool = False,
) -> tuple[tuple[Part, ...], MixedManifest]:
    """The parts of the datasets of a mixture, which is trained on in the ratios `mix` (None: one for each dataset), and
    their manifest.

    All datasets must have one schema, but for fields that state a default, and the same fitted files, since one model
    and one encoder see all; format, compression and the size of blocks may differ. With `tasks` each has a label for
    itself, of one kind: yes or no, classes, or a number. Raises as `open_parts`.
    """
    urls = several(urls)
    groups = groups_of(urls, mix or [1] * len(urls))
    opened = [open_parts(group, split, selection) for group in groups]
    parts = tuple(part for each, _ in opened for part in each)
    manifests = tuple(manifest for _, manifest in opened)
    names = [", ".join(group) for group in groups]
    first = manifests[0]
    for url, manifest in zip(names, manifests, strict=True):
        if split not in manifest.splits:
            raise _unfit(url, f"no split `{split}`", ", ".join(manifest.splits), "Correct --split.")
    schema = _schema_of_tasks(names, manifests) if tasks else _one_schema(names, manifests)
    if not tasks:
        _check_classes(parts)
    if len({part.manifest.digest for part in parts}) < len(urls):
        raise _unfit(", ".join(urls), "a dataset twice", "each dataset once", "Name each dataset once.")
    values = {field.name: getattr(first, field.name) for field in fields(DatasetManifest)}
    values["schema"] = schema
    values["digest"] = sha256_hex(canonical_bytes([manifest.digest for manifest in manifests]))
    values["created_by"] = _created_by(manifests)
    return parts, MixedManifest(**values, mixed=manifests)


def open_parts(
    urls: str | Sequence[str], split: str, selection: Selection | None = None
) -> tuple[tuple[Part, ...], DatasetManifest]:
    """The parts named by `urls` and `split` (names separated by `,`, such as fold-1,fold-2), and one manifest of them.

    The manifest is that of the first dataset. With several parts, its split `split` has the shards of all; with several
    datasets, its digest is that of the list of their digests, and its schema has all fields: the datasets must have one
    schema, but for fields that state a default, one format, the same fitted files and blocks of one size; they need not
    be appended to one another. Sample ids are not compared: only an
    append was checked against the dataset that it continues, and two appends of one parent may have the same records.
    With `selection`, the split has only the records that it selects.
    Raises NotFoundError for a missing dataset, ConfigError for parts that do not fit together or a dataset given twice.
    """
    urls = several(urls)
    if not urls:
        raise _unfit("nothing", "no dataset", "one or more", "Name a dataset.")
    manifests = [load_dataset(url) for url in urls]
    names = split.split(",")
    if selection is not None:
        for name in names:
            manifests = [selection.applied(manifest, name) for manifest in manifests]
    first = manifests[0]
    parts = tuple(Part(url, found, name) for url, found in zip(urls, manifests, strict=True) for name in names)
    if len(parts) == 1:
        return parts, first
    missing = [part for part in parts if part.split not in part.manifest.splits]
    if missing:
        there = ", ".join(missing[0].manifest.splits)
        raise _unfit(missing[0].url, f"no split `{missing[0].split}`", there, "Correct --split.")
    if len({part.manifest.digest for part in parts}) < len(urls) or len(set(names)) < len(names):
        way = "Correct --split." if len(urls) == 1 else "Name each dataset and each split once."
        raise _unfit(", ".join(urls), f"the same records twice, split {split}", "each dataset and each split once", way)
    schema = _one_schema(urls, manifests)
    _check_classes(parts)
    for part in parts:
        if part.manifest.format != first.format:
            raise _unfit(part.url, f"another format: {part.manifest.format}", f"{first.format}, as of {urls[0]}")
    sizes = {part.manifest.splits[part.split].block_records for part in parts}
    if len(sizes) > 1:
        raise _unfit(", ".join(urls), f"blocks of {', '.join(map(str, sorted(sizes)))} records", "blocks of one size")
    joined = [part.manifest.splits[part.split] for part in parts]
    shards = tuple(shard for info in joined for shard in info.shards)
    kept = None if selection is None else tuple(count for info in joined for count in info.kept or ())
    digest = first.digest if len(urls) == 1 else sha256_hex(canonical_bytes([found.digest for found in manifests]))
    splits = {**first.splits, split: SplitInfo(sizes.pop(), shards, joined[0].where, kept)}
    return parts, replace(first, schema=schema, splits=splits, digest=digest, created_by=_created_by(manifests))


def split_of(manifest: DatasetManifest, split: str) -> SplitInfo:
    """A split of a dataset. Raises ConfigError naming the splits it has."""
    if split not in manifest.splits:
        raise ConfigError(
            f"the dataset has no split `{split}`",
            got=split,
            allowed=", ".join(sorted(manifest.splits)),
            next_step="Correct --split, or build the dataset with that split.",
        )
    return manifest.splits[split]


def rows_of(manifest: DatasetManifest, split: str) -> int:
    """The rows of a split, at least one. Raises ConfigError for an empty one, or as `split_of`."""
    rows = split_of(manifest, split).records
    if not rows:
        filled = [name for name, info in sorted(manifest.splits.items()) if info.records]
        raise ConfigError(
            f"split `{split}` has no rows",
            got="0 rows",
            allowed=f"a split with rows: {', '.join(filled) or 'none here'}",
            next_step="Choose another --split.",
        )
    return rows


def held_out(manifest: DatasetManifest, split: str, *, training: bool) -> str | None:
    """The fold whose fitted files leave it out: in training the one that `split` lacks, else `split` itself."""
    names = split.split(",")
    if len(names) == 1 and not training:
        return split
    rest = [name for name in manifest.splits if name not in names and name != split]
    return rest[0] if len(rest) == 1 else None


def what_differs(found: Sequence[DatasetManifest], urls: Sequence[str], digest: str) -> str:
    """How datasets differ from those at `urls` that had the digest `digest`: schemas, fitted files and splits.

    If the latter were removed or replaced, only their digest is known.
    """
    try:
        was = [load_dataset(url) for url in urls]
    except LockstepError as error:  # the caller raises its own error; this only adds to it
        return f"another digest; the difference is unknown: {error.what}"
    if digest not in (was[0].digest, sha256_hex(canonical_bytes([manifest.digest for manifest in was]))):
        return f"another digest; the difference is unknown: {', '.join(urls)} has been replaced since"
    if len(found) not in (1, len(was)):
        return f"{len(found)} datasets (not {len(was)})"
    differing = [
        f"{url}: {manifest_differences(manifest, wanted)}"
        for url, manifest, wanted in zip(urls, found, was, strict=False)
        if manifest.digest != wanted.digest
    ]
    return "; ".join(differing) or f"datasets in another order, or not all {len(was)}"


def manifest_differences(found: DatasetManifest, wanted: DatasetManifest) -> str:
    """How a dataset differs from `wanted` in what its digest covers: schema, fitted files, splits and their shards."""
    found_differences = [
        Schema.from_json(found.schema).differences(Schema.from_json(wanted.schema)),
        fitted_differences(found, wanted),
    ]
    for name in [*wanted.splits, *(name for name in found.splits if name not in wanted.splits)]:
        if name not in found.splits or name not in wanted.splits:
            found_differences.append(f"no split {name}" if name not in found.splits else f"split {name} (not there)")
            continue
        mine, other = found.splits[name], wanted.splits[name]
        if sizes := differences(_sizes(mine), _sizes(other)):
            found_differences.append(f"split {name}: {', '.join(sizes)}")
        elif mine != other:
            found_differences.append(f"split {name}: as many records, but other content")
    return "; ".join(filter(None, found_differences))[:500]


def _sizes(split: SplitInfo) -> dict[str, int]:
    return {"records": split.records, "block_records": split.block_records, "shards": len(split.shards)}


def widest(manifests: Sequence[DatasetManifest]) -> int:
    """The number of the first of the datasets with the most fields."""
    counts = [len(manifest.schema["fields"]) for manifest in manifests]
    return counts.index(max(counts))


def _one_schema(urls: Sequence[str], manifests: Sequence[DatasetManifest]) -> Mapping[str, Any]:
    """The schema with all fields; raises ConfigError for datasets that do not fit together."""
    number = widest(manifests)
    wide, first_url, first = Schema.from_json(manifests[number].schema), urls[number], manifests[number]
    for url, manifest in zip(urls, manifests, strict=True):
        if manifest.schema != first.schema:
            schema = Schema.from_json(manifest.schema)
            if wide.added_to(schema) is None:
                raise _unfit(url, f"another schema: {schema.differences(wide)}", f"that of {first_url}")
        if fitted := fitted_differences(manifest, first):
            raise _unfit(url, f"another set of fitted files: {fitted}", f"that of {first_url}")
    return first.schema


def _check_classes(parts: Sequence[Part]) -> None:
    """Raise ConfigError unless all parts whose classes have names have the same: an equal schema has only numbers."""
    named = [part for part in parts if class_names_of(part.manifest) is not None]
    for part in named[1:]:
        if classes := other_classes(class_names_of(part.manifest), class_names_of(named[0].manifest)):
            allowed = f"those of {named[0].url}, in that order: a label is a number"
            raise _unfit(part.url, classes, allowed, SAME_CLASSES)


def _schema_of_tasks(urls: Sequence[str], manifests: Sequence[DatasetManifest]) -> Mapping[str, Any]:
    """The schema of the first dataset; raises ConfigError unless all have its inputs and its kind of label."""
    wanted = Schema.from_json(manifests[0].schema)
    for url, manifest in zip(urls, manifests, strict=True):
        schema = Schema.from_json(manifest.schema)
        if found := without_label(schema).differences(without_label(wanted)):
            raise _unfit(url, f"other inputs: {found}", f"those of {urls[0]}", SAME_INPUTS)
        mine, other = _kind_of_label(schema), _kind_of_label(wanted)
        if mine != other or schema.label is None:
            raise _unfit(url, f"a label that is {mine}", f"{other}, as of {urls[0]}: one loss for all", SAME_INPUTS)
        if fitted := fitted_differences(manifest, manifests[0]):
            raise _unfit(url, f"another set of fitted files: {fitted}", f"that of {urls[0]}", SAME_INPUTS)
        if sampled_of(manifest) is not None:
            raise _unfit(url, "a dataset of --sample or --weights", "tasks of all their rows", "Build it without.")
    return manifests[0].schema


def without_label(schema: Schema) -> Schema:
    """The schema without its label, which each task has for itself, and without what was sampled by it."""
    return Schema(tuple(field for field in schema if field.kind != "label"), schema.record)


def _kind_of_label(schema: Schema) -> str:
    label = schema.label
    if label is None:
        return "not there"
    if label.num_classes is not None:
        return "classes"
    return "yes or no" if label.dtype == "bool" else "a number"


def tasks_of(manifests: Sequence[DatasetManifest]) -> tuple[Task, ...]:
    """The task of each of the datasets of a run, which `open_mixture` has checked."""
    labels = [Schema.from_json(manifest.schema).label for manifest in manifests]
    widths = tuple((label.num_classes or 1) if label is not None else 1 for label in labels)
    return tuple(Task(number, widths) for number in range(len(widths)))


def task_of(config: TrainConfig, dataset: str) -> Task | None:
    """The task of `dataset`, which is one of a run's or continues one; None for a run without tasks.

    Raises ConfigError for another dataset, and what reading the manifests of the run's datasets raises.
    """
    if config.data.tasks is None:
        return None
    ours = [absolute(url) for url in config.data.datasets]
    found = [url for url in (absolute(dataset), *(url for url, _ in load_chain(dataset))) if url in ours]
    if not found:
        raise ConfigError(
            "the model has an output layer for each dataset of its run, and this is none of them",
            got=dataset,
            allowed=f"{', '.join(ours)}, or a dataset that continues one (--append-to)",
            next_step="Name one of these, or build the dataset as an append of the one whose label it has.",
        )
    return tasks_of([load_dataset(url) for url in ours])[ours.index(found[0])]


def fitted_differences(found: DatasetManifest, wanted: DatasetManifest) -> str:
    """How the fitted files of a dataset differ from those of `wanted`; "" if they are equal."""
    mine, other = (
        {path: info for path, info in manifest.files.items() if path.startswith("_fitted/")}
        for manifest in (found, wanted)
    )
    missing = [f"no {path}" for path in other if path not in mine]
    added = [f"{path} (not there)" for path in mine if path not in other]
    return "; ".join(
        [*missing, *added, *(f"{path} of other content" for path in mine if mine[path] != other.get(path, mine[path]))]
    )


def _created_by(manifests: Sequence[DatasetManifest]) -> dict[str, Any]:
    """Return `created_by` of the first manifest; without what was sampled or weighted if that differs, as no share fits
    all.
    """
    first = dict(manifests[0].created_by)
    if any(sampled_of(other) != sampled_of(manifests[0]) for other in manifests):
        drop = ("sampled", "class_counts")
        first["config"] = {key: value for key, value in first["config"].items() if key not in drop}
    return first


def _unfit(where: str, got: str, allowed: str, way: str = "") -> ConfigError:
    way = way or "Build the later ones with --append-to the first, or the splits with --split kfold:K."
    return ConfigError(f"{where} cannot be trained on as one", got=got, allowed=allowed, next_step=way)
