"""A model's signature: names, shapes and dtypes of its inputs and label, without the batch dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.storage.errors import ConfigError

_MAY_LACK = ("weight", "label_is_number", "class_names", "tasks")
DATASET = "_dataset"
"""The input with the number of each row's task (n,) int64. No field's name begins with `_`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One of the datasets that a model is trained on, where each has an output layer for itself."""

    number: int
    """From 0, in the order of the run's datasets."""
    widths: tuple[int, ...]
    """The width of each task's output layer: the classes of its label, 1 for yes or no and for a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape of one row (batch dimension left out) and NumPy dtype name.

    `ids` is set where the values are ids for an embedding: they are in 0..ids-1, and 0 means null, padding or unknown.
    """

    shape: tuple[int, ...]
    dtype: str
    ids: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON; `ids` only where it is set."""
        return {"shape": list(self.shape), "dtype": self.dtype} | ({} if self.ids is None else {"ids": self.ids})

    @classmethod
    def from_json(cls, document: object) -> TensorSpec:
        """Rebuild a spec; raises ConfigError for anything but what to_json gives."""
        if (
            not isinstance(document, dict)
            or set(document) - {"ids"} != {"shape", "dtype"}
            or not isinstance(document["dtype"], str)
        ):
            raise _bad(repr(document)[:80], "an object of shape, dtype and perhaps ids")
        shape, ids = document["shape"], document.get("ids")
        if "ids" in document and (type(ids) is not int or ids < 1):
            raise _bad(repr(ids)[:80], "ids from 1 up")
        if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
            raise _bad(repr(shape)[:80], "positive sizes")
        return cls(shape=tuple(shape), dtype=document["dtype"], ids=ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A model's inputs by name in byte order, its label (None if the dataset has none) and its number of classes.

    `num_classes` is None for a yes-or-no label (float32 0 or 1) and for a numeric label, for which `label_is_number` is
    set. `weight` is set if each sample has a weight. `class_names`, set in an exported model, are the names of the
    classes 0, 1 ..., or of no and yes, if the dataset has some. `tasks`, set where each dataset is a task, is the width
    of each task's output layer; then the features have `_dataset`, and `num_classes` is that of the task with the most.

    >>> import lockstep
    >>> signature = lockstep.data.PlannedBatches.open("data", global_batch=16).signature
    >>> isinstance(signature, lockstep.Signature), signature.features["a"].shape, signature.num_classes
    (True, (1,), None)
    """

    features: Mapping[str, TensorSpec]
    label: TensorSpec | None
    num_classes: int | None
    weight: TensorSpec | None = None
    label_is_number: bool = False
    class_names: tuple[str, ...] | None = None
    tasks: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The signature as JSON, features in byte order of their names; from `weight` on only what is set."""
        more: dict[str, Any] = {} if self.weight is None else {"weight": self.weight.to_json()}
        if self.label_is_number:
            more["label_is_number"] = True
        if self.class_names is not None:
            more["class_names"] = list(self.class_names)
        if self.tasks is not None:
            more["tasks"] = list(self.tasks)
        return {
            "features": {name: self.features[name].to_json() for name in sorted(self.features, key=str.encode)},
            "label": None if self.label is None else self.label.to_json(),
            "num_classes": self.num_classes,
            **more,
        }

    @classmethod
    def from_json(cls, document: object) -> Signature:
        """Rebuild a signature; raises ConfigError for anything but what to_json gives."""
        if not isinstance(document, dict) or set(document) - {*_MAY_LACK} != {"features", "label", "num_classes"}:
            raise _bad(repr(document)[:80], f"features, label, num_classes and perhaps {', '.join(_MAY_LACK)}")
        features, classes = document["features"], document["num_classes"]
        number = document.get("label_is_number", False)
        if not isinstance(features, dict) or not isinstance(classes, int | None) or not isinstance(number, bool):
            raise _bad(repr(document)[:80], "features by name, num_classes a number or null, label_is_number a bool")
        label, names = document["label"], document.get("class_names")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise _bad(repr(names)[:80], "class_names a list of texts")
        tasks = document.get("tasks")
        if tasks is not None and not (isinstance(tasks, list) and all(type(width) is int for width in tasks)):
            raise _bad(repr(tasks)[:80], "tasks a list of widths")
        return cls(
            features={name: TensorSpec.from_json(features[name]) for name in sorted(features, key=str.encode)},
            label=None if label is None else TensorSpec.from_json(label),
            num_classes=classes,
            weight=TensorSpec.from_json(document["weight"]) if "weight" in document else None,
            label_is_number=number,
            class_names=None if names is None else tuple(names),
            tasks=None if tasks is None else tuple(tasks),
        )


def _bad(got: str, allowed: str) -> ConfigError:
    return ConfigError(
        "this is not a model signature", got=got, allowed=allowed, next_step="Take the signature that the export wrote."
    )
