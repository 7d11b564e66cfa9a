"""Epochs of a run, counted by the steps it has done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any


def steps_in_epoch(plan: Mapping[str, Any]) -> Fraction | None:
    """The steps of an epoch by the `plan` of run.json; None for one that has not their number. They are no whole number
    where the last samples of an epoch fill no batch: the next epoch begins with them.
    """
    if "client_fraction" in plan:
        return Fraction(1)
    part = plan["parts"][0] if "parts" in plan else plan  # of a mix, an epoch is a pass over the first dataset
    records, batch = part.get("records"), part.get("global_batch")
    if isinstance(records, int) and isinstance(batch, int) and batch > 0:
        return Fraction(records, batch)
    return None


def epochs_trained(steps: int, of_epoch: Fraction, asked: int) -> float:
    """The epochs that `steps` steps are: their samples over the samples of an epoch (`of_epoch`, of `steps_in_epoch`).

    Steps that reach the end of an epoch, as Keras counts, are whole epochs: its last samples fill no batch, and the
    next epoch begins with them. So a run of all its `asked` epochs has trained as many.
    """
    if steps == asked * of_epoch // 1:
        return asked
    whole = math.ceil(steps / of_epoch)
    return whole if whole * of_epoch // 1 == steps else float(steps / of_epoch)


def epochs_words(trained: float, asked: int) -> str:
    """Say `5`, or `0.54 of 5` where they differ; rounded down, so that it never looks like the whole."""
    shown = math.floor(trained * 100) / 100
    words = f"{shown:g}" if trained == int(trained) else f"{shown:.2f}" if shown else f"{trained:.1g}"
    return words if trained == asked else f"{words} of {asked}"
