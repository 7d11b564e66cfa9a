"""Checks the audits of a run, along its chain of checkpoints: was each sample of each epoch used exactly once?

`lockstep.training.batches.audit_log` writes the files and describes their format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import is_temporary
from lockstep.storage.urls import join
from lockstep.training.batches.audit_log import HEADER, MIXED_HEADER, sample_hex
from lockstep.training.batches.clients import read_table
from lockstep.training.batches.training_set import TrainingSet, sample_ids
from lockstep.training.config import TrainConfig
from lockstep.training.plan.client_plan import ClientPlan
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.mixture import MixedPlan, Plan
from lockstep.training.plan.order import Run
from lockstep.training.reading.bad_records import BadRecords, Skipped
from lockstep.training.reading.reader import SplitReader
from lockstep.training.reading.selecting import selection_of
from lockstep.training.results.audit_clients import check_clients
from lockstep.training.run.lineage import CheckpointRef, chain_of, epochs_asked, find_tip, read_claims
from lockstep.training.run.metrics import BAD_RECORD, read_rows
from lockstep.training.run.paths import RunPaths, audit_step_of
from lockstep.training.run.run_json import read_run
from lockstep.training.ways import Federated

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
    """The faults, each with its file and row."""
    words: str | None = None
    """What a run without faults did, if it has no global batches."""
    replaced: int = 0
    """Samples that had weight 0, since their records could not be decoded (--on-bad-record skip)."""
    under_way: int | None = None
    """The epoch, counted from 1, in which the run stopped: `left_over` are then the samples that a resumed run will
    train on, and the few that it leaves. None for a run that has trained its last epoch to the end."""

    def __str__(self) -> str:
        """What a run without faults did."""
        left = f"{len(self.left_over)} left over"
        if self.under_way is not None:
            left = f"{len(self.left_over)} not trained on yet, since epoch {self.under_way} is under way"
        return self.words or (
            f"{self.samples} samples in {self.steps} steps, each once; {left}"
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
    audits: Iterable[str | tuple[str, bytes] | Rows],
    *,
    steps: int,
    epochs: int,
    stand_ins: Mapping[int, int] = MappingProxyType({}),
) -> AuditReport:
    """Check the audits of a run against its dataset, or against each dataset of a mixture.

    `audits` are the URLs (or name and content, or rows, which are changed) of all ranks' audit files along the chain of
    checkpoints, oldest first. One is held at a time, besides two bytes for each sample of each epoch.
    `steps` are the steps at the tip of the chain, `epochs` those of the whole run. Sample ids are read from the shards,
    so the check depends on the plan only for the samples that are left over; `stand_ins` are those of `stand_ins_of`.
    For the datasets of a mixture after the first, it checks the epochs that have begun.
    """
    readers = [readers] if isinstance(readers, SplitReader) else readers
    parts: tuple[EpochPlan, ...] = plan.parts if isinstance(plan, MixedPlan) else (plan,)
    mixed, passes = isinstance(plan, MixedPlan), [epochs]
    if isinstance(plan, MixedPlan):
        passes += [plan.epochs_begun(number, steps) for number in range(1, len(parts))]
    tallies = [
        _Tally(part, reader, steps, each, f" of dataset {number + 1}" if mixed else "")
        for number, (part, reader, each) in enumerate(zip(parts, readers, passes, strict=True))
    ]
    replaced = samples = 0
    strange: list[tuple[int, str]] = []
    for audit in audits:
        rows = _load(audit)
        samples, replaced = samples + len(rows), replaced + translate(rows, stand_ins)
        for number, tally in enumerate(tallies):
            tally.add(rows[rows["dataset"] == number] if mixed else rows)
        if mixed:
            strange += _names(rows[rows["dataset"] >= len(parts)], " of no dataset")
    reports = [tally.report() for tally in tallies]
    return AuditReport(
        steps=steps,
        samples=samples,
        missing=tuple(sample for report in reports for sample in report.missing),
        repeated=tuple(sample for report in reports for sample in report.repeated),
        unknown=(*(sample for report in reports for sample in report.unknown), *strange),
        short_steps=tuple(sorted({step for report in reports for step in report.short_steps})),
        left_over=reports[0].left_over,
        replaced=replaced,
        under_way=plan.epoch_of_step(steps) + 1 if steps < plan.steps(epochs) else None,
    )


def stand_ins_of(readers: Sequence[SplitReader], skipped: Iterable[BadRecords]) -> dict[int, int]:
    """Return, for each id that stood for a record's own in a run, the id that the readers find there now. It is the
    record's own if its shard was restored since. `skipped` are the records that the run reported."""
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


class _Tally:
    """Counts the samples of one dataset in cells (epoch, index of the id among all sorted ids)."""

    def __init__(self, plan: EpochPlan, reader: SplitReader, steps: int, epochs: int, suffix: str) -> None:
        self._plan, self._steps, self._epochs, self._suffix = plan, steps, epochs, suffix
        self._ids = all_ids(reader)
        self._sorted = np.sort(self._ids)
        self._counts = np.zeros((epochs, len(self._sorted)), np.uint16)
        self._a_step = np.zeros(steps + 1, np.int64)
        self._unknown: list[tuple[int, str]] = []
        self._samples = 0

    def add(self, rows: Rows) -> None:
        """Count the rows of a file."""
        place = np.minimum(np.searchsorted(self._sorted, rows["id"]), len(self._sorted) - 1)
        step, epoch = rows["step"], rows["epoch"]
        known = (self._sorted[place] == rows["id"]) & (epoch < self._epochs) & (step >= 1) & (step <= self._steps)
        np.add.at(self._counts, (epoch[known], place[known]), 1)
        np.add.at(self._a_step, step[known], 1)
        self._unknown += _names(rows[~known], self._suffix)
        self._samples += len(rows)

    def report(self) -> AuditReport:
        """What is wrong, and left over as planned."""
        left: list[tuple[int, int, int]] = []
        for epoch, positions, records in _left_records(self._plan, self._epochs, self._steps):
            self._counts[epoch, np.searchsorted(self._sorted, self._ids[records])] += 1
            cells = zip(positions.tolist(), self._ids[records].tolist(), strict=True)
            left += ((epoch, *cell) for cell in cells)
        return AuditReport(
            steps=self._steps,
            samples=self._samples,
            missing=self._named(self._counts < 1),
            repeated=self._named(self._counts > 1),
            unknown=tuple(self._unknown),
            short_steps=tuple((np.flatnonzero(self._a_step[1:] != self._plan.global_batch) + 1).tolist()),
            left_over=tuple((epoch, sample_hex(sample) + self._suffix) for epoch, _, sample in sorted(left)),
        )

    def _named(self, cells: npt.NDArray[np.bool_]) -> tuple[tuple[int, str], ...]:
        found = zip(*np.nonzero(cells), strict=True)
        return tuple((int(epoch), sample_hex(int(self._sorted[place])) + self._suffix) for epoch, place in found)


def _names(rows: Rows, suffix: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(row["epoch"]), sample_hex(int(row["id"])) + suffix) for row in rows)


def _left_records(
    plan: EpochPlan, epochs: int, steps: int
) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield (epoch, positions, records) of the samples of `epochs` epochs that `steps` steps leave: two (n,) int64;
    records are numbered over all shards."""
    used = steps * (plan.global_batch // plan.lanes)
    for lane in range(plan.lanes):
        for epoch, positions in plan.lane_positions(lane, used, plan.received(lane, epochs)):
            yield epoch, positions, _records_at(plan, epoch, positions)


def _records_at(plan: EpochPlan, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The records at positions (n,) of an epoch, numbered over all shards: (n,) int64."""
    first = int(positions.min())
    runs = plan.runs(epoch, first, int(positions.max()) + 1)
    records = [np.arange(run.count) + plan.table.number(run) for run in runs]
    return np.concatenate(records)[positions - first]


def _load(audit: str | tuple[str, bytes] | Rows) -> Rows:
    if isinstance(audit, np.ndarray):
        return audit
    if isinstance(audit, str):
        return parse_audit(filesystem(audit).read_bytes(audit), file=audit)
    return parse_audit(audit[1], file=audit[0])


@dataclass(frozen=True, slots=True)
class Span:
    """Steps first..last of a run's chain, whose rows the ranks of one generation divided into `num_ranks` parts."""

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


class Places:
    """The faults of audit files, a line each; at most one of a kind for each file. Memory: four bytes a step of a rank.

    `groups` are the run's lane groups, `ids` (n,) the sample ids of the split in file order. For a mixture, the number
    of rows is checked, but not the order of samples.
    """

    def __init__(self, plan: Plan, groups: int | None, ids: npt.NDArray[np.int64], spans: Sequence[Span]) -> None:
        self._plan, self._groups, self._ids, self._spans = plan, groups, ids, {span.generation: span for span in spans}
        self._files: list[str] = []
        self._too_many: dict[int, list[str]] = {span.generation: [] for span in spans}
        self._found: dict[tuple[int, int], list[str]] = {}
        self._where: dict[tuple[int, int], npt.NDArray[np.int32]] = {}  # of each step 1 + the number of its file, or 0
        for span in spans:
            for rank in range(span.num_ranks):
                self._found[span.generation, rank] = []
                self._where[span.generation, rank] = np.zeros(span.last - span.first + 1, np.int32)

    def add(self, part: Part) -> None:
        """Compare a file with the plan."""
        span = self._spans.get(part.generation)
        if span is None:
            return
        if part.rank >= span.num_ranks:
            had = f"generation {span.generation} had {span.num_ranks} ranks"
            self._too_many[span.generation].append(f"{part.url}: {had}")
            return
        self._found[span.generation, part.rank] += self._of_part(part, span)

    def faults(self) -> list[str]:
        """Return the faults of all files, and the steps that no file has."""
        found = []
        for span in self._spans.values():
            found += self._too_many[span.generation]
            for rank in range(span.num_ranks):
                found += self._found[span.generation, rank]
                missing = (np.flatnonzero(self._where[span.generation, rank] == 0) + span.first).tolist()
                found += [
                    f"generation {span.generation}, rank {rank}: {_steps(first, last)} in none of its parts"
                    for first, last in _ranges(missing)
                ]
        return found

    def _of_part(self, part: Part, span: Span) -> list[str]:
        """The faults of one part; notes its steps."""
        found: list[str] = []
        steps, starts, counts = np.unique(part.rows["step"], return_index=True, return_counts=True)
        inside = (steps >= span.first) & (steps <= span.last)
        if not inside.all():
            strange, did = int(steps[~inside][0]), f"generation {span.generation} did {_steps(span.first, span.last)}"
            found.append(f"{part.url}, row {_row(part, strange)}: step {strange}, but {did}")
        steps, starts, counts = steps[inside], starts[inside], counts[inside]
        where = self._where[span.generation, part.rank]
        earlier = where[steps - span.first]
        if earlier.any():
            twice = int(steps[np.flatnonzero(earlier)[0]])
            other = self._files[int(earlier[earlier > 0][0]) - 1]
            found.append(f"{part.url}, row {_row(part, twice)}: step {twice} is in {other} too")
        self._files.append(part.url)
        where[steps[earlier == 0] - span.first] = len(self._files)
        lanes = self._plan.rank_lanes(part.rank, span.num_ranks, self._groups, span.shares)
        rows = len(lanes) * (self._plan.global_batch // self._plan.lanes)
        planned: npt.NDArray[np.int64] | None = None
        if not isinstance(self._plan, MixedPlan) and len(steps):
            planned = _planned(self._plan, self._ids, lanes, int(steps[0]), int(steps[-1]))
        for step, start, count in zip(steps.tolist(), starts.tolist(), counts.tolist(), strict=True):
            if count != rows:
                found.append(f"{part.url}, row {start + 1}: step {step} has {count} rows of {rows}")
                break
            if planned is None:
                continue
            right, mine = planned[step - int(steps[0])], part.rows["id"][start : start + count]
            wrong = np.flatnonzero((right != mine) | (part.rows["step"][start : start + count] != step))
            if len(wrong):
                at = int(wrong[0])
                difference = f"sample {sample_hex(int(mine[at]))} where the plan has {sample_hex(int(right[at]))}"
                found.append(f"{part.url}, row {start + at + 1}: step {step}, {difference}")
                break
        return found


def _planned(plan: EpochPlan, ids: npt.NDArray[np.int64], lanes: range, first: int, last: int) -> npt.NDArray[np.int64]:
    """Return (steps, rows): sample ids of these lanes in the global batches of steps first..last, lane after lane."""
    each = plan.global_batch // plan.lanes
    table = np.zeros((last - first + 1, len(lanes), each), np.int64)
    for column, lane in enumerate(lanes):
        found = [
            ids[_records_at(plan, epoch, positions)]
            for epoch, positions in plan.lane_positions(lane, (first - 1) * each, last * each)
        ]
        table[:, column] = np.concatenate(found).reshape(-1, each)  # (steps * each,) -> (steps, each)
    return table.reshape(len(table), -1)


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
                next_step=f"Run `lockstep verify {paths.root}`.",
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
        found.append(Span(ref.generation, claim.data_ranks or claim.num_ranks, first, ref.step, claim.shares))
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
    config = TrainConfig.from_json(document["config"])
    if not config.exactness.audit:
        raise _unchecked(run_url, "a run without --audit")
    tip = find_tip(fs, paths)
    if tip is None:
        raise _unchecked(run_url, "a run without a checkpoint")
    try:
        datasets = [dataset_url] if dataset_url else config.data.datasets
        opened = TrainingSet.at(
            datasets,
            config.data.split,
            config.data.mix,
            selection=selection_of(config, datasets),
            also=[config.way.clients or ""] if isinstance(config.way, Federated) else [],
            tasks=config.data.tasks is not None,
        )
        where = f"{paths.run_json}: plan"
        federated = isinstance(config.way, Federated)
        clients = ClientPlan.of(document["plan"], opened.manifest, where) if federated else None
        plan = None if federated else opened.plan(document["plan"], where)
    except CorruptionError:
        raise
    except (ConfigError, DataError) as error:
        raise _unchecked(run_url, error.what) from error
    skipped = [bad for _, row in read_rows(run_url, BAD_RECORD)[1] if (bad := BadRecords.of_row(row)) is not None]
    if skipped or config.exactness.on_bad_record == "skip":
        for reader in opened.readers:
            reader.skip_bad_records(Skipped(lambda bad: None))
    stand_ins = stand_ins_of(opened.readers, skipped)
    files = audit_files(fs, paths, tip.ref)
    spans = audit_spans(fs, paths, tip.ref)
    ids = all_ids(opened.readers[0])
    if clients is not None:
        parts = [_part(fs, url) for url in files]
        for part in parts:
            translate(part.rows, stand_ins)
        faults = check_clients(clients, read_table(opened.readers[0], clients.clients), ids, spans, parts)
        count = sum(len(part.rows) for part in parts)
        words = f"{count} samples in {tip.ref.step} rounds, as planned; each client on one rank"
        return AuditReport(tip.ref.step, count, (), (), (), (), (), tuple(faults), words)
    assert plan is not None
    # Only the epochs that the steps have reached, and one more: memory is proportional to their number.
    epochs = min(epochs_asked(read_claims(fs, paths)), plan.epoch_of_step(tip.ref.step) + 1)
    places = Places(plan, config.step.lane_groups, ids, spans)

    def audits() -> Iterator[Rows]:
        for url in files:
            part = _part(fs, url)
            yield part.rows  # which puts in what stand-ins stood for
            places.add(part)

    report = check_audit(plan, opened.readers, audits(), steps=tip.ref.step, epochs=epochs, stand_ins=stand_ins)
    return replace(report, places=tuple(places.faults()))


def _part(fs: FileSystem, url: str) -> Part:
    generation, rank, _ = url.split("/")[-3:]
    rows = parse_audit(fs.read_bytes(url), file=url)
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
