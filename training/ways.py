"""The ways to exchange what ranks learn: what asks for one, what it cannot be combined with, and where its code is.

A new way is an entry of WAYS, and a module of `training/strategies` whose `WAY` is a subclass of `Exchanging`. This
module loads no TensorFlow. docs/strategies.md explains the ways; a test keeps its table equal to this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.training.comm.options import UNAUTHENTICATED

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Refused:
    """What a way cannot be combined with: values of one field of TrainConfig."""

    field: str
    wrong: Callable[[Any], bool]
    """Whether a value of the field is refused."""
    flag: str
    """The flag in words; `{}` stands for its value."""
    why: str = ""
    """The reason, after the flag in an error; empty where the flag says it."""


def _other_than(field: str, usual: object, flag: str, why: str = "") -> Refused:
    return Refused(field, lambda value: value != usual, flag, why)


def _one_of(field: str, values: tuple[object, ...], flag: str, why: str = "") -> Refused:
    return Refused(field, lambda value: value in values, flag, why)


# What assumes one sum of gradients in each step.
CANONICAL = _other_than("canonical", False, "--canonical")
MICRO_BATCHES = _other_than("micro_batches", 1, "--micro-batches")
SCALED_LOSS = _one_of("precision", ("mixed_float16",), "--precision mixed_float16", ", whose scale changes")
SKIPPED = _other_than("non_finite", "stop", "--non-finite skip")
OWN_LINKS = _one_of("backend", UNAUTHENTICATED, "--backend {}")
SUM_IN_EACH_STEP = (CANONICAL, MICRO_BATCHES, SCALED_LOSS, SKIPPED, OWN_LINKS)
# Other ways, and what they have in common.
DELAY = _other_than("delay", 0, "--delay")
SYNC_EVERY = _other_than("sync_every", 1, "--sync-every")
COMPRESSION = _other_than("compression", "none", "--compression")
SYNC_BATCHNORM = _one_of("batchnorm", ("sync",), "--batchnorm sync")
MEETING_BATCHNORM = _one_of("batchnorm", ("sync",), "--batchnorm sync", ", which meets in each step")
ELASTIC = _other_than("elastic", False, "--min-ranks or --max-ranks")
SHARDS = _other_than("shard_embeddings", None, "--shard-embeddings")


@dataclass(frozen=True, slots=True)
class Way:
    """A way to exchange."""

    name: str
    """The flag that asks for it."""
    field: str
    """The field of that flag, which errors name."""
    otherwise: str
    """The value of that field without this way, in words."""
    asked: Callable[[TrainConfig], bool]
    """Whether a configuration asks for it."""
    module: str
    """The module of lockstep.training.strategies with its code: a class `Exchanging`."""
    refuses: tuple[Refused, ...] = ()
    runs: Callable[[TrainConfig], bool] = lambda config: True
    """Whether it differs from one sum in each step, such as with several ranks."""

    def faults(self, config: TrainConfig) -> Iterator[str]:
        """What `field` is allowed to be, for each thing in `config` that this way refuses."""
        for refused in self.refuses:
            value = getattr(config, refused.field)
            if refused.wrong(value):
                yield f"{self.otherwise} with {refused.flag.format(value)}{refused.why}"


EVERY_STEP = Way("sync", "strategy", "sync", lambda config: True, "every_step")
_LATE = (*SUM_IN_EACH_STEP, DELAY, SYNC_EVERY, COMPRESSION, MEETING_BATCHNORM)
_OF_TENSORFLOW = (*SUM_IN_EACH_STEP, ELASTIC, DELAY, SYNC_EVERY, COMPRESSION, SYNC_BATCHNORM, SHARDS)
WAYS = (
    Way("--delay", "delay", "0", lambda config: config.delay != 0, "delay", SUM_IN_EACH_STEP),
    Way(
        "--sync-every", "sync_every", "1", lambda config: config.sync_every != 1, "local_steps",
        (*SUM_IN_EACH_STEP, DELAY, MEETING_BATCHNORM),
    ),
    Way(
        "--strategy async", "strategy", "sync", lambda config: config.strategy == "async", "asynchronous", _LATE,
        runs=lambda config: config.is_async,
    ),
    Way(
        "--strategy parameter-server", "strategy", "sync", lambda config: config.strategy == "parameter-server",
        "parameter_server", _LATE, runs=lambda config: config.num_servers > 0,
    ),
    Way(
        "--strategy federated", "strategy", "another one", lambda config: config.strategy == "federated", "federated",
        (*SUM_IN_EACH_STEP, ELASTIC),
    ),
    Way(
        "--strategy mirrored", "strategy", "sync", lambda config: config.strategy == "mirrored", "mirrored",
        _OF_TENSORFLOW,
    ),
    Way(
        "--strategy multi-worker-mirrored", "strategy", "sync",
        lambda config: config.strategy == "multi-worker-mirrored", "mirrored", _OF_TENSORFLOW,
    ),
)  # fmt: skip
"""All ways but one sum in each step. A configuration asks for at most one of them."""


def way_of(config: TrainConfig) -> Way:
    """The way by which the ranks of a checked configuration exchange."""
    return next((way for way in WAYS if way.asked(config) and way.runs(config)), EVERY_STEP)


def table() -> list[tuple[str, str]]:
    """What the ways refuse, in words: the table of docs/strategies.md. Its first row is what all of them refuse."""
    rows: list[tuple[str, tuple[Refused, ...]]] = [("each of these", SUM_IN_EACH_STEP)]
    rows += [(f"`{way.name}`", tuple(each for each in way.refuses if each not in SUM_IN_EACH_STEP)) for way in WAYS]
    return [(name, ", ".join(f"`{each.flag.replace('{}', 'X')}`" for each in refused) or "-") for name, refused in rows]
