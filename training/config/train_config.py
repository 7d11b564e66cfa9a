"""The configuration of one training run: its parts, and its options by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from fractions import Fraction
from typing import Annotated, Any, Unpack, get_type_hints

from lockstep.storage.errors import ConfigError, nearest
from lockstep.training import ways
from lockstep.training.config.checkpoints import CheckpointConfig
from lockstep.training.config.combinations import check_combinations
from lockstep.training.config.data import DataConfig
from lockstep.training.config.exactness import ExactnessConfig
from lockstep.training.config.limits import LimitsConfig
from lockstep.training.config.model import ModelConfig
from lockstep.training.config.options import Changes, MoreOptions
from lockstep.training.config.ranks import RanksConfig
from lockstep.training.config.reading import ReadingConfig
from lockstep.training.config.step import StepConfig
from lockstep.training.config.validation import ValidationConfig
from lockstep.training.parts import Option, Part, default_of, options_of, require_option
from lockstep.training.ways import Way, way_asked

# The first group of --help: what most calls give, whichever part it belongs to.
FIRST_GROUP = "what is trained on what"
FIRST = (
    "datasets", "run", "model", "num_ranks", "global_batch", "epochs", "split", "where", "since", "mix", "tasks",
    "replay", "init_from", "lora_rank", "ewc", "extra", "seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True, init=False)
class TrainConfig:
    """All that defines a run; stored in run.json and handed to every rank. Raises ConfigError for invalid values.

    The constructor takes the options of `lockstep.train` by name, wherever they belong; they are read by part. They are
    also the flags of `lockstep train`, whose --help is made of the sentence below each field of a part, its type and
    its default. A text in `Annotated` is how --help names the value.

    >>> import lockstep
    >>> config = lockstep.TrainConfig(
    ...     datasets="data", run="run", model="logistic", num_ranks=2, global_batch=16, epochs=1
    ... )
    >>> config.data.seed, config.checkpoints.checkpoint_every
    (0, 200)
    >>> config.but(seed=7).data.seed
    7
    """

    run: Annotated[str, "URL"]
    """Directory of the run, local or hdfs://; an existing run is resumed."""
    model: ModelConfig
    validation: ValidationConfig
    data: DataConfig
    reading: ReadingConfig
    step: StepConfig
    way: Way
    checkpoints: CheckpointConfig
    exactness: ExactnessConfig
    ranks: RanksConfig
    limits: LimitsConfig

    def __init__(
        self,
        *,
        datasets: str | Iterable[str],
        run: str,
        model: str,
        num_ranks: int,
        global_batch: int,
        epochs: int,
        **options: Unpack[MoreOptions],
    ) -> None:
        given: dict[str, Any] = {
            "datasets": datasets,
            "run": run,
            "model": model,
            "num_ranks": num_ranks,
            "global_batch": global_batch,
            "epochs": epochs,
            **options,
        }
        known = option_names()
        for name in given.keys() - set(known):
            raise TypeError(f"TrainConfig has no option `{name}`{nearest(name, known)}")
        object.__setattr__(self, "run", run)
        for name, part in parts().items():
            mine = part.__dataclass_fields__.keys() & given.keys()
            object.__setattr__(self, name, part(**{option: given[option] for option in mine}))
        object.__setattr__(self, "way", way_asked(given))
        check_combinations(self)

    @property
    def skips_bad_images(self) -> bool:
        """Whether images that cannot be decoded are skipped, by either flag."""
        return self.reading.bad_images == "skip" or self.exactness.on_bad_record == "skip"

    @property
    def accumulated(self) -> int:
        """The micro-batches that the optimizer counts in a step; one if a pipeline adds their gradients before."""
        return 1 if self.way.mates[0] > 1 else self.step.micro_batches

    @property
    def num_servers(self) -> int:
        """The parameter servers that are started."""
        return self.way.num_servers(self.ranks.num_ranks)

    @property
    def processes(self) -> int:
        """Processes of a launch: ranks, then parameter servers."""
        return self.ranks.num_ranks + self.num_servers

    def but(self, **changes: Unpack[Changes]) -> TrainConfig:
        """Return a copy with some other options. Raises ConfigError for invalid values."""
        return TrainConfig(**{**self.options(), **changes})

    def with_all_datasets(self) -> TrainConfig:
        """Return the configuration with all datasets that `since` or `replay` asks for; itself without them.

        Raises ConfigError for several datasets with one of them, and what datasets_since and load_chain raise.
        """
        if self.data.replay is not None:
            return self._with_replay(self.data.replay)
        if self.data.since is None:
            return self
        from lockstep.storage.dataset.increments import datasets_since

        self.data.check("datasets", len(self.data.datasets) == 1, "with --since one dataset, or a folder of increments")
        return self.but(datasets=datasets_since(self.data.datasets[0], self.data.since))

    def _with_replay(self, share: float) -> TrainConfig:
        """The newest dataset and those that it continues, nearest first; the first of a chain is trained on alone."""
        from lockstep.storage.dataset.increments import newest_in
        from lockstep.storage.dataset.layout import DatasetPaths
        from lockstep.storage.dataset.manifest import load_chain
        from lockstep.storage.fs import filesystem
        from lockstep.storage.urls import absolute

        self.data.check("mix", self.data.mix is None, "unset with --replay, which sets it")
        self.data.check("since", self.data.since is None, "unset with --replay, which trains on all earlier datasets")
        self.data.check("datasets", len(self.data.datasets) == 1, "with --replay one, or a folder of increments")
        url = absolute(self.data.datasets[0])
        if not filesystem(url).exists(DatasetPaths(url).manifest):
            url = newest_in(url) or url
        chain = [one for one, _ in load_chain(url)]
        if len(chain) == 1:
            return self.but(datasets=chain)
        return self.but(datasets=chain, mix=self._ratios_of(share))

    def _ratios_of(self, share: float) -> tuple[int, int]:
        """The ratios of the newest dataset and of all earlier ones: `share` in hundredths, or where it does not divide
        each lane's part of a batch, the nearest that does.
        """
        exact = Fraction(str(share)).limit_denominator(100)
        unit = self.data.lanes or math.lcm(self.step.lane_groups or 1, self.data.cache_groups or 1)
        rows, rest = divmod(self.data.global_batch, unit)  # the least part of a batch that has both
        if rest or rows < 2 or rows % exact.denominator == 0:
            return exact.denominator - exact.numerator, exact.numerator
        earlier = min(max(round(share * rows), 1), rows - 1)
        return rows - earlier, earlier

    def options(self) -> dict[str, Any]:
        """All options by name, those of other ways with their defaults: what the constructor takes."""
        own = [{field.name: getattr(part, field.name) for field in fields(part)} for part in self._parts().values()]
        return {"run": self.run, **self.defaults(), **{name: value for part in own for name, value in part.items()}}

    @staticmethod
    def defaults() -> dict[str, Any]:
        """The default of each option that has one, by name."""
        found = {field.name: default_of(field) for part in (*parts().values(), *ways.WAYS) for field in fields(part)}
        return {name: default for name, default in found.items() if default is not MISSING}

    def check(self, name: str, right: bool, allowed: str) -> None:
        """Raise ConfigError, which names the option `name` and its flag, unless it is `right`."""
        if not right:
            require_option(name, self.options()[name], right, allowed)

    def _parts(self) -> dict[str, Part]:
        return {name: getattr(self, name) for name in (*parts(), "way")}

    def to_json(self) -> dict[str, Any]:
        """The run's URL and the parts as a JSON object; `way` has the options of this run's way."""
        return {"run": self.run, **{name: _as_json(part) for name, part in self._parts().items()}}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_json`; a field that `document` lacks has its default. Raises ConfigError for an unknown
        part or field, and for a missing one without a default.
        """
        for name, value in document.items():
            _check_stored(name, value)
        try:
            return cls(**options_in(document))
        except TypeError as error:
            raise _does_not_fit(str(error), sorted(option_names())) from None


def options_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a stored configuration has, by name."""
    found = {"run": document["run"]} if "run" in document else {}
    for name in (*parts(), "way"):
        if isinstance(part := document.get(name), Mapping):
            found |= part
    return found


def names_by_part() -> dict[str, set[str]]:
    """The names of the options of each part; those of all ways as `way`."""
    found = {name: set(_names(part)) for name, part in parts().items()}
    return found | {"way": {option for way in ways.WAYS for option in _names(way)}}


def _check_stored(name: str, value: Any) -> None:
    known = names_by_part()
    if name == "run":
        return
    if name not in known or not isinstance(value, Mapping):
        raise _does_not_fit(f"{name} = {value!r}"[:200], ["run", *known])
    if strange := value.keys() - known[name]:
        raise _does_not_fit(f"{name}.{min(strange)}", sorted(known[name]))


def _does_not_fit(got: str, allowed: Iterable[str]) -> ConfigError:
    return ConfigError(
        "a stored training configuration does not fit this version",
        got=got,
        allowed=", ".join(allowed),
        next_step="Resume the run with the version that began it.",
    )


def _as_json(part: Any) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(part).items()}


@functools.cache
def parts() -> dict[str, type[Part]]:
    """The parts of a configuration but for its way, by name."""
    hints = get_type_hints(TrainConfig)
    return {name: hint for name, hint in hints.items() if name not in ("run", "way")}


def option_names() -> tuple[str, ...]:
    """The names of all options of a run."""
    return tuple(dict.fromkeys(["run", *(field for part in (*parts().values(), *ways.WAYS) for field in _names(part))]))


def _names(part: type[Part]) -> list[str]:
    return [field.name for field in fields(part)]


def all_options() -> dict[str, Option]:
    """The options of a run, by name and in the order of --help."""
    return {option.name: option for group in groups().values() for option in group}


def groups() -> dict[str, list[Option]]:
    """The groups of --help, by title. The options of the ways follow the one that chooses among them."""
    found = options_of(TrainConfig) | {option.name: option for part in parts().values() for option in _listed(part)}
    grouped = {FIRST_GROUP: [found[name] for name in FIRST]}
    for part in parts().values():
        if rest := [option for option in _listed(part) if option.name not in FIRST]:
            grouped[part.title] = rest
    return grouped


def _listed(part: type[Part]) -> Iterator[Option]:
    for option in options_of(part).values():
        yield option
        if option.name == "strategy":
            for way in ways.WAYS:
                yield from options_of(way).values()
