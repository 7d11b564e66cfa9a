"""Publishes a run's model under a name if it is better than the one published there, on the same rows."""

from __future__ import annotations

import datetime
from typing import Any

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.documents import seal, sha256_hex
from lockstep.storage.errors import ConfigError, ExistsError, NotFoundError, require
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, write_file
from lockstep.storage.urls import absolute, basename, join
from lockstep.training.launch.session import Launch
from lockstep.training.results.chosen_on import chosen_words
from lockstep.training.results.evaluate import evaluate
from lockstep.training.rules import BEST, BEST_ALLOWED
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.published import CURRENT, KIND, REFUSED, read_published
from lockstep.training.run.result import find_model

FORMAT_VERSION = 1


def publish(
    run: str,
    models: str,
    dataset: str,
    split: str,
    metric: str,
    launch: Launch,
    *,
    num_ranks: int = 1,
    batch: int = 512,
) -> dict[str, Any]:
    """Publish the model of the finished run `run` in the folder `models` if none is published there, or if its metric
    on `split` of `dataset` and of all that it continues is better.

    `metric` is METRIC:max or METRIC:min. Both models are evaluated on the same rows; a published run that is not there
    any more is replaced. `_current.json` is replaced atomically; a worse or equal model leaves it and is noted in
    `_refused/`. A run that is published already is not evaluated again. Returns the document that was written, or that
    is there: {published, reason, run, model, model_sha256 (of the model's manifest), metric, value, dataset,
    dataset_digest, earlier, split, samples, chosen_on (as `evaluate` has it, of this model), at, replaces (None, or
    run, model and value of the one before)}. Raises
    NotFoundError for an unfinished run, ConfigError for an unknown metric, ExistsError if another process publishes
    there meanwhile.
    """
    found = BEST.fullmatch(metric)
    require(found is not None, "--metric", metric, BEST_ALLOWED)
    assert found is not None
    name = found["metric"]
    run, models, dataset = absolute(run), absolute(models), absolute(dataset)
    fs = filesystem(models)
    model = find_model(filesystem(run), RunPaths(run))
    digest = sha256_hex(filesystem(model).read_bytes(join(model, MANIFEST_NAME)))
    current = read_published(fs, models)
    if current is not None and (current["model"], current["model_sha256"]) == (model, digest):
        return current
    result = evaluate(run, dataset, split, launch, num_ranks=num_ranks, batch=batch, earlier=True)
    value = _value(result, name)
    document = {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "run": run,
        "model": model,
        "model_sha256": digest,
        "metric": metric,
        "value": value,
        "dataset": dataset,
        "dataset_digest": load_dataset(dataset).digest,
        "earlier": result["earlier"],
        "split": split,
        "samples": result["samples"],
        "chosen_on": result["chosen_on"],
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if current is None:
        return _write(fs, models, None, {**document, "reason": "no model was published", "replaces": None})
    try:
        current_result = evaluate(
            current["run"], dataset, split, launch, num_ranks=num_ranks, batch=batch, earlier=True
        )
    except NotFoundError as error:
        reason = f"the published run {current['run']} is not there any more: {error.what}"
        return _write(fs, models, current, {**document, "reason": reason, "replaces": None})
    before = _value(current_result, name)
    theirs = {"run": current["run"], "model": current["model"], "value": before}
    better = value < before if metric.endswith(":min") else value > before
    said = f"{metric} {value:.6g}, and {before:.6g} of {current['run']}, on {result['samples']} rows"
    for whose, each in (("this", result), ("the published", current_result)):
        if each["chosen_on"]:
            said += f"; {whose} model was {chosen_words(each['chosen_on'])}"
    if better:
        return _write(fs, models, current, {**document, "reason": f"better: {said}", "replaces": theirs})
    document |= {"published": False, "reason": f"not better: {said}", "replaces": None, "kept": theirs}
    refused = join(models, REFUSED, f"{basename(run)}-{sha256_hex(run.encode())[:8]}.json")
    fs.mkdirs(join(models, REFUSED))
    write_file(fs, refused, seal(document), exclusive=False)
    return document


def _write(fs: FileSystem, models: str, current: dict[str, Any] | None, document: dict[str, Any]) -> dict[str, Any]:
    """Replace `_current.json`, if it still is what was compared."""

    def unchanged() -> None:
        if (there := read_published(fs, models)) != current:
            raise ExistsError(
                f"another model was published in {models} meanwhile",
                got=f"{there and there['run']}",
                allowed=f"{current and current['run']}, which this one was compared with",
                next_step="Publish again: the comparison is then with that model.",
            )

    document = {**document, "published": True}
    fs.mkdirs(models)
    write_file(fs, join(models, CURRENT), seal(document), exclusive=False, confirm=unchanged)
    return document


def _value(result: dict[str, Any], name: str) -> float:
    value = result["metrics"].get(name)
    if not isinstance(value, int | float):
        raise ConfigError(
            f"the evaluation has no number as metric `{name}`",
            got=f"{name}: {value}",
            allowed=", ".join(sorted(result["metrics"])),
            next_step="Correct --metric.",
        )
    return float(value)
