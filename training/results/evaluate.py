"""Evaluates a run's model on a split: the caller's side, and the entry of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Self, cast

from lockstep.features.schema.sampled import Sampled, sampled_of, shares_of_classes
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_chain, load_dataset
from lockstep.storage.documents import parse_canonical
from lockstep.storage.errors import ConfigError, require
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import absolute, join, several
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.task import RankTask
from lockstep.training.launch.session import Launch
from lockstep.training.plan.datasets import held_out, open_mixture, open_parts, rows_of
from lockstep.training.rank import runtime
from lockstep.training.results.chosen_on import chosen_on, chosen_words, has_rows_of
from lockstep.training.results.export_run import Which, weights_of
from lockstep.training.run import notes
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from lockstep.training.run.run_json import read_run
from lockstep.training.run.weights_source import SCHEMA_FILE, checked_file
from lockstep.training.scoring.baseline import check_baseline
from lockstep.training.scoring.scores import BATCH_ROWS
from lockstep.training.scoring.slices import slices_of

ENTRY = "lockstep.training.results.evaluate:main"
SHOWN_CLASSES = 10  # in the line above the table, and of a confusion matrix
SHOWN_METRICS = 3  # of a slice


@dataclass(frozen=True, slots=True)
class Scored:
    """A run's model, or one of its checkpoints; `kept` is the share of each class that counts in training, `rows` that
    of its rows.
    """

    run: str
    config: TrainConfig
    dataset_digest: str
    model: str | None
    checkpoint: str | None
    kept: tuple[float, ...] | None
    document: dict[str, Any]
    """The content of run.json."""
    rows: tuple[float, ...] | None

    @classmethod
    def of(cls, run: str, which: Which | str | None, evaluated: DatasetManifest) -> Self:
        """The newest model or else checkpoint of the run if no checkpoint is named."""
        document = read_run(filesystem(run), RunPaths(run))
        config, digest = TrainConfig.from_json(document["config"]), document["dataset_digest"]
        url = isinstance(which, str) and which not in ("last", "best")
        model, checkpoint = (None, str(which)) if url else weights_of(run, config, cast("Which | None", which))
        sampled, label = _sampled(model, evaluated, digest), Schema.from_json(evaluated.schema).label
        rows = None if sampled is None else shares_of_classes(sampled.unweighted(), label)
        shares = shares_of_classes(sampled, label)
        return cls(run, config, digest, model, checkpoint, shares, document, rows)

    def to_json(self) -> dict[str, Any]:
        """What a rank needs of it."""
        kept = {name: getattr(self, name) for name in ("run", "model", "checkpoint", "kept")}
        return {**kept, "config": self.config.to_json()}

    def chosen_on(self, datasets: Sequence[str], split: str) -> list[str]:
        """Return what chose the model by rows of `split` (lockstep.training.results.chosen_on); nothing for other
        datasets.
        """
        if not has_rows_of(self.document, datasets):
            return []
        result = find_result(filesystem(self.run), RunPaths(self.run))
        return chosen_on(self.document, split, (result or {}).get("watching", ()))


def evaluate(
    run: str | Sequence[str],
    dataset: str,
    split: str,
    launch: Launch,
    *,
    num_ranks: int = 1,
    batch: int = BATCH_ROWS,
    baseline: str | None = None,
    slices: Sequence[str] = (),
    clusters: str | None = None,
    checkpoint: Which | str | None = None,
    earlier: bool = False,
    more: Sequence[str] = (),
    pictures: bool = False,
) -> dict[str, Any]:
    """Evaluate the run's model (its newest claim's, else the weights of the last checkpoint; or those of `checkpoint`:
    `last`, `best`, a step or a URL) on `split` of `dataset`; of several runs the mean of their models' probabilities,
    and each model.

    `baseline` is `rate:COLUMN` (the mean label for each value of a column, smoothed), `majority` (the class shares), or
    `mean` or `median` of labels that are numbers,
    counted on the training rows (of the first run) and applied to the same rows as the model. `slices` are COLUMN,
    COLUMN:day or COLUMN:hour. Rows of one value of the stored column `clusters` (by default that of a split by group)
    depend on each other, and intervals count the values. With `earlier`, the rows of all datasets that `dataset`
    continues are evaluated too, and the result names them as `earlier`, nearest first. The rows of the datasets `more`
    follow.

    With `pictures`, the result of one run has `misjudged` (lockstep.training.scoring.misjudged) where rows have
    pictures.

    Returns {run, dataset, split, model, chosen_on (what chose the model, or its length, by these rows:
    lockstep.training.results.chosen_on), samples, weighted (the metrics in which the rows' weights count, None if rows
    have none), left_out ({samples, first}: with --bad-images skip, rows of images
    that cannot be decoded), metrics, intervals (95 %, of metrics that have one), class_counts (None if labels are not
    classes), baseline: None or {name, metrics, intervals, class_counts}, difference (model less baseline, {metric:
    {value, interval}}), compared_by (the metric that decides, None without a baseline), calibration, roc, confusion
    (lockstep.training.scoring.calibration; None where there is none), slices ({name:
    lockstep.training.scoring.slices.metrics_of_slices})}; of several runs, run and model are lists, `members` has such
    a result of each, and `comparisons` the differences {of, less, difference} of the mean (`mean`) and the best run,
    and of each two runs (lockstep.training.scoring.scores.compared). Prints notes on doubtful numbers to standard
    error. Raises ConfigError and NotFoundError, where possible before any rank is started.
    """
    require(batch >= 1 and num_ranks >= 1, "--batch or --num-ranks", f"{batch} rows, {num_ranks} ranks", "1 or more")
    dataset = absolute(dataset)
    manifest = checked_dataset(dataset, split, slices)
    grouped, stored = clusters_of(manifest, clusters)
    datasets = [url for url, _ in load_chain(dataset)] if earlier else [dataset]
    datasets += [absolute(url) for url in more]
    models = [Scored.of(absolute(one), checkpoint, manifest) for one in several(run)]
    require(bool(models), "--run", "no run", "one run, or several whose models are averaged")
    first = models[0]
    if baseline is not None:
        check_baseline(baseline, Schema.from_json(manifest.schema))
        _check_trained_on(first.config, first.dataset_digest, baseline)
    check_alike(models, manifest, split)
    payload = {
        "config": first.config.to_json(),
        "members": [one.to_json() for one in models],
        "datasets": datasets,
        "split": split,
        "batch": batch,
        "baseline": baseline,
        "slices": list(slices),
        "clusters": stored,
        "pictures": pictures,
    }
    tls = any(model.config.tls == "on" for model in models)  # as the runs were trained
    found = launch(RankTask(ENTRY, payload, hadoop=hadoop_settings(), tls=tls), num_ranks)[0]
    where = [{"run": one.run, "model": one.model or one.checkpoint} for one in models]
    if len(models) > 1:
        found["members"] = [{**one, **scored} for one, scored in zip(where, found["members"], strict=True)]
    named = where[0] if len(models) == 1 else {key: [one[key] for one in where] for key in ("run", "model")}
    reasons = dict.fromkeys(reason for one in models for reason in one.chosen_on(datasets, split))
    result = {**named, "dataset": dataset, "split": split, "chosen_on": list(reasons), **found}
    if earlier:
        result["earlier"] = datasets[1 : len(datasets) - len(more)]
    trained = find_result(filesystem(first.run), RunPaths(first.run))
    thinned = thinned_of(manifest, split)
    web = "role_columns" in manifest.created_by["config"]
    lost = notes.of_groups(grouped if stored is None else None, is_web_log=web)
    notes.show([*_doubts(result, trained, first.rows, thinned), *lost])
    return result


def without_pictures(result: Any) -> Any:
    """A result of `evaluate` to be printed: pictures are for the report. Another value as it is."""
    if not isinstance(result, Mapping):
        return result
    return {name: value for name, value in result.items() if name != "misjudged"}


def evaluate_pooled(
    runs: Mapping[str, str], dataset: str, launch: Launch, *, num_ranks: int = 1, batch: int = BATCH_ROWS
) -> dict[str, Any]:
    """Evaluate several runs, each on the split of `dataset` that it is the value of, and put all predictions together:
    {samples, metrics, intervals} of the metrics that rows decide. The splits have no row in common.
    """
    dataset = absolute(dataset)
    manifest = load_dataset(dataset)
    _, stored = clusters_of(manifest, None)
    models = [Scored.of(run, None, manifest) for run in runs.values()]
    payload = {
        "config": models[0].config.to_json(),
        "members": [{**one.to_json(), "split": split} for split, one in zip(runs, models, strict=True)],
        "datasets": [dataset],
        "split": next(iter(runs)),
        "batch": batch,
        "baseline": None,
        "slices": [],
        "clusters": stored,
        "pooled": True,
    }
    task = RankTask(ENTRY, payload, hadoop=hadoop_settings(), tls=any(one.config.tls == "on" for one in models))
    return dict(launch(task, num_ranks)[0])


def check_alike(models: Sequence[Scored], manifest: DatasetManifest, split: str) -> None:
    """Raise ConfigError for models that are fed other inputs, or were trained on other shares of the classes."""
    trained_on = [one.config.split for one in models if split in one.config.split.split(",")]
    folds = {held_out(manifest, names, training=True) for names in trained_on}
    alike = len(folds) <= 1 and len(trained_on) in (0, len(models)) and len({one.kept for one in models}) == 1
    if not alike:
        raise ConfigError(
            "these models cannot be averaged",
            got="; ".join(f"trained on {one.config.split}, shares of classes {one.kept or 'all'}" for one in models),
            allowed=f"all trained on the same folds, or none of them on `{split}`; with the same --sample",
            next_step="Choose another --split, or evaluate these runs one by one.",
        )


def checked_dataset(dataset: str, split: str, slices: Sequence[str]) -> DatasetManifest:
    """The manifest of a dataset that has rows in this split, and these slices. Raises ConfigError, or what reading it
    raises.
    """
    manifest = load_dataset(dataset)
    rows_of(manifest, split)
    slices_of(slices, Schema.from_json(manifest.schema))
    return manifest


def clusters_of(manifest: DatasetManifest, asked: str | None) -> tuple[str | None, str | None]:
    """Return the column by whose groups the dataset is split, and the stored column whose rows count as clusters:
    `asked`, or the first one if it is stored. Raises ConfigError for a column that is not stored.
    """
    schema = Schema.from_json(manifest.schema)
    stored = {field.name for field in schema if field.shape == ()}
    if asked is not None and asked not in stored:
        raise ConfigError(
            f"the dataset has no column `{asked}` for clusters",
            got=asked,
            allowed=", ".join(sorted(stored)),
            next_step="Correct --clusters, or store the column when the dataset is made.",
        )
    kind, _, rest = str(manifest.created_by["config"].get("split", "")).partition(":")
    grouped = rest.rpartition(":")[0] if kind == "group" else rest.partition(":")[2] if kind == "kfold" else ""
    return grouped or None, asked or (grouped if grouped in stored else None)


def thinned_of(manifest: DatasetManifest, split: str) -> tuple[float, ...] | None:
    """The share of each class that --sample kept of `split`; None if it kept all rows or a class has none."""
    sampled = sampled_of(manifest)
    if sampled is None or split not in sampled.splits:
        return None
    return shares_of_classes(sampled.unweighted(), Schema.from_json(manifest.schema).label)


def _sampled(model: str | None, evaluated: DatasetManifest, digest: str) -> Sampled | None:
    """What was sampled or weighted for training: from the exported model, else from the evaluated dataset if its digest
    is the run's.
    """
    if model is None:
        return sampled_of(evaluated) if evaluated.digest == digest else None
    return Schema.from_json(parse_canonical(checked_file(model, SCHEMA_FILE), file=join(model, SCHEMA_FILE))).sampled


def _check_trained_on(config: TrainConfig, digest: str, baseline: str) -> None:
    """Raise ConfigError if the run's datasets have changed, or lack what `baseline` needs."""
    trained_on = (open_parts if config.mix is None else open_mixture)(config.datasets, config.split)[1]
    if trained_on.digest != digest:
        raise ConfigError(
            f"the baseline {baseline} cannot be counted on the run's training rows",
            got=f"datasets {', '.join(config.datasets)} of digest {trained_on.digest}",
            allowed=f"digest {digest}",
            next_step="Put the run's datasets back in their places, or leave --baseline out.",
        )
    check_baseline(baseline, Schema.from_json(trained_on.schema))


def _doubts(
    result: Mapping[str, Any],
    trained: Mapping[str, Any] | None,
    kept: Sequence[float] | None,
    thinned: Sequence[float] | None,
) -> list[str]:
    baseline, split = result["baseline"], result["split"]
    trained_on = _before(baseline["class_counts"] if baseline else (trained or {}).get("class_counts"), kept)
    return [
        *notes.of_left_out(result["left_out"], split),
        *notes.of_classes(result["class_counts"], f"split `{split}`"),
        *notes.of_classes(trained_on, "what the run was trained on"),
        *notes.of_base_rates(trained_on, _before(result["class_counts"], thinned), split),
        *notes.of_metrics(result["metrics"], f"the metrics of split `{split}`"),
        *notes.of_baseline(result),
    ]


def _before(counts: Sequence[int] | None, shares: Sequence[float] | None) -> Sequence[int] | None:
    """Return the rows that each class had before --sample."""
    if not counts or not shares:
        return counts
    return [round(rows / share) for rows, share in zip(counts, shares, strict=True)]


def summary(result: Mapping[str, Any]) -> str:
    """Small tables of a result."""
    baseline, counts, members = result["baseline"], result["class_counts"], result.get("members", [])
    head = f"{result['split']} of {PurePosixPath(result['dataset']).name}: {result['samples']} samples"
    head += f" with {len(result['earlier'])} earlier datasets" if result.get("earlier") else ""
    if counts is not None:
        classes = ", ".join(f"{rows} of {number}" for number, rows in enumerate(counts[:SHOWN_CLASSES]))
        head += f", {classes}" + (", ..." if len(counts) > SHOWN_CLASSES else "")
    if result.get("clusters"):
        head += f"; intervals count {result['clusters']['clusters']} values of {result['clusters']['column']}, not rows"
    if result.get("weighted") is not None:
        head += f"\nrows count by their weights in {', '.join(result['weighted'])}, and once in all else"
    table = [["metric", f"mean of {len(members)}" if members else "model", "95 % interval"]]
    if baseline:
        table[0] += [baseline["name"], "difference", "95 % interval"]
    table[0] += [PurePosixPath(member["run"]).name for member in members]
    for name, value in sorted(result["metrics"].items()):
        row = [name, number(value), span(result["intervals"].get(name))]
        if baseline:
            difference = result["difference"].get(name, {"value": None, "interval": None})
            row += [number(baseline["metrics"].get(name)), number(difference["value"]), span(difference["interval"])]
        table.append([*row, *(number(member["metrics"].get(name)) for member in members)])
    if chosen := chosen_words(result["chosen_on"]):
        head += f"\n{chosen}"
    parts = [
        [head, *aligned(table)],
        aligned(_comparisons(result.get("comparisons", []))),
        _calibration(result["calibration"]),
        _confusion(result["confusion"]),
    ]
    parts += [aligned(slice_table(name, slices)) for name, slices in result["slices"].items()]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Differences of the mean and the best run, and of each two runs: the first metrics that have intervals."""
    if not comparisons:
        return []
    differences = [one["difference"] for one in comparisons]
    shown = [name for name in differences[0] if any(one[name]["interval"] for one in differences)][:SHOWN_METRICS]
    table = [["difference", *(text for name in shown for text in (name, "95 % interval"))]]
    for one in comparisons:
        of, less = (PurePosixPath(one[which]).name for which in ("of", "less"))
        cells = [one["difference"][name] for name in shown]
        row = [text for cell in cells for text in (number(cell["value"]), span(cell["interval"]))]
        table.append([f"mean - {less} (best)" if of == "mean" else f"{of} - {less}", *row])
    return table


def _calibration(calibration: Mapping[str, Any] | None) -> list[str]:
    if calibration is None:
        return []
    error, brier, bins = calibration["expected_error"], calibration["brier"], calibration["bins"]
    chance = calibration["error_by_chance"]
    rows = [[name, *(f"{each[name]:.3f}" for each in bins)] for name in ("predicted", "observed")]
    of = f"calibration of {calibration['of']}"
    errors = f"expected error {error:.4f} (by chance alone {chance:.4f}), Brier score {brier:.4f}"
    return [f"{of}: {errors}, bins of equal count", *aligned(rows)]


def _confusion(confusion: Mapping[str, Any] | None) -> list[str]:
    if confusion is None or len(confusion["classes"]) > SHOWN_CLASSES:
        return []
    rows = [[name, *map(str, counts)] for name, counts in zip(confusion["classes"], confusion["samples"], strict=True)]
    return aligned([["true \\ predicted", *confusion["classes"]], *rows])


def slice_table(name: str, slices: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Head and rows of the slices of one column: their samples, and the first metrics that have intervals."""
    shown = (
        [metric for metric in slices[0]["metrics"] if any(metric in one["intervals"] for one in slices)]
        if slices
        else []
    )
    shown = shown[:SHOWN_METRICS]
    head = [name, "samples", *(text for metric in shown for text in (metric, "95 % interval"))]
    return [head] + [
        [one["value"], str(one["samples"])]
        + [
            text
            for metric in shown
            for text in (number(one["metrics"].get(metric)), span(one["intervals"].get(metric)))
        ]
        for one in slices
    ]


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]  # none of an empty table
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def main(context: RankContext) -> dict[str, Any]:
    """Evaluate this rank's share; rank 0 returns a result of `evaluate` from `samples` on, other ranks {}."""
    config = TrainConfig.from_json(context.payload["config"])
    runtime.configure(context.world, precision=config.precision, seed=config.seed)
    from lockstep.training.results.evaluate_rank import run  # here, since it imports TensorFlow, which is set up now

    return run(context, config)


def number(value: Any) -> str:
    """A metric's value in a table; - if there is none."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, int | float) else str(value)


def span(interval: Sequence[float] | None) -> str:
    """An interval in a table; - if there is none."""
    return "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
