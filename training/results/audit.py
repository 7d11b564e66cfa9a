"""Checks the audits of a run, along its chain of checkpoints: was each sample of each epoch used exactly once?

`training.batches.audit_log` writes the files and describes their format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import is_temporary
from lockstep.storage.urls import join
from training.batches.audit_log import HEADER, MIXED_HEADER, sample_hex
from training.batches.clients import read_table
from training.batches.training_set import TrainingSet, sample_ids
from training.config import LANE_GROUPS
from training.plan.client_plan import ClientPlan
from training.plan.epoch_plan import EpochPlan
from training.plan.mixture import MixedPlan, Plan
from training.plan.order import Run
from training.reading.bad_records import BadRecords, Skipped
from training.reading.reader import SplitReader
from training.results.audit_clients import check_clients
from training.run.lineage import CheckpointRef, chain_of, epochs_asked, find_tip, read_claims
from training.run.metrics import BAD_RECORD, read_rows
from training.run.paths import RunPaths, audit_step_of
from training.run.run_json import read_run

_LINE = re.compile(rb"([0-9]{1,18}),([0-9]{1,18}),([0-9a-f]{16})")  # numbers that an int64 holds
_MIXED_LINE = re.compile(_LINE.pattern + rb",([0-9]{1,18})")
ROW = np.dtype([("step", np.int64), ("epoch", np.int64), ("id", np.int64), ("dataset", np.int64)])
Rows = npt.NDArray[np.void]


def parse_audit(data: bytes, *, file: str) -> Rows:
    """Rows (n,) of int64 fields step, epoch, id, dataset (0 without a mixture). Raises CorruptionError naming file
    and row for anything else."""
    header = MIXED_HEADER if data.startswith(MIXED_HEADER) else HEADER
    if not data.startswith(header) or not data.endswith(b"\n"):
        what = "an audit without its header or cut in a line"
        raise CorruptionError(what, file=file, got=repr(data[:40]), allowed=f"{HEADER!r} and whole lines")
    lines, row_form = data[len(header) :].split(b"\n")[:-1], _MIXED_LINE if header is MIXED_HEADER else _LINE
    rows = np.zeros(len(lines), dtype=ROW)
    for number, line in enumerate(lines):
        cells = row_form.fullmatch(line)
        if cells is None:
            raise CorruptionError("a row of an audit cannot be read", file=file, record=number, got=repr(line[:60]))
        value = int(cells[3], 16)
        signed = value - (1 << 64) if value >> 63 else value
        rows[number] = (int(cells[1]), int(cells[2]), signed, int(cells[4]) if header is MIXED_HEADER else 0)
    return rows


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit. Samples are (epoch, sample id in hex, in a mixture also the dataset).

    A correct run has no samples in any field except `left_over`; of a mixture, `left_over` is that of the first
    dataset, whose epochs the run counts.
    """

    steps: int
    samples: int
    missing: tuple[tuple[int, str], ...]
    repeated: tuple[tuple[int, str], ...]
    unknown: tuple[tuple[int, str], ...]
    short_steps: tuple[int, ...]
    left_over: tuple[tuple[int, str], ...]
    places: tuple[str, ...] = ()
    """Faults, each with its file and row."""
    words: str | None = None
    """What a run without faults did, if it has no global batches."""
    replaced: int = 0
    """Samples that had weight 0, since their records could not be decoded (--on-bad-record skip)."""

    def __str__(self) -> str:
        """What a run without faults did."""
        return self.words or (
            f"{self.samples} samples in {self.steps} steps, each once; {len(self.left_over)} left over"
            + (f"; {self.replaced} had weight 0, their records could not be decoded" if self.replaced else "")
        )

    @property
    def ok(self) -> bool:
        """Whether each sample of each epoch was used once or left over as planned, in full batches, at its planned
        place.
        """
        return not (self.missing or self.repeated or self.unknown or self.short_steps or self.places)


def check_audit(
    plan: Plan,
    readers: SplitReader | Sequence[SplitReader],
    audits: Iterable[str | tuple[str, bytes]],
    *,
    steps: int,
    epochs: int,
    stand_ins: Mapping[int, int] = MappingProxyType({}),
) -> AuditReport:
    """Check the audits of a run against its dataset, or against each dataset of a mixture.

    `audits` are the URLs (or name and content) of all ranks' audit files along the chain of checkpoints, oldest first;
    `steps` are the steps at the tip of the chain, `epochs` those of the whole run. Sample ids are read from the shards,
    so the check depends on the plan only for the samples that are left over; `stand_ins` are those of `stand_ins_of`.
    For the datasets of a mixture after the first, it checks the epochs that have begun.
    """
    rows = np.concatenate([np.zeros(0, dtype=ROW), *(_load(audit) for audit in audits)])
    replaced = translate(rows, stand_ins)
    readers = [readers] if isinstance(readers, SplitReader) else readers
    if not isinstance(plan, MixedPlan):
        return replace(_check(plan, readers[0], rows, steps, epochs), replaced=replaced)
    strange = rows[rows["dataset"] >= len(plan.parts)]
    reports = []
    for number, (part, reader) in enumerate(zip(plan.parts, readers, strict=True)):
        passes = epochs if number == 0 else plan.epochs_begun(number, steps)
        suffix = f" of dataset {number + 1}"
        reports.append(_check(part, reader, rows[rows["dataset"] == number], steps, passes, suffix))
    return AuditReport(
        steps=steps,
        samples=len(rows),
        missing=tuple(sample for report in reports for sample in report.missing),
        repeated=tuple(sample for report in reports for sample in report.repeated),
        unknown=(*(sample for report in reports for sample in report.unknown), *_names(strange, " of no dataset")),
        short_steps=tuple(sorted({step for report in reports for step in report.short_steps})),
        left_over=reports[0].left_over,
        replaced=replaced,
    )


def stand_ins_of(readers: Sequence[SplitReader], skipped: Iterable[BadRecords]) -> dict[int, int]:
    """For each id that stood for a record's own in a run: the id that the readers find there now, which is the record's
    own if its shard was restored since. `skipped` are the records that the run reported."""
    found: dict[int, int] = {}
    for bad in skipped:
        for reader in readers:
            for number, (_, _, stored) in enumerate(reader.stored):
                if stored.sha256 == bad.sha256:
                    now = sample_ids(reader, Run(number, bad.first, bad.count)).tolist()
                    found |= dict(zip(bad.ids, now, strict=True))
    return found


def translate(rows: Rows, stand_ins: Mapping[int, int]) -> int:
    """Put the ids of `stand_ins_of` into rows of an audit; returns how many rows had one that stood for another."""
    strange = np.flatnonzero(np.isin(rows["id"], np.array(sorted(stand_ins), np.int64)))
    rows["id"][strange] = [stand_ins[one] for one in rows["id"][strange].tolist()]
    return len(strange)


def all_ids(reader: SplitReader) -> npt.NDArray[np.int64]:
    """The sample ids of a split in file order, (n,)."""
    blocks: list[Run] = [reader.table.run(block) for block in range(reader.table.num_blocks)]
    return np.concatenate([sample_ids(reader, run) for run in blocks])


def _check(plan: EpochPlan, reader: SplitReader, rows: Rows, steps: int, epochs: int, suffix: str = "") -> AuditReport:
    ids = all_ids(reader)
    everything = np.sort(ids)
    # Samples are counted in cells (epoch, index of the id among all sorted ids).
    place = np.minimum(np.searchsorted(everything, rows["id"]), len(everything) - 1)
    known = (everything[place] == rows["id"]) & (rows["epoch"] < epochs) & (rows["step"] >= 1) & (rows["step"] <= steps)
    counts = np.zeros((epochs, len(everything)), dtype=np.int64)
    np.add.at(counts, (rows["epoch"][known], place[known]), 1)
    planned = np.zeros_like(counts)
    left: list[tuple[int, int, int]] = []
    for epoch, positions, records in _left_records(plan, reader, epochs, steps):
        planned[epoch, np.searchsorted(everything, ids[records])] = 1
        left += ((epoch, *cell) for cell in zip(positions.tolist(), ids[records].tolist(), strict=True))
    a_step = np.bincount(rows["step"][known], minlength=steps + 1)[1 : steps + 1]

    def named(cells: npt.NDArray[np.bool_]) -> tuple[tuple[int, str], ...]:
        return tuple((int(e), sample_hex(int(everything[s])) + suffix) for e, s in zip(*np.nonzero(cells), strict=True))

    return AuditReport(
        steps=steps,
        samples=len(rows),
        missing=named(counts + planned < 1),
        repeated=named(counts + planned > 1),
        unknown=_names(rows[~known], suffix),
        short_steps=tuple((np.flatnonzero(a_step != plan.global_batch) + 1).tolist()),
        left_over=tuple((epoch, sample_hex(sample) + suffix) for epoch, _, sample in sorted(left)),
    )


def _names(rows: Rows, suffix: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(row["epoch"]), sample_hex(int(row["id"])) + suffix) for row in rows)


def _left_records(
    plan: EpochPlan, reader: SplitReader, epochs: int, steps: int
) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(epoch, positions, records) of the samples of `epochs` epochs that `steps` steps leave: two (n,) int64; records
    are numbered over all shards."""
    used = steps * (plan.global_batch // plan.lanes)
    for lane in range(plan.lanes):
        for epoch, positions in plan.lane_positions(lane, used, plan.received(lane, epochs)):
            yield epoch, positions, _records_at(plan, epoch, positions)


def _records_at(plan: EpochPlan, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The records at positions (n,) of an epoch, numbered over all shards: (n,) int64."""
    starts = np.concatenate([[0], np.cumsum(plan.shard_records)])
    first = int(positions.min())
    runs = plan.runs(epoch, first, int(positions.max()) + 1)
    records = [np.arange(run.count) + starts[run.shard] + run.first_record for run in runs]
    return np.concatenate(records)[positions - first]


def _load(audit: str | tuple[str, bytes]) -> Rows:
    if isinstance(audit, str):
        return parse_audit(filesystem(audit).read_bytes(audit), file=audit)
    return parse_audit(audit[1], file=audit[0])


@dataclass(frozen=True, slots=True)
class Span:
    """Steps first..last of a run's chain, done by the `num_ranks` ranks of one generation."""

    generation: int
    num_ranks: int
    first: int
    last: int
    shares: tuple[int, ...] | None = None
    """The lanes of each rank, if they are not as even as possible."""


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
    """The faults of the parts, a line each; at most one of a kind for each part.

    `groups` are the run's lane groups, `ids` (n,) the sample ids of the split in file order. For a mixture, the number
    of rows is checked, but not the order of samples.
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
        lanes = plan.rank_lanes(rank, span.num_ranks, groups, span.shares)
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
    """The faults of one part; adds the steps of the part to `where`."""
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
            difference = f"sample {sample_hex(int(mine[at]))} where the plan has {sample_hex(int(right[at]))}"
            found.append(f"{part.url}, row {start + at + 1}: step {step}, {difference}")
            break
    return found


def _planned(plan: Plan, ids: npt.NDArray[np.int64], spans: Sequence[Span]) -> npt.NDArray[np.int64]:
    """(steps, G): the sample ids of each global batch, lane after lane."""
    assert not isinstance(plan, MixedPlan)
    steps = max((span.last for span in spans), default=0)
    each = plan.global_batch // plan.lanes
    table = np.zeros((steps, plan.lanes, each), np.int64)
    for lane in range(plan.lanes):
        found = []
        for epoch, positions in plan.lane_positions(lane, 0, steps * each):
            found.append(ids[_records_at(plan, epoch, positions)])
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


class NotAuditedError(DataError):
    """A run that cannot be checked: it has no audit, no checkpoint yet, or its dataset is missing."""


def audit_files(fs: FileSystem, paths: RunPaths, tip: CheckpointRef) -> list[str]:
    """URLs of the audit files that lead to `tip`, oldest first.

    These are the files of its generation up to its step, of that claim's parent up to the parent's step, and so on. The
    claims define the chain, since retention removes old checkpoints but no audits. A part for a checkpoint that was not
    committed is after the step from which the next generation began, and does not count.
    """
    claims = read_claims(fs, paths)
    found: list[list[str]] = []
    ref: CheckpointRef | None = tip
    while ref is not None:
        if ref.generation not in claims:
            raise DataError(
                f"{paths.root} has no claim of generation {ref.generation}",
                got=f"claims {sorted(claims)}",
                allowed="a claim for each generation of the chain",
                next_step=f"Run `python -m jobs.verify {paths.root}`.",
            )
        found.append(_files_of(fs, paths, ref))
        ref = claims[ref.generation].parent
    return [url for urls in reversed(found) for url in urls]


def audit_spans(fs: FileSystem, paths: RunPaths, tip: CheckpointRef) -> list[Span]:
    """The steps of each generation on the chain to `tip`, oldest first, and its number of ranks."""
    claims, found = read_claims(fs, paths), []
    ref: CheckpointRef | None = tip
    while ref is not None:
        claim = claims[ref.generation]
        first = claim.parent.step + 1 if claim.parent else 1
        found.append(Span(ref.generation, claim.num_ranks, first, ref.step, claim.shares))
        ref = claim.parent
    return found[::-1]


def check_run_audit(run_url: str, dataset_url: str | None = None) -> AuditReport:
    """Check the audits of a run up to its tip. `dataset_url` is needed if the dataset has moved since the run began.

    Raises NotAuditedError for a run without `--audit`, without a checkpoint or whose dataset is missing, DataError for
    a broken chain, CorruptionError for a file that cannot be read.
    """
    fs, paths = filesystem(run_url), RunPaths(run_url)
    chain_of(fs, paths)  # first: a lost checkpoint is a fault without an audit too
    document = read_run(fs, paths)
    config: dict[str, Any] = document["config"]
    if not config["audit"]:
        raise _unchecked(run_url, "a run without --audit")
    tip = find_tip(fs, paths)
    if tip is None:
        raise _unchecked(run_url, "a run without a checkpoint")
    try:
        # The run.json of an older version has no `mix`.
        datasets = [dataset_url] if dataset_url else config["datasets"]
        opened = TrainingSet.at(datasets, config["split"], config.get("mix"))
        where = f"{paths.run_json}: plan"
        federated = config.get("strategy") == "federated"
        clients = ClientPlan.of(document["plan"], opened.manifest, where) if federated else None
        plan = None if federated else opened.plan(document["plan"], where)
    except CorruptionError:
        raise
    except (ConfigError, DataError) as error:
        raise _unchecked(run_url, error.what) from error
    skipped = [bad for _, row in read_rows(run_url, BAD_RECORD)[1] if (bad := BadRecords.of_row(row)) is not None]
    if skipped or config.get("on_bad_record") == "skip":
        for reader in opened.readers:
            reader.skip_bad_records(Skipped(lambda bad: None))
    stand_ins = stand_ins_of(opened.readers, skipped)
    files = audit_files(fs, paths, tip.ref)
    contents = [(url, fs.read_bytes(url)) for url in files]
    parts, spans = [_part(url, parse_audit(data, file=url)) for url, data in contents], audit_spans(fs, paths, tip.ref)
    for part in parts:
        translate(part.rows, stand_ins)
    ids = all_ids(opened.readers[0])
    if clients is not None:
        faults = check_clients(clients, read_table(opened.readers[0], clients.clients), ids, spans, parts)
        count = sum(len(part.rows) for part in parts)
        words = f"{count} samples in {tip.ref.step} rounds, as planned; each client on one rank"
        return AuditReport(tip.ref.step, count, (), (), (), (), (), tuple(faults), words)
    assert plan is not None
    # Only the epochs that the steps have reached, and one more: memory is proportional to their number.
    epochs = min(epochs_asked(read_claims(fs, paths)), plan.epoch_of_step(tip.ref.step) + 1)
    report = check_audit(plan, opened.readers, contents, steps=tip.ref.step, epochs=epochs, stand_ins=stand_ins)
    groups = LANE_GROUPS if config["batchnorm"] == "ghost" else None
    return replace(report, places=tuple(misplaced(plan, groups, ids, spans, parts)))


def _part(url: str, rows: Rows) -> Part:
    generation, rank, _ = url.split("/")[-3:]
    return Part(url, int(generation.removeprefix("g")), int(rank.removeprefix("rank-")), rows)


def _files_of(fs: FileSystem, paths: RunPaths, upto: CheckpointRef) -> list[str]:
    directory = paths.audits(upto.generation)
    urls: list[tuple[int, str]] = []
    try:
        ranks = [entry.name for entry in fs.list(directory) if entry.is_dir]
        strange = next((name for name in ranks if not name.removeprefix("rank-").isdigit()), None)
        if strange is not None:
            raise CorruptionError("a folder that is not a rank's", file=join(directory, strange), got=strange)
    except NotFoundError:
        return []
    for rank in ranks:
        for entry in fs.list(join(directory, rank)):
            step = audit_step_of(entry.name)
            if step is None and is_temporary(entry.name):  # its rank was killed while writing; no checkpoint names it
                continue
            if step is None:
                raise CorruptionError("a file that is not part of an audit", file=entry.url, got=entry.name)
            if step <= upto.step:
                urls.append((step, entry.url))
    return [url for _, url in sorted(urls)]


def _unchecked(run_url: str, got: str) -> NotAuditedError:
    return NotAuditedError(
        f"{run_url} has no audit to check",
        got=got,
        allowed="a run with `audit` in its config, at least one checkpoint, and its dataset in its place",
        next_step="Train with --audit, and keep the dataset.",
    )
