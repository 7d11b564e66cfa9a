"""How many images, rejected and left-out records there are, and which classes the images have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etl import columns as c
from etl.images.config import MAX_CLASSES, ImagesConfig
from etl.images.image_rows import BAD, DROPPED, RECORD
from etl.images.pieces import ImagePlan
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import DataError
from lockstep.storage.urls import absolute

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_OTHER_GROUPS = 16  # what is rejected, and what is left out by the few rules there are


@dataclass(frozen=True, slots=True)
class Tally:
    """How many rows of each kind there are, and the classes of the images by their names."""

    read: int
    bad: int
    raw_bytes: int
    dropped: Mapping[str, int]
    classes: tuple[str, ...]
    without_split: int


def tally_of(parsed: DataFrame, most_classes: int = MAX_CLASSES) -> Tally:
    """Count the rows of etl.images.image_rows in one pass. Raises DataError for more classes than that: unique texts
    in place of labels are as many as images.
    """
    from pyspark.sql import functions as f

    by = ("kind", "class", f.when(f.col("kind") == DROPPED, f.col("reason")).alias("reason"))
    sums = (
        f.count(f.lit(1)).alias("n"),
        f.sum(f.octet_length("raw")).alias("raw"),
        f.count(f.when(f.col(c.SPLIT).isNull(), 1)).alias("unsplit"),
    )
    most = most_classes + _OTHER_GROUPS
    found = parsed.groupBy(*by).agg(*sums).limit(most + 1).collect()
    if len(found) > most:
        raise _wrong_number(f"more than {most_classes}", [row["class"] for row in found], f"{most_classes} at most")
    good = [row for row in found if row["kind"] == RECORD]
    bad = [row for row in found if row["kind"] == BAD]
    return Tally(
        read=sum(row["n"] for row in found),
        bad=sum(row["n"] for row in bad),
        raw_bytes=sum(row["raw"] or 0 for row in bad),
        dropped={row["reason"]: row["n"] for row in found if row["kind"] == DROPPED},
        classes=tuple(sorted(row["class"] for row in good if row["class"] is not None)),
        without_split=sum(row["unsplit"] for row in good),
    )


def class_names(config: ImagesConfig, plan: ImagePlan, tally: Tally) -> Sequence[str]:
    """The names of the labels in order, () where nobody knows any: sorted, or those of the dataset that is continued.

    Raises DataError where they cannot be labels.
    """
    if config.split_spec.given and tally.without_split:
        raise DataError(
            f"{tally.without_split} images do not name their split",
            got="neither a folder nor an archive named like a split",
            allowed="train/CLASS/..., test/CLASS/... or val/CLASS/..., or archives named so",
            next_step="Use --split 80/20.",
        )
    if plan.num_classes is not None:
        return plan.class_names
    most = config.num_classes or MAX_CLASSES
    least = 2 if config.append_to is None else 1
    if not least <= len(tally.classes) <= most:
        raise _wrong_number(str(len(tally.classes)), tally.classes, f"{least} to {most}")
    return tally.classes if config.append_to is None else _continued(config.append_to, tally.classes)


def _wrong_number(found: str, classes: Sequence[str | None], allowed: str) -> DataError:
    return DataError(
        f"{found} classes were found",
        got=", ".join(sorted(name for name in classes if name is not None)[:5])[:500] or "no image",
        allowed=allowed,
        next_step="Put the images of each class into a folder of its name; correct --num-classes.",
    )


def _continued(url: str, found: Sequence[str]) -> Sequence[str]:
    """The names of the dataset at `url`, whose labels the new one's must be. Raises DataError for another name."""
    known = load_dataset(absolute(url)).created_by["config"].get("class_names")
    names = known if isinstance(known, list) else []
    others = [name for name in found if name not in set(names)]
    if others:
        raise DataError(
            f"{url} cannot be continued: it has not all classes",
            got=", ".join(others[:5]),
            allowed=", ".join(map(str, names[:20])) or "a dataset whose classes have names",
            next_step="Make a dataset of its own without --append-to.",
        )
    return names
