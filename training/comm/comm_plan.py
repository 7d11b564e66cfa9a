"""The communication plan that a run freezes: a restart must add in the same order, or the last bits of weights differ.

A plan belongs to a number of ranks, their layout on hosts, and the requested backend and algorithm. Its costs were
measured once, at the first start; later starts follow the table made from them (docs/decisions/043-cost-model.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.storage import documents
from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import DataError
from lockstep.training.comm.cost import (
    COUNTS,
    LARGEST_BYTES,
    AlgorithmCosts,
    LinkCosts,
    Table,
    hierarchical_s,
    look_up,
    predict_s,
    table_of,
)
from lockstep.training.comm.hosts import Layout
from lockstep.training.comm.tcp.algorithms import default_choice

HIERARCHICAL = "hierarchical"
NAMES = (*COUNTS, HIERARCHICAL)
BACKENDS = ("tcp", "shm", "hierarchical")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommPlan:
    """The algorithm of all_reduce and reduce_scatter at each size, for one layout of the ranks."""

    layout: Layout
    """Which ranks share a host, as found after trying shared memory."""
    backend: str
    """The backend in use: tcp, shm or hierarchical."""
    asked: str
    """The requested algorithm; `auto` if the costs chose."""
    table: Table
    """Algorithm by size of the buffer in bytes; empty for `shm`, which has only one."""
    leaders: Table = ()
    """Algorithm between the hosts' leaders by size, if the algorithm is `hierarchical`; empty: TCP's own choice by
    size."""
    flat: AlgorithmCosts | None = None
    """Measured between all ranks over TCP; None if there was no choice."""
    outer: AlgorithmCosts | None = None
    """Measured between the hosts' leaders; None if no two ranks share a host."""
    inner: LinkCosts | None = None
    """Measured within hosts; None if no two ranks share a host."""

    def choose(self, nbytes: int) -> str:
        """The algorithm for a buffer of this size; the backend's name if it has only one."""
        return look_up(self.table, nbytes) if self.table else self.backend

    def choose_flat(self, nbytes: int) -> str:
        """Choose as `choose` does, for the TCP communicator of all ranks, which does not know two levels."""
        name = self.choose(nbytes)
        return default_choice(nbytes) if name == HIERARCHICAL else name

    def choose_between_leaders(self, nbytes: int) -> str:
        """The algorithm between the hosts' leaders."""
        return look_up(self.leaders, nbytes) if self.leaders else default_choice(nbytes)

    @property
    def key(self) -> str:
        """The plan's identity: equal keys mean the same order of additions."""
        return key_of(self.layout, self.backend, self.asked)

    def describe(self) -> str:
        """The table in one line."""
        if not self.table:
            return "shared memory"
        if len(self.table) == 1:
            return self.table[0][1]
        steps = [f"{name} up to {_size(most)}" for most, name in self.table[:-1]]
        return ", ".join([*steps, f"{self.table[-1][1]} above"])

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {
            "host_of": list(self.layout.host_of),
            "backend": self.backend,
            "asked": self.asked,
            "table": [[most, name] for most, name in self.table],
            "leaders": [[most, name] for most, name in self.leaders],
            "flat": self.flat.to_json() if self.flat else None,
            "outer": self.outer.to_json() if self.outer else None,
            "inner": self.inner.to_json() if self.inner else None,
        }

    @classmethod
    def from_json(cls, document: Any, *, where: str) -> CommPlan:
        """The inverse of `to_json`; raises DataError naming `where` for anything else."""
        doc = documents.obj(
            document, ("host_of", "backend", "asked", "table", "leaders", "flat", "outer", "inner"), where=where
        )
        host_of = tuple(
            documents.count(v, where=f"{where}: host_of")
            for v in documents.items(doc["host_of"], where=f"{where}: host_of")
        )
        backend = documents.string(doc["backend"], where=f"{where}: backend", choices=BACKENDS)
        flat_names = tuple(COUNTS)
        table = _table(doc["table"], NAMES if backend == HIERARCHICAL else flat_names, where=f"{where}: table")
        # Numbered by first rank, as Layout.of does.
        _check(host_of and host_of == Layout.of([str(host) for host in host_of]).host_of, host_of, f"{where}: host_of")
        _check(bool(table) is (backend != "shm"), table, f"{where}: table")
        return cls(
            layout=Layout(host_of),
            backend=backend,
            asked=documents.string(doc["asked"], where=f"{where}: asked", choices=("auto", *NAMES)),
            table=table,
            leaders=_table(doc["leaders"], flat_names, where=f"{where}: leaders"),
            flat=_algorithm_costs(doc["flat"], where=f"{where}: flat"),
            outer=_algorithm_costs(doc["outer"], where=f"{where}: outer"),
            inner=_costs(doc["inner"], where=f"{where}: inner"),
        )


def key_of(layout: Layout, backend: str, asked: str) -> str:
    """Return 16 hex digits that depend on layout, backend and requested algorithm."""
    identity = {"host_of": list(layout.host_of), "backend": backend, "asked": asked}
    return hashlib.sha256(canonical_bytes(identity)).hexdigest()[:16]


def make_plan(
    layout: Layout,
    backend: str,
    asked: str,
    flat: AlgorithmCosts | None = None,
    outer: AlgorithmCosts | None = None,
    inner: LinkCosts | None = None,
) -> CommPlan:
    """The plan for these costs; none are needed if there is no choice."""
    table: Table = ()
    leaders: Table = ()
    if backend == HIERARCHICAL and outer is not None:
        hosts = len(layout.sizes)
        leaders = table_of(lambda name, nbytes: predict_s(name, hosts, nbytes, outer), tuple(COUNTS))
    if backend != "shm" and asked != "auto":
        table = ((LARGEST_BYTES, asked),)
    elif backend != "shm":
        # Two levels first: of equally fast ones they send the least between hosts.
        names = (HIERARCHICAL, *COUNTS) if backend == HIERARCHICAL else tuple(COUNTS)

        def seconds(name: str, nbytes: int) -> float:
            assert flat is not None, "a choice needs costs"
            if name != HIERARCHICAL:
                return predict_s(name, len(layout.host_of), nbytes, flat)
            assert outer is not None and inner is not None
            return hierarchical_s(layout.sizes, nbytes, inner, outer)

        table = table_of(seconds, names)
    return CommPlan(
        layout=layout,
        backend=backend,
        asked=asked,
        table=table,
        leaders=leaders,
        flat=flat,
        outer=outer,
        inner=inner,
    )


def _table(document: Any, names: Sequence[str], *, where: str) -> Table:
    rows = [documents.items(row, where=where) for row in documents.items(document, where=where)]
    _check(all(len(row) == 2 for row in rows), rows, where)
    table = tuple(
        (documents.count(most, where=where), documents.string(name, where=where, choices=names)) for most, name in rows
    )
    _check(all(first[0] < second[0] for first, second in pairwise(table)), rows, where)
    return table


def _check(right: Any, got: Any, where: str) -> None:
    if not right:
        raise DataError(
            f"{where} is not that of a communication plan",
            got=str(got)[:200],
            allowed="what this version of Lockstep wrote",
            next_step="Restore the file from a backup, or start a new run.",
        )


def _algorithm_costs(document: Any, *, where: str) -> AlgorithmCosts | None:
    if document is None:
        return None
    found = {name: _costs(each, where=where) for name, each in documents.obj(document, COUNTS, where=where).items()}
    return AlgorithmCosts({name: costs for name, costs in found.items() if costs is not None})


def _costs(document: Any, *, where: str) -> LinkCosts | None:
    if document is None:
        return None
    doc: Mapping[str, Any] = documents.obj(document, ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte"), where=where)
    return LinkCosts(**{name: documents.number(value, where=f"{where}: {name}") for name, value in doc.items()})


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} bytes"
