"""How many ranks a run has, who starts them, and how they talk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from lockstep.training.comm.options import Backend, CommOptions
from lockstep.training.parts import Part

Launcher = Literal["barrier", "local"]
Switch = Literal["on", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksConfig(Part):
    """The ranks and their links. Raises ConfigError for invalid values."""

    title: ClassVar[str] = "ranks and how they talk (docs/performance.md, docs/security.md)"

    num_ranks: int
    """Number of training processes."""
    launcher: Launcher = "barrier"
    """How ranks are started: in a Spark barrier stage (barrier), or as processes of this host (local)."""
    min_ranks: Annotated[int | None, "A"] = None
    """The fewest ranks that the run continues with when slots are lost (default: --num-ranks)."""
    max_ranks: Annotated[int | None, "B"] = None
    """The most ranks that the run grows to when there are slots for them (default: --num-ranks)."""
    slots_file: Annotated[str | None, "FILE"] = None
    """With --launcher local and --min-ranks or --max-ranks, a text file with the number of ranks that may run now."""
    spare_executors: int = 0
    """With --launcher barrier, slots beyond the ranks' on which a process that has imported TensorFlow waits for a rank
    whose executor is lost."""
    balance: bool = False
    """Move lanes from slow ranks to fast ones while the run trains, where steps then take 10 % less time; the batches
    stay the same (docs/operations.md)."""
    tls: Switch = "off"
    """Encrypt connections between ranks on different hosts; conf/production.toml turns it on."""
    backend: Backend = "auto"
    """What carries gradients: auto chooses by where the ranks are; nccl is for GPUs (docs/gpu.md)."""
    trust_network: Annotated[str | None, "IFACE"] = None
    """The interface (or ADDRESS/BITS) whose network may carry gRPC and NCCL, which cannot be authenticated; for the
    backends tensorflow and nccl."""

    def __post_init__(self) -> None:
        self.check_choices()
        self.check_count("num_ranks")
        self.check("min_ranks", 1 <= self.possible.start <= self.num_ranks, "from 1 to --num-ranks")
        self.check("max_ranks", self.num_ranks < self.possible.stop <= 2**31, "--num-ranks or more")
        takes, words = self.launcher == "local" and self.elastic, "a file for fewer or more local ranks, else unset"
        self.check("slots_file", bool(self.slots_file) == takes, words)
        spares = self.spare_executors
        allowed = "0, or executors from 1 up with --launcher barrier and without --max-ranks, which uses every slot"
        right = spares > 0 and self.launcher == "barrier" and self.max_ranks is None
        self.check("spare_executors", spares == 0 or right, allowed)
        self.check("trust_network", self.trust_network != "", "an interface's name, or a network as 10.1.0.0/16")
        CommOptions(backend=self.backend, trust_network=self.trust_network)  # what fits what

    @property
    def possible(self) -> range:
        """The numbers of ranks that a generation may have, if the run can train on so many."""
        least, most = (self.num_ranks if some is None else some for some in (self.min_ranks, self.max_ranks))
        return range(least, most + 1)

    @property
    def elastic(self) -> bool:
        """Whether the number of ranks may change while the run trains."""
        return len(self.possible) > 1
