"""What a way to exchange is: its options, what asks for it, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lockstep.training.comm.options import UNAUTHENTICATED
from lockstep.training.parts import Part, default_of

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig
    from lockstep.training.world import Grid

Strategy = Literal[
    "sync", "async", "parameter-server", "federated", "mirrored", "multi-worker-mirrored", "layers", "tasks"
]


@dataclass(frozen=True, slots=True)
class Refused:
    """What a way cannot be combined with: values of another part of the configuration."""

    field: str
    """The part and its field, such as step.precision."""
    wrong: Callable[[Any], bool]
    """Whether a value of the field is refused."""
    flag: str
    """The flag in words; `{}` stands for its value."""
    why: str = ""
    """The reason, after the flag in an error; empty where the flag says it."""


def other_than(field: str, usual: object, flag: str, why: str = "") -> Refused:
    """Every value of a field but the usual one is refused."""
    return Refused(field, lambda value: value != usual, flag, why)


def one_of(field: str, values: tuple[object, ...], flag: str, why: str = "") -> Refused:
    """These values of a field are refused."""
    return Refused(field, lambda value: value in values, flag, why)


# What assumes one sum of gradients in each step.
CANONICAL = other_than("exactness.canonical", False, "--canonical")
MICRO_BATCHES = other_than("step.micro_batches", 1, "--micro-batches")
SCALED_LOSS = one_of("step.precision", ("mixed_float16",), "--precision mixed_float16", ", whose scale changes")
SKIPPED = other_than("exactness.non_finite", "stop", "--non-finite skip")
OWN_LINKS = one_of("ranks.backend", UNAUTHENTICATED, "--backend {}")
SUM_OF_EACH_BATCH = (CANONICAL, MICRO_BATCHES, SCALED_LOSS, SKIPPED, OWN_LINKS)
# What needs all weights on each rank at the end, besides.
EWC = other_than("model.ewc", None, "--ewc")
SUM_IN_EACH_STEP = (*SUM_OF_EACH_BATCH, EWC)
# What some ways refuse besides.
COMPRESSION = other_than("step.compression", "none", "--compression")
SYNC_BATCHNORM = one_of("step.batchnorm", ("sync",), "--batchnorm sync")
MEETING_BATCHNORM = one_of("step.batchnorm", ("sync",), "--batchnorm sync", ", which meets in each step")
ELASTIC = other_than("ranks.elastic", False, "--min-ranks or --max-ranks")
SHARDS = other_than("step.shard_embeddings", None, "--shard-embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way(Part):
    """A way to exchange. Its fields are its options: with another way, they must have their defaults."""

    flag: ClassVar[str]
    """The flag that asks for it."""
    option: ClassVar[str] = "strategy"
    """The option of that flag, which errors name."""
    strategy: ClassVar[Strategy] = "sync"
    otherwise: ClassVar[str] = "sync"
    """The value of `option` without this way, in words."""
    module: ClassVar[str]
    """The module of lockstep.training.strategies with its code, whose `WAY` is a class `Exchanging`."""
    refuses: ClassVar[tuple[Refused, ...]] = ()

    @classmethod
    def asked(cls, options: Mapping[str, Any]) -> bool:
        """Whether the options of a run ask for this way, and not for one of those before it in WAYS."""
        if options.get("strategy", "sync") != cls.strategy:
            return False
        usual = {field.name: default_of(field) for field in fields(cls)}
        return cls.option == "strategy" or options.get(cls.option, usual[cls.option]) != usual[cls.option]

    @property
    def stage(self) -> int:
        """The stage of --zero: what each rank has only its part of."""
        return 0

    def runs(self, num_ranks: int) -> bool:
        """Whether so many ranks exchange in this way; else they add their gradients in each step."""
        return True

    def num_servers(self, num_ranks: int) -> int:
        """The processes that this way starts besides so many ranks."""
        return 0

    @property
    def mates(self) -> tuple[int, int]:
        """The stages of the model, and the parts of its divided layers."""
        return 1, 1

    def grid(self, num_ranks: int) -> Grid:
        """The division of the work over so many ranks, a multiple of those of `mates`."""
        from lockstep.training.world import Grid  # not for the --help of each command

        stages, tensor = self.mates
        return Grid(num_ranks // (stages * tensor), stages, tensor)

    def faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        """What cannot be combined with this way: names of options, each with what it is allowed to be."""
        for refused in self.refuses:
            value = attrgetter(refused.field)(config)
            if refused.wrong(value):
                yield self.option, f"{self.otherwise} with {refused.flag.format(value)}{refused.why}"
        stages, tensor = self.mates
        if config.ranks.num_ranks % (stages * tensor):
            words = f"a multiple of {stages * tensor} with {self.flag}"
            yield "num_ranks", f"{words}: that many ranks compute on the same rows"
        yield from self.own_faults(config)

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        """Do what `faults` does for what this way alone cannot be combined with."""
        return iter(())
