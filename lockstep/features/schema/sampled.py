"""Sampled and weighted classes: what share of their records counts in training, and probabilities corrected for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lockstep.features.schema.encodings import declaration_error
from lockstep.features.schema.fields import Field, check_keys
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError

_YES_OR_NO = ("false", "true")


@dataclass(frozen=True, slots=True)
class Sampled:
    """`shares`: by the text of a value of `column`, the share of its records that was kept, in `splits` only.

    All records with other values were kept. `weights`: by the text of a value, what a record counts in a loss that is
    weighted by --weights balanced, relative to the largest weight.
    """

    column: str
    shares: Mapping[str, Fraction]
    splits: tuple[str, ...]
    weights: Mapping[str, Fraction] = field(default_factory=dict)

    def of_classes(self, label: Field) -> tuple[float, ...] | None:
        """The share of each class of `label` that counts in training, relative to the class that counts most, in the
        order of a model's outputs: (no, yes), or one for each class.

        None if another column was sampled or the label has no classes: predictions cannot be corrected then.
        """
        if self.column != label.name:
            return None
        if label.num_classes is not None:
            classes: tuple[str, ...] = tuple(map(str, range(label.num_classes)))
        elif label.dtype == "bool":
            classes = _YES_OR_NO
        else:
            return None
        return tuple(float(self.shares.get(name, 1) * self.weights.get(name, 1)) for name in classes)

    def unweighted(self) -> Sampled:
        """Return this without weights: how many records there are, and not what they count."""
        return replace(self, weights={})

    def to_json(self) -> dict[str, Any]:
        """Return the form that a manifest stores in `created_by.config.sampled`, with shares as exact fractions."""
        shares = {value: str(share) for value, share in self.shares.items()}
        weights = {value: str(weight) for value, weight in self.weights.items()}
        found = {"column": self.column, "shares": shares, "splits": list(self.splits)}
        return found | ({"weights": weights} if weights else {})

    @classmethod
    def from_json(cls, document: object) -> Sampled:
        """Rebuild from JSON; raises ConfigError for anything but what to_json gives."""
        keys = {"column": str, "shares": dict, "splits": list}
        if isinstance(document, dict) and "weights" in document:
            keys["weights"] = dict
        check_keys(document, keys, "what was sampled")
        values = cast(dict[str, Any], document)
        if not all(isinstance(name, str) for name in values["splits"]):
            raise declaration_error("what was sampled", f"splits {values['splits']!r}"[:200], "names")
        shares = {value: _share(text) for value, text in values["shares"].items()}
        weights = {value: _share(text) for value, text in values.get("weights", {}).items()}
        return cls(values["column"], shares, tuple(values["splits"]), weights)


def corrected(probabilities: ArrayLike, shares: Sequence[float]) -> NDArray[np.float64]:
    """Correct the predictions of a model that was trained on sampled classes, as if it had seen all records.

    `probabilities` are (n,) or (n, 1) of yes, with `shares` = (no, yes), or (n, classes) with one share for each class:
    the share of the class, above 0 and at most 1, that training kept. Returns float64 of the same shape.

    If sampling depended on the class only, a well calibrated model predicts q_k, which is proportional to
    p_k shares_k. So p_k is q_k / shares_k divided by the sum of these over all classes, and the odds of yes are the
    predicted odds times shares[0] / shares[1]. The correction keeps the order of predictions of yes, so also AUC; it
    changes log loss, accuracy and calibration. Raises ConfigError for shares and shapes that do not fit.
    """
    found, kept = np.asarray(probabilities, dtype=np.float64), np.asarray(shares, dtype=np.float64)
    yes_or_no = kept.shape == (2,) and (found.ndim == 1 or found.shape[1:] == (1,))
    if not (yes_or_no or (found.ndim == 2 and kept.shape == found.shape[1:])) or not ((kept > 0) & (kept <= 1)).all():
        raise ConfigError(
            "probabilities cannot be corrected for sampling",
            got=f"probabilities of shape {found.shape}, shares {tuple(shares)}",
            allowed="(n,) or (n, 1) with two shares, or (n, classes) with one a class; shares above 0, at most 1",
            next_step="Give the share that was kept of each class; a class that was dropped cannot be corrected.",
        )
    if yes_or_no:
        yes, no = found / kept[1], (1 - found) / kept[0]
        return cast(NDArray[np.float64], yes / (yes + no))
    weighed = found / kept
    return cast(NDArray[np.float64], weighed / weighed.sum(axis=1, keepdims=True))


def sampled_of(manifest: DatasetManifest) -> Sampled | None:
    """What was sampled or weighted when a dataset was made; None if nothing was or the manifest does not say.

    Raises ConfigError for an entry that cannot be read.
    """
    config = manifest.created_by["config"]
    stored = config.get("sampled")
    found = None if stored is None else Sampled.from_json(stored)
    counts = config.get("class_counts") if config.get("weights") == "balanced" else None
    label = next((one["name"] for one in manifest.schema["fields"] if one["kind"] == "label"), None)
    if not counts or label is None or (found is not None and found.column != label):
        return found
    # Weights are inverse to the classes' records: the rarest class counts most.
    weights = {value: Fraction(min(counts.values()), records) for value, records in counts.items()}
    return replace(found, weights=weights) if found is not None else Sampled(label, {}, (), weights)


def shares_of_classes(sampled: Sampled | None, label: Field | None) -> tuple[float, ...] | None:
    """Return `Sampled.of_classes` where predictions can be corrected by it; None if all rows count alike, or if a whole
    class was left out.
    """
    shares = None if sampled is None or label is None else sampled.of_classes(label)
    return shares if shares is not None and all(shares) and min(shares) < 1 else None


def _share(text: object) -> Fraction:
    try:
        share = Fraction(text) if isinstance(text, str) and len(text) <= 50 and "e" not in text.lower() else None
    except (ValueError, ZeroDivisionError):
        share = None
    if share is None or not 0 <= share <= 1:
        raise declaration_error("what was sampled", f"a share {text!r}"[:200], "fractions from 0 to 1, such as 1/10")
    return share
