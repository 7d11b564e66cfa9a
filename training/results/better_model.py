"""Publishes a run's model under a name if it is better than the one published there, on the same rows."""

from __future__ import annotations

import datetime
from dataclasses import replace
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
from lockstep.training.results.evaluate import EvaluateRequest, evaluate
from lockstep.training.rules import BEST, BEST_ALLOWED
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.published import CURRENT, KIND, REFUSED, OtherModelError, published_model, read_published
from lockstep.training.run.result import find_model

FORMAT_VERSION = 1


def publish_if_better(
    request: EvaluateRequest, models: str, metric: str, launch: Launch, *, max_drop: float | None = None
) -> dict[str, Any]:
    """Publish the model of the request's one finished run in the folder `models` if none is published there, or if its
    metric on the rows of the request, and of all datasets that its dataset continues, is better.

    `metric` is METRIC:max or METRIC:min. With `max_drop`, a better model is refused too if it is worse by more than
    that on the rows of one of these datasets: it has forgotten them. Both models are evaluated on the same rows; a
    published run that is not there any more is replaced. `_current.json` is replaced atomically; a worse or equal model
    leaves it and is noted in `_refused/`. A run that is published already is not evaluated again. Returns the document
    that was written, or that is there: {published, reason, run, model, model_sha256 (of the model's manifest), metric,
    value, dataset, dataset_digest, earlier, split, samples, chosen_on (as `evaluate` has it, of this model), at,
    replaces (None, or run, model and value of the one before)}. Raises NotFoundError for an unfinished run, ConfigError
    for an unknown metric, ExistsError if another process publishes there meanwhile.
    """
    require(BEST.fullmatch(metric) is not None, "--metric", metric, BEST_ALLOWED)
    request, models = replace(request, earlier=True), absolute(models)
    fs = filesystem(models)
    model = find_model(filesystem(request.runs[0]), RunPaths(request.runs[0]))
    digest = sha256_hex(filesystem(model).read_bytes(join(model, MANIFEST_NAME)))
    current = read_published(fs, models)
    if current is not None and (current["model"], current["model_sha256"]) == (model, digest):
        return current
    result = evaluate(request, launch)
    document = {**_document(request, models, metric, result), "model": model, "model_sha256": digest}
    if current is None:
        return _write(fs, models, None, {**document, "reason": "no model was published", "replaces": None})
    try:
        published_model(fs, models)
        theirs = evaluate(replace(request, runs=(current["run"],)), launch)
    except (NotFoundError, OtherModelError) as error:
        reason = f"the published run {current['run']} is not there any more: {error.what}"
        return _write(fs, models, current, {**document, "reason": reason, "replaces": None})
    value, before = document["value"], _value(theirs, metric)
    better = value < before if metric.endswith(":min") else value > before
    fallen = None if max_drop is None else _fallen(result, theirs, metric, max_drop)
    said = f"{metric} {value:.6g}, and {before:.6g} of {current['run']}, on {result['samples']} rows"
    for whose, each in (("this", result), ("the published", theirs)):
        if each["chosen_on"]:
            said += f"; {whose} model was {chosen_words(each['chosen_on'])}"
    other = {"run": current["run"], "model": current["model"], "value": before}
    if better and fallen is None:
        return _write(fs, models, current, {**document, "reason": f"better: {said}", "replaces": other})
    reason = f"better, but {fallen}: {said}" if better else f"not better: {said}"
    document |= {"published": False, "reason": reason, "replaces": None, "kept": other}
    run = request.runs[0]
    refused = join(models, REFUSED, f"{basename(run)}-{sha256_hex(run.encode())[:8]}.json")
    fs.mkdirs(join(models, REFUSED))
    write_file(fs, refused, seal(document), exclusive=False)
    return document


def _fallen(result: dict[str, Any], theirs: dict[str, Any], metric: str, most: float) -> str | None:
    """Which dataset's rows the published model was better for by more than `most`; None if there is none."""
    sign = -1.0 if metric.endswith(":min") else 1.0
    drops = [
        (sign * (_value(before, metric) - _value(now, metric)), now["dataset"])
        for now, before in zip(result["by_dataset"], theirs["by_dataset"], strict=True)
    ]
    drop, dataset = max(drops)
    if drop <= most:
        return None
    return f"worse by {drop:.6g} on {basename(dataset)}, of which --max-drop allows {most:g}"


def _document(request: EvaluateRequest, models: str, metric: str, result: dict[str, Any]) -> dict[str, Any]:
    """What is published of a run and its evaluation."""
    return {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "run": request.runs[0],
        "models": models,
        "metric": metric,
        "value": _value(result, metric),
        "dataset": request.dataset,
        "dataset_digest": load_dataset(request.dataset).digest,
        **{name: result[name] for name in ("earlier", "split", "samples", "chosen_on")},
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


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


def _value(result: dict[str, Any], metric: str) -> float:
    name = metric.rpartition(":")[0]
    value = result["metrics"].get(name)
    if not isinstance(value, int | float):
        raise ConfigError(
            f"the evaluation has no number as metric `{name}`",
            got=f"{name}: {value}",
            allowed=", ".join(sorted(result["metrics"])),
            next_step="Correct --metric.",
        )
    return float(value)
