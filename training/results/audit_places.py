"""Where an audit is wrong: each rank's parts held against the claims of its run and, row by row, against the plan.

`training.results.audit` counts samples, which proves that each was used once whatever the plan says. This says by file
and row what was lost, doubled or forged, and that batches were the planned ones, at whatever number of ranks each
generation had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.plan.mixture import MixedPlan, Plan
from training.results.audit import Rows, sample_hex


@dataclass(frozen=True, slots=True)
class Span:
    """Steps first..last of a run's chain, which `num_ranks` ranks of one generation did."""

    generation: int
    num_ranks: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Part:
    """One audit file."""

    url: str
    generation: int
    rank: int
    rows: Rows


def misplaced(
    plan: Plan, groups: int | None, ids: npt.NDArray[np.int64], spans: Sequence[Span], parts: Sequence[Part]
) -> list[str]:
    """What is wrong with the parts, in words, a line each; at most one of a kind for each part.

    `groups` are the run's lane groups, `ids` (n,) the sample ids of the split in file order. The order of a mixture's
    samples is not held against its plan, the number of its rows is.
    """
    planned = None if isinstance(plan, MixedPlan) else _planned(plan, ids, spans)
    return [line for span in spans for line in _of_span(plan, groups, planned, span, parts)]


def _of_span(
    plan: Plan, groups: int | None, planned: npt.NDArray[np.int64] | None, span: Span, parts: Sequence[Part]
) -> list[str]:
    mine = [part for part in parts if part.generation == span.generation]
    had = f"generation {span.generation} had {span.num_ranks} ranks"
    found = [f"{part.url}: {had}" for part in mine if part.rank >= span.num_ranks]
    for rank in range(span.num_ranks):
        lanes = plan.rank_lanes(rank, span.num_ranks, groups)
        each = plan.global_batch // plan.lanes
        columns = slice(lanes.start * each, lanes.stop * each)
        where: dict[int, str] = {}
        for part in mine:
            if part.rank == rank:
                found += _of_part(part, span, columns, planned, where)
        missing = [step for step in range(span.first, span.last + 1) if step not in where]
        found += [
            f"generation {span.generation}, rank {rank}: {_steps(first, last)} in none of its parts"
            for first, last in _ranges(missing)
        ]
    return found


def _of_part(
    part: Part, span: Span, columns: slice, planned: npt.NDArray[np.int64] | None, where: dict[int, str]
) -> list[str]:
    """`where` gets the steps that the part holds."""
    found: list[str] = []
    steps, starts, counts = np.unique(part.rows["step"], return_index=True, return_counts=True)
    strange = [step for step in steps.tolist() if not span.first <= step <= span.last]
    if strange:
        did = f"generation {span.generation} did {_steps(span.first, span.last)}"
        found.append(f"{part.url}, row {_row(part, strange[0])}: step {strange[0]}, but {did}")
    twice = [step for step in steps.tolist() if step in where]
    if twice:
        found.append(f"{part.url}, row {_row(part, twice[0])}: step {twice[0]} is in {where[twice[0]]} too")
    where |= {step: part.url for step in steps.tolist() if step not in where}
    rows = columns.stop - columns.start
    for step, start, count in zip(steps.tolist(), starts.tolist(), counts.tolist(), strict=True):
        if step in strange:
            continue
        if count != rows:
            found.append(f"{part.url}, row {start + 1}: step {step} has {count} rows of {rows}")
            break
        if planned is None:
            continue
        right, mine = planned[step - 1, columns], part.rows["id"][start : start + count]
        wrong = np.flatnonzero((right != mine) | (part.rows["step"][start : start + count] != step))
        if len(wrong):
            at = int(wrong[0])
            told = f"sample {sample_hex(int(mine[at]))} where the plan has {sample_hex(int(right[at]))}"
            found.append(f"{part.url}, row {start + at + 1}: step {step}, {told}")
            break
    return found


def _planned(plan: Plan, ids: npt.NDArray[np.int64], spans: Sequence[Span]) -> npt.NDArray[np.int64]:
    """(steps, G): the sample ids of each global batch, lane after lane."""
    assert not isinstance(plan, MixedPlan)
    steps = max((span.last for span in spans), default=0)
    each = plan.global_batch // plan.lanes
    starts = np.concatenate([[0], np.cumsum(plan.shard_records)])
    table = np.zeros((steps, plan.lanes, each), np.int64)
    for lane in range(plan.lanes):
        found = []
        for epoch, positions in plan.lane_positions(lane, 0, steps * each):
            first = int(positions.min())
            runs = plan.runs(epoch, first, int(positions.max()) + 1)
            records = np.concatenate([np.arange(run.count) + starts[run.shard] + run.first_record for run in runs])
            found.append(ids[records[positions - first]])
        table[:, lane] = np.concatenate(found).reshape(steps, each)
    return table.reshape(steps, plan.global_batch)


def _row(part: Part, step: int) -> int:
    return int(np.flatnonzero(part.rows["step"] == step)[0]) + 1


def _ranges(steps: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and found[-1][1] == step - 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
