"""What a chain of runs has forgotten: each run's metric on the dataset of each day so far.

A run with `--init-from` continues the run whose weights it begins with, and its dataset continues the datasets before.
`lockstep evaluate --earlier` stores a run's metrics on each of them in the run; here they become one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import LockstepError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import absolute, basename
from lockstep.training.results.stored_baselines import deciding_metric
from lockstep.training.rules import is_error
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_model
from lockstep.training.run.run_json import begun_from, names_of_datasets, read_run

KIND, FOLDER = "evaluation of days", "days-"
MISSING = "not evaluated"
Value = float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Forgetting:
    """The metric R[i][j] of the run of day i on the dataset of day j <= i, and the usual figures of such a matrix.

    A value that was not evaluated is None, and no figure takes it for a number. Days count from the oldest, T is the
    last run's.
    """

    metric: str
    days: tuple[str, ...]
    """The datasets, oldest first."""
    runs: tuple[str | None, ...]
    """The run of each day; None for a day that no run of the chain was trained for."""
    values: tuple[tuple[Value, ...], ...]
    """R: a row a day, with one value more than the row before."""

    @property
    def average(self) -> tuple[Value, int]:
        """The mean of R[T][j] over all days j (Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual
        Learning", NIPS 2017), and how many days have a value.
        """
        return _mean(self.values[-1])

    @property
    def backward_transfer(self) -> tuple[Value, int]:
        """The mean over days j < T of R[T][j] - R[j][j] (Lopez-Paz and Ranzato, 2017), and how many days have both:
        what later days did to earlier ones. It is negative where the model became worse, also for errors and losses,
        whose sign is turned.
        """
        last = self.values[-1]
        return _mean([self._gain(self.values[day][day], last[day]) for day in range(len(last) - 1)])

    @property
    def forgetting(self) -> tuple[Value, int]:
        """The mean over days j < T of the best R[l][j], j <= l < T, less R[T][j] (Chaudhry et al., "Riemannian Walk for
        Incremental Learning", ECCV 2018), and how many days have both. For errors and losses the best is the least and
        the sign is turned, so positive is always forgotten. Where an R[l][j] is missing, the best may have been better:
        the figure is then a lower bound.
        """
        last, found = self.values[-1], list[Value]()
        best = min if is_error(self.metric) else max
        for day in range(len(last) - 1):
            before = [value for row in self.values[day:-1] if (value := row[day]) is not None]
            loss = self._gain(best(before), last[day]) if before else None
            found.append(None if loss is None else -loss)
        return _mean(found)

    @property
    def missing(self) -> int:
        """The values that are None."""
        return sum(value is None for row in self.values for value in row)

    def to_json(self) -> dict[str, Any]:
        """{metric, days, runs, values, average, backward_transfer, forgetting, missing}; a figure is {value, days}."""
        figures = {name: getattr(self, name) for name in ("average", "backward_transfer", "forgetting")}
        return {
            **{name: getattr(self, name) for name in ("metric", "days", "runs", "values", "missing")},
            **{name: {"value": value, "days": days} for name, (value, days) in figures.items()},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The matrix in what `to_json` returned."""
        values = tuple(map(tuple, document["values"]))
        return cls(metric=document["metric"], days=tuple(document["days"]), runs=tuple(document["runs"]), values=values)

    def table(self) -> list[list[str]]:
        """Head and rows: a row for the run of each day, a column for the dataset of each day."""
        head = [f"{self.metric} of the run below on", *map(basename, self.days)]
        rows = [
            [MISSING if run is None else basename(run), *(_shown(value) for value in row)]
            for run, row in zip(self.runs, self.values, strict=True)
        ]
        return [head, *([*row, *[""] * (len(head) - len(row))] for row in rows)]

    def words(self) -> str:
        """Say the three figures, and over how many days, if some have no value."""
        earlier, parts = len(self.days) - 1, []
        for name, (value, days), most in (
            (f"average {self.metric}", self.average, earlier + 1),
            ("forgetting", self.forgetting, earlier),
            ("backward transfer", self.backward_transfer, earlier),
        ):
            over = "" if days == most else f" (over {days} of {most} days)"
            parts.append(f"{name} {_shown(value)}{over}")
        least = "; values are missing, so the forgetting is at least this" if self.missing else ""
        return ", ".join(parts) + least

    def _gain(self, before: Value, after: Value) -> Value:
        """How much better `after` is."""
        if before is None or after is None:
            return None
        return before - after if is_error(self.metric) else after - before


def keep_days(result: Mapping[str, Any]) -> None:
    """Store the metrics of each dataset of the chain in the run, from a `result` of
    lockstep.training.results.evaluate of its exported model with `earlier`. A later call with the same split and the
    same model replaces them.
    """
    fs, paths = filesystem(result["run"]), RunPaths(result["run"])
    url, chain = _url(paths, result["split"], result["model"]), {result["dataset"], *result["earlier"]}
    days = [day for day in result["by_dataset"] if day["dataset"] in chain]  # of tasks there are others
    each = [{name: day[name] for name in ("dataset", "samples", "metrics")} for day in days]
    fs.mkdirs(url.rpartition("/")[0])
    write_file(fs, url, seal({"format_version": 1, "kind": KIND, "by_dataset": each}), exclusive=False)


def forgetting_of(run: str, split: str) -> Forgetting | None:
    """The matrix of the run at URL `run` and of those that it continues, by what `keep_days` stored of `split`.

    None if nothing is stored of this run, or if it is of the first day. Earlier runs that are not there any more are
    missing. Raises CorruptionError for a damaged file.
    """
    fs, paths = filesystem(run), RunPaths(run)
    stored = _stored(fs, paths, split)
    if stored is None:
        return None
    urls = list(reversed(stored))  # the chain of datasets, oldest first
    found = _chain(run, urls)
    last = max(found, default=0)
    if last == 0:
        return None
    metrics = stored[urls[last]]
    metric = deciding_metric(metrics) or next((name for name in ("r2", "loss") if name in metrics), None)
    if metric is None:
        return None
    rows: list[tuple[Value, ...]] = []
    for day in range(last + 1):
        of_run = stored if day == last else _stored_in(found[day], split) if day in found else {}
        rows.append(tuple(_number(of_run.get(url, {}).get(metric)) for url in urls[: day + 1]))
    return Forgetting(
        metric=metric,
        days=tuple(urls[: last + 1]),
        runs=tuple(found.get(day) for day in range(last + 1)),
        values=tuple(rows),
    )


def forgotten_in(run: str) -> dict[str, Forgetting]:
    """The matrix of each split of which `keep_days` has stored something in the run, where there is one."""
    fs, paths = filesystem(run), RunPaths(run)
    try:
        names = [entry.name for entry in fs.list(paths.evaluations("").rstrip("/"))]
    except NotFoundError:
        return {}
    splits = sorted(name.removeprefix(FOLDER) for name in names if name.startswith(FOLDER))
    return {split: found for split in splits if (found := forgetting_of(run, split)) is not None}


def _chain(run: str, urls: Sequence[str]) -> dict[int, str]:
    """The run of each day, from this run back: of each day the newest one, as long as days become earlier."""
    found, seen = dict[int, str](), set[str]()
    at: str | None = absolute(run)
    while at is not None and at not in seen:
        seen.add(at)
        try:
            document = read_run(filesystem(at), RunPaths(at))
        except LockstepError:  # it is gone, or no run but a file of weights
            break
        days = [urls.index(url) for names in names_of_datasets(document) for url in names if url in urls]
        if not days or (found and max(days) > min(found)):
            break
        found.setdefault(max(days), at)
        at = begun_from(document)
    return found


def _url(paths: RunPaths, split: str, model: str) -> str:
    return f"{paths.evaluations(FOLDER + split)}/{basename(model)}.json"


def _stored(fs: FileSystem, paths: RunPaths, split: str) -> dict[str, Mapping[str, Any]] | None:
    """The metrics of each dataset, the newest first, of the run's newest model; None if nothing is stored of it."""
    try:
        url = _url(paths, split, find_model(fs, paths))
    except NotFoundError:
        return None
    if not fs.exists(url):
        return None
    return {day["dataset"]: day["metrics"] for day in unseal_as(KIND, fs.read_bytes(url), url)["by_dataset"]}


def _stored_in(run: str, split: str) -> dict[str, Mapping[str, Any]]:
    return _stored(filesystem(run), RunPaths(run), split) or {}


def _mean(values: Sequence[Value]) -> tuple[Value, int]:
    """The mean of the values that are there, and their number."""
    there = [value for value in values if value is not None]
    return (sum(there) / len(there) if there else None), len(there)


def _number(value: Any) -> Value:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _shown(value: Value) -> str:
    return MISSING if value is None else f"{value:.4f}"
