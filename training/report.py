"""A run's report: one HTML file with its curves, readable without a network and without Lockstep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment

from storage.errors import NotFoundError
from storage.fs import filesystem
from storage.manifest import DatasetManifest
from storage.publish import write_file
from training.chain import find_result
from training.claims import Claim, read_claims
from training.history import History, read_history
from training.launch.restarts import told
from training.paths import RunPaths
from training.report_curves import epoch_curve, loss_curve
from training.report_rows import checkpoint_rows, reading_rows, time_rows
from training.run_json import read_run

# The headings are the sections of a run's life; everything that comes from data is escaped by the template engine.
_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
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
<table>{% for key, value in rows %}<tr><th>{{ key }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
{% endfor %}
{% for name, svg in curves %}
<h2>{{ name }}</h2>
{{ svg }}
{% endfor %}
</body></html>
""")


def write_report(run: str, manifest: DatasetManifest, evaluation: Mapping[str, Any] | None) -> str:
    """Write the report of the newest result of `run`; returns its URL.

    `evaluation` is what training.evaluate returned: {split, samples, metrics, baseline}. A report that is there
    already is replaced: it holds nothing that the run does not. Raises NotFoundError while the run has no result.
    """
    fs, paths = filesystem(run), RunPaths(run)
    result = find_result(fs, paths)
    if result is None:
        raise NotFoundError(
            f"{run} has no result yet",
            got="a run that has not ended",
            allowed="a run that jobs.train finished",
            next_step="Run jobs.train with this --run to its end.",
        )
    url = paths.report(int(result["generation"]))
    about = about_run(read_run(fs, paths), read_claims(fs, paths), result)
    page = render(run, about, result, read_history(run), manifest, evaluation)
    fs.mkdirs(url.rpartition("/")[0])
    write_file(fs, url, page.encode(), exclusive=False)
    return url


def about_run(
    document: Mapping[str, Any], claims: Mapping[int, Claim], result: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What was trained, how and when, as rows of text: of run.json, the claims and the result, not of this moment."""
    config = document["config"]
    versions = document.get("versions", {})
    rows = [
        ("model", config.get("model")),
        ("datasets", ", ".join(map(str, config.get("datasets", [])))),
        ("split", config.get("split")),
        ("ranks", _over_steps(claims, result, lambda claim: claim.num_ranks)),
        ("global batch", config.get("global_batch")),
        ("epochs asked for", _over_steps(claims, result, lambda claim: claim.epochs)),
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
    """`linear from a global batch of 128, 5 epochs of warm-up`, as far as that was asked for."""
    rule, warm_up = config.get("learning_rate_scaling", "none"), config.get("warm_up_epochs")
    parts = [] if rule == "none" else [f"{rule} from a global batch of {config.get('base_batch')}"]
    return ", ".join([*parts, *([f"{warm_up:g} epochs of warm-up"] if warm_up else [])])


def _over_steps(claims: Mapping[int, Claim], result: Mapping[str, Any], value: Callable[[Claim], int]) -> str:
    """`2`, or `2, from step 400 on 4` where the generations that lead to the result differ."""
    chain: list[Claim] = []
    claim = claims.get(int(result["generation"]))
    while claim is not None:
        chain.append(claim)
        claim = claims.get(claim.parent.generation) if claim.parent else None
    told: list[str] = []
    last: int | None = None
    for claim in reversed(chain):
        if value(claim) != last:
            last = value(claim)
            told.append(f"from step {claim.parent.step} on {last}" if told and claim.parent else str(last))
    return ", ".join(told)


def render(
    run: str,
    about: Sequence[tuple[str, str]],
    result: Mapping[str, Any],
    history: History,
    manifest: DatasetManifest,
    evaluation: Mapping[str, Any] | None,
) -> str:
    """The page's HTML; `about` are the rows of `about_run`."""
    counts = manifest.counts
    tables: list[tuple[str, Sequence[tuple[str, object]]]] = [
        ("Run", about),
        (
            "Data",
            [
                ("read", counts.read),
                ("written", counts.written),
                ("quarantined", counts.quarantined),
                *((f"dropped: {reason}", n) for reason, n in sorted(counts.dropped.items())),
                *((f"split {name}", f"{split.records} records") for name, split in sorted(manifest.splits.items())),
                ("digest", manifest.digest),
            ],
        ),
        (
            "Training",
            [
                ("steps", result["steps"]),
                ("epochs", result["epochs"]),
                ("samples/s", f"{result['samples_per_s']:.0f}"),
                ("starts (one, and one for each restart or resumption)", history.generations),
                *((f"restart: generation {each['generation']}", told(each)) for each in result.get("restart_log", [])),
                ("samples left over (they fill no last global batch)", len(result["left_over"])),
                *((f"last epoch: {name}", _number(value)) for name, value in sorted(result["metrics"].items())),
                ("checkpoint", result["checkpoint"]),
                ("model", result["model"]),
            ],
        ),
    ]
    if history.times:
        tables.append(("Where each rank's time went", time_rows(history)))
    if history.checkpoints:
        tables.append(("Checkpoints", checkpoint_rows(history)))
    if history.reading:
        tables.append(("What each rank read", reading_rows(history)))
    if evaluation is not None:
        tables.append((f"Evaluation on {evaluation['split']}, with 95 % intervals", _evaluation_rows(evaluation)))
    metrics = sorted({name for row in history.epochs for name in row["metrics"]} - {"loss"})
    curves = [("Loss over the global batch", loss_curve(history))] if history.steps else []
    curves += [(f"{name} by epoch", epoch_curve(history, name)) for name in metrics]
    return _PAGE.render(title="Lockstep: report of a run", where=run, tables=tables, curves=curves)


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


def _interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.4f} to {interval[1]:.4f}]"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
