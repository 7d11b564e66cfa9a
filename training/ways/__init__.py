"""The options of the ways to exchange, a module for each, and what it cannot be combined with.

A new way is a class `Way` in a module here, an entry of WAYS, and a module of `training/strategies` whose `WAY` is a
subclass of `Exchanging`. This room loads no TensorFlow. docs/strategies.md explains the ways; a test keeps its table
equal to this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lockstep.training.parts import default_of, require_option
from lockstep.training.ways.asynchronous import Asynchronous
from lockstep.training.ways.delay import Delay
from lockstep.training.ways.every_step import EveryStep
from lockstep.training.ways.federated import Federated
from lockstep.training.ways.layers import Layers
from lockstep.training.ways.local_steps import LocalSteps
from lockstep.training.ways.of_tensorflow import Mirrored, MultiWorkerMirrored, OfTensorflow
from lockstep.training.ways.parameter_server import ParameterServer
from lockstep.training.ways.pipeline import Pipeline
from lockstep.training.ways.tasks import Tasks
from lockstep.training.ways.tensor_parallel import TensorParallel
from lockstep.training.ways.way import SUM_IN_EACH_STEP, Refused, Strategy, Way
from lockstep.training.ways.zero import Zero

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig

__all__ = [
    "WAYS",
    "Asynchronous",
    "Delay",
    "EveryStep",
    "Federated",
    "Layers",
    "LocalSteps",
    "Mirrored",
    "MultiWorkerMirrored",
    "OfTensorflow",
    "ParameterServer",
    "Pipeline",
    "Refused",
    "Strategy",
    "Tasks",
    "TensorParallel",
    "Way",
    "Zero",
    "table",
    "way_asked",
    "way_of",
]

# In the order of their flags in --help. The last one is asked for if no other is.
WAYS: tuple[type[Way], ...] = (
    Federated,
    ParameterServer,
    Asynchronous,
    Mirrored,
    MultiWorkerMirrored,
    Layers,
    Tasks,
    Delay,
    LocalSteps,
    Pipeline,
    TensorParallel,
    Zero,
    EveryStep,
)
"""All ways."""


def way_asked(options: Mapping[str, Any]) -> Way:
    """The way that the options of a run ask for. Raises ConfigError for an option of another way that has not its
    default, and for wrong values.
    """
    asked = next(way for way in WAYS if way.asked(options))
    mine = {field.name for field in fields(asked)}
    for way in WAYS:
        for field in fields(way):
            name, usual = field.name, default_of(field)
            if name not in mine and options.get(name, usual) != usual:
                flags = " or ".join(each.flag for each in WAYS if name in each.__dataclass_fields__)
                why = f", without {flags}" if asked is EveryStep else f" with {asked.flag}, which does not have it"
                require_option(name, options[name], False, f"{'unset' if usual is None else usual}{why}")
    return asked(**{name: options[name] for name in mine & options.keys()})


def way_of(config: TrainConfig) -> Way:
    """The way by which the ranks of a checked configuration exchange."""
    return config.way if config.way.runs(config.ranks.num_ranks) else EveryStep()


def table() -> list[tuple[str, str]]:
    """What the ways refuse, in words: the table of docs/strategies.md. Its first row is what all of them refuse."""
    rows: list[tuple[str, tuple[Refused, ...]]] = [("each of these", SUM_IN_EACH_STEP)]
    for way in WAYS:
        if way is not EveryStep:
            takes = [each.flag for each in SUM_IN_EACH_STEP if each not in way.refuses]
            name = f"`{way.flag}`" + "".join(f", which takes `{flag}`" for flag in takes)
            rows.append((name, tuple(each for each in way.refuses if each not in SUM_IN_EACH_STEP)))
    return [(name, ", ".join(f"`{each.flag.replace('{}', 'X')}`" for each in refused) or "-") for name, refused in rows]
