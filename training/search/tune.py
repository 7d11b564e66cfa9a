"""The driver of a search: it runs several trials at once, and resumes them after it was killed.

Each trial trains in a thread, by the same driver as lockstep train. Its reports come through one queue, so only one
thread uses the study and the journal.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.process.signals import ended_in_order
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, LockstepError, NotFoundError, StorageError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.shown import counted
from lockstep.storage.urls import basename
from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import LauncherGoneError
from lockstep.training.driver.ownership import Lease
from lockstep.training.driver.preflight import check_validation, preflight
from lockstep.training.driver.stop import EndedByCallerError
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.session import Launch, SessionLauncher
from lockstep.training.results.evaluate import EvaluateRequest, evaluate
from lockstep.training.rules import check_metric
from lockstep.training.run import notes
from lockstep.training.run.lineage import SupersededError
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult
from lockstep.training.search.config import SearchConfig, check_search, open_search
from lockstep.training.search.journal import Journal
from lockstep.training.search.live import AsLines, SearchProgress
from lockstep.training.search.report import tested_words, write_search_report
from lockstep.training.search.space import config_of_trial, corners, flags_of
from lockstep.training.search.study import DONE, FAILED, OPEN, PRUNED, VERSION, Study, Trial
from lockstep.training.ways import Federated

FORMAT_VERSION = 1
LOOK_S = 0.5
TEST = "test"
"""The split that is kept apart if none is named."""
END_S = 120.0  # for a trial to end in order: its ranks stop, and a commit in flight ends
OF_THE_SEARCH = (StorageError, CorruptionError, SupersededError, LauncherGoneError, EndedByCallerError)
Trainer = Callable[[TrainConfig, Hooks], RunResult]
"""Trains one configuration as lockstep.training.driver.train.train does."""
Shows = Callable[[SearchConfig, Study], SearchProgress]
Tests = Callable[[str], dict[str, Any] | None]
"""Evaluates a run on the split that no trial has seen; None without such a split."""


def tune(
    config: SearchConfig,
    launch: Launch,
    *,
    take_over: bool = False,
    hooks: Hooks | None = None,
    progress: Shows = AsLines,
) -> dict[str, Any]:
    """Run the trials of a search that have not ended; returns the content of best.json.

    The same call resumes a search. `progress` shows it; that of `hooks` is unused. Raises ConfigError for parameters
    that do not fit the dataset, the session's slots, the GPUs or the search; TrainingFailedError if no trial has a
    value; and the error of a trial, if none has ended before.
    """
    check_search(filesystem(config.root), config, VERSION)
    test = split_apart(config)
    for corner in corners(config.base, config.space, f"{config.root}/trials/check"):
        preflight(corner)
    launches: queue.SimpleQueue[Launch] = queue.SimpleQueue()
    for each in _launches(config, launch):
        launches.put(each)

    def trainer(of_trial: TrainConfig, its_hooks: Hooks) -> RunResult:
        mine = launches.get_nowait()  # there is one for each trial at once
        try:
            return train(of_trial, mine, take_over=take_over, hooks=its_hooks)
        finally:
            launches.put(mine)

    def tests(run: str) -> dict[str, Any] | None:
        if test is None:
            return None
        first, *more = config.base.data.datasets
        request = EvaluateRequest((run,), first, test, num_ranks=config.base.ranks.num_ranks, more=tuple(more))
        found = evaluate(request, launches.get_nowait())
        return {name: found[name] for name in ("split", "model", "samples", "metrics", "intervals", "compared_by")}

    hooks = replace(hooks or Hooks(), metric=config.metric)
    return run_trials(config, trainer, take_over=take_over, hooks=hooks, progress=progress, tests=tests)


def split_apart(config: SearchConfig) -> str | None:
    """The split to evaluate the best trial on: --test, else `test` if all datasets have it and no trial sees it.

    Raises ConfigError for a --test that the datasets do not have.
    """
    if config.test is not None:
        check_validation(config.base, config.test, "--test")
        return config.test
    there = all(TEST in load_dataset(url).splits for url in config.base.data.datasets)
    if there and TEST not in config.seen:
        return TEST
    note = (
        f"no split is kept apart: the best value is chosen on split `{config.chosen_on}`, so it is optimistic; next: "
    )
    notes.show([note + "build the dataset with a third split, such as --split 80/10/10, and give --test SPLIT"])
    return None


def _launches(config: SearchConfig, launch: Launch) -> Sequence[Launch]:
    """What starts the ranks of each of the trials that train at once."""
    if not isinstance(launch, SessionLauncher):
        return [launch] * min(config.parallel, config.number)
    _check_slots(config, launch)
    return launch.divided(config.parallel, config.base.processes)


def _check_slots(config: SearchConfig, launch: SessionLauncher) -> None:
    ranks = config.parallel * (config.base.processes + config.base.ranks.spare_executors)
    try:
        launch.ready(ranks, config.base.limits.start_limit_s)
    except ConfigError as error:
        raise ConfigError(
            f"{config.parallel} trials of {config.base.processes} processes do not fit at once",
            got=f"{error.what}; {error.got}",
            allowed=f"{ranks} slots at once: --parallel times all ranks, servers and spare executors",
            next_step=f"Lower --parallel. {error.next_step}",
        ) from error


def run_trials(
    config: SearchConfig,
    trainer: Trainer,
    *,
    take_over: bool,
    hooks: Hooks,
    progress: Shows = AsLines,
    tests: Tests = lambda run: None,
) -> dict[str, Any]:
    """Do what `tune` does without its checks; `trainer` runs a trial, `tests` evaluates the best one."""
    fs = filesystem(config.root)
    way = config.base.way
    notes.show(notes.of_private_search(way.noise_multiplier if isinstance(way, Federated) else 0.0))
    lease = Lease(fs, f"{config.root}/lease.json", hooks.lease_watch_s, hooks.lease_every_s, take_over=take_over)
    with ended_in_order(), lease:
        open_search(fs, config, VERSION)
        study = Study(config, Journal(fs, config.root, confirm=lease.check_not_lost))
        with progress(config, study) as shown:
            _Search(config, study, trainer, hooks, lease, shown).run()
        best = study.best()
        run = config.run_of(best.number)
        tested = _tested(config, best) or tests(run)
        document = {
            "search": config.root,
            "trial": best.number,
            "parameters": best.parameters,
            "flags": flags_of(best.parameters),
            "metric": config.metric,
            "value": best.value,
            "chosen_on": config.chosen_on,
            "test": tested,
            "run": run,
            "model": best.model,
            "report": write_search_report(fs, config, study, tested),
        }
        data = seal({"format_version": FORMAT_VERSION, "kind": "best trial", **document})
        write_file(fs, f"{config.root}/best.json", data, exclusive=False, confirm=lease.check_not_lost)
    return document


def _tested(config: SearchConfig, best: Trial) -> dict[str, Any] | None:
    """The evaluation in best.json, if it is one of this trial's model on the same split."""
    url, model = f"{config.root}/best.json", best.model
    try:
        document = unseal_as("best trial", filesystem(config.root).read_bytes(url), url, version=FORMAT_VERSION)
    except NotFoundError:
        return None
    found: dict[str, Any] = document.get("test") or {}
    if model is None or found.get("split") != (config.test or TEST) or document["trial"] != best.number:
        return None
    if basename(found["model"]) != basename(model):
        return None
    return found | {"model": model}  # the search may have been moved since


def summary_of_search(best: Mapping[str, Any]) -> str:
    """What best.json has, in a few lines."""
    head = f"best trial {best['trial']}: {best['metric'].rpartition(':')[0]} {best['value']:.6g}"
    head += f" with {' '.join(best['flags'])}\nchosen on split {best['chosen_on']}: optimistic\n"
    if best["test"] is not None:
        head += f"on split {best['test']['split']}, which no trial has seen: {tested_words(best['test'])}\n"
    return f"{head}run {best['run']}\nmodel {best['model']}\nreport {best['report']}"


def trials_of(config: SearchConfig) -> list[dict[str, Any]]:
    """The trials of a search so far, by number: {trial, run, parameters, state, value, epochs}; starts nothing."""
    study = Study(config, Journal(filesystem(config.root), config.root))
    return [
        {"trial": trial.number, "run": config.run_of(trial.number), "parameters": trial.parameters}
        | {"state": trial.state, "value": trial.value, "epochs": trial.epochs}
        for trial in study.trials
    ]


class _Message(NamedTuple):
    """What the thread of a trial reports: the row of an epoch's metrics, or at its end the result or the error."""

    trial: int
    content: dict[str, Any] | RunResult | BaseException


class _Running:
    """A trial that trains in a thread."""

    def __init__(
        self, trial: Trial, config: TrainConfig, trainer: Trainer, hooks: Hooks, messages: queue.Queue[_Message]
    ) -> None:
        self.trial, self.config = trial, config
        self._trainer, self._messages = trainer, messages
        self._hooks = replace(hooks, on_epoch=self._put, ended=self._ended)
        self._error: EndedByCallerError | None = None
        self._thread = threading.Thread(target=self._run, name=f"trial-{trial.number:04d}", daemon=True)
        self._thread.start()

    def end(self, why: str) -> None:
        """End the run soon, in order; it can be resumed."""
        self._error = EndedByCallerError(f"trial {self.trial.number} was ended: {why}")

    def join(self) -> None:
        """Wait until the thread has ended, for END_S at the most."""
        self._thread.join(END_S)

    def _run(self) -> None:
        try:
            self._put(self._trainer(self.config, self._hooks))
        except BaseException as error:  # the main thread raises it
            self._put(error)

    def _put(self, content: dict[str, Any] | RunResult | BaseException) -> None:
        self._messages.put(_Message(self.trial.number, content))

    def _ended(self) -> EndedByCallerError | None:
        return self._error


class _Search:
    """The loop over trials."""

    def __init__(
        self,
        config: SearchConfig,
        study: Study,
        trainer: Trainer,
        hooks: Hooks,
        lease: Lease,
        progress: SearchProgress,
    ) -> None:
        self._config, self._study, self._trainer, self._hooks, self._lease = config, study, trainer, hooks, lease
        self._progress = progress
        self._messages: queue.Queue[_Message] = queue.Queue()
        self._running: dict[int, _Running] = {}

    def run(self) -> None:
        """Run all trials to their end. Whatever it raises, their threads have ended."""
        try:
            while True:
                while len(self._running) < self._config.parallel and (trial := self._next()) is not None:
                    self._start(trial)
                if not self._running:
                    return
                number, content = self._message()
                running = self._running.get(number)
                if running is None:
                    continue  # a row that has arrived late, of a trial that was ended
                if not isinstance(content, dict):
                    del self._running[number]
                    self._end(running.trial, content)
                elif self._judge(running.trial, content, running.config.data.epochs):
                    running.end("pruned")
        finally:
            for running in self._running.values():
                running.end("the search ends")
            for running in self._running.values():
                running.join()

    def _next(self) -> Trial | None:
        """A trial that an earlier driver has left open, else a new one; None after the last."""
        for trial in self._study.trials:
            if trial.state == OPEN and trial.number not in self._running:
                return trial
        return self._study.ask() if len(self._study.trials) < self._config.number else None

    def _start(self, trial: Trial) -> None:
        run = self._config.run_of(trial.number)
        config = config_of_trial(self._config.base, trial.parameters, run)
        if filesystem(run).exists(RunPaths(run).run_json):
            for row in read_history(run).epochs:  # those that an earlier driver may not have judged
                if self._judge(trial, row, config.data.epochs):
                    return
        hooks = replace(self._hooks, progress=self._progress.of_trial(trial.number))
        self._running[trial.number] = _Running(trial, config, self._trainer, hooks, self._messages)

    def _message(self) -> _Message:
        while True:
            if (lost := self._lease.lost) is not None:
                raise lost
            self._progress.look()
            try:
                return self._messages.get(timeout=LOOK_S)
            except queue.Empty:
                continue

    def _judge(self, trial: Trial, row: Mapping[str, Any], epochs_asked: int) -> bool:
        """Take the metrics of an epoch that has ended; whether the trial is pruned by them."""
        if trial.state != OPEN:
            return False  # it was pruned, and has made one more epoch since
        check_metric(self._config.metric, row["metrics"], "--metric")
        epochs, name = int(row["epoch"]) + 1, self._config.metric_name
        value = _number(row["metrics"].get(name))
        if value is None:
            return False  # no validation after this epoch
        trial.saw(epochs, value)
        # An epoch that is made again after a restart was judged before; the last one saves nothing.
        if epochs <= trial.judged or epochs >= epochs_asked or not self._study.judge(trial, epochs, value):
            return False
        self._progress.ended(trial, f"pruned after {counted(epochs, 'epoch')} at {name} {value:.6g}")
        return True

    def _end(self, trial: Trial, outcome: RunResult | BaseException) -> None:
        if trial.state == PRUNED:
            if not isinstance(outcome, RunResult | EndedByCallerError):
                print(f"trial {trial.number}, which was pruned, ended by: {outcome}", file=sys.stderr, flush=True)
            return
        if isinstance(outcome, RunResult):
            metrics = outcome.metrics if outcome.best is None else outcome.best["metrics"]  # those of its model
            value = _number(metrics.get(self._config.metric_name, trial.last))
            self._study.end(trial, value, model=outcome.model)
        elif self._of_this_trial(outcome):
            self._study.end(trial, None, reason=str(outcome).splitlines()[0])
        else:
            raise outcome
        failed = trial.state == FAILED
        words = f"failed: {trial.reason}" if failed else f"{self._config.metric_name} {trial.value:.6g}"
        self._progress.ended(trial, words)

    def _of_this_trial(self, error: BaseException) -> bool:
        """Whether the search continues after this error: another trial need not meet it.

        A loss that is not finite is a DataError. Any other error before the first trial has ended is likely to be a
        mistake in the call.
        """
        if not isinstance(error, LockstepError) or isinstance(error, OF_THE_SEARCH):
            return False
        return type(error) is DataError or any(trial.state in (DONE, PRUNED) for trial in self._study.trials)


def _number(value: object) -> float | None:
    """A metric as a number, also "nan" and "inf", as JSON has them; None for none, or for several."""
    return float(value) if isinstance(value, int | float) or value in ("nan", "inf", "-inf") else None
