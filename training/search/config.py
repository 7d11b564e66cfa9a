"""What defines a search, and whether a later call may resume it: search.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import ConfigError, LockstepError, NotFoundError, differences, require
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import absolute
from lockstep.training.config import TrainConfig, options_in
from lockstep.training.plan.datasets import open_data
from lockstep.training.rules import BEST, BEST_ALLOWED, of_validation
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.run_json import read_run, refuse_strange_directory
from lockstep.training.search.space import OPERATIONAL, Parameter

FORMAT_VERSION = 1
MOST_POINTS = 100_000  # of a grid, which is in memory
Sampler = Literal["random", "grid", "tpe"]
Pruner = Literal["none", "median", "hyperband"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """All that defines a search. Raises ConfigError for invalid values."""

    base: TrainConfig
    """The configuration of every trial but for its parameters; its `run` is the search's directory, its `seed` also
    the sampler's."""
    space: tuple[Parameter, ...]
    metric: str
    """NAME:max or NAME:min of an epoch's metrics, such as val_auc:max."""
    trials: int | None = None
    """The number of trials in total; None: the whole grid."""
    parallel: int = 1
    """How many trials run at once."""
    sampler: Sampler = "tpe"
    pruner: Pruner = "none"
    test: str | None = None
    """The split that no trial sees, on which the best one is evaluated at the end; None: `test`, if the datasets have
    it and no trial sees it."""

    def __post_init__(self) -> None:
        urls = tuple(map(absolute, self.base.data.datasets))
        object.__setattr__(self, "base", self.base.but(run=absolute(self.base.run), datasets=urls))
        require(BEST.fullmatch(self.metric) is not None, "--metric", self.metric, BEST_ALLOWED)
        validated = self.base.validation.validate is not None or not of_validation(self.metric)
        step = "Give --validate, or a metric of the training rows."
        require(validated, "--metric", f"{self.metric} without --validate", "a metric that trials have", step)
        fixed = not self.base.ranks.elastic
        require(fixed, "a search's number of ranks", "--min-ranks or --max-ranks", "a fixed number for each trial")
        require(not self.base.ranks.balance, "a search's shares of ranks", "--balance", "even shares in each trial")
        apart, seen = "a split that no trial trains or is judged on", self.seen
        require(self.test is None or self.test not in seen, "--test", f"{self.test}, of {', '.join(seen)}", apart)
        require(self.parallel >= 1, "--parallel", str(self.parallel), "an integer from 1 up")
        for name, kinds in (("sampler", Sampler), ("pruner", Pruner)):
            words = get_args(kinds)
            require(getattr(self, name) in words, f"--{name}", getattr(self, name), " or ".join(words))
        if self.sampler == "grid":
            points = math.prod(parameter.points() for parameter in self.space)
            few, step = (
                f"a grid of {MOST_POINTS} points at most",
                "Raise a step, give choices, or use --sampler random.",
            )
            require(points <= MOST_POINTS, "--sampler grid", f"a grid of {points} points", few, step)
            allowed = f"1 to {points}, the points of the grid, or no --trials for all of them"
            require(self.trials is None or self.trials <= points, "--trials", str(self.trials), allowed)
            object.__setattr__(self, "trials", points if self.trials is None else self.trials)
        number = self.trials
        require(number is not None and number >= 1, "--trials", str(number), "an integer from 1 up", "Give --trials.")

    @property
    def seen(self) -> list[str]:
        """The splits that trials see: those that they train on, and the one that judges them."""
        return [
            *self.base.data.split.split(","),
            *([] if self.base.validation.validate is None else [self.base.validation.validate]),
        ]

    @property
    def chosen_on(self) -> str:
        """The split whose rows decide which trial is best."""
        return str(self.base.validation.validate) if of_validation(self.metric) else self.base.data.split

    @property
    def number(self) -> int:
        """The number of trials."""
        return self.trials or 0

    @property
    def root(self) -> str:
        """The URL of the search's directory."""
        return self.base.run.rstrip("/")

    @property
    def metric_name(self) -> str:
        """The metric without its direction."""
        return self.metric.rpartition(":")[0]

    @property
    def maximize(self) -> bool:
        """Whether a greater metric is better."""
        return self.metric.endswith(":max")

    def run_of(self, trial: int) -> str:
        """The URL of a trial's run."""
        return f"{self.root}/trials/{trial:04d}"

    def identity(self) -> dict[str, Any]:
        """What every call of this search has in common, as a JSON object."""
        searched = {parameter.name for parameter in self.space}
        base = {
            name: value for name, value in options_in(self.base.to_json()).items() if name not in OPERATIONAL | searched
        }
        return {
            "space": [parameter.to_json() for parameter in self.space],
            "metric": self.metric,
            "sampler": self.sampler,
            "pruner": self.pruner,
            "base": base,
        }


def open_search(fs: FileSystem, config: SearchConfig, optuna: str) -> None:
    """Write search.json for a new search, else check that it was begun with the same; `optuna` is its version.

    Raises ConfigError for another search, and for a directory that is none.
    """
    if not check_search(fs, config, optuna):
        document = {"format_version": FORMAT_VERSION, "kind": "search", "optuna": optuna, **config.identity()}
        write_file(fs, f"{config.root}/search.json", seal(document))


def check_search(fs: FileSystem, config: SearchConfig, optuna: str) -> bool:
    """Whether there is a search to resume; changes nothing. Raises ConfigError as `open_search` does."""
    url = f"{config.root}/search.json"
    try:
        stored = unseal_as("search", fs.read_bytes(url), url, version=FORMAT_VERSION)
    except NotFoundError:
        refuse_strange_directory(fs, config.root, "search", "search.json")
        return False
    given, begun = config.identity(), {name: stored.get(name) for name in config.identity()}
    base, datasets = begun["base"], given["base"]["datasets"]
    if isinstance(base, dict) and base.get("datasets") != datasets and _same_data(fs, config):
        begun["base"] = {**base, "datasets": datasets}
    found = differences(given, begun)
    if stored.get("optuna") != optuna:
        found.append(f"Optuna {optuna} (not {stored.get('optuna')})")
    if found:
        raise ConfigError(
            f"{config.root} is another search",
            got="; ".join(found)[:2000],
            allowed="the arguments that it was begun with; --trials, --parallel and --num-ranks may change",
            next_step="Give the same arguments, or a --run that does not exist yet.",
        )
    return True


def _same_data(fs: FileSystem, config: SearchConfig) -> bool:
    """Whether the trials so far trained on datasets with the digest of those that `config` names: they were moved."""
    base, digests = config.base, set()
    for number in range(config.number):
        try:
            digests.add(read_run(fs, RunPaths(config.run_of(number)))["dataset_digest"])
        except NotFoundError:
            continue
    try:
        there = open_data(base.data.datasets, base.data.split, base.data.mix, tasks=base.data.tasks is not None)[1]
    except LockstepError:  # its caller says what differs
        return False
    return digests == {there.digest}
