"""Evaluates a run's model on a split: the caller's side, and the entry of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Self

from lockstep.features.schema.sampled import Sampled, sampled_of, shares_of_classes
from lockstep.features.schema.schema import Schema, class_names_of, class_word
from lockstep.storage.dataset.manifest import DatasetManifest, load_chain, load_dataset
from lockstep.storage.documents import parse_canonical
from lockstep.storage.errors import ConfigError, StorageError, require
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, join
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.protocol import Message
from lockstep.training.launch.session import Launch
from lockstep.training.plan.datasets import held_out, open_data, rows_of
from lockstep.training.plan.selection import Selection
from lockstep.training.rank import runtime
from lockstep.training.reading.selecting import select
from lockstep.training.results.chosen_on import chosen_on, chosen_words, has_rows_of
from lockstep.training.results.forgetting import Forgetting, forgetting_of, keep_days
from lockstep.training.results.model_inputs import other_pixels
from lockstep.training.results.stored_model import StoredModel, Which, task_of
from lockstep.training.run import notes
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from lockstep.training.run.run_json import read_run
from lockstep.training.run.weights_source import SCHEMA_FILE, checked_file
from lockstep.training.scoring.naive_baseline import check_baseline
from lockstep.training.scoring.scores import BATCH_ROWS
from lockstep.training.scoring.slices import slices_of

ENTRY = "lockstep.training.results.evaluate:main"
SHOWN_CLASSES = 10  # in the line above the table, and of a confusion matrix
SHOWN_METRICS = 3  # of a slice


@dataclass(frozen=True)
class EvaluateRequest(Message):
    """What to evaluate, on which rows, and what to compute. Raises ConfigError without rows or ranks."""

    runs: tuple[str, ...]
    """The runs whose models are evaluated: of several the mean of their probabilities, and each."""
    dataset: str
    split: str
    _: KW_ONLY
    num_ranks: int = 1
    batch: int = BATCH_ROWS
    """Rows that a rank computes at a time."""
    baseline: str | None = None
    """`rate:COLUMN` (the mean label for each value of a column, smoothed), `majority` (the class shares), or `mean` or
    `median` of labels that are numbers, counted on the training rows of the first run."""
    slices: tuple[str, ...] = ()
    """COLUMN, COLUMN:day or COLUMN:hour."""
    where: str | None = None
    """A condition in SQL: only the samples that meet it are evaluated (None: all)."""
    clusters: str | None = None
    """A stored column: rows of one of its values depend on each other, and intervals count the values. None: that of a
    split by group."""
    checkpoint: int | str | None = None
    """`last`, `best`, a step or a URL; None: the newest model, else the weights of the last checkpoint."""
    earlier: bool = False
    """Whether to evaluate the rows of all datasets that `dataset` continues too."""
    more: tuple[str, ...] = ()
    """Datasets whose rows follow."""
    pictures: bool = False
    """Whether to add `misjudged` (lockstep.training.scoring.misjudged) for one run, where rows have pictures."""

    def __post_init__(self) -> None:
        if self.where is not None:
            from lockstep.features.condition import one_form  # its parser is loaded only for those who need it

            object.__setattr__(self, "where", one_form(self.where))
        got = f"{self.batch} rows, {self.num_ranks} ranks"
        require(self.batch >= 1 and self.num_ranks >= 1, "--batch or --num-ranks", got, "1 or more")
        for name, value in (
            ("runs", tuple(map(absolute, self.runs))),
            ("dataset", absolute(self.dataset)),
            ("more", tuple(map(absolute, self.more))),
        ):
            object.__setattr__(self, name, value)

    def checked_dataset(self) -> DatasetManifest:
        """The manifest of the dataset, which has rows in this split, and these slices.

        Raises ConfigError, or what reading it raises.
        """
        manifest = load_dataset(self.dataset)
        rows_of(manifest, self.split)
        slices_of(self.slices, Schema.from_json(manifest.schema))
        return manifest


@dataclass(frozen=True, kw_only=True)
class EvaluateOrder(Message):
    """What ranks are asked to evaluate."""

    request: EvaluateRequest
    """Its `clusters` are a stored column, or None."""
    members: list[StoredModel]
    datasets: tuple[str, ...]
    """All datasets whose rows are evaluated."""
    pooled: tuple[str, ...] | None = None
    """The split of each member, whose predictions are then put together; None: all have the request's."""
    selection: Mapping[str, Any] | None = None
    """The samples that meet the request's condition, as Selection.to_json has them; None: all."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A run's model, or one of its checkpoints, and what it was trained on."""

    stored: StoredModel
    dataset_digest: str
    document: dict[str, Any]
    """The content of run.json."""
    rows: tuple[float, ...] | None
    """The share of the rows of each class that training kept; `stored.kept` is the share that counts."""

    @classmethod
    def of(cls, run: str, which: Which | str | None, evaluated: DatasetManifest) -> Self:
        """The newest model or else checkpoint of the run if no checkpoint is named."""
        document = read_run(filesystem(run), RunPaths(run))
        config, digest = TrainConfig.from_json(document["config"]), document["dataset_digest"]
        stored = StoredModel.of(run, config, which)
        sampled, label = _sampled(stored.model, evaluated, digest), Schema.from_json(evaluated.schema).label
        rows = None if sampled is None else shares_of_classes(sampled.unweighted(), label)
        return cls(replace(stored, kept=shares_of_classes(sampled, label)), digest, document, rows)

    def chosen_on(self, datasets: Sequence[str], split: str) -> list[str]:
        """Return what chose the model by rows of `split` (lockstep.training.results.chosen_on); nothing for other
        datasets.
        """
        if not has_rows_of(self.document, datasets):
            return []
        result = find_result(filesystem(self.stored.run), RunPaths(self.stored.run))
        return chosen_on(self.document, split, (result or {}).get("watching", ()))


def evaluate(request: EvaluateRequest, launch: Launch) -> dict[str, Any]:
    """Evaluate the model of the request's run; of several runs the mean of their models' probabilities, and each model.

    Returns {run, dataset, split, model, chosen_on (what chose the model, or its length, by these rows:
    lockstep.training.results.chosen_on), samples, weighted (the metrics in which the rows' weights count, None if rows
    have none), left_out ({samples, first}: with --bad-images skip, rows of images
    that cannot be decoded), metrics, intervals (95 %, of metrics that have one), class_counts (None if labels are not
    classes), class_names (None if they have none), baseline: None or {name, metrics, intervals, class_counts},
    difference (model less baseline, {metric:
    {value, interval}}), compared_by (the metric that decides, None without a baseline), calibration, roc, confusion
    (lockstep.training.scoring.calibration; None where there is none), slices ({name:
    lockstep.training.scoring.slices.metrics_of_slices}), where (the condition, if there is one), earlier (if it was
    asked for: the datasets that this one continues, nearest first), by_dataset (then of one run without a condition:
    {dataset, samples, metrics, intervals} of each dataset alone, this one first; it is stored in the run), forgetting
    (then of an exported model: lockstep.training.results.forgetting, None on the first day)}; of several runs, run and
    model are lists, `members` has such a result of each, and `comparisons` the differences {of, less, difference} of
    the mean (`mean`) and the best run, and of each two runs (lockstep.training.scoring.scores.compared). Prints notes
    on doubtful numbers to standard error. Raises ConfigError and NotFoundError, where possible before any rank is
    started.
    """
    split = request.split
    manifest = request.checked_dataset()
    grouped, clusters = clusters_of(manifest, request.clusters)
    chain = [url for url, _ in load_chain(request.dataset)] if request.earlier else [request.dataset]
    datasets = (*chain, *request.more)
    models = [Scored.of(run, request.checkpoint, manifest) for run in request.runs]
    require(bool(models), "--run", "no run", "one run, or several whose models are averaged")
    first, stored = models[0], [one.stored for one in models]
    if request.baseline is not None:
        check_baseline(request.baseline, Schema.from_json(manifest.schema))
        _check_trained_on(first.stored.config, first.dataset_digest, request.baseline)
    check_alike(stored, manifest, split)
    selected = None if request.where is None else select(Selection(request.where, {}), datasets, [split]).to_json()
    order = EvaluateOrder(
        request=replace(request, clusters=clusters), members=stored, datasets=datasets, selection=selected
    )
    found = launch(task_of(ENTRY, order, stored), request.num_ranks)[0]
    where = [{"run": one.run, "model": one.url} for one in stored]
    if len(where) > 1:
        found["members"] = [{**one, **scored} for one, scored in zip(where, found["members"], strict=True)]
    named = where[0] if len(where) == 1 else {key: [one[key] for one in where] for key in ("run", "model")}
    reasons = dict.fromkeys(reason for one in models for reason in one.chosen_on(datasets, split))
    result = {**named, "dataset": request.dataset, "split": split, "chosen_on": list(reasons), **found}
    names = class_names_of(manifest)
    result["class_names"] = None if names is None or result["class_counts"] is None else list(names)
    if request.where is not None:
        result["where"] = request.where
    if request.earlier:
        result["earlier"] = chain[1:]
        if "by_dataset" in result and stored[0].model is not None and request.checkpoint is None:
            result["forgetting"] = _kept_days(result)
    trained = find_result(filesystem(first.stored.run), RunPaths(first.stored.run))
    web = "role_columns" in manifest.created_by["config"]
    lost = notes.of_groups(grouped if clusters is None else None, is_web_log=web)
    made = notes.of_pixels(other_pixels(stored[0], manifest))
    notes.show([*made, *_doubts(result, trained, first.rows, thinned_of(manifest, split)), *lost])
    return result


def _kept_days(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Store the metrics of each day in the run; returns the matrix of the runs so far, None on the first day."""
    try:
        keep_days(result)
    except StorageError as error:  # such as another user's run
        notes.show([f"the metrics of each day are not stored in {result['run']}: {error.what}"])
    found = forgetting_of(result["run"], result["split"])
    return None if found is None else found.to_json()


def without_pictures(result: Any) -> Any:
    """A result of `evaluate` to be printed: pictures are for the report. Another value as it is."""
    if not isinstance(result, Mapping):
        return result
    return {name: value for name, value in result.items() if name != "misjudged"}


def evaluate_pooled(runs: Mapping[str, str], dataset: str, launch: Launch, *, num_ranks: int = 1) -> dict[str, Any]:
    """Evaluate several runs, each on the split of `dataset` that it is the value of, and put all predictions together:
    {samples, metrics, intervals} of the metrics that rows decide. The splits have no row in common.
    """
    request = EvaluateRequest(tuple(runs.values()), dataset, next(iter(runs)), num_ranks=num_ranks)
    manifest = load_dataset(request.dataset)
    request = replace(request, clusters=clusters_of(manifest, None)[1])
    members = [Scored.of(run, None, manifest).stored for run in request.runs]
    order = EvaluateOrder(request=request, members=members, datasets=(request.dataset,), pooled=tuple(runs))
    return dict(launch(task_of(ENTRY, order, members), num_ranks)[0])


def check_alike(models: Sequence[StoredModel], manifest: DatasetManifest, split: str) -> None:
    """Raise ConfigError for models that are fed other inputs, or were trained on other shares of the classes."""
    trained_on = [one.config.data.split for one in models if split in one.config.data.split.split(",")]
    folds = {held_out(manifest, names, training=True) for names in trained_on}
    alike = len(folds) <= 1 and len(trained_on) in (0, len(models)) and len({one.kept for one in models}) == 1
    if not alike:
        raise ConfigError(
            "these models cannot be averaged",
            got="; ".join(
                f"trained on {one.config.data.split}, shares of classes {one.kept or 'all'}" for one in models
            ),
            allowed=f"all trained on the same folds, or none of them on `{split}`; with the same --sample",
            next_step="Choose another --split, or evaluate these runs one by one.",
        )


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
    if config.data.tasks is not None:
        raise ConfigError(
            "a baseline of several tasks would mix their labels",
            got=f"--baseline {baseline} and a run with --tasks",
            allowed="no baseline",
            next_step="Leave --baseline out; lockstep baseline takes each dataset alone.",
        )
    trained_on = open_data(config.data.datasets, config.data.split, config.data.mix)[1]
    if trained_on.digest != digest:
        raise ConfigError(
            f"the baseline {baseline} cannot be counted on the run's training rows",
            got=f"datasets {', '.join(config.data.datasets)} of digest {trained_on.digest}",
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
    baseline, split, names = result["baseline"], result["split"], result["class_names"]
    trained_on = _before(baseline["class_counts"] if baseline else (trained or {}).get("class_counts"), kept)
    return [
        *notes.of_left_out(result["left_out"], split),
        *notes.of_classes(result["class_counts"], f"split `{split}`", names),
        *notes.of_classes(trained_on, "what the run was trained on", names),
        *notes.of_base_rates(trained_on, _before(result["class_counts"], thinned), split, names),
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
    head += f" that meet {result['where']}" if result.get("where") else ""
    if counts is not None:
        shown = enumerate(counts[:SHOWN_CLASSES])
        classes = ", ".join(f"{rows} of {class_word(number, result.get('class_names'))}" for number, rows in shown)
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
    if len(days := result.get("by_dataset", [])) > 1:
        named = [{"value": PurePosixPath(day["dataset"]).name, **day} for day in days]
        parts.append(aligned(slice_table("dataset", named)))
    if (found := result.get("forgetting")) is not None:
        matrix = Forgetting.from_json(found)
        parts.append([*aligned(matrix.table()), matrix.words()])
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
    config = EvaluateOrder.from_json(context.payload).members[0].config
    runtime.configure(context.world, precision=config.step.precision, seed=config.data.seed)
    from lockstep.training.results.evaluate_rank import run  # here, since it imports TensorFlow, which is set up now

    return run(context)


def number(value: Any) -> str:
    """A metric's value in a table; - if there is none."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, int | float) else str(value)


def span(interval: Sequence[float] | None) -> str:
    """An interval in a table; - if there is none."""
    return "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
