"""Says which choices of a run were made on a split: its figures there are better than on rows that no choice saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import LockstepError
from lockstep.training.config import options_in
from lockstep.training.rules import of_validation


def chosen_on(document: Mapping[str, Any], split: str, watching: Sequence[str] = ()) -> list[str]:
    """What chose this run's model, or its length, by the rows of `split`: `--early-stop val_auc:max:3`, ...

    `document` is run.json, `watching` the callbacks of its result that watch the validation.
    """
    config = options_in(document["config"])
    rules = {
        "--keep-best": config.get("keep_best"),
        "--early-stop": config.get("early_stop"),
        "the --metric of a search,": document.get("search_metric"),
    }
    judged: dict[bool, list[Any]] = {True: [config.get("validate")], False: str(config["split"]).split(",")}
    found = [f"{flag} {rule}" for flag, rule in rules.items() if rule and split in judged[of_validation(rule)]]
    return found + [f"the model's {one}" for one in watching if split == config.get("validate")]


def has_rows_of(document: Mapping[str, Any], datasets: Sequence[str]) -> bool:
    """Whether one of these datasets is one that the run was trained with, by its URL or its digest."""
    urls = options_in(document["config"])["datasets"]
    if set(urls) & set(datasets):
        return True
    digests = {document.get("dataset_digest")}
    for url in urls:
        try:
            digests.add(load_dataset(url).digest)
        except LockstepError:  # it was moved: only the digest of the run is left
            continue
    return any(load_dataset(url).digest in digests for url in datasets)


def chosen_words(reasons: Sequence[str]) -> str:
    """Say `chosen on this split (--keep-best val_auc:max): optimistic`; nothing without a reason."""
    return f"chosen on this split ({'; '.join(reasons)}): optimistic" if reasons else ""
