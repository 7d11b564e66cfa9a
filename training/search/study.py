"""The trials of a search: Optuna proposes and judges them, and each step of it is in the journal.

Optuna's study is in memory only. A resumed search asks and reports again what the journal lists, in the same order, so
its samplers and pruners are in the same state as before, and the next trial is the one that Optuna with this seed would
propose without a break.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from lockstep.storage.errors import DataError, TrainingFailedError
from lockstep.storage.run_layout import MODELS
from lockstep.storage.urls import basename
from lockstep.training.control.protocol import json_safe
from lockstep.training.search.config import SearchConfig
from lockstep.training.search.journal import ASKED, ENDED, EPOCH, PRUNED, Journal
from lockstep.training.search.space import Parameter

VERSION: str = optuna.__version__
OPEN, DONE, FAILED = "open", "done", "failed"  # and PRUNED
__all__ = ["DONE", "FAILED", "OPEN", "PRUNED", "VERSION", "Study", "Trial"]
NAME = "lockstep"  # Hyperband chooses a trial's bracket by it
STARTUP_TRIALS = 10  # of the median: while TPE proposes at random; with 5 a search lost more (decision 092)
MIN_FOR_IMPORTANCE = 3  # different values: with two, every parameter that differs explains all


@dataclass(slots=True)
class Trial:
    """One trial, as the journal has it."""

    number: int
    parameters: dict[str, Any]
    state: str = OPEN
    """The trial's state: open, done, pruned or failed."""
    value: float | None = None
    """The metric of a trial that is done, after its last epoch; of a pruned one, where it was ended."""
    epochs: int = 0
    """Epochs after which its metric is known."""
    judged: int = 0
    """Epochs after which it was last judged by the pruner."""
    last: float | None = None
    """The metric after `epochs`."""
    model: str | None = None
    """URL of the exported model, if it is done."""
    reason: str = ""
    """Why the trial failed."""

    def saw(self, epochs: int, value: float) -> None:
        """The metric after `epochs` epochs is known."""
        self.epochs, self.last = epochs, value


class Study:
    """All trials of a search. Used by one thread."""

    def __init__(self, config: SearchConfig, journal: Journal) -> None:
        """Rebuild the trials of `journal`. Raises DataError if Optuna does not propose and judge what it lists."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.trials: list[Trial] = []
        """The trials in the order in which they were proposed."""
        self._config, self._journal = config, journal
        self._space = {parameter.name: _distribution(parameter) for parameter in config.space}
        self._study = optuna.create_study(
            study_name=NAME,
            sampler=_sampler(config),
            pruner=_pruner(config),
            direction="maximize" if config.maximize else "minimize",
        )
        self._asked: list[optuna.Trial] = []
        for event in journal.read():
            self._again(event)

    def ask(self) -> Trial:
        """The next trial, with the parameters that Optuna proposes."""
        trial = self._ask()
        self._journal.append(ASKED, trial.number, parameters=trial.parameters)
        return trial

    def judge(self, trial: Trial, epochs: int, value: float) -> bool:
        """Report the metric of `trial` after `epochs` epochs; whether the trial ends here, as pruned."""
        if self._config.pruner == "none":
            return False
        pruned = self._judge(trial, epochs, value)
        self._journal.append(PRUNED if pruned else EPOCH, trial.number, epochs=epochs, value=json_safe(value))
        return pruned

    def end(self, trial: Trial, value: float | None, *, model: str | None = None, reason: str = "") -> None:
        """A trial has ended with the metric `value`, or failed for `reason`."""
        self._end(trial, value, model, reason)
        more = {"epochs": trial.epochs, "value": json_safe(value), "model": model, "reason": reason}
        self._journal.append(ENDED, trial.number, **more)

    def best(self) -> Trial:
        """The trial with the best metric of those that are done, the earliest of equal ones.

        Raises TrainingFailedError if no trial is done.
        """
        best = self.best_so_far()
        if best is None:
            raise TrainingFailedError(
                f"no trial of {self._config.root} has ended with a value",
                got="; ".join(f"trial {trial.number}: {trial.reason or trial.state}" for trial in self.trials)[:2000],
                allowed="at least one trial",
                next_step="Correct the space, and begin another search.",
            )
        return best

    def best_so_far(self) -> Trial | None:
        """The best trial as `best` has it; None while no trial is done."""
        done = any(trial.state == DONE for trial in self.trials)
        return self.trials[self._study.best_trial.number] if done else None

    def importances(self) -> dict[str, float]:
        """The share of each parameter in the variance of the metric, greatest first; empty for too few trials.

        By PED-ANOVA (Watanabe et al., IJCAI 2023), over the trials that are done.
        """
        if len({trial.value for trial in self.trials if trial.state == DONE}) < MIN_FOR_IMPORTANCE:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found: dict[str, float] = optuna.importance.get_param_importances(self._study, evaluator=evaluator)
        return found

    def _again(self, event: dict[str, Any]) -> None:
        number = int(event["trial"])
        if event["event"] == ASKED:
            asked = self._ask()
            self._require_same(event, (number, event["parameters"]), (asked.number, asked.parameters))
            return
        trial, value = self.trials[number], None if event["value"] is None else float(event["value"])
        if event["event"] == ENDED or value is None:
            trial.epochs = int(event["epochs"])
            self._end(trial, value, event["model"], event["reason"])
        else:
            trial.saw(int(event["epochs"]), value)
            pruned = self._judge(trial, trial.epochs, value)
            self._require_same(event, event["event"], PRUNED if pruned else EPOCH)

    def _require_same(self, event: dict[str, Any], listed: object, now: object) -> None:
        if listed != now:
            raise DataError(
                f"the journal of {self._config.root} does not repeat: {event['event']} of trial {event['trial']}",
                got=f"{now!r}",
                allowed=f"{listed!r}, as the journal lists",
                next_step="Use the versions of Optuna and NumPy that the search was begun with, or begin another one.",
            )

    def _ask(self) -> Trial:
        asked = self._study.ask(self._space)
        self._asked.append(asked)
        self.trials.append(Trial(asked.number, dict(asked.params)))
        return self.trials[-1]

    def _judge(self, trial: Trial, epochs: int, value: float) -> bool:
        asked = self._asked[trial.number]
        asked.report(value, step=epochs)
        trial.judged = epochs
        if not asked.should_prune():
            return False
        self._study.tell(asked, state=TrialState.PRUNED)
        trial.state, trial.value = PRUNED, value
        return True

    def _end(self, trial: Trial, value: float | None, model: str | None, reason: str) -> None:
        asked = self._asked[trial.number]
        if value is None or not math.isfinite(value):
            self._study.tell(asked, state=TrialState.FAIL)
            trial.state, trial.reason = FAILED, reason or f"its metric is {value}"
        else:
            self._study.tell(asked, value)
            trial.state, trial.value = DONE, value
            # The journal has the model's URL of that day; the search may have been moved since.
            trial.model = model and f"{self._config.run_of(trial.number)}/{MODELS}/{basename(model)}"


def _distribution(parameter: Parameter) -> BaseDistribution:
    low, high, step = parameter.low, parameter.high, parameter.step
    if low is None or high is None:
        return CategoricalDistribution(list(parameter.choices))
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=parameter.log, step=1 if step is None else int(step))
    return FloatDistribution(low, high, log=parameter.log, step=step)


class _Grid(GridSampler):
    """Optuna's, without the end of its `optimize`, which a search does not call."""

    def after_trial(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def _sampler(config: SearchConfig) -> BaseSampler:
    seed = config.base.data.seed % 2**32  # all that NumPy's RandomState takes
    if config.sampler == "random":
        return RandomSampler(seed=seed)
    if config.sampler == "grid":
        return _Grid({parameter.name: parameter.grid() for parameter in config.space}, seed=seed)
    return TPESampler(seed=seed)


def _pruner(config: SearchConfig) -> BasePruner:
    if config.pruner == "none":
        return NopPruner()
    if config.pruner == "median":
        return MedianPruner(n_startup_trials=STARTUP_TRIALS)
    searched = any(parameter.name == "epochs" for parameter in config.space)
    return HyperbandPruner(max_resource="auto" if searched else config.base.data.epochs)
