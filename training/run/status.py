"""RUN/status.json: what a run is doing now, small enough to be polled, and its text.

The driver of the run replaces the file every few seconds (lockstep.training.driver.status_board). It is a snapshot for
people and monitors; nothing is resumed from it.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import CorruptionError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import MANIFEST_NAME, read_replaced
from lockstep.storage.shown import counted
from lockstep.storage.urls import join
from lockstep.training.run.epochs import epochs_words
from lockstep.training.run.paths import RunPaths

FORMAT_VERSION = 1
STARTING, TRAINING, WAITING = "starting", "training", "waiting"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
INTERRUPTED = "interrupted"
ENDS = (FINISHED, STOPPED, FAILED)
SILENT_S = 30.0  # without a new status: six of those that a driver writes
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """One rank: medians of its last rows of metrics, in seconds a step. None: not reported yet."""

    rank: int
    host: str | None = None
    step_s: float | None = None
    input_s: float | None = None
    compute_s: float | None = None
    wait_s: float | None = None
    """Seconds of a step that the rank waited in the exchange: for the network, and for slower ranks."""
    other_s: float | None = None
    """Seconds between two steps, for callbacks and ends of epochs too."""
    rss_bytes: int | None = None
    cores: float | None = None
    """Cores that the rank keeps busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The content of status.json."""

    state: str
    """starting, training, waiting (for slots, or before a restart), finished, stopped or failed; for who asks
    (lockstep.training.results.state) also interrupted: its driver is gone without another one."""
    exit_code: int | None = None
    """The exit code of the command that ran it, once it has ended."""
    why: str | None = None
    """The error that ended the run, or the last generation; how it was stopped."""
    written_at: str = ""
    """When the status was written: UTC, ISO 8601."""
    started_at: str = ""
    """When this driver began."""
    host: str = ""
    pid: int = 0
    application: str | None = None
    """Spark's application ID; None without Spark."""
    model: str = ""
    datasets: list[str] = field(default_factory=list)
    generation: int = 0
    num_ranks: int = 0
    step: int = 0
    steps: int = 0
    epochs_done: int = 0
    epochs: int = 0
    """Epochs that were asked for."""
    epochs_trained: float = 0.0
    """Epochs trained so far, computed from the steps (lockstep.training.run.epochs)."""
    samples_per_s: float | None = None
    left_s: float | None = None
    """Seconds until the last step, at this rate."""
    loss: float | None = None
    """The loss of the last step that was reported."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The metrics of the last epoch; None for a value that is not finite."""
    checkpoint: str | None = None
    restarts: int = 0
    """How often this driver has started the ranks again."""
    ranks: list[RankStatus] = field(default_factory=list)
    slow: dict[str, Any] | None = None
    """{rank, host, what} of the rank that the others wait for now: input, compute, between steps or network."""
    bad_records: int = 0
    """How many records --on-bad-record skip has skipped."""

    def to_bytes(self) -> bytes:
        """The file: canonical JSON."""
        return canonical_bytes({"format_version": FORMAT_VERSION, "kind": "status", **asdict(self)})

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """The inverse of `to_bytes`, once parsed. Raises KeyError, TypeError or ValueError for a wrong document."""
        values = dict(document)
        if (values.pop("kind"), values.pop("format_version")) != ("status", FORMAT_VERSION):
            raise ValueError(f"kind is not `status`, or format_version not {FORMAT_VERSION}")
        return cls(**{**values, "ranks": [RankStatus(**rank) for rank in values["ranks"]]})

    @property
    def ended(self) -> bool:
        """Whether its driver has ended in order."""
        return self.state in ENDS

    def silent_s(self, now: datetime.datetime) -> float | None:
        """Return how long no driver has written, if longer than a living one takes; else None, and None for a run that
        ended.

        Compares this host's clock with the driver's.
        """
        age_s = (now - datetime.datetime.fromisoformat(self.written_at)).total_seconds()
        return None if self.ended or age_s < SILENT_S else age_s


def now_utc() -> datetime.datetime:
    """This host's clock."""
    return datetime.datetime.now(datetime.UTC)


def no_run(fs: FileSystem, paths: RunPaths) -> NotFoundError:
    """The error for a path without a run.json, by what is there instead."""
    if fs.exists(paths.agent_json):
        return NotFoundError(
            f"{paths.root} is a run of lockstep agent",
            got=paths.agent_json,
            allowed="a run of lockstep train",
            next_step="See `lockstep status` and `lockstep watch`; its metrics/ has a row every 5 s (docs/agents.md).",
        )
    got = "no run.json" if fs.exists(paths.root) else "nothing at this path"
    next_step = "Check the path: it is the --run of lockstep train, which writes there within seconds of its start."
    if fs.exists(join(paths.root, MANIFEST_NAME)):
        got = f"{MANIFEST_NAME}, which a dataset, a checkpoint or a model has"
        next_step = f"Give the --run of lockstep train; `lockstep describe {paths.root}` shows a dataset."
    return NotFoundError(
        f"{paths.root} is not a run", got=got, allowed="a folder that lockstep train has begun", next_step=next_step
    )


def read_status(fs: FileSystem, paths: RunPaths) -> RunStatus:
    """The newest status of a run.

    Raises NotFoundError for a run without one and for what is no run, CorruptionError for a file that is no status.
    """
    try:
        data = read_replaced(fs, paths.status)
    except NotFoundError:
        if not fs.exists(paths.run_json):
            raise no_run(fs, paths) from None
        raise NotFoundError(
            f"{paths.root} has no status",
            got="no status.json: its driver ended in its first seconds, or could not write it",
            allowed="a run that lockstep train has begun",
            next_step=f"See `lockstep report {paths.root}`; the same lockstep train call continues the run.",
        ) from None
    try:
        return RunStatus.of(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptionError(
            f"a status is damaged ({type(error).__name__})",
            file=paths.status,
            got=repr(data[:80]),
            next_step="Delete the file: the run's driver writes it again every few seconds.",
        ) from error


def words(status: RunStatus, run: str, now: datetime.datetime) -> str:
    """The status as lines of text, for a terminal."""
    lines = [f"{run}: {_headline(status)}"]
    silent_s = status.silent_s(now)
    if silent_s is not None:
        then = "resumes" if status.checkpoint else "begins again, since there is no checkpoint yet"
        lines.append(
            f"  no driver has written for {silent_s:.0f} s: it was killed, is paused or cannot write; the same "
            f"lockstep train {then}"
        )
    elif status.state == INTERRUPTED:
        lines.append(
            "  its driver ended without a word: it was killed, or could not write its status; the same lockstep train "
            f"{'resumes it' if status.checkpoint else 'begins again, since there is no checkpoint yet'}"
        )
    restarts = f", {status.restarts} restarts" if status.restarts else ""
    where = f", {status.application}" if status.application else ""
    lines.append(f"  driver {status.pid} on {status.host}{where}, generation {status.generation}{restarts}")
    if status.why:
        lines += [f"  | {line}" for line in status.why.splitlines()]
    numbers = [f"{name} {value:.4f}" for name, value in status.metrics.items() if isinstance(value, float)]
    if status.loss is not None:
        lines.append(f"  loss {status.loss:.4f}")
    if numbers:
        lines.append(f"  epoch {status.epochs_done}: {', '.join(numbers)}")
    lines.append(f"  newest checkpoint: {status.checkpoint or 'none yet'}")
    if status.bad_records:
        lines.append(f"  {status.bad_records} records skipped")
    if status.ranks:
        lines += _table(status.ranks)
    if status.slow is not None:
        lines.append(f"  rank {status.slow['rank']} on {status.slow['host']} is slow: {status.slow['what']}")
    return "\n".join(lines)


def _headline(status: RunStatus) -> str:
    percent = f" ({status.step / status.steps:.0%})" if status.steps else ""
    parts = [f"{status.state}, step {status.step} of {status.steps}{percent}"]
    if status.state == FINISHED:
        parts.append(counted(epochs_words(status.epochs_trained, status.epochs), "epoch"))
    else:
        parts.append(f"epoch {min(int(status.epochs_trained) + 1, status.epochs)} of {status.epochs}")
    if status.state == TRAINING and status.samples_per_s:
        parts.append(f"{status.samples_per_s:,.0f} samples/s")
        if status.left_s is not None:
            parts.append(f"about {datetime.timedelta(seconds=round(status.left_s))} left")
    return ", ".join(parts)


def _table(ranks: list[RankStatus]) -> list[str]:
    """The time of a step of each rank in milliseconds, and what it uses."""
    width = max(len("host"), *(len(rank.host or "?") for rank in ranks))
    times = ("step", "input", "compute", "wait", "other")
    head = f"  rank  {'host':<{width}}" + "".join(f"{name + ' ms':>12}" for name in times) + "  memory MiB  cores"
    rows = [head]
    for rank in ranks:
        values = (rank.step_s, rank.input_s, rank.compute_s, rank.wait_s, rank.other_s)
        cells = "".join(f"{'-' if value is None else f'{value * 1e3:,.1f}':>12}" for value in values)
        memory = "-" if rank.rss_bytes is None else f"{rank.rss_bytes // MIB:,}"
        cores = "-" if rank.cores is None else f"{rank.cores:.1f}"
        rows.append(f"  {rank.rank:4}  {rank.host or '?':<{width}}{cells}{memory:>12}{cores:>7}")
    return rows
