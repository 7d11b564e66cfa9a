"""Writes a run's report: one HTML file with its curves, readable offline and without Lockstep."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from markupsafe import Markup

from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import DataError, LockstepError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from training.config import VALIDATION
from training.plan.datasets import open_mixture, open_parts
from training.results import baselines
from training.results.evaluate import slice_table
from training.results.follow import followed
from training.run.lineage import Claim, chain_of, read_claims
from training.run.metrics import PARTS, History, read_history
from training.run.paths import RunPaths, generation_name
from training.run.result import find_result, restart_words
from training.run.run_json import read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIME_WORDS = {
    "data_s": "waiting for data",
    "compute_s": "computing",
    "exchange_s": "waiting for the all-reduce",
    "checkpoint_s": "writing checkpoints",
    "validation_s": "validating",
    "other_s": "callbacks and ends of epochs",
}


def time_rows(history: History) -> list[tuple[str, str]]:
    """How each rank's time was spent over all generations, and what it sent over the network."""
    rows = []
    for rank in sorted({row["rank"] for row in history.times}):
        sums = {part: sum(row[part] for row in history.times if row["rank"] == rank) for part in PARTS}
        if not sums["validation_s"]:  # a run without validation
            del sums["validation_s"]
        total = sum(sums.values())
        shares = [f"{_TIME_WORDS[part]} {seconds / total:.1%}" for part, seconds in sums.items() if total]
        mine = [row for row in history.times if row["rank"] == rank]
        sent, steps = _sum(mine, "sent_bytes"), _sum(mine, "steps")
        text = f"; {sent / steps / 1e6:.3g} MB sent a step" if sent and steps else ""
        rows.append((f"rank {rank}", f"{', '.join(shares)} of {total:.1f} s{text}"))
    return rows


def checkpoint_rows(history: History) -> list[tuple[str, str]]:
    """How many checkpoints were committed and skipped, and what they cost the training."""
    rows = history.checkpoints
    found = [
        ("committed", str(len(rows))),
        ("skipped, while one was being written", str(sum(row.get("skipped", 0) for row in rows))),
    ]
    for name, words in (
        ("blocked_s", "steps stopped for"),
        ("written_s", "written in the background in"),
        ("cost_s", "cost of one, including slower steps"),
    ):
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if values:
            found.append((words, f"{median(values):.3f} s in the median, {max(values):.3f} s at most"))
    return found


def reading_rows(history: History) -> list[tuple[str, str]]:
    """What each rank read, over all generations, and how much of it came from a cache."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for row in history.reading:  # a row counts since its process began: the newest of a generation has it all
        last[row["rank"], row["generation"]] = row
    found = []
    for rank in sorted({rank for rank, _ in last}):
        rows = [row for (of, _), row in last.items() if of == rank]
        fetched, waited = _sum(rows, "fetched_bytes"), _sum(rows, "waited_s")
        text = f"{fetched / 1e6:.1f} MB fetched, {waited:.1f} s waited for"
        if any("cache_hits" in row for row in rows):
            hits, misses = _sum(rows, "cache_hits"), _sum(rows, "cache_misses")
            share = f" ({hits / (hits + misses):.1%})" if hits + misses else ""
            text += f"; {hits:.0f} of {hits + misses:.0f} reads from the cache{share}"
            text += f", {_sum(rows, 'cache_hit_bytes') / 1e6:.1f} MB"
        found.append((f"rank {rank}", text))
    return found


def _sum(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row.get(name, 0) for row in rows)


SMOOTHED_STEPS = 20  # of the dark line: the loss of a single batch says little
MARKED_POINTS = 30  # up to this number each point is marked
LIGHT, DARK, OTHER = "#b9cbe0", "#1f4e89", "#c8641b"
FOLLOWED = ("#2e7d4f", "#7a4ea3", "#777777")


def loss_curve(history: History) -> Markup:
    """The loss of each step, and its mean over the last ones."""
    rows = [row for row in history.steps if isinstance(row["loss"], (int, float))]  # not "nan", of a skipped step
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    smooth = [_mean(losses[max(0, i - SMOOTHED_STEPS + 1) : i + 1]) for i in range(len(losses))]
    lines = [("one step", steps, losses, LIGHT), (f"mean of {SMOOTHED_STEPS} steps", steps, smooth, DARK)]
    return _curve(lines, "step")


Followed = Mapping[str, Mapping[int, Mapping[str, Any]]]


def curve_names(history: History, followed: Followed = MappingProxyType({})) -> list[str]:
    """The metrics that get a curve by epoch, which training rows, validation and `followed` checkpoints share.

    The training loss has a curve of its own, by step, unless there is another loss to compare it with.
    """
    names = {name for row in history.epochs for name in _numbers(row["metrics"])}
    scored = {name for by_step in followed.values() for metrics in by_step.values() for name in _numbers(metrics)}
    alone = {name.removeprefix(VALIDATION) for name in names} | scored
    return sorted(alone if f"{VALIDATION}loss" in names or "loss" in scored else alone - {"loss"})


def _numbers(metrics: Mapping[str, Any]) -> Mapping[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}  # not "nan"


def epoch_curve(history: History, name: str, followed: Followed = MappingProxyType({})) -> Markup:
    """A metric at the end of each epoch, of the training rows and of the validation split where there are any, and of
    each checkpoint that was `followed` (training.results.follow); before the end of an epoch by step.
    """
    lines: list[tuple[str, Sequence[float], Sequence[float], str]] = []
    for key, label, colour in ((name, "training", DARK), (f"{VALIDATION}{name}", "validation", OTHER)):
        rows = [row for row in history.epochs if key in _numbers(row["metrics"])]
        if rows:
            points = [row["epoch"] + 1 for row in rows], [row["metrics"][key] for row in rows]
            lines.append((label, *points, colour))
    steps = history.epochs[-1]["step"] / (history.epochs[-1]["epoch"] + 1) if history.epochs else 1.0
    for (label, by_step), colour in zip(followed.items(), cycle(FOLLOWED), strict=False):
        scores = {step: row[name] for step, row in by_step.items() if name in _numbers(row)}
        if scores:
            lines.append((label, [step / steps for step in scores], list(scores.values()), colour))
    return _curve(lines, "epoch" if history.epochs else "step")


def calibration_plot(calibration: Mapping[str, Any]) -> Markup:
    """The observed rate of each bin against its mean prediction; on the diagonal, predictions are right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4))
    axes = figure.add_subplot()
    predicted, observed = ([one[name] for one in calibration["bins"]] for name in ("predicted", "observed"))
    most = max([*predicted, *observed]) or 1.0
    axes.plot([0, most], [0, most], color=LIGHT)
    axes.plot(predicted, observed, color=DARK, marker="o")
    axes.set_xlabel("mean prediction of a bin")
    axes.set_ylabel("observed rate")
    axes.grid(alpha=0.3)
    return svg(figure)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _curve(lines: Sequence[tuple[str, Sequence[float], Sequence[float], str]], x_label: str) -> Markup:
    """`lines` are (label, x, y, colour)."""
    from matplotlib.figure import Figure  # half a second of import that only a report needs
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 3))
    axes = figure.add_subplot()
    for name, x, y, colour in lines:
        axes.plot(x, y, color=colour, label=name, marker="o" if len(x) <= MARKED_POINTS else None)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return svg(figure)


def svg(figure: Figure) -> Markup:
    """A figure as part of a page, the same bytes each time."""
    from matplotlib import rc_context

    target = io.StringIO()
    with rc_context({"svg.hashsalt": "lockstep", "svg.fonttype": "none"}):
        figure.savefig(target, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = target.getvalue()
    # Made by matplotlib from numbers and metric names, which it escapes; HTML takes no XML head.
    return Markup(text[text.index("<svg") :])


Rows = Sequence[tuple[str, object]]


def page(
    title: str,
    where: str,
    tables: Sequence[tuple[str, Sequence[Sequence[object]]]],
    curves: Sequence[tuple[str, Markup]],
) -> str:
    """The HTML of a report: tables (name, rows of cells), then curves (name, `svg`)."""
    return _PAGE.render(title=title, where=where, tables=tables, curves=curves)


# The template engine escapes everything that comes from data.
_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border: 1px solid #ccc; padding: .2rem .6rem; text-align: left }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere } svg { max-width: 100%; height: auto }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ where }}</p>
{% for name, rows in tables %}
<h2>{{ name }}</h2>
<table>
{% for row in rows %}
<tr><th>{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
{% for name, svg in curves %}
<h2>{{ name }}</h2>
{{ svg }}
{% endfor %}
</body></html>
""")


def write_report(run: str, evaluation: Mapping[str, Any] | None = None) -> str:
    """Write the report of the run at URL `run`, finished or not; returns the report's URL, in the newest generation.

    `evaluation` is a result of training.results.evaluate, which later reports of this generation show too. An existing
    report is replaced. Raises NotFoundError if there is no run or no generation has started, CorruptionError for a
    damaged file of its metrics.
    """
    fs, paths = filesystem(run), RunPaths(run)
    history, document, claims = read_history(run), read_run(fs, paths), read_claims(fs, paths)
    if not claims:
        raise NotFoundError(
            f"{run} has nothing to report",
            got="a run without a generation",
            allowed="a run whose ranks were started",
            next_step="Run jobs.train with this --run.",
        )
    newest, result = max(claims), find_result(fs, paths)
    done = result if result is not None and result["generation"] == newest else None
    about = about_run(document, claims, done or {"generation": newest})
    training = _result_rows(done, history) if done else _unfinished_rows(fs, paths, history)
    compared = baselines.tables(baselines.stored(fs, paths))
    evaluation = _kept(fs, f"{paths.evaluations('reported')}/{generation_name(newest)}.json", evaluation)
    page = render(run, about, training, history, _data_rows(document), evaluation, compared, followed(fs, paths))
    url = paths.report(newest)
    fs.mkdirs(url.rpartition("/")[0])
    write_file(fs, url, page.encode(), exclusive=False)
    return url


def _kept(fs: FileSystem, url: str, evaluation: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """`evaluation`, which is stored at `url`; without one, that of an earlier report, if there is any."""
    if evaluation is not None:
        fs.mkdirs(url.rpartition("/")[0])
        document = {"format_version": 1, "kind": "reported evaluation", "result": evaluation}
        write_file(fs, url, seal(document), exclusive=False)
    elif fs.exists(url):
        evaluation = unseal_as("reported evaluation", fs.read_bytes(url), url)["result"]
    return evaluation


def about_run(
    document: Mapping[str, Any], claims: Mapping[int, Claim], result: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What was trained, how and when, as rows of text, from run.json, the claims and the result."""
    config = document["config"]
    versions = document.get("versions", {})
    rows = [
        ("model", config.get("model")),
        ("its settings", ", ".join(f"{name}={value}" for name, value in config.get("extra", {}).items())),
        ("datasets", ", ".join(map(str, config.get("datasets", [])))),
        ("split", config.get("split")),
        ("ranks", _over_steps(claims, result, lambda claim: claim.num_ranks)),
        ("global batch", config.get("global_batch")),
        ("epochs asked for", _over_steps(claims, result, lambda claim: claim.epochs)),
        ("validated on", _validation(config)),
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


def _validation(config: Mapping[str, Any]) -> str:
    """`test, every 2 epochs`; nothing for a run without validation."""
    split, every = config.get("validate"), config.get("validate_every")
    return "" if split is None else f"{split}, every {f'{every} epochs' if every != 1 else 'epoch'}"


def _over_steps(claims: Mapping[int, Claim], result: Mapping[str, Any], value: Callable[[Claim], int]) -> str:
    """`2`, or `2, from step 400 on 4` if the generations on the chain to the result differ."""
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
    compared: Sequence[tuple[str, Rows]] = (),
    scores: Followed = MappingProxyType({}),
) -> str:
    """The page's HTML; `about` are the rows of `about_run`, `training` and `data` those of these sections, `compared`
    the tables of training.results.baselines, `scores` those of training.results.follow.
    """
    tables: list[tuple[str, Sequence[Sequence[object]]]] = [("Run", about), ("Data", data), ("Training", training)]
    if history.times:
        tables.append(("Where each rank's time went", time_rows(history)))
    if history.checkpoints:
        tables.append(("Checkpoints", checkpoint_rows(history)))
    if history.reading:
        tables.append(("What each rank read", reading_rows(history)))
    if evaluation is not None:
        tables.append((f"Evaluation on {evaluation['split']}, with 95 % intervals", _evaluation_rows(evaluation)))
    tables += compared
    curves = [("Loss over the global batch", loss_curve(history))] if history.steps else []
    by = "epoch" if history.epochs else "step"
    curves += [(f"{name} by {by}", epoch_curve(history, name, scores)) for name in curve_names(history, scores)]
    if evaluation is not None:
        tables += _evaluation_tables(evaluation)
    if evaluation is not None and (calibration := evaluation["calibration"]):
        text = f"Calibration of {calibration['of']}: expected error {calibration['expected_error']:.4f}"
        curves.append((f"{text}, Brier score {calibration['brier']:.4f}", calibration_plot(calibration)))
    return page("Lockstep: report of a run", run, tables, curves)


def _data_rows(document: Mapping[str, Any]) -> Rows:
    """Rows about the run's first dataset, if it can still be read; `document` is run.json."""
    config, digest = document["config"], ("digest", document.get("dataset_digest"))
    try:
        opener = open_parts if config.get("mix") is None else open_mixture
        manifest = opener(config["datasets"], config["split"])[1]
    except (LockstepError, KeyError) as error:
        return [("cannot be read now", str(error)), digest]
    counts = manifest.counts
    return [
        ("read", counts.read),
        ("written", counts.written),
        ("quarantined", counts.quarantined),
        *((f"dropped: {reason}", n) for reason, n in sorted(counts.dropped.items())),
        *((f"split {name}", f"{split.records} records") for name, split in sorted(manifest.splits.items())),
        digest,
    ]


def _result_rows(result: Mapping[str, Any], history: History) -> Rows:
    return [
        ("steps", result["steps"]),
        ("epochs", result["epochs"]),
        *([("ended early by", result["stopped_by"])] if result.get("stopped_by") else []),
        *([("validation", f"{result['validation_s']:.1f} s")] if result.get("validation_s") else []),
        *([("rows left out of validation", left_out)] if (left_out := _left_out(history)) else []),
        ("samples/s", f"{result['samples_per_s']:.0f}"),
        _starts(history),
        *((f"restart: generation {each['generation']}", restart_words(each)) for each in result.get("restart_log", [])),
        ("samples left over (they fill no last global batch)", len(result["left_over"])),
        *((f"last epoch: records of class {n}", count) for n, count in enumerate(result.get("class_counts") or ())),
        *((f"last epoch: {name}", _number(value)) for name, value in sorted(result["metrics"].items())),
        ("checkpoint", result["checkpoint"]),
        ("model", result["model"]),
    ]


def _left_out(history: History) -> int:
    """Rows that the last validation left out."""
    last = history.epochs[-1].get("validation", {}) if history.epochs else {}
    return int(last.get("left_out", {}).get("samples", 0))


def _unfinished_rows(fs: FileSystem, paths: RunPaths, history: History) -> Rows:
    metrics = history.epochs[-1]["metrics"] if history.epochs else {}
    try:
        chain, _ = chain_of(fs, paths)
        checkpoint = str(chain[0]) if chain else "none yet"
    except DataError as error:
        checkpoint = str(error)
    return [
        ("state", "not finished: it is running, or jobs.train with the same flags resumes it"),
        ("steps so far", history.steps[-1]["step"] if history.steps else 0),
        ("epochs so far", len(history.epochs)),
        _starts(history),
        *((f"last epoch: {name}", _number(value)) for name, value in sorted(metrics.items())),
        ("newest checkpoint", checkpoint),
    ]


def _starts(history: History) -> tuple[str, object]:
    return "starts (one, and one for each restart or resumption)", history.generations


def _evaluation_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("records", str(evaluation["samples"]))]
    counts, baseline = evaluation["class_counts"], evaluation["baseline"]
    rows += [(f"records of class {number}", str(count)) for number, count in enumerate(counts or ())]
    for name, value in sorted(evaluation["metrics"].items()):
        text = _number(value) + _interval(evaluation["intervals"].get(name))
        if baseline and name in baseline["metrics"]:
            text += f"   (baseline {baseline['name']}: {_number(baseline['metrics'][name])}"
            difference = evaluation["difference"].get(name)
            if difference:
                text += f"; difference {_number(difference['value'])}{_interval(difference['interval'])}"
            text += ")"
        rows.append((name, text))
    return rows


def _evaluation_tables(evaluation: Mapping[str, Any]) -> list[tuple[str, Sequence[Sequence[object]]]]:
    """The confusion matrix and the slices by each column, each with a head as its first row."""
    tables: list[tuple[str, Sequence[Sequence[object]]]] = []
    if confusion := evaluation["confusion"]:
        rows = [[name, *counts] for name, counts in zip(confusion["classes"], confusion["samples"], strict=True)]
        title = "Confusion: true class by row, predicted class by column"
        tables.append((title, [["", *confusion["classes"]], *rows]))
    tables += [(f"Slices by {name}", slice_table(name, slices)) for name, slices in evaluation["slices"].items()]
    return tables


def _interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.4f} to {interval[1]:.4f}]"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
