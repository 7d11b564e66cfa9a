"""How the ranks of a launch communicate: backend, algorithm, and the plans that a run has frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from lockstep.storage.errors import ConfigError, require
from lockstep.training.comm.hosts import require_trust

Backend = Literal["auto", "tcp", "shm", "hierarchical", "tensorflow", "nccl"]
UNAUTHENTICATED = ("tensorflow", "nccl")  # backends whose traffic does not prove the sender's identity
Algorithm = Literal["auto", "ring", "halving-doubling", "double-tree", "hierarchical"]
ALGORITHMS_OF: dict[str, tuple[str, ...]] = {
    "auto": get_args(Algorithm),
    "tcp": ("auto", "ring", "halving-doubling", "double-tree"),
    "hierarchical": ("auto", "hierarchical"),
}
"""The other backends have one algorithm, so only `auto`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommOptions:
    """Options of `lockstep.training.comm.connect`; by default it chooses."""

    backend: Backend = "auto"
    """`auto`: shared memory if all ranks share a host, both if some do, else TCP; any other value forces one."""
    algorithm: Algorithm = "auto"
    """The algorithm of all_reduce: `auto` chooses by size from the cost model; any other value forces one."""
    trust_network: str | None = None
    """Interface whose network may carry unauthenticated traffic (gRPC, NCCL); None: no network may."""
    plans: Sequence[Mapping[str, Any]] = ()
    """Plans that earlier starts froze for this number of ranks (CommPlan as JSON); if none fits, ranks calibrate."""

    def __post_init__(self) -> None:
        self._check("backend", self.backend in get_args(Backend), " | ".join(get_args(Backend)))
        self._check("algorithm", self.algorithm in get_args(Algorithm), " | ".join(get_args(Algorithm)))
        self._check("trust_network", self.trust_network != "", "an interface's name, such as eth1")
        if self.algorithm not in ALGORITHMS_OF.get(self.backend, ("auto",)):
            raise ConfigError(
                f"backend `{self.backend}` has no algorithm `{self.algorithm}`",
                got=f"backend = {self.backend!r}, algorithm = {self.algorithm!r}",
                allowed="; ".join(f"{name}: {' | '.join(each)}" for name, each in ALGORITHMS_OF.items()),
                next_step="Set the backend or the algorithm to `auto`.",
            )
        if self.backend in UNAUTHENTICATED and self.trust_network is None:
            require_trust(None, self.backend)

    def _check(self, name: str, right: bool, allowed: str) -> None:
        got, next_step = f"{name} = {getattr(self, name)!r}", f"Correct --{name.replace('_', '-')}."
        require(right, f"the communicator's `{name}`", got, allowed, next_step)

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {**asdict(self), "plans": [dict(plan) for plan in self.plans]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CommOptions:
        """The inverse of `to_json`; raises ConfigError for an unknown field."""
        known = {field.name for field in fields(cls)}
        if strange := sorted(document.keys() - known):
            raise ConfigError(
                "the communicator's options are not those of this version",
                got=", ".join(strange),
                allowed=", ".join(sorted(known)),
                next_step="Install one version on the driver and the executors.",
            )
        return cls(**{**document, "plans": tuple(document.get("plans", ()))})
