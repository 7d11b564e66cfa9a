"""Checks the audit of a federated run: each client's samples on one rank, in each round as planned, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lockstep.training.batches.audit_log import sample_hex
from lockstep.training.plan.client_plan import ClientPlan, ClientTable

if TYPE_CHECKING:
    from lockstep.training.results.audit import Part, Span

I64 = npt.NDArray[np.int64]


def check_clients(
    plan: ClientPlan, table: ClientTable, ids: I64, spans: Sequence[Span], parts: Sequence[Part]
) -> list[str]:
    """The faults of the audit files `parts` of the generations `spans`; `ids` (n,) are the split's, in file order.

    That no client is on two ranks of a generation follows from the dataset and the audit only; the rest is compared
    with the plan.
    """
    order = np.argsort(ids)
    faults: list[str] = []
    for span in spans:
        mine = [part for part in parts if part.generation == span.generation]
        faults += [f"{part.url}: generation {span.generation} had {span.num_ranks} ranks" for part in mine
                   if part.rank >= span.num_ranks]  # fmt: skip
        where: dict[int, tuple[int, str]] = {}
        for part in mine:
            rows = part.rows["id"]
            at = order[np.minimum(np.searchsorted(ids, rows, sorter=order), len(ids) - 1)]
            strange = np.flatnonzero(ids[at] != rows)
            if len(strange):
                name = sample_hex(int(rows[strange[0]]))
                faults.append(f"{part.url}, row {strange[0] + 1}: sample {name} is not in the dataset")
            for client in np.unique(table.of_row[at]).tolist():
                rank, url = where.setdefault(client, (part.rank, part.url))
                if rank != part.rank:
                    faults.append(f"{part.url}: client `{table.names[client]}` is in {url} too")
        for rank in range(span.num_ranks):
            own = [part.rows for part in mine if part.rank == rank]
            rows = np.concatenate(own) if own else np.zeros(0, parts[0].rows.dtype)
            faults += _of_rank(plan, table, ids, span, rank, rows)
    return faults


def _of_rank(
    plan: ClientPlan, table: ClientTable, ids: I64, span: Span, rank: int, rows: npt.NDArray[np.void]
) -> list[str]:
    """The first fault of a rank's rows in a generation, if there is one."""
    owners = table.owners(span.num_ranks)
    by_client = np.argsort(table.of_row, kind="stable")
    starts = np.concatenate([[0], np.cumsum(table.counts)])
    who = f"generation {span.generation}, rank {rank}"
    outside = rows[(rows["step"] < span.first) | (rows["step"] > span.last)]
    if len(outside):
        return [f"{who}: round {outside['step'][0]}, but it did rounds {span.first} to {span.last}"]
    for step in range(span.first, span.last + 1):
        drawn = plan.drawn(step - 1, len(table.counts))
        wanted: list[tuple[int, int]] = []
        for client in drawn[owners[drawn] == rank].tolist():
            own = ids[by_client[starts[client] : starts[client + 1]]]
            for local in range(plan.local_epochs):
                wanted += [(local, one) for one in own[plan.order(step - 1, client, local, len(own))].tolist()]
        found = rows[rows["step"] == step]
        got = list(zip(found["epoch"].tolist(), found["id"].tolist(), strict=True))
        if got != wanted:
            at = next((i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), None)
            if at is None:
                return [f"{who}: round {step} has {len(got)} rows of {len(wanted)}"]
            names = [f"sample {sample_hex(one)} of local epoch {local}" for local, one in (got[at], wanted[at])]
            return [f"{who}: round {step}, row {at + 1}: {names[0]} where the plan has {names[1]}"]
    return []
