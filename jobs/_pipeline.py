"""One pipeline: the steps of several jobs, called as functions in one session."""

from __future__ import annotations

import math
import re
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from lockstep.etl import tables
from lockstep.etl.images import job as image_sets
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.tables import TableConfig
from lockstep.jobs import _train, etl_images, etl_logs, etl_table, evaluate, train
from lockstep.jobs._cli import JobParser, read_toml, refuse_idle
from lockstep.jobs._etl import rejected_line
from lockstep.jobs.pipeline import KEYS
from lockstep.process.own_code import imported_here
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, CorruptionError, nearest, require
from lockstep.storage.urls import join, several
from lockstep.storage.verify import verify
from lockstep.training.driver.train import Hooks
from lockstep.training.driver.train import train as train_run
from lockstep.training.launch.barrier import OnSpark
from lockstep.training.launch.local import run_local
from lockstep.training.launch.session import Launch
from lockstep.training.models import check_name
from lockstep.training.results.evaluate import EvaluateRequest
from lockstep.training.results.evaluate import evaluate as evaluate_run
from lockstep.training.results.report import write_report
from lockstep.training.run.epochs import epochs_words
from lockstep.training.run.result import RunResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ETL_JOBS = {"etl_logs": etl_logs, "etl_images": etl_images, "etl_table": etl_table}
TABLES = ("pipeline", *ETL_JOBS, "train", "evaluate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results of one pipeline, for the table at the end."""

    name: str
    manifest: DatasetManifest
    result: RunResult
    evaluation: dict[str, Any]
    metric: str
    """The metric that is compared with `bar`."""
    bar: float
    bar_name: str
    """A baseline's name, or `configured`."""
    seconds: float
    dataset: str
    report: str

    @property
    def value(self) -> float:
        """The model's metric on the evaluated split."""
        return float(self.evaluation["metrics"][self.metric])

    @property
    def good(self) -> bool:
        """Whether the model reaches its bar."""
        return self.value >= self.bar


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One configuration file: the command lines of its steps, with dataset and run inside `folder`."""

    name: str
    metric: str
    at_least: str
    etl: LogsConfig | ImagesConfig | TableConfig
    train_args: Namespace
    evaluate_args: Namespace
    dataset: str
    run_url: str

    @classmethod
    def load(cls, path: str, folder: str) -> Self:
        """Read a file. Raises ConfigError for unknown tables, keys and values."""
        document = read_toml(path)
        unknown = sorted(set(document) - set(TABLES))
        etls = [name for name in ETL_JOBS if name in document]
        if unknown or len(etls) != 1:
            raise ConfigError(
                f"{path} is not a pipeline",
                got=f"tables {', '.join(sorted(document)) or 'none'}"
                + "".join(nearest(name, TABLES) for name in unknown),
                allowed=f"[pipeline], one of {', '.join(f'[{name}]' for name in ETL_JOBS)}, [train], [evaluate]",
                next_step="See conf/demo_weblog.toml for an example.",
            )
        masters = [name for name in TABLES if "master" in _table(document, name)]
        if masters:
            raise ConfigError(
                f"{path}: `master` does nothing in the steps of a pipeline, which share one session",
                got=f"master in {' and '.join(f'[{name}]' for name in masters)}",
                allowed="the master of the call",
                next_step="Remove it from the file and give lockstep pipeline --master URL.",
            )
        own = _own(path)
        dataset, run_url = join(folder, own.name, "dataset"), join(folder, own.name, "run")
        job = ETL_JOBS[etls[0]]
        etl = job.config_of(job.parser().parse(["--config", path, "--output", dataset]))
        where = ["--config", path, "--dataset", dataset, "--run", run_url]
        evaluate_args = evaluate.parser().parse(where)
        require(not evaluate_args.follow, f"{path}: follow in [evaluate]", "follow", "an evaluation after the training")
        if own.at_least == "baseline" and evaluate_args.baseline is None:
            raise ConfigError(
                f"{path}: there is no baseline to compare the model with",
                got='at_least = "baseline" in [pipeline], no `baseline` in [evaluate]',
                allowed="both, or a number as at_least",
                next_step="Add `baseline` to [evaluate], or give at_least a number.",
            )
        return cls(
            name=own.name,
            metric=own.metric,
            at_least=own.at_least,
            etl=etl,
            train_args=train.parser().parse(where),
            evaluate_args=evaluate_args,
            dataset=dataset,
            run_url=run_url,
        )

    def check(self) -> None:
        """Check all that needs no Spark session. Raises ConfigError."""
        config = _train.config_of(self.train_args)
        refuse_idle("--dry-run", self.train_args.dry_run, "lockstep train")
        check_name(config.model.model, config.model.extra, here=imported_here(config.ranks.launcher))
        if isinstance(self.etl, LogsConfig):
            logs.check(self.etl)
        elif isinstance(self.etl, TableConfig):
            tables.check(self.etl)
        else:
            image_sets.check(self.etl)

    def run(self, spark: SparkSession) -> Outcome:
        """Run all steps in order; the first failure ends the pipeline with its error."""
        began = time.monotonic()
        manifest = self._step("etl", lambda: self._run_etl(spark))
        print(rejected_line(manifest, self.dataset), end="", flush=True)
        self._step("verify", self._verify)
        config = _train.config_of(self.train_args)
        launch = OnSpark(spark)
        take_over = self.train_args.take_over
        trains = launch if config.ranks.launcher == "barrier" else run_local
        hooks = Hooks(on_event=self.train_args.on_event)
        result = self._step("train", lambda: train_run(config, trains, take_over=take_over, hooks=hooks))
        evaluation = self._step("evaluate", lambda: self._evaluate(launch))
        if self.metric not in evaluation["metrics"]:
            raise ConfigError(
                f"{self.name}: the model has no metric `{self.metric}`",
                got=f"metric = {self.metric!r} in [pipeline]",
                allowed=", ".join(sorted(evaluation["metrics"])),
                next_step=f"Correct it; the run {self.run_url} is complete and can be evaluated by lockstep evaluate.",
            )
        report = self._step("report", lambda: write_report(self.run_url, evaluation))
        bar, bar_name = self._bar(evaluation)
        return Outcome(
            name=self.name,
            manifest=manifest,
            result=result,
            evaluation=evaluation,
            metric=self.metric,
            bar=bar,
            bar_name=bar_name,
            seconds=time.monotonic() - began,
            dataset=self.dataset,
            report=report,
        )

    def _step(self, name: str, step: Callable[[], T]) -> T:
        print(f"== {self.name}: {name}", flush=True)
        return step()

    def _run_etl(self, spark: SparkSession) -> DatasetManifest:
        if isinstance(self.etl, LogsConfig):
            return logs.run(spark, self.etl)
        if isinstance(self.etl, TableConfig):
            return tables.run(spark, self.etl)
        return image_sets.run(spark, self.etl)

    def _verify(self) -> None:
        findings = verify(self.dataset)
        if findings:
            raise CorruptionError(f"{len(findings)} faults in the new dataset", file=self.dataset, got=str(findings[0]))

    def _evaluate(self, launch: Launch) -> dict[str, Any]:
        args = self.evaluate_args
        chosen = launch if args.launcher == "barrier" else run_local
        request = EvaluateRequest(
            several(args.run), args.dataset, args.split,
            num_ranks=args.num_ranks, batch=args.batch, baseline=args.baseline, slices=tuple(args.slice),
            earlier=args.earlier, pictures=True,
        )  # fmt: skip
        return evaluate_run(request, chosen)

    def _bar(self, evaluation: dict[str, Any]) -> tuple[float, str]:
        if self.at_least != "baseline":
            return float(self.at_least), "configured"
        baseline = evaluation["baseline"]
        if self.metric not in baseline["metrics"]:
            raise ConfigError(
                f"{self.name}: the baseline {baseline['name']} has no metric `{self.metric}`",
                got=f'metric = {self.metric!r}, at_least = "baseline" in [pipeline]',
                allowed=", ".join(sorted(baseline["metrics"])),
                next_step=f"Correct it; the run {self.run_url} is complete and can be evaluated by lockstep evaluate.",
            )
        return float(baseline["metrics"][self.metric]), baseline["name"]


def _table(document: dict[str, object], name: str) -> dict[str, object]:
    """A file's table; empty if there is none. The parser of the table refuses another kind of value."""
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _own(path: str) -> Namespace:
    job = JobParser("pipeline", "The table [pipeline].", "pipeline")
    job.add_argument("--name", required=True, help=KEYS["name"])
    job.add_argument("--metric", required=True, help=KEYS["metric"])
    job.add_argument("--at-least", default="baseline", help=KEYS["at_least"])
    own = job.parse(["--config", path])
    if not _NAME.fullmatch(own.name):
        job.error(
            f"name = {own.name!r}: only letters, digits and ._-, a letter or digit first, since it names a folder"
        )
    if own.at_least != "baseline":
        try:
            good = math.isfinite(float(own.at_least))
        except ValueError:
            good = False
        if not good:
            job.error(f"at_least = {own.at_least}: neither a number nor `baseline`")
    return own


def table(outcomes: Sequence[Outcome]) -> str:
    """All outcomes side by side, one row a fact."""
    return "\n".join(
        [_line("", [o.name for o in outcomes])]
        + [_line(name, [str(value(o)) for o in outcomes]) for name, value in _FACTS]
        + [f"{o.name}: dataset {o.dataset}\n{o.name}: run     {o.result.run}\n{o.name}: model   {o.result.model}"
           f"\n{o.name}: report  {o.report}" for o in outcomes]
    )  # fmt: skip


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<22}" + "".join(f"{cell:>34}" for cell in cells)


_FACTS: tuple[tuple[str, Callable[[Outcome], object]], ...] = (
    ("read", lambda o: o.manifest.counts.read),
    ("written", lambda o: o.manifest.counts.written),
    ("quarantined", lambda o: o.manifest.counts.quarantined),
    ("dropped", lambda o: ", ".join(f"{n} {why}" for why, n in sorted(o.manifest.counts.dropped.items())) or 0),
    ("steps", lambda o: o.result.steps),
    ("epochs", lambda o: epochs_words(o.result.epochs, o.result.epochs_asked)),
    ("seconds to first step", lambda o: _or_dash(o.result.first_step_s, ".1f")),
    ("samples/s after it", lambda o: _or_dash(o.result.samples_per_s, ".0f")),
    ("metric", lambda o: f"{o.metric} {o.value:.4f}"),
    ("baseline", lambda o: _baseline(o)),
    ("seconds in all", lambda o: f"{o.seconds:.0f}"),
)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _baseline(outcome: Outcome) -> str:
    baseline = outcome.evaluation.get("baseline") or {"metrics": {}}
    value = baseline["metrics"].get(outcome.metric)
    return "-" if value is None else f"{float(value):.4f} ({baseline['name']})"
