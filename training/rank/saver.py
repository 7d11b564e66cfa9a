"""Saves and restores the checkpoints of a rank: copies its part, writes it in the background, reports it to the driver.

Decision 077.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import LockstepError, StorageTimeoutError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join, split_url
from lockstep.training.batches.audit_log import AuditLog
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.messages import BestCheckpoint, CheckpointReport, Restore, TrainOrder
from lockstep.training.control.protocol import json_safe
from lockstep.training.embeddings.sharded_embedding import TABLES
from lockstep.training.rank import callback_state
from lockstep.training.rank.early_stop import EarlyStop
from lockstep.training.rank.metrics import Saved
from lockstep.training.rank.prepare import JoinedModel
from lockstep.training.run import checkpoint_division
from lockstep.training.run.checkpoint import (
    HostBuffer,
    Tensors,
    TensorSpec,
    base_url,
    file_bytes,
    file_name,
    read_resumable,
    sha256_of,
    tensors_in,
    upload,
    write_bytes,
)
from lockstep.training.run.checkpoint_division import Piece, assemble, read_parts, read_parts_and_own
from lockstep.training.run.late_copy import LateCopy
from lockstep.training.run.paths import RunPaths, staged_checkpoint
from lockstep.training.steps import model_state
from lockstep.training.steps.ewc import Earlier
from lockstep.training.world import Grid

CLASS_COUNTS = "class_counts/epoch"
MORE_BYTES = 1 << 20  # of class counts, callbacks and a strategy's state: else the first checkpoint moves the buffer
T = TypeVar("T")
Report = Callable[[str], None]
# A tenth of a core while other threads want it, a whole core while they do not: a step has such moments, between its
# batches and while it waits for another rank. 19 would be a seventieth: a checkpoint's half second of CPU time must not
# take half a minute on a busy host, since the checkpoint is lost if the rank fails meanwhile.
NICE = 10
_LOWEST = 19


class InFlight(Generic[T]):
    """One piece of work at a time in a thread. All calls come from one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[T] | None = None
        self._what, self._stage, self._since = "", "", 0.0

    @property
    def busy(self) -> bool:
        """Whether work is in progress."""
        return self._future is not None and not self._future.done()

    def begin(self, what: str, work: Callable[[Report], T]) -> None:
        """Start `work`, which calls its argument with the name of each stage; `what` names the work in errors.

        Call `look` or `wait` after the end of earlier work, before the next `begin`.
        """
        if self._future is not None:
            raise LockstepError(
                f"{what} cannot begin",
                got="earlier work whose result was not taken",
                allowed="look() or wait() before the next begin()",
                next_step="Resume the run; incomplete checkpoints are ignored.",
            )
        self._what = what
        self._report("beginning")
        self._future = self._pool.submit(work, self._report)

    def look(self) -> T | None:
        """The result of work that has ended, once; None before and after. Raises the error of the work."""
        if self._future is None or self.busy:
            return None
        future, self._future = self._future, None
        return future.result()

    def wait(self, deadline_s: float) -> T | None:
        """Wait for work in progress, then `look`. Raises StorageTimeoutError naming the work and its stage."""
        if self._future is not None and not wait([self._future], deadline_s).done:
            raise StorageTimeoutError(
                f"{self._what} did not end",
                got=f"{self._stage}, for {time.monotonic() - self._since:.0f} s",
                allowed=f"its end within {deadline_s:.0f} s",
                next_step="Look at the storage that it writes to, and at the driver's log.",
            )
        return self.look()

    def _report(self, stage: str) -> None:
        self._stage, self._since = stage, time.monotonic()


def at_low_priority(work: Callable[[], T]) -> T:
    """Run `work` in a thread of low priority, and return its result or raise its error.

    Use it for work that seldom holds the interpreter's lock: a thread that holds it and is not scheduled delays all
    others. `work` must not start threads that outlive it: they inherit the priority, and cannot raise it again. Only
    Linux has priorities of single threads; elsewhere the priority does not change.
    """
    with ThreadPoolExecutor(1, initializer=_step_back) as pool:
        return pool.submit(work).result()


def _step_back() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()  # one thread: PRIO_PROCESS means that on Linux, and the process elsewhere
        with suppress(OSError):  # a sandbox may refuse even this; the work is the same at any priority
            os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, os.getpriority(os.PRIO_PROCESS, thread) + NICE))


@dataclass(slots=True)
class Progress:
    """The progress of a run."""

    step: int
    """Optimizer steps done."""
    stopped: bool
    """Whether a callback has ended the training."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the last epoch that has ended, over all ranks."""
    cut: bool = False
    """Whether that epoch ended before its last step, by --max-steps or a callback: a later call may train the rest."""
    class_counts: NDArray[np.float64] | None = None
    """(classes,): this rank's rows of each class in the epoch so far; None if no step of it is done."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint to resume from."""

    url: str
    manifest: dict[str, Any]
    parts: dict[int, Tensors]
    """The file of each rank that wrote it."""
    own: dict[int, Tensors] = field(default_factory=dict)
    """The parts of tables in shards, or of divided weights and optimizers, in the files that this rank has read; they
    are not in `parts`."""
    base: Found | None = None
    """The checkpoint of which the tables' parts are the difference; its `parts` are not used."""


class Saver:
    """Writes and restores checkpoints of one rank; every rank calls `save` at the same steps.

    Weights and optimizer state, which all ranks have alike, are divided over them; the rest of a file is this rank's
    own state.
    """

    def __init__(
        self,
        context: RankContext,
        config: TrainConfig,
        joined: JoinedModel,
        callbacks: list[Any],
        early_stop: EarlyStop | None,
        audit: AuditLog | None,
    ) -> None:
        self._context, self._config, self._model, self._joined = context, config, joined.model, joined
        self._comm, self._callbacks, self._audit = joined.strategy.communicator, callbacks, audit
        self._early_stop = early_stop
        self._exchange, self._strategy, self._tables = joined.exchange, joined.strategy, joined.tables
        self._metrics: Callable[[], None] = self._model.reset_metrics
        self._specs = model_state.specs_of(self._model, model_state.WEIGHTS, model_state.OPTIMIZER)
        self._pieces = model_state.pieces_of(self._model)
        common = {name: spec for name, spec in self._specs.items() if name not in self._pieces}
        self._share = checkpoint_division.divide(common, self._comm.num_ranks)[self._comm.rank]
        self._share += [piece for piece in self._pieces.values() if piece.stop > piece.start]
        self._divided = model_state.divided_kinds(self._model)
        self._grid = config.way.grid(config.ranks.num_ranks)
        self._buffer = HostBuffer()
        self._flight: InFlight[Saved] = InFlight()
        self._touching: threading.Thread | None = None
        self.staging = ""
        self.last_step: int | None = None
        """Step of the last checkpoint that was begun or restored."""

    def find(self) -> Found | None:
        """Ask the driver for the checkpoint to resume from, and read it; None for a new run. A collective."""
        reply = Restore.from_json(self._context.control.request("restore", self._config.limits.start_limit_s))
        self.staging = reply.staging
        return None if reply.checkpoint is None else self._read(reply.checkpoint)

    def _read(self, url: str) -> Found:
        plan = TrainOrder.from_json(self._context.payload).plan
        manifest = read_resumable(url, plan)
        if self._tables is not None:
            found = Found(url, manifest, *read_parts_and_own(url, manifest, self._comm, TABLES))
            if (base := base_url(url, manifest)) is None:
                return found
            of_base = read_resumable(base, plan)
            return replace(found, base=Found(base, of_base, *read_parts_and_own(base, of_base, self._comm, TABLES)))
        if self._pieces:
            return Found(url, manifest, *read_parts_and_own(url, manifest, self._comm, *self._divided))
        return Found(url, manifest, read_parts(url, manifest, self._comm))

    def restore(self, found: Found) -> Progress:
        """Load the checkpoint into model, optimizer, seed generators and callbacks. Call it after on_train_begin.

        Raises ConfigError for another model, DataError for tensors that do not fit.
        """
        world, saved, url = self._context.world, found.manifest["state"], found.url
        self._load(found)
        callback_state.load(self._callbacks, saved["callbacks"], found.parts[0], url)
        rule = saved.get("early_stop")  # not among the callbacks: a later call may have another rule, or none
        if self._early_stop is not None and rule is not None:
            self._early_stop.resume(rule)
        self._strategy.load(found.parts[0], url)
        if self._config.model.ewc and self._config.model.init_from is not None:
            self._joined.earlier = Earlier.resumed(self._model, found.parts[0], url)
        written = Grid(*saved["grid"]) if "grid" in saved else Grid(int(found.manifest["num_ranks"]))
        same, data_rank = written == self._grid, self._grid.place(world.rank)[0]
        if same:
            parts = [found.parts[world.rank]]
            model_state.load(self._model, parts[0], (model_state.SEEDS,), url)
        else:
            parts = [found.parts[rank] for rank in written.counting]
            model_state.derive_seeds(self._model, self._config.data.seed, int(found.manifest["step"]), data_rank)
        takes_sums = same or data_rank == 0
        own = [{k: v.copy() for k, v in part.items() if k.startswith(model_state.METRICS)} for part in parts]
        if any(own):  # of an epoch that is resumed
            whole = self._exchange.sums_metrics  # then each rank's states are those of all ranks
            mine, takes = (own[:1], True) if whole else (own, takes_sums)
            self._metrics = partial(model_state.load_metrics, self._model, mine, url, takes_sums=takes)
        self._exchange.restore_compression(parts, divide=not same)
        self.last_step = int(found.manifest["step"])
        by_rule = (
            rule is not None and rule["reason"] is not None
        )  # lockstep.training.rank.fit asks the rule of this call
        stopped = bool(saved["stopped"]) and not by_rule and self._config.data.epochs <= int(saved["epochs"])
        counts = [part[CLASS_COUNTS] for part in parts if takes_sums and CLASS_COUNTS in part]
        return Progress(
            self.last_step, stopped, dict(saved["metrics"]), class_counts=np.sum(counts, axis=0) if counts else None
        )

    def restore_best(self) -> None:
        """Load weights and optimizer state of the run's best checkpoint, if the driver knows one. A collective, after
        the last checkpoint.
        """
        answer = self._context.control.request("best", self._config.limits.stall_limit_s)
        if (url := BestCheckpoint.from_json(answer).checkpoint) is not None:
            self._load(self._read(url))

    def _load(self, found: Found) -> None:
        """Load the state that all ranks have alike."""
        kinds = tuple(k for k in (model_state.WEIGHTS, model_state.OPTIMIZER) if k not in self._divided)
        model_state.load(self._model, assemble(found.manifest, found.parts, found.url, kinds), kinds, found.url)
        if self._pieces:
            model_state.load_pieces(self._model, found.url, found.manifest, found.own, self._comm)
        if self._tables is not None:
            for one in (found,) if found.base is None else (found.base, found):
                self._tables.restore(one.url, one.manifest, one.own)

    def restore_metrics(self) -> None:
        """Load the metrics of the epoch that is resumed into the model; Keras has just reset them."""
        self._metrics()

    def make_ready(self) -> None:
        """Touch the memory for the copies in the background, before the first checkpoint. A collective.

        Tables that are copied by a thread touch it there.
        """
        tables = ({}, {}) if self._tables is None else self._tables.state()
        size = file_bytes(self._tensors([model_state.SEEDS, model_state.METRICS], *tables)) + MORE_BYTES
        if self._tables is not None and self._tables.copied_later:
            self._buffer.reserve(size, touch=False)
            return
        self._touching = threading.Thread(target=self._buffer.reserve, args=(size,), daemon=True)
        self._touching.start()

    def save(self, progress: Progress, *, in_epoch: bool = False) -> None:
        """Copy this rank's part; a thread writes and commits it while the training continues. A collective.

        Do not call this while a checkpoint is in flight. `look` and `wait` raise the error of a failed write.
        """
        control, step = self._context.control, progress.step
        control.beat(step, "checkpoint")
        resumed = in_epoch or progress.cut
        base, table_specs, tables = (None, {}, {}) if self._tables is None else self._tables.to_save(step)
        own = [model_state.SEEDS, model_state.METRICS] if resumed else [model_state.SEEDS]
        tensors = self._tensors(own, table_specs, tables)
        if resumed and progress.class_counts is not None:
            tensors[CLASS_COUNTS] = progress.class_counts
        document: dict[str, Any] = {}
        if self._context.world.is_leader:
            callbacks, arrays = callback_state.save(self._callbacks)
            tensors |= arrays | self._strategy.state()
            if self._joined.earlier is not None:
                tensors |= self._joined.earlier.tensors(self._model)
            document = {
                **({"grid": self._grid.to_json()} if self._grid.mates > 1 else {}),
                "in_epoch": in_epoch,
                "stopped": progress.stopped,
                "epochs": self._config.data.epochs,
                "metrics": json_safe(progress.metrics),
                "callbacks": callbacks,
                "early_stop": None if self._early_stop is None else self._early_stop.state(),
            }
        if self._touching is not None:
            self._touching.join()
        file, copies = self._filled(tensors, table_specs, {} if base is not None else tables)
        self.last_step = step
        what = f"rank {self._context.world.rank}'s part of the checkpoint of step {step}"
        report = checkpoint_division.report([*self._share, *tables], self._specs | table_specs)
        self._flight.begin(what, partial(self._write, step, file, copies, {"tensors": report, "base": base}, document))
        control.beat(step, "train")

    def _filled(
        self, tensors: Tensors, table_specs: Mapping[str, TensorSpec], whole: Mapping[Piece, NDArray[Any]]
    ) -> tuple[NDArray[np.uint8], list[LateCopy]]:
        """The file of `tensors`, and the copies of `whole` tables that are still to be made in it."""
        if self._tables is None or not whole:
            return self._buffer.fill(tensors), []
        later = self._tables.copied_later
        keys = {p.name: checkpoint_division.key_of(p, table_specs[p.name]) for p in whole if p.name in later}
        file = self._buffer.fill(tensors, keys.values())
        views = tensors_in(file, "the copy of a checkpoint")
        return file, self._tables.copies({name: views[key] for name, key in keys.items()})

    @property
    def in_flight(self) -> bool:
        """Whether a checkpoint is being written, or not committed yet."""
        return self._flight.busy

    def look(self) -> Saved | None:
        """The checkpoint that was committed since the last look; raises the error of a failed write."""
        return self._flight.look()

    def wait(self, deadline_s: float) -> Saved | None:
        """Wait for a checkpoint in flight, then `look`. Raises StorageTimeoutError naming rank, step and stage."""
        return self._flight.wait(deadline_s)

    def _tensors(
        self, own: list[str], table_specs: Mapping[str, TensorSpec], tables: Mapping[Piece, NDArray[Any]]
    ) -> Tensors:
        """This rank's share of the common state and of the tables, and its own state of these kinds: no copies."""
        mine = {piece.name for piece in self._share} | self._pieces.keys()  # parts may be collectives
        views = model_state.views_of(self._model, model_state.WEIGHTS, model_state.OPTIMIZER, only=mine)
        tensors = {}
        for piece in self._share:
            name = checkpoint_division.key_of(piece, self._specs[piece.name])
            held = views[piece.name]
            if piece.name in self._pieces:  # this rank has no more of it
                tensors[name] = held.reshape(self._specs[piece.name].shape) if name == piece.name else held
            else:
                tensors[name] = held if name == piece.name else held.reshape(-1)[piece.start : piece.stop]
        for piece, part in tables.items():
            spec = table_specs[piece.name]
            name = checkpoint_division.key_of(piece, spec)
            tensors[name] = part.reshape(spec.shape) if name == piece.name else part
        return tensors | model_state.views_of(self._model, *own) | self._exchange.compression_state()

    def _write(
        self,
        step: int,
        file: NDArray[np.uint8],
        copies: list[LateCopy],
        about: dict[str, Any],
        document: dict[str, Any],
        report: Report,
    ) -> Saved:
        began, directory, rank = time.perf_counter(), staged_checkpoint(self.staging, step), self._context.world.rank
        url, fs = join(directory, file_name(rank)), filesystem(directory)
        report("copying the tables")
        for copy in copies:
            at_low_priority(copy.run)
        report("hashing it")
        digest = at_low_priority(partial(sha256_of, file))
        written = {"name": file_name(rank), "bytes": file.size, "sha256": digest}
        report(f"writing {url}")
        fs.mkdirs(directory)
        if split_url(url)[0] == "file":
            at_low_priority(partial(upload, fs, url, file))
        else:  # the client's threads read batches later, and would inherit the priority
            upload(fs, url, file)
        audit = self._write_audit(step)
        report("waiting for the driver to commit what all ranks report")
        done = CheckpointReport(step=step, files=[written], **about, audit=audit, state=document)
        self._context.control.request("checkpoint", self._config.limits.stall_limit_s, **done.to_json())
        return Saved(step, int(file.size), time.perf_counter() - began)

    def _write_audit(self, step: int) -> list[dict[str, Any]]:
        if self._audit is None:
            return []
        paths, world = RunPaths(self._config.run), self._context.world
        url = paths.audit(world.generation, self._grid.place(world.rank)[0], step)
        directory, _, name = url.rpartition("/")
        report = write_bytes(directory, name, self._audit.take(step))
        return [{"path": paths.relative(url), "bytes": report["bytes"], "sha256": report["sha256"]}]
