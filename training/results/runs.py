"""Many runs side by side: where they are, how each is doing, what they differ in, and which is best."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.storage.errors import ConfigError, LockstepError, NotFoundError, nearest
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.run_layout import AGENT_JSON, CLAIMS, RUN_JSON
from lockstep.storage.urls import absolute, basename, join
from lockstep.training.config import options_in
from lockstep.training.driver.ownership import REWRITE_EVERY_S, read_lease
from lockstep.training.results.evaluate import aligned, number
from lockstep.training.results.pages import printable
from lockstep.training.results.report import reported_evaluation
from lockstep.training.results.state import ELSEWHERE, state_of, state_without_driver
from lockstep.training.rules import VALIDATION, is_error
from lockstep.training.run.epochs import epochs_trained, epochs_words, steps_in_epoch
from lockstep.training.run.lineage import epochs_asked, read_claims
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from lockstep.training.run.run_json import begun_from, read_run
from lockstep.training.run.status import TRAINING
from lockstep.training.run.summary import read_summary

MOST_DEPTH = 3  # folders below the one that was named: FOLDER/SEARCH/trials/0001
LOOK_S = REWRITE_EVERY_S + 1.5  # in which a living driver of another host rewrites its lease
SHOWN_METRICS = 9
SHOWN_DIGEST = 12  # characters
FINISHED, DAMAGED = "finished", "damaged"
_CONDITION = re.compile(r"([^=<>!]+)(!=|>=|<=|=|<|>)(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """A run as a listing shows it. Names and values may come from strangers and must be escaped."""

    url: str
    name: str
    """The path below the folder that was named."""
    state: str
    """`training` (its driver lives), `finished`, `stopped` (in good order), `failed` (its driver gave up),
    `interrupted` (none of these: the same call of lockstep train resumes it), or `damaged`."""
    problem: str = ""
    """What is wrong with a damaged run."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration of run.json, each setting of the model as `set.NAME`."""
    digest: str = ""
    """The digest of the run's datasets."""
    begun: str = ""
    generation: int = 0
    ranks: int = 0
    steps: int = 0
    steps_asked: int | None = None
    steps_in_epoch: float | None = None
    epochs: float | None = None
    """Epochs that were trained until now (lockstep.training.run.epochs); those asked for are in `config`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last epoch, or of a finished run's best checkpoint (--keep-best), `val_METRIC` of a validation
    among them, and SPLIT_METRIC of an evaluation in its report."""
    evaluated: str = ""
    """The split of the evaluation in its report."""
    stopped_by: str = ""
    """Why a finished run ended before its last epoch."""
    begun_from: str | None = None
    """The run, or the file, that its first weights are of (--init-from); None if they were drawn."""

    @property
    def datasets(self) -> list[str]:
        """The URLs of its datasets."""
        found = self.config.get("datasets")
        return [str(one) for one in found] if isinstance(found, list | tuple) else []

    def base_of(self, metric: str) -> str:
        """A metric's name without what says that it is of the validation or of the evaluation."""
        of_evaluation = f"{self.evaluated}_"
        return metric.removeprefix(VALIDATION if metric.startswith(VALIDATION) else of_evaluation)

    def fields(self) -> dict[str, Any]:
        """What --where and --sort name: the configuration, the metrics, and the columns of a listing."""
        columns = {name: getattr(self, name) for name in ("name", "state", "digest", "begun", "ranks", "steps")}
        return {**self.config, **self.metrics, **columns, "epochs_trained": self.epochs}


def read_runs(urls: Sequence[str], look_s: float = LOOK_S) -> list[ListedRun]:
    """The runs at these URLs, each a run or a folder that holds runs (also a search of lockstep tune), oldest first.

    A run whose lease another host wrote is looked at again after `look_s` seconds, all such runs at once. A run that
    cannot be read is listed as damaged. Raises NotFoundError for a URL without a run.
    """
    runs: dict[str, ListedRun] = {}
    for url in dict.fromkeys(absolute(url).rstrip("/") or "/" for url in urls):
        for found, problem in _find(url).items():
            name = basename(url) if found == url else found.removeprefix(f"{url.rstrip('/')}/")
            name = name if len(urls) == 1 or found == url else f"{basename(url)}/{name}"
            if found not in runs:
                unread = ListedRun(url=found, name=name, state=DAMAGED, problem=problem)
                runs[found] = unread if problem else _read(found, name)
    return sorted(_looked_at_again(list(runs.values()), look_s), key=lambda run: (run.begun, run.name))


def _find(root: str) -> dict[str, str]:
    """The URLs of the runs at or below `root`, and of folders that cannot be listed, with what is wrong with these."""
    fs = filesystem(root)
    found: dict[str, str] = {}
    level = [root]
    for depth in range(MOST_DEPTH + 1):
        below: list[str] = []
        for url in level:
            try:
                entries = fs.list(url)
            except NotFoundError:
                if depth:
                    continue  # removed since
                raise _none(root, "nothing there") from None
            except LockstepError as error:
                if not depth:
                    raise
                found[url] = error.what
                continue
            names = {entry.name for entry in entries}
            if AGENT_JSON in names:  # lockstep status shows it
                continue
            if RUN_JSON in names or CLAIMS in names:
                found[url] = ""
            elif MANIFEST_NAME not in names:  # a dataset, a model
                folders = (each for each in entries if each.is_dir and not each.name.startswith((".", "_")))
                below += [join(url, each.name) for each in folders]
        level = below
    if not found:
        raise _none(root, f"no {RUN_JSON} in it, nor {MOST_DEPTH} folders below it")
    return dict(sorted(found.items()))


def _none(root: str, got: str) -> NotFoundError:
    return NotFoundError(
        f"no run at {root}",
        got=got,
        allowed="a run, or a folder that holds runs",
        next_step="Correct the path: it is what lockstep train got as --run, or a folder above it.",
    )


def _read(url: str, name: str) -> ListedRun:
    try:
        return _read_whole(filesystem(url), RunPaths(url), name)
    except LockstepError as error:
        return ListedRun(url=url, name=name, state=DAMAGED, problem=error.what)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        problem = f"its files are not those of a run of this version ({type(error).__name__})"
        return ListedRun(url=url, name=name, state=DAMAGED, problem=problem)


def _read_whole(fs: FileSystem, paths: RunPaths, name: str) -> ListedRun:
    document, claims = read_run(fs, paths), read_claims(fs, paths)
    config, newest = options_in(document["config"]), max(claims, default=0)
    settings = config.pop("extra", None) or {}
    config |= {f"set.{key}": value for key, value in settings.items()}
    of_epoch, asked = steps_in_epoch(document["plan"]), epochs_asked(claims) or int(config["epochs"])
    steps_asked = None if of_epoch is None else int(asked * of_epoch)
    if steps_asked is not None and isinstance(config.get("max_steps"), int):
        steps_asked = min(steps_asked, config["max_steps"])
    result = find_result(fs, paths)
    if result is not None and result["generation"] == newest:
        state, metrics, steps = FINISHED, (result["best"] or result)["metrics"], result["steps"]
    else:
        history = read_summary(paths.root)
        metrics = history.epochs[-1]["metrics"] if history.epochs else {}
        steps = history.steps[-1]["step"] if history.steps else 0
        state = state_of(fs, paths)
    evaluation, evaluated = reported_evaluation(fs, paths, newest), ""
    if evaluation is not None:
        of_split = {f"{evaluation['split']}_{key}": value for key, value in evaluation["metrics"].items()}
        metrics, evaluated = {**metrics, **of_split}, str(evaluation["split"])
    return ListedRun(
        url=paths.root,
        name=name,
        state=state,
        config={**config, "epochs": asked},
        digest=str(document.get("dataset_digest") or ""),
        begun=str(document.get("created_at") or ""),
        generation=newest,
        ranks=claims[newest].num_ranks if newest else int(config["num_ranks"]),
        steps=steps,
        steps_asked=steps_asked,
        steps_in_epoch=None if of_epoch is None else float(of_epoch),
        epochs=None if of_epoch is None else epochs_trained(steps, of_epoch, asked),
        metrics={str(key): float(value) for key, value in metrics.items() if _is_number(value)},
        evaluated=evaluated,
        stopped_by=str((result or {}).get("stopped_by") or "") if state == FINISHED else "",
        begun_from=begun_from(document),
    )


def _looked_at_again(runs: Sequence[ListedRun], look_s: float) -> list[ListedRun]:
    """Return `runs`, those whose driver is on another host with their state: a driver that lives has rewritten its
    lease.
    """
    waiting = {run.url: _lease_of(run) for run in runs if run.state == ELSEWHERE}
    if waiting:
        time.sleep(look_s)
    return [_decided(run, waiting[run.url]) if run.url in waiting else run for run in runs]


def _decided(run: ListedRun, before: object) -> ListedRun:
    if _lease_of(run) != before:
        now = _read(run.url, run.name)  # it may have ended since
        return replace(now, state=TRAINING) if now.state == ELSEWHERE else now
    return replace(run, state=state_without_driver(filesystem(run.url), RunPaths(run.url)))


def _lease_of(run: ListedRun) -> object:
    try:
        return read_lease(filesystem(run.url), RunPaths(run.url).lease)
    except LockstepError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Choosing and ordering


def filtered(runs: Sequence[ListedRun], conditions: Iterable[str]) -> list[ListedRun]:
    """The runs that meet all `conditions`: KEY=VALUE, or with !=, >=, <=, > or <. KEY is a metric, a column or a key of
    the configuration; `datasets` has the value of each dataset's URL or name. Raises ConfigError for an unknown key.
    """
    found = list(runs)
    for condition in conditions:
        match = _CONDITION.fullmatch(condition)
        if match is None:
            raise ConfigError(
                f"--where {condition} is no condition",
                got=condition,
                allowed="KEY=VALUE, KEY!=VALUE, KEY>=VALUE, KEY<=VALUE, KEY>VALUE or KEY<VALUE",
                next_step="Put it into quotes, such as 'epochs>=3': a shell takes > and < for files.",
            )
        key, operator, wanted = match[1].strip(), match[2], match[3].strip()
        _check_known(runs, key, "--where")
        found = [run for run in found if key in (values := run.fields()) and _meets(values[key], operator, wanted)]
    return found


def _meets(value: Any, operator: str, wanted: str) -> bool:
    if isinstance(value, list | tuple):
        texts = {str(one) for one in value} | {basename(str(one)) for one in value if str(one)}
        equal = wanted in texts or wanted == ",".join(map(str, value))
        return equal if operator == "=" else not equal if operator == "!=" else False
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    try:
        left, right = float(text), float(wanted)
    except ValueError:
        return text == wanted if operator == "=" else text != wanted if operator == "!=" else False
    return {
        "=": left == right, "!=": left != right, ">=": left >= right, "<=": left <= right, ">": left > right,
        "<": left < right,
    }[operator]  # fmt: skip


def ordered(runs: Sequence[ListedRun], by: str) -> list[ListedRun]:
    """The runs by METRIC, METRIC:max or METRIC:min, the best first; those without it last. Without a direction the
    lowest error or loss is best, and the highest of anything else. Raises ConfigError for an unknown metric.
    """
    key = metric_of(by)
    direction = by[len(key) + 1 :] or ("min" if is_error(key) else "max")
    _check_known(runs, key, "--sort")
    having = [run for run in runs if _is_number(run.fields().get(key)) and run.fields()[key] == run.fields()[key]]
    having.sort(key=lambda run: run.fields()[key], reverse=direction == "max")
    return [*having, *(run for run in runs if run not in having)]


def metric_of(by: str) -> str:
    """The metric of METRIC, METRIC:max or METRIC:min."""
    return by[:-4] if by.endswith((":max", ":min")) else by


def _check_known(runs: Sequence[ListedRun], key: str, flag: str) -> None:
    known = {name for run in runs for name in run.fields()}
    if key not in known:
        raise ConfigError(
            f"{flag}: no run has `{printable(key)}`",
            got=f"{printable(key)}{nearest(key, known)}",
            allowed=", ".join(map(printable, sorted(known))),
            next_step=f"Correct the name after {flag}.",
        )


# Tables


def short_digest(digest: str) -> str:
    """The beginning of a digest, enough to see whether two are equal."""
    return digest[:SHOWN_DIGEST]


def metric_names(runs: Sequence[ListedRun], by: str = "") -> list[str]:
    """All metrics of these runs: first `by` (the one they are ordered by), then the others, those that most runs have
    first, each next to those of its validation and evaluation.
    """
    having: dict[str, set[str]] = {}
    forms: dict[str, set[str]] = {}
    for run in runs:
        for name in run.metrics:
            having.setdefault(base := run.base_of(name), set()).add(run.url)
            forms.setdefault(base, set()).add(name)
    bases = sorted(forms, key=lambda base: (-len(having[base]), -len(forms[base]), base))
    names = [name for base in bases for name in sorted(forms[base], key=lambda name: (len(name), name))]
    return sorted(dict.fromkeys(names), key=lambda name: name != by)


def listing(runs: Sequence[ListedRun], by: str = "") -> list[list[str]]:
    """Head and rows of a table with a row for each run, with up to SHOWN_METRICS metrics: `by` first."""
    metrics = metric_names(runs, metric_of(by))[:SHOWN_METRICS]
    rows = [["run", "state", "model", "ranks", "step", "epochs", *metrics, "begun", "dataset", "digest"]]
    for run in runs:
        if run.state == DAMAGED:
            rows.append([run.name, f"{DAMAGED}: {run.problem}", *[""] * (len(rows[0]) - 2)])
            continue
        step = str(run.steps) if run.steps_asked is None else f"{run.steps} of {run.steps_asked}"
        values = [number(run.metrics.get(name)) for name in metrics]
        datasets = ", ".join(basename(one) for one in run.datasets)
        model, digest = str(run.config.get("model")), short_digest(run.digest)
        asked = run.config.get("epochs")
        epochs = str(asked) if run.epochs is None or asked is None else epochs_words(run.epochs, asked)
        rows.append([run.name, run.state, model, str(run.ranks), step, epochs, *values, run.begun, datasets, digest])
    return rows


def comparison(runs: Sequence[ListedRun]) -> list[list[str]]:
    """Head and rows of the options that differ, and of all metrics, of the runs that are not damaged."""
    whole = [run for run in runs if run.state != DAMAGED]
    metrics = metric_names(whole)
    columns = [
        {
            **run.config,
            "epochs trained": _trained(run),
            "dataset_digest": short_digest(run.digest),
            "num_ranks": run.ranks,
        }
        for run in whole
    ]
    for each in columns:
        each.pop("run", None)
    keys = dict.fromkeys(key for each in columns for key in each)
    differing = [key for key in keys if len({value_text(each.get(key)) for each in columns}) > 1]
    rows = [["run", *differing, *metrics]]
    for run, each in zip(whole, columns, strict=True):
        values = [number(run.metrics.get(name)) for name in metrics]
        rows.append([run.name, *(value_text(each.get(key)) for key in differing), *values])
    return rows


def _trained(run: ListedRun) -> str:
    return "-" if run.epochs is None else epochs_words(run.epochs, 0).partition(" ")[0]


def value_text(value: Any) -> str:
    """A value of a configuration in a table; - if there is none."""
    if isinstance(value, list | tuple):
        return ", ".join(basename(str(one)) or str(one) for one in value)
    return "-" if value is None or value == "" else f"{value:g}" if isinstance(value, float) else str(value)


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """A table as aligned lines; a damaged run's line is not padded, since its problem may be long."""
    shown = [[printable(cell) for cell in row] for row in rows]
    padded = [row for row in shown if not row[1:2] or not row[1].startswith(f"{DAMAGED}:")]
    width = max(len(row[0]) for row in shown)
    lines = iter(aligned([[row[0].ljust(width), *row[1:]] for row in padded]))
    return "\n".join(next(lines) if row in padded else f"{row[0].ljust(width)}  {row[1]}" for row in shown)
