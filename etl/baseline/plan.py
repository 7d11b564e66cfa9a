"""A baseline before Spark starts: its dataset, its label and the settings of its estimator are checked."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.etl.baseline.config import CLUSTERS, KINDS, BaselineConfig, Kind
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ConfigError, nearest, require


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked configuration: manifest and schema of the dataset, the label, and the settings as values."""

    manifest: DatasetManifest
    schema: Schema
    label: Field | None
    """The field of the label; None for clusters of a dataset that has no label, or whose label is not classes."""
    settings: Mapping[str, Any]


def check(config: BaselineConfig) -> Plan:
    """Check all that needs no Spark session: the dataset, its splits and columns, the label, the names of settings.

    Raises NotFoundError if there is no dataset, ConfigError naming the flag.
    """
    manifest = load_dataset(config.dataset)
    schema, kind, splits = Schema.from_json(manifest.schema), KINDS[config.kind], manifest.splits
    for flag, split in (("--split", config.split), *(("--train-split", one) for one in config.train_split.split(","))):
        filled = [name for name in splits if splits[name].records]
        require(split in filled, flag, split + nearest(split, filled), f"splits with records: {listed(filled)}")
    for flag, column in (("--user", config.user), ("--item", config.item), ("--rating", config.rating)):
        known = [field.name for field in schema if not field.shape and field.kind != "id"]
        require(column in (None, *known), flag, f"{column}{nearest(column or '', known)}", f"columns: {listed(known)}")
    label = schema.label if config.rating is None else schema[config.rating]
    numeric = label is not None and not label.shape and label.dtype not in ("string", "bytes")
    if config.kind in CLUSTERS and (
        label is None or not numeric or not _fits(KINDS[config.kind], classes_of(label), label)
    ):
        return Plan(manifest, schema, None, _settings(config.settings, kind))
    allowed = f"a label, for als --rating; {' and '.join(CLUSTERS)} need none"
    require(numeric, "the dataset", "no label that is a number", allowed, "Correct --dataset.")
    assert label is not None
    classes = None if config.kind == "als" else classes_of(label)
    fits = [name for name, one in KINDS.items() if _fits(one, classes, label) or (name == "als" and config.user)]
    whose = "a number" if classes is None else f"{classes} classes"
    require(config.kind in fits, "--kind", f"{config.kind} for the label `{label.name}`, {whose}", ", ".join(fits))
    return Plan(manifest, schema, label, _settings(config.settings, kind))


def classes_of(label: Field) -> int | None:
    return 2 if label.dtype == "bool" else label.num_classes


def _fits(kind: Kind, classes: int | None, label: Field) -> bool:
    """Whether a kind takes such a label; whole numbers that are not declared as classes may be 0 and 1."""
    if classes is None:
        return kind.of_numbers.startswith("regression") or (label.dtype == "int64" and bool(kind.of_classes))
    return bool(kind.of_classes) and (classes == 2 or not kind.two_classes)


def estimator_class(name: str) -> Any:
    module, _, called = name.partition(".")
    return getattr(importlib.import_module(f"pyspark.ml.{module}"), called)


def _settings(given: Sequence[str], kind: Kind) -> dict[str, Any]:
    """NAME=VALUE as values of the parameters' types. Raises ConfigError with the nearest name."""
    if not given:
        return {}
    from pyspark.ml.param import Param

    members: dict[str, Any] = {}
    for estimator in map(estimator_class, filter(None, (kind.of_numbers, kind.of_classes))):
        members |= {name: getattr(estimator, name) for name in dir(estimator)}
    known = {name: one for name, one in members.items() if isinstance(one, Param) and not name.endswith("Col")}
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            raise bad_setting(text, name + nearest(name, known), f"NAME=VALUE, with a name of {listed(known)}")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        try:
            found[name] = known[name].typeConverter(parsed)
        except TypeError as error:
            raise bad_setting(text, str(error), known[name].doc) from None
    return found


def bad_setting(text: str, got: str, allowed: str) -> ConfigError:
    next_step = "Correct --set; pyspark.ml's documentation explains each parameter."
    return ConfigError(f"--set {text} is invalid", got=got, allowed=allowed, next_step=next_step)


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))[:500] or "none"
