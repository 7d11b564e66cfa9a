"""Pictures whose class a model got wrong, for a report: those that it was surest of, a bounded number of bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from lockstep.features.schema.pictures import data_url, image_field
from lockstep.features.schema.schema import class_word
from lockstep.training.batches.feed import eval_batches
from lockstep.training.comm.base import Communicator
from lockstep.training.reading.open import OpenSplit
from lockstep.training.scoring.calibration import CONFIDENCE, PREDICTED
from lockstep.training.scoring.score_split import Outputs, Watched

MOST_PICTURES = 24
MOST_BYTES = 1 << 20  # of all data URLs


def misjudged(
    split: OpenSplit,
    outputs: Outputs,
    comm: Communicator,
    *,
    batch: int,
    names: Sequence[str] | None,
    skip_bad_images: bool,
) -> list[dict[str, Any]]:
    """Up to MOST_PICTURES rows of `split` whose predicted class is wrong: {sample_id, true, predicted, confidence (None
    for outputs that are no probabilities), picture (a data URL)}, the most confident first, equal ones by sample id:
    the same at any number of ranks.

    `outputs` are in detail, of a score with this `batch`. Reads this rank's share once more. Empty for a split without
    pictures or a model that does not predict one of several classes, and on other ranks than 0. A collective.
    """
    image = image_field(split.encoder.schema.fields)
    if image is None:
        return []
    details, watched, done = outputs.class_details(), Watched(split, skip_bad_images), 0
    found: list[tuple[tuple[float, int], dict[str, Any]]] = []
    if details is not None:
        for rows in eval_batches(split.reader, watched, comm.rank, comm.num_ranks, batch):
            mine = details[done : done + len(rows.sample_id)]
            done += len(mine)
            if rows.y is None or len(mine) != len(rows.sample_id) or rows.y.ndim != 1:
                break
            column = watched.rows.column(image.name)
            for row in (mine[:, PREDICTED] != rows.y).nonzero()[0].tolist():
                confidence, sample_id = round(float(mine[row, CONFIDENCE]), 6), int(rows.sample_id[row])
                place = (1.0 if math.isnan(confidence) else -confidence, sample_id)
                if len(found) == MOST_PICTURES and place >= found[-1][0]:
                    continue
                value = column[row].as_py()
                url = None if value is None else data_url(value, image)
                if url is None:
                    continue
                one: dict[str, Any] = {"sample_id": sample_id, "picture": url}
                one |= {"true": class_word(int(rows.y[row]), names)}
                one["predicted"] = class_word(int(mine[row, PREDICTED]), names)
                one["confidence"] = None if math.isnan(confidence) else confidence
                found = sorted([*found, (place, one)], key=lambda each: each[0])[:MOST_PICTURES]
    gathered = [one for part in comm.all_gather_bytes(json.dumps(found).encode()) for one in json.loads(part)]
    return [] if comm.rank else _within_bytes([one for _, one in sorted(gathered, key=lambda each: each[0])])


def _within_bytes(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first MOST_PICTURES, without those that make all of them larger than MOST_BYTES."""
    kept: list[dict[str, Any]] = []
    size = 0
    for one in found:
        if len(kept) < MOST_PICTURES and size + len(one["picture"]) <= MOST_BYTES:
            kept.append(one)
            size += len(one["picture"])
    return kept
