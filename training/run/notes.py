"""Notes on numbers of a run that need care, each a line that ends with what to do next."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.features.schema.schema import class_word
from lockstep.training.rules import VALIDATION, of_validation

# Shares of a class are far apart by the rule of lockstep etl_* for splits: they differ by more than a tenth of the
# smaller one, and by more than five standard deviations.
FAR, FAR_DEVIATIONS = 0.1, 5.0
NAMED = 20  # of the rows whose image cannot be decoded


def show(notes: Iterable[str]) -> None:
    """Print each as a line on standard error."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr, flush=True)


def of_classes(counts: Sequence[int] | None, where: str, names: Sequence[str] | None = None) -> list[str]:
    """Labels of one class only; `where` is, for example, "split `train`", `names` those of the classes."""
    present = [number for number, rows in enumerate(counts or ()) if rows]
    if len(present) != 1 or counts is None:
        return []
    return [
        f"all {counts[present[0]]} labels of {where} are {class_word(present[0], names)}, so no metric shows whether a "
        "model distinguishes classes; next: check the label with lockstep describe, or build the dataset with --split "
        "stratified:LABEL:..."
    ]


def of_left_out(left_out: Mapping[str, Any], split: str, what: str = "are left out") -> list[str]:
    """Rows of `split` that cannot be decoded; `left_out` as in lockstep.training.scoring.score_split.Scorer.score."""
    if not left_out["samples"]:
        return []
    return [
        f"{left_out['samples']} rows of split `{split}` {what}, the first: {left_out['first'][0]}; next: build "
        "the dataset again without what cannot be decoded"
    ]


def of_replay(asked: float | None, ratios: Sequence[int] | None) -> list[str]:
    """A share of earlier datasets other than the one that was asked for."""
    if asked is None or ratios is None:
        return []
    met = ratios[-1] / sum(ratios)
    return [] if abs(met - asked) < 1e-9 else [f"--replay {asked:g} takes {met:g} of each batch, in whole rows"]


def of_keep_best(best: str | None) -> list[str]:
    """A best checkpoint that is chosen by a metric of the training rows."""
    if best is None or of_validation(best):
        return []
    return [
        f"--keep-best {best} judges checkpoints by the training rows, on which a model looks best when it overfits; "
        f"next: hold out a split and give --validate SPLIT --keep-best {VALIDATION}{best}"
    ]


def of_private_search(noise_multiplier: float) -> list[str]:
    """A search whose trials train with noise on clients."""
    if not noise_multiplier:
        return []
    return [
        "epsilon is that of each trial alone: the choice among trials by a metric without noise is not covered; next: "
        "choose by other clients' data, or add up the epsilons and deltas of all trials"
    ]


def of_metrics(metrics: Mapping[str, Any], where: str) -> list[str]:
    """Metrics that are not finite numbers; `where` is, for example, "epoch 3"."""
    names = [name for name, value in sorted(metrics.items()) if not _finite(value)]
    if not names:
        return []
    return [
        f"no finite number in {where}: {', '.join(f'{name} {metrics[name]}' for name in names)}; next: look for a "
        "class without rows, for inputs that are not finite (lockstep describe), and for too high a learning rate"
    ]


def of_predictions(not_finite: int, rows: int) -> list[str]:
    """Predictions that are not finite numbers."""
    if not not_finite:
        return []
    return [
        f"{not_finite} of {rows} predictions are not finite; next: look for inputs that are not finite (lockstep "
        "describe) and for a run that diverged (lockstep report)"
    ]


def of_pixels(otherwise: str | None) -> list[str]:
    """Pictures that became pixels `otherwise` than those that the model was trained on."""
    if otherwise is None:
        return []
    return [f"the dataset's pixels were made with {otherwise}; next: make it by the flags of the training data"]


def of_base_rates(
    trained: Sequence[int] | None, evaluated: Sequence[int] | None, split: str, names: Sequence[str] | None = None
) -> list[str]:
    """The class whose share differs most between the training data and `split`, if any differs clearly."""
    if not trained or not evaluated or len(trained) != len(evaluated) or not sum(trained) or not sum(evaluated):
        return []
    far = []
    for number, (before, after) in enumerate(zip(trained, evaluated, strict=True)):
        shares = before / sum(trained), after / sum(evaluated)
        common = (before + after) / (sum(trained) + sum(evaluated))
        error = math.sqrt(common * (1 - common) * (1 / sum(trained) + 1 / sum(evaluated)))
        low, high = sorted(shares)
        if high - low > FAR_DEVIATIONS * error and high - low > FAR * low:
            far.append(((high - low) / error, number, shares))
    if not far:
        return []
    # Two classes are equally far apart: report class 1.
    _, number, (learnt, here) = max(far, key=lambda one: (round(one[0], 6), one[1]))
    return [
        f"class {class_word(number, names)} is {here:.2%} of split `{split}` and {learnt:.2%} of the training data: "
        "probabilities, log loss and accuracy do not carry over; next: compare the splits with lockstep describe, "
        "and check whether --sample has left rows out"
    ]


def of_groups(column: str | None, *, is_web_log: bool = False) -> list[str]:
    """Rows of one group that depend on each other where the dataset does not say which they are."""
    if column is None:
        return []
    way = f'declare `{column}` in --schema with encoding = {{ kind = "ignore" }}, which stores it and feeds no model'
    if is_web_log:
        way = "no flag stores it in a dataset of web requests: write the requests as records with a --schema, which can"
    return [
        f"intervals take rows for independent, but the dataset is split by `{column}`, whose rows depend on each "
        f"other, and does not store it, so they are too narrow; next: {way}; or give --clusters a stored column that "
        "stands for it"
    ]


def of_baseline(result: Mapping[str, Any]) -> list[str]:
    """A model that is not clearly better than its baseline; `result` as from lockstep.training.results.evaluate."""
    baseline, name = result["baseline"], result["compared_by"]
    if baseline is None or name is None or result["difference"][name]["interval"] is None:
        return []
    low, high = result["difference"][name]["interval"]
    if low > 0:
        return []
    is_, rows = ("is worse than", "") if high < 0 else ("cannot be distinguished from", "evaluate on more rows, ")
    return [
        f"the model {is_} its baseline {baseline['name']}: {name} {result['metrics'][name]:.4f} and "
        f"{baseline['metrics'][name]:.4f}, a difference of {low:.4f} to {high:.4f} (95 % interval); next: {rows}"
        "train longer, or give the model other inputs"
    ]


def _finite(value: Any) -> bool:
    if isinstance(value, str):  # "nan" and "inf", as JSON has them
        return False
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, int | float) and math.isfinite(one) for one in values)
