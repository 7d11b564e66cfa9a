"""Writes a run's report: one HTML file with its curves, readable offline and without Lockstep."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from markupsafe import Markup

from lockstep.features.schema.schema import class_names_of, class_word
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import DataError, LockstepError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import basename, parent
from lockstep.training.config import options_in
from lockstep.training.config.data import UNCERTAINTY, weights_of
from lockstep.training.plan.datasets import open_data
from lockstep.training.results import stored_baselines
from lockstep.training.results.chosen_on import chosen_on, chosen_words
from lockstep.training.results.curves import (
    Followed,
    calibration_plot,
    confusion_table,
    curve_names,
    epoch_curve,
    of_each_task,
    roc_plot,
    task_curve,
    time_bars,
    without_tasks,
)
from lockstep.training.results.evaluate import number, slice_table, span
from lockstep.training.results.follow import followed
from lockstep.training.results.forgetting import Forgetting, forgotten_in
from lockstep.training.results.pages import Section, estimate, figures, link, page, paragraph, picture_sheet, table
from lockstep.training.results.resources import (
    bad_record_rows,
    checkpoint_rows,
    reading_rows,
    straggler_rows,
    time_rows,
    usage_rows,
)
from lockstep.training.results.state import WORDS, read_stopped, state_of
from lockstep.training.rules import VALIDATION, metric_in
from lockstep.training.run import notes
from lockstep.training.run.command import command_of
from lockstep.training.run.epochs import epochs_trained, epochs_words, steps_in_epoch
from lockstep.training.run.lineage import Claim, chain_of, epochs_asked, read_claims
from lockstep.training.run.metrics import History
from lockstep.training.run.paths import RunPaths, generation_name
from lockstep.training.run.result import find_result, restart_words
from lockstep.training.run.run_json import names_of_datasets, read_run
from lockstep.training.run.status import STOPPED
from lockstep.training.run.summary import read_summary

Rows = Sequence[tuple[str, object]]


def write_report(run: str, evaluation: Mapping[str, Any] | None = None, *, page: str | None = None) -> str:
    """Write the report of the run at URL `run`, finished or not, to `page`, by default in the newest generation;
    returns its URL.

    `evaluation` is a result of lockstep.training.results.evaluate, which later reports of this generation show too. An
    existing report is replaced. Raises NotFoundError if there is no run or no generation has started, CorruptionError
    for a damaged file of its metrics.
    """
    fs, paths = filesystem(run), RunPaths(run)
    history, document, claims = read_summary(run), read_run(fs, paths), read_claims(fs, paths)
    if not claims:
        raise NotFoundError(
            f"{run} has nothing to report",
            got="a run without a generation",
            allowed="a run whose ranks were started",
            next_step="Run lockstep train with this --run.",
        )
    newest, result = max(claims), find_result(fs, paths)
    done = result if result is not None and result["generation"] == newest else None
    url, so_far = page or paths.report(newest), _epochs_so_far(document, claims, history)
    manifest = _dataset_of(document)
    class_names = None if isinstance(manifest, str) else class_names_of(manifest)
    content = render(
        run,
        about_run(document, claims, done or {"generation": newest}),
        _result_rows(done, history, class_names) if done else _unfinished_rows(fs, paths, history, so_far),
        history,
        _data_rows(document, manifest, url),
        reported_evaluation(fs, paths, newest) if evaluation is None else _keep(fs, paths, newest, evaluation),
        stored_baselines.stored(fs, paths),
        followed(fs, paths),
        document=document,
        restarts=_restart_rows(done, history),
        forgotten=forgotten_in(run),
    )
    out = filesystem(url)
    if page is None:
        out.mkdirs(parent(url))
    write_file(out, url, content.encode(), exclusive=False)
    return url


def _evaluation_url(paths: RunPaths, generation: int) -> str:
    return f"{paths.evaluations('reported')}/{generation_name(generation)}.json"


def _keep(fs: FileSystem, paths: RunPaths, generation: int, evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Store `evaluation`, which later reports of this generation show too."""
    url = _evaluation_url(paths, generation)
    fs.mkdirs(url.rpartition("/")[0])
    document = {"format_version": 1, "kind": "reported evaluation", "result": evaluation}
    write_file(fs, url, seal(document), exclusive=False)
    return evaluation


def reported_evaluation(fs: FileSystem, paths: RunPaths, generation: int) -> Mapping[str, Any] | None:
    """The evaluation that an earlier report of this generation has shown; None if none has. Raises CorruptionError."""
    url = _evaluation_url(paths, generation)
    if not fs.exists(url):
        return None
    result: Mapping[str, Any] = unseal_as("reported evaluation", fs.read_bytes(url), url)["result"]
    return result


def about_run(
    document: Mapping[str, Any], claims: Mapping[int, Claim], result: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What was trained, how and when, as rows of text, from run.json, the claims and the result."""
    config = options_in(document["config"])
    versions = document.get("versions", {})
    rows = [
        ("model", config.get("model")),
        ("its settings", ", ".join(f"{name}={value}" for name, value in config.get("extra", {}).items())),
        ("datasets", ", ".join(map(str, config.get("datasets", [])))),
        ("weights of the tasks", config.get("tasks")),
        ("split", config.get("split")),
        ("ranks", _over_steps(claims, result, lambda claim: claim.num_ranks)),
        ("global batch", config.get("global_batch")),
        ("epochs asked for", _over_steps(claims, result, lambda claim: claim.epochs)),
        ("validated on", _validation(document, result.get("watching", ()))),
        ("early stop", config.get("early_stop")),
        ("learning rate", config.get("learning_rate") or "the model's own"),
        ("its scaling", _scaling(config)),
        ("micro-batches", config.get("micro_batches")),
        *((name, config.get(name)) for name in ("batchnorm", "precision", "seed", "launcher")),
        ("begun", document.get("created_at")),
        ("finished", result.get("finished_at")),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))),
        ("git revision", document.get("git_revision")),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _scaling(config: Mapping[str, Any]) -> str:
    """The configured parts of `linear from a global batch of 128, 5 epochs of warm-up`."""
    rule, warm_up = config.get("learning_rate_scaling", "none"), config.get("warm_up_epochs")
    parts = [] if rule == "none" else [f"{rule} from a global batch of {config.get('base_batch')}"]
    return ", ".join([*parts, *([f"{warm_up:g} epochs of warm-up"] if warm_up else [])])


def _validation(document: Mapping[str, Any], watching: Sequence[str]) -> str:
    """Say `test, every 2 epochs`, and what was chosen on it; nothing for a run without validation."""
    config = options_in(document["config"])
    split, every = config.get("validate"), config.get("validate_every")
    chosen = f"; {said}" if split is not None and (said := chosen_words(chosen_on(document, split, watching))) else ""
    return "" if split is None else f"{split}, every {f'{every} epochs' if every != 1 else 'epoch'}{chosen}"


def _over_steps(claims: Mapping[int, Claim], result: Mapping[str, Any], value: Callable[[Claim], int]) -> str:
    """Say `2`, or `2, from step 400 on 4` if the generations on the chain to the result differ."""
    chain: list[Claim] = []
    claim = claims.get(int(result["generation"]))
    while claim is not None:
        chain.append(claim)
        claim = claims.get(claim.parent.generation) if claim.parent else None
    parts: list[str] = []
    last: int | None = None
    for claim in reversed(chain):
        if value(claim) != last:
            last = value(claim)
            parts.append(f"from step {claim.parent.step} on {last}" if parts and claim.parent else str(last))
    return ", ".join(parts)


def render(
    run: str,
    about: Rows,
    training: Rows,
    history: History,
    data: Rows,
    evaluation: Mapping[str, Any] | None,
    compared: Sequence[Mapping[str, Any]] = (),
    scores: Followed = MappingProxyType({}),
    *,
    document: Mapping[str, Any] = MappingProxyType({}),
    restarts: Rows = (),
    forgotten: Mapping[str, Forgetting] = MappingProxyType({}),
) -> str:
    """The page's HTML; `about` are the rows of `about_run`, `training` and `data` those of these sections, `compared`
    the documents of lockstep.training.results.stored_baselines, `scores` those of lockstep.training.results.follow,
    `document` run.json, `forgotten` a matrix a split.
    """
    first = (("model", "state", "finished"), ("versions", "git revision"))
    state = [row for row in training if row[0] == "state"]
    head = [f"{name} {value}" for name, value in [*about, *state] if name in first[0]]
    environment = [row for row in about if row[0] in first[1]]
    command = command_of(document.get("config", {}))
    config = options_in(document.get("config", {}))
    tasks = config["datasets"] if config.get("tasks") is not None else []
    common = without_tasks(history, len(tasks)) if tasks else history
    sections = [
        _result_section(run, document, common, evaluation, compared),
        Section("Curves", figures(_curves(common, scores, evaluation))),
        *([_tasks_section(document, history, evaluation)] if tasks else []),
        *([] if evaluation is None else _evaluation_sections(evaluation)),
        *_forgetting_sections(forgotten),
        Section("Where each rank's time went", time_bars(history) + table(time_rows(history))),
        Section("Starts and restarts", table(restarts)),
        Section("Slow ranks", table(straggler_rows(history))),
        Section("What each rank used", table(usage_rows(history), head=True) if history.usage else Markup()),
        Section("What each rank read", table(reading_rows(history))),
        Section("Checkpoints", table(checkpoint_rows(history)) if history.checkpoints else Markup()),
        Section("Skipped records and images, with weight 0", table(bad_record_rows(history))),
        Section("Training", table(training)),
        Section("The command that repeats it", Markup("<pre><code>{}</code></pre>").format(command)),
        Section("Run", table([row for row in about if row not in environment])),
        Section("Data", table(data)),
        Section("Environment", table(environment)),
    ]
    return page(f"{basename(run)}: report of a run", "; ".join([run, *head]), sections)


def _result_section(
    run: str,
    document: Mapping[str, Any],
    history: History,
    evaluation: Mapping[str, Any] | None,
    compared: Sequence[Mapping[str, Any]],
) -> Section:
    """The evaluation with its baseline; without one the metrics of the last epoch, and how to get one."""
    alike = [] if evaluation is None else stored_baselines.on_rows_of(compared, evaluation)
    others = stored_baselines.tables([document for document in compared if document not in alike])
    later = Markup("").join(Markup("<h3>{}</h3>\n{}").format(name, table(rows, head=True)) for name, rows in others)
    if evaluation is not None:
        name = f"Result on {evaluation['split']}, with 95 % intervals"
        counts = _class_words(evaluation["class_counts"] or (), evaluation.get("class_names"))
        records = f"{evaluation['samples']} records{f': {counts}' if counts else ''}"
        said = [records, *filter(None, [chosen_words(evaluation.get("chosen_on", ()))]), *_verdict(evaluation, alike)]
        body = Markup("").join(map(paragraph, said))
        return Section(name, body + table(_evaluation_rows(evaluation, alike), head=True) + later)
    last = history.epochs[-1]["metrics"] if history.epochs else {}
    names = sorted({name.removeprefix(VALIDATION) for name in last})
    rows = [(name, *(_number(last.get(key, "-")) for key in (name, VALIDATION + name))) for name in names]
    config = options_in(document.get("config", {}))
    chosen = config and chosen_on(document, str(config.get("validate")))
    validation = "validation (chosen on: optimistic)" if chosen else "validation"
    body = table([("metric", "training", validation), *rows], head=True) if rows else Markup()
    if dataset := next(iter(config.get("datasets", [])), None):
        words = ["lockstep", "evaluate", "--run", run, "--dataset", str(dataset), "--split", "test"]
        of_classes = any("auc" in name or "accuracy" in name for name in names)
        of_numbers = any("error" in name for name in names) and not of_classes
        call = shlex.join([*words, "--baseline", "mean" if of_numbers else "majority", "--report"])
        body += Markup(
            "<p>Not evaluated yet, so nothing says whether it beats a baseline: <code>{}</code></p>\n"
        ).format(call)
    return Section("Result of the last epoch", body + later)


def _tasks_section(document: Mapping[str, Any], history: History, evaluation: Mapping[str, Any] | None) -> Section:
    """A row for each task of a run with --tasks: its weight and its metrics of the last epoch, and those of an
    evaluation; and a figure for each metric with a line a task.
    """
    config = options_in(document["config"])
    urls: Sequence[str] = config["datasets"]
    last = history.epochs[-1]["metrics"] if history.epochs else {}
    names = of_each_task(last, len(urls))
    heads = [_head_of_tasks(name) for name in names]
    weights = None if config["tasks"] == UNCERTAINTY else weights_of(config["tasks"], len(urls))
    judged = {} if evaluation is None else {each["dataset"]: each for each in evaluation.get("by_dataset", [])}
    known = [next((url for url in names if url in judged), names[0]) for names in names_of_datasets(document)]
    found = list(dict.fromkeys(name for url in known if url in judged for name in judged[url]["intervals"]))
    columns: list[list[object]] = [["task", *(f"{place}: {basename(url)}" for place, url in enumerate(urls))]]
    columns += [] if weights is None else [["weight", *(f"{one:g}" for one in weights)]]
    for name, head in zip(names, heads, strict=True):
        columns.append([head, *(_number(last[f"{name}_{place}"]) for place in range(len(urls)))])
    for name in found:
        of = [judged.get(url, {"metrics": {}, "intervals": {}}) for url in known]
        cells = [estimate(number(one["metrics"].get(name)), span(one["intervals"].get(name))) for one in of]
        columns.append([f"{name} on {evaluation['split'] if evaluation else ''}", *cells])
    drawn = [
        (f"{head} by epoch", task_curve(history, name, list(map(basename, urls))))
        for head, name in zip(heads, names, strict=True)
    ]
    return Section("Tasks", table(list(zip(*columns, strict=True)), head=True) + figures(drawn))


def _head_of_tasks(name: str) -> str:
    """Say `validation accuracy`, `training loss`, `learned weight`."""
    if name == "weight":
        return "learned weight"
    return f"validation {name.removeprefix(VALIDATION)}" if name.startswith(VALIDATION) else f"training {name}"


def _class_words(counts: Sequence[int], names: Sequence[str] | None) -> str:
    """Say `37 bag, 39 coat`; without names `37 of class 0`."""
    named = names is not None and len(names) == len(counts) and any(not name.isdecimal() for name in names)
    return ", ".join(
        f"{count} {class_word(place, names)}" if named else f"{count} of class {place}"
        for place, count in enumerate(counts)
    )


def _verdict(evaluation: Mapping[str, Any], alike: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the model is better than the strongest baseline, also of the stored ones `alike`, and than its own."""
    decides, baseline = evaluation.get("compared_by"), evaluation["baseline"]
    metric = decides or stored_baselines.deciding_metric(evaluation["metrics"])
    strongest = [] if metric is None else stored_baselines.strongest_words(evaluation, baseline, alike, metric)
    if not baseline or not decides or evaluation["difference"][decides]["interval"] is None:
        return strongest
    low, high = evaluation["difference"][decides]["interval"]
    better = f"the model is better than its baseline {baseline['name']}: {decides} by {low:.4f} to {high:.4f}"
    return [*strongest, *(notes.of_baseline(evaluation) or [f"{better} (95 % interval)"])]


def _curves(history: History, scores: Followed, evaluation: Mapping[str, Any] | None) -> list[tuple[str, Markup]]:
    by = "epoch" if history.epochs else "step"
    return [
        (f"{name}{f' ({also} is the same)' if (also := ', '.join(twins)) else ''} by {by}",
         epoch_curve(history, name, scores, evaluation))
        for name, twins in curve_names(history, scores, evaluation).items()
    ]  # fmt: skip


def _evaluation_sections(evaluation: Mapping[str, Any]) -> list[Section]:
    """ROC, calibration, the confusion matrix, and the slices by each column."""
    plots = []
    if roc := evaluation.get("roc"):
        plots.append(("ROC: yes found against false alarms", roc_plot(roc)))
    if calibration := evaluation["calibration"]:
        text = f"Calibration of {calibration['of']}: expected error {calibration['expected_error']:.4f}"
        plots.append((f"{text}, Brier score {calibration['brier']:.4f}", calibration_plot(calibration)))
    confusion = evaluation["confusion"]
    matrix = confusion_table(confusion) if confusion else Markup()
    slices = evaluation["slices"].items()
    return [
        Section(f"Errors on {evaluation['split']}", figures(plots)),
        Section("Confusion: true class by row, predicted class by column", matrix),
        Section("Misjudged pictures, the surest mistakes first", picture_sheet(_misjudged(evaluation))),
        *(Section(f"Slices by {name}", table(slice_table(name, each), head=True)) for name, each in slices),
    ]


def _forgetting_sections(forgotten: Mapping[str, Forgetting]) -> list[Section]:
    """The matrix of runs and days of each split."""
    return [
        Section(
            f"What earlier days lost on {split}: run of a day by row, dataset of a day by column",
            paragraph(found.words()) + table(found.table(), head=True),
        )
        for split, found in forgotten.items()
    ]


def _misjudged(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (data URL, caption) of each picture that lockstep.training.scoring.misjudged chose."""
    return [
        (one["picture"], f"{one['true']}, taken for {one['predicted']}{_surely(one['confidence'])}{_file_of(one)}")
        for one in evaluation.get("misjudged", [])
    ]


def _surely(confidence: float | None) -> str:
    return "" if confidence is None else f" ({confidence:.0%})"


def _file_of(misjudged: Mapping[str, Any]) -> str:
    return f": {misjudged['file']}" if "file" in misjudged else ""


def page_of(dataset: str) -> str:
    """Where the page of lockstep describe about a dataset is looked for: DATASET.html."""
    return f"{dataset.rstrip('/')}.html"


def describe_page(dataset: str) -> str | None:
    """The URL of the page of lockstep describe about a dataset, if one is stored next to it: DATASET.html."""
    url = page_of(dataset)
    try:
        return url if filesystem(url).exists(url) else None
    except LockstepError:
        return None


def _dataset_links(datasets: Sequence[str], url: str) -> list[tuple[str, Markup]]:
    """A row for each dataset: a link to its folder, and to its page or else the call of lockstep describe that makes
    it.
    """
    rows = []
    for dataset in datasets:
        found = describe_page(dataset)
        call = f"lockstep describe {shlex.quote(dataset)} --html {shlex.quote(page_of(dataset))}"
        described = Markup(", described in ") + link(url, found, basename(found)) if found is not None else Markup(
            ", not described yet: <code>{}</code>").format(call)  # fmt: skip
        rows.append(("dataset", link(url, dataset, basename(dataset) or dataset) + described))
    return rows


def _dataset_of(document: Mapping[str, Any]) -> DatasetManifest | str:
    """The manifest of the run's first dataset; why it cannot be read, if it cannot."""
    config = options_in(document["config"])
    try:
        tasks, digest = config.get("tasks") is not None, document.get("dataset_digest")
        manifest = open_data(config["datasets"], config["split"], config.get("mix"), tasks=tasks)[1]
        return manifest if manifest.digest == digest else f"{', '.join(config['datasets'])} is another dataset now"
    except (LockstepError, KeyError) as error:
        return str(error)


def _data_rows(document: Mapping[str, Any], manifest: DatasetManifest | str, url: str) -> Rows:
    """Rows about the run's datasets; `document` is run.json, `url` the report's."""
    digest = ("digest", document.get("dataset_digest"))
    if isinstance(manifest, str):
        return [("cannot be read now", manifest), digest]
    counts = manifest.counts
    return [
        *_dataset_links(options_in(document["config"])["datasets"], url),
        ("read", counts.read),
        ("written", counts.written),
        ("quarantined", counts.quarantined),
        *((f"dropped: {reason}", n) for reason, n in sorted(counts.dropped.items())),
        *((f"split {name}", f"{split.records} records") for name, split in sorted(manifest.splits.items())),
        digest,
    ]


def _privacy_rows(privacy: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if privacy is None:
        return []
    covers = f"epsilon {privacy['epsilon']:.4f} at delta {privacy['delta']:g}"
    left = "; ".join([*privacy.get("not_covered", []), "losses, metrics and class counts in the run directory"])
    return [("differential privacy of each client", covers), ("not covered by it", left)]


def _result_rows(result: Mapping[str, Any], history: History, names: Sequence[str] | None) -> Rows:
    return [
        ("steps", result["steps"]),
        ("epochs", epochs_words(result["epochs"], result["epochs_asked"])),
        *([("ended early by", result["stopped_by"])] if result.get("stopped_by") else []),
        *([("validation", f"{result['validation_s']:.1f} s")] if result.get("validation_s") else []),
        *([("rows left out of validation", left_out)] if (left_out := _left_out(history)) else []),
        *(
            []
            if (first := result.get("first_step_s")) is None
            else [("time to the end of the first step", f"{first:.1f} s")]
        ),
        *([] if (rate := result["samples_per_s"]) is None else [("samples/s after it", f"{rate:.0f}")]),
        *(
            [("samples left over (they fill no last global batch)", len(result["left_over"]))]
            if result["epochs"] == result["epochs_asked"]
            else []
        ),
        *([("last epoch: records", _class_words(counts, names))] if (counts := result.get("class_counts")) else []),
        *((f"last epoch: {name}", _number(value)) for name, value in sorted(result["metrics"].items())),
        *((f"table {name}", _table_words(figures)) for name, figures in _growing_tables(history).items()),
        *_privacy_rows(result.get("privacy")),
        ("checkpoint", result["checkpoint"]),
        *([] if (best := result["best"]) is None else [("best checkpoint", _best_words(result["keep_best"], best))]),
        ("model", result["model"] if best is None else f"{result['model']}, of the best checkpoint"),
    ]


def _best_words(rule: str, best: Mapping[str, Any]) -> str:
    return f"{best['checkpoint']}: best {metric_in(rule)} {best['value']:.6g} at step {best['step']}"


def _growing_tables(history: History) -> Mapping[str, Mapping[str, int]]:
    """The last figures of each table without a number of rows (training/embeddings/sharded_embedding.py)."""
    return history.epochs[-1].get("tables", {}) if history.epochs else {}


def _table_words(of: Mapping[str, int]) -> str:
    return (
        f"{of['rows']} rows ({of['admitted']} admitted, {of['evicted']} evicted), {of['waiting']} ids wait for one, "
        f"{of['bytes'] / 2**20:.1f} MiB on all ranks"
    )


def _left_out(history: History) -> int:
    """Rows that the last validation left out."""
    last = history.epochs[-1].get("validation", {}) if history.epochs else {}
    return int(last.get("left_out", {}).get("samples", 0))


def _epochs_so_far(document: Mapping[str, Any], claims: Mapping[int, Claim], history: History) -> str:
    of_epoch, steps = steps_in_epoch(document["plan"]), history.steps[-1]["step"] if history.steps else 0
    asked = epochs_asked(claims)
    if of_epoch is None:  # a plan without its numbers
        return str(len(history.epochs))
    return epochs_words(epochs_trained(steps, of_epoch, asked), asked)


def _unfinished_rows(fs: FileSystem, paths: RunPaths, history: History, epochs: str) -> Rows:
    metrics = history.epochs[-1]["metrics"] if history.epochs else {}
    state = state_of(fs, paths)
    stopped = read_stopped(fs, paths) if state == STOPPED else None
    try:
        chain, _ = chain_of(fs, paths)
        checkpoint = str(chain[0]) if chain else "none yet"
    except DataError as error:
        checkpoint = str(error)
    return [
        ("state", f"not finished, {state}: {WORDS[state]}"),
        *([] if stopped is None else [("stopped", _stopped_words(stopped))]),
        ("steps so far", history.steps[-1]["step"] if history.steps else 0),
        ("epochs so far", epochs),
        *((f"last epoch: {name}", _number(value)) for name, value in sorted(metrics.items())),
        ("newest checkpoint", checkpoint),
    ]


def _stopped_words(stopped: Mapping[str, Any]) -> str:
    saved = "with a checkpoint of its last step" if stopped["saved"] else "without a checkpoint of its last step"
    return f"by {stopped['by']} at {stopped['stopped_at']}, at step {stopped['step']} of {stopped['steps']}, {saved}"


def _restart_rows(result: Mapping[str, Any] | None, history: History) -> Rows:
    """The starts of the run, and each restart of a finished one."""
    restarts = [] if result is None else result.get("restart_log", [])
    return [
        ("starts (one, and one for each restart or resumption)", history.generations),
        *((f"restart: generation {each['generation']}", restart_words(each)) for each in restarts),
    ]


def _evaluation_rows(evaluation: Mapping[str, Any], alike: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """Head and rows of the metrics, the one that decides first; the stored baselines `alike` are the last columns."""
    baseline, decides = evaluation["baseline"], evaluation.get("compared_by")
    names = sorted(evaluation["metrics"], key=lambda name: (name != decides, name))
    columns: list[list[object]] = [["metric", *names], _column("model", evaluation, names)]
    if baseline:
        columns.append(_column(f"baseline {baseline['name']}", baseline, names))
        differences = [evaluation["difference"].get(name) or {"value": None, "interval": None} for name in names]
        cells = [estimate(number(one["value"]), span(one["interval"])) for one in differences]
        columns.append(["model less baseline", *cells])
    columns += [[f"baseline {stored_baselines.called(one)}", *stored_baselines.column_of(one, names)] for one in alike]
    return [list(row) for row in zip(*columns, strict=True)]


def _column(head: str, result: Mapping[str, Any], names: Sequence[str]) -> list[object]:
    """A column of values and intervals below its head."""
    intervals = result.get("intervals", {})
    return [head, *(estimate(number(result["metrics"].get(name)), span(intervals.get(name))) for name in names)]


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
