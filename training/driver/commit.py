"""Commits of checkpoints: ranks upload and report, the driver writes the manifest and renames (decision 081)."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lockstep.storage.dataset.layout import safe_relative
from lockstep.storage.documents import canonical_bytes, seal, unseal
from lockstep.storage.errors import CommunicationError, CorruptionError, LockstepError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, lost_write, publish_directory, read_back, write_file
from lockstep.storage.urls import join
from lockstep.training.control.protocol import Tag
from lockstep.training.control.server import Handler
from lockstep.training.driver.balance import Balancer
from lockstep.training.driver.live import RunProgress
from lockstep.training.driver.memory_watch import MemoryWatch
from lockstep.training.driver.retention import empty_trash, retire
from lockstep.training.driver.status import Board
from lockstep.training.driver.stragglers import Stragglers
from lockstep.training.launch.executors import ExecutorMemory
from lockstep.training.rules import Keep, check_metric
from lockstep.training.run import notes
from lockstep.training.run.best import Best, MetricValues, find_best
from lockstep.training.run.checkpoint_division import merge
from lockstep.training.run.comm_plans import freeze_plan
from lockstep.training.run.lineage import Checkpoint, CheckpointRef, Claim, check_newest
from lockstep.training.run.metrics import BAD_RECORD, PACE, READING, USAGE, PartWriter
from lockstep.training.run.paths import RunPaths, staged_checkpoint, staged_model

log = logging.getLogger(__name__)
METRICS_LOOK_S = 1.0
FORMAT_VERSION, DIFFERENCE_VERSION = 2, 3  # of checkpoints: see lockstep.training.run.checkpoint
MODEL_FORMAT_VERSION = 1


def _nothing() -> None:
    """The default of `before_rename`; tests pause a driver there."""


class CommitHandler:
    """Commits of one generation; the control server's threads call its methods, one for each rank."""

    def __init__(
        self,
        fs: FileSystem,
        paths: RunPaths,
        claim: Claim,
        plan: dict[str, Any],
        *,
        keep: Keep,
        deadline_s: float,
        before_rename: Callable[[], None] = _nothing,
        confirm: Callable[[], None] | None = None,
    ) -> None:
        """`confirm` raises SupersededError when this driver must delete nothing more; None reads only the claims."""
        self.tip = claim.parent
        self._fs, self._paths, self._claim, self._plan = fs, paths, claim, plan
        self._staging = paths.staging(claim.generation, claim.nonce)
        self._keep, self._deadline_s, self._before_rename = keep, deadline_s, before_rename
        self._values = MetricValues(keep)
        self._confirm = confirm or (lambda: check_newest(fs, paths, claim.generation))
        self._reports: dict[int, dict[int, dict[str, Any]]] = {}
        self._failed: LockstepError | None = None
        self._busy = False
        self._changed = threading.Condition()
        self._best: Best | None = None
        self._looked = False
        self._looking = threading.Lock()

    def checkpoint(self, rank: int, fields: dict[str, Any]) -> dict[str, Any]:
        """Take a rank's report: {step, files, tensors, audit, state, base}. Returns when all ranks' are committed.

        `base`: None, or the step of this generation's checkpoint to which this one is the difference.
        Raises CommunicationError naming ranks that did not report in time, or the error of the commit.
        """
        step, end = int(fields["step"]), time.monotonic() + self._deadline_s
        with self._changed:
            if self.tip is not None and self.tip.step == step:
                return {"committed": True}  # a run that was resumed at its end
            if self._failed is not None:
                raise self._failed  # a late rank must not complete a checkpoint that the driver has given up
            reports = self._reports.setdefault(step, {})
            reports[rank] = fields
            last = len(reports) == self._claim.num_ranks
            if last:
                self._busy = True
        if last:
            try:
                self._commit(step, [reports[r] for r in sorted(reports)])
            except LockstepError as error:
                self.abort(error)
                raise
            finally:
                with self._changed:
                    self._busy = False
                    self._reports.pop(step)  # each of thousands of checkpoints may have a MiB of reports
                    self._changed.notify_all()
            return {"committed": True}
        with self._changed:
            while self.tip is None or self.tip.step < step:
                if self._failed is not None:
                    raise self._failed
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    absent = ", ".join(str(r) for r in range(self._claim.num_ranks) if r not in reports)
                    raise CommunicationError(
                        f"the checkpoint of step {step} was not committed within {self._deadline_s:.0f} s",
                        got=f"no report of rank {absent}" if absent else "a slower storage",
                        allowed="reports of all ranks",
                        next_step="Look at the log of those ranks.",
                    )
        return {"committed": True}

    def best(self) -> Best | None:
        """The checkpoint whose weights the run's model gets, looked up once: ask after the last commit. None for a run
        whose model has the weights of the last step.
        """
        with self._looking:
            if not self._looked:
                self._best = find_best(self._fs, self._paths, self._keep, self._values)
                self._looked = True
            return self._best

    def model(self, rank: int, fields: dict[str, Any]) -> dict[str, Any]:
        """Publish rank 0's final export, {files}, as models/gNNNN."""
        best = self.best()
        of = self.tip if best is None else best.ref
        staged, target = staged_model(self._staging), self._paths.model(self._claim.generation)
        files = _files([fields], staged)
        manifest = {
            "format_version": MODEL_FORMAT_VERSION,
            "kind": "model",
            "generation": self._claim.generation,
            "checkpoint": str(of) if of else None,
            "plan": self._plan,
            "files": files,
        }
        self._publish(staged, target, manifest)
        return {"committed": True, "model": target}

    def abort(self, error: LockstepError) -> None:
        """Wake the waiting threads of ranks with an error."""
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()

    def newest(self) -> CheckpointRef | None:
        """The newest committed checkpoint."""
        return self.tip

    def close(self, wait_s: float) -> None:
        """Wait for a running commit; one that takes longer becomes an orphan of its generation."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, wait_s)

    def _commit(self, step: int, reports: list[dict[str, Any]]) -> None:
        if self.tip is not None and step <= self.tip.step:
            raise CommunicationError(
                f"a checkpoint of step {step} does not follow {self.tip}",
                got=f"step {step}",
                allowed=f"a step above {self.tip.step}",
                next_step="Look at the ranks' logs: they repeated steps.",
            )
        generation = self._claim.generation
        staged = staged_checkpoint(self._staging, step)
        audit = self._audits(reports)
        base = reports[0].get("base")
        manifest = {
            "format_version": FORMAT_VERSION if base is None else DIFFERENCE_VERSION,
            "kind": "checkpoint",
            "step": step,
            "generation": generation,
            "parent": self.tip.to_json() if self.tip else None,
            "plan": self._plan,
            "next_step": step,
            "num_ranks": self._claim.num_ranks,
            "files": _files(reports, staged),
            "tensors": merge([report.get("tensors", {}) for report in reports], staged),
            "audit": audit,
            "state": reports[0].get("state", {}),
            **({} if base is None else {"base": CheckpointRef(int(base), generation).to_json()}),
        }
        self._publish(staged, self._paths.checkpoint(step, generation), manifest)
        with self._changed:
            self.tip = CheckpointRef(step, generation)
            self._values.know(self.tip, manifest)
            self._changed.notify_all()
        state = manifest["state"]
        if not state.get("in_epoch", True):
            check_metric(self._keep.best, state["metrics"])
        # Delete what earlier commits moved there: a process that reads such a checkpoint had an interval to finish.
        empty_trash(self._fs, self._paths, generation, self._confirm)
        retire(self._fs, self._paths, generation, self._keep, self._values)

    def _publish(self, staged: str, target: str, manifest: dict[str, Any]) -> None:
        check_newest(self._fs, self._paths, self._claim.generation)
        self._check_uploads(staged, manifest["files"])
        sealed = seal(manifest)
        write_file(self._fs, join(staged, MANIFEST_NAME), sealed)
        self._fs.mkdirs(target.rpartition("/")[0])
        self._before_rename()
        # A newer claimant sweeps away what was written before this check, so a driver that is paused after it has
        # nothing to rename: see lockstep.training.driver.retention.drop_stagings.
        check_newest(self._fs, self._paths, self._claim.generation)
        try:
            publish_directory(self._fs, staged, target)
            where = join(target, MANIFEST_NAME)
            with read_back(where):
                unseal(self._fs.read_bytes(where), where)
        finally:
            # A driver that was paused before the rename has left an orphan, or found its uploads swept away: it must
            # not continue with retention or a result.
            check_newest(self._fs, self._paths, self._claim.generation)

    def _audits(self, reports: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        found = {}
        for file in (file for report in reports for file in report.get("audit", [])):
            path = safe_relative(file["path"], where=self._paths.root)
            url, found[path] = join(self._paths.root, path), _digest(file)
            with read_back(url):
                size = self._fs.stat(url).size_bytes
            if size != found[path]["bytes"]:
                raise lost_write(url, f"{size} bytes", f"{found[path]['bytes']} bytes, which its rank has reported")
        return found

    def _check_uploads(self, staged: str, files: dict[str, dict[str, Any]]) -> None:
        try:
            there = {entry.name: entry.size_bytes for entry in self._fs.list(staged) if not entry.is_dir}
        except NotFoundError:
            there = {}
        for name, info in files.items():
            if there.get(name) != info["bytes"]:
                raise lost_write(
                    join(staged, name),
                    f"{there.get(name, 'no')} bytes",
                    f"{info['bytes']} bytes, which its rank has reported",
                )


def _files(reports: Iterable[dict[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    for report in reports:
        for file in report["files"]:
            name = safe_relative(file["name"], where=where)
            if name in files:
                raise CorruptionError("two ranks uploaded files of the same name", file=join(where, name))
            files[name] = _digest(file)
    return files


def _digest(file: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": int(file["bytes"]), "sha256": str(file["sha256"])}


class RunHandler(Handler):
    """The driver's side of one generation of a run; used as a context manager around the launch."""

    def __init__(
        self,
        paths: RunPaths,
        claim: Claim,
        tip: Checkpoint | None,
        commits: CommitHandler,
        progress: RunProgress,
        overtaken: Callable[[], LockstepError | None] = lambda: None,
        memory: ExecutorMemory | None = None,
        on_epoch: Callable[[dict[str, Any]], None] = lambda row: None,
        leave: Callable[[], float | None] = lambda: None,
        rows: Sequence[int] = (),
        balancer: Balancer | None = None,
        bad_records: dict[str, int] | None = None,
        board: Board | None = None,
    ) -> None:
        """`memory`: an executor's memory for its ranks, if enforced; rank 0 reports what a rank needs. `on_epoch` takes
        the row of each epoch's metrics; `leave` is `Handler.leave`. `rows`: how many rows of a global batch each rank
        has (none: 1); `balancer` takes their times. `bad_records`: the words for what ranks skip, and how many records
        these are; `board` has requests to the ranks."""
        super().__init__()
        self._leave = leave
        self._on_epoch = on_epoch
        self.commits, self._memory, self._overtaken = commits, memory, overtaken
        self._paths, self._claim, self._tip, self._progress = paths, claim, tip, progress
        self._board = board
        self._metrics = PartWriter(paths.metrics(claim.generation), "jsonl", confirm=self._confirm)
        self.bad_records = {} if bad_records is None else bad_records
        self.suspects: dict[int, list[str]] = {}
        """The sample ids (hex) of each rank's part of the batch in which a rank of the generation before died."""
        self._step, self._loss_note, self._val_note = 0, "", ""
        self._doubted: set[str] = set()  # metrics that a note was printed about
        self._stragglers = Stragglers(rows or [1] * claim.num_ranks)
        self._balancer = balancer
        self._memory_watch = MemoryWatch(memory.rank_limit_mib() << 20 if memory else None)
        self._hosts: dict[int, str] = {}
        self._without_cache: set[str] = set()  # hosts that a note was printed about
        self._watching = threading.Lock()
        self._bar = threading.Lock()
        self._ended = threading.Event()
        self._uploader = threading.Thread(target=self._upload, name="metrics-upload", daemon=True)

    def __enter__(self) -> RunHandler:
        self._uploader.start()
        self.on_step(self._tip.ref.step if self._tip else 0)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.commits.abort(error if isinstance(error, LockstepError) else LockstepError(str(error)))
        self._ended.set()
        self._uploader.join()
        self._metrics.try_flush()

    def overtaken(self) -> LockstepError | None:
        """The error with which the launch must end."""
        return self._overtaken()

    def leave(self) -> float | None:
        """The seconds in which the ranks must leave; None while they train on."""
        return self._leave()

    def orders(self) -> Sequence[Tag]:
        """What `Handler.orders` says."""
        return () if self._board is None else self._board.orders()

    def on_stacks(self, rank: int, text: str) -> None:
        """Hand a rank's stacks on to the process that asked."""
        if self._board is not None:
            self._board.stacks(rank, text)

    def answer(self, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Answer one request or take one notice. Raises CommunicationError for an unknown kind."""
        if kind == "restore":
            return {
                "checkpoint": self._tip.url if self._tip else None,
                "step": self._tip.ref.step if self._tip else 0,
                "staging": self._paths.staging(self._claim.generation, self._claim.nonce),
                "generation": self._claim.generation,
                "parent": self._claim.parent.to_json() if self._claim.parent else None,
            }
        if kind == "checkpoint":
            if rank == 0:  # before its report, so before the commit, after which these steps are never repeated
                self._metrics.try_flush()
            return self.commits.checkpoint(rank, fields)
        if kind == "best":
            best = self.commits.best()
            return {"checkpoint": None if best is None else best.url}
        if kind == "model":
            return self.commits.model(rank, fields)
        if kind == "metrics":
            self._take_metrics(fields["rows"])
            return {}
        if kind == "memory":
            near = self._memory.judge(int(fields["rank_mib"]), "a rank of this model") if self._memory else None
            if near is not None:
                print(near, file=sys.stderr, flush=True)
            return {}
        if kind == "suspect":
            self.suspects[rank] = fields["samples"]
            return {}
        if kind == "comm_plan":
            fs = filesystem(self._paths.root)
            url = freeze_plan(fs, self._paths, self._claim.generation, fields["plan"])
            print(f"the order in which ranks add gradients is frozen in {url}", file=sys.stderr, flush=True)
            return {}
        raise CommunicationError(
            f"rank {rank} asked for `{kind}`",
            got=kind,
            allowed="restore, checkpoint, metrics, best, model, comm_plan, memory, suspect",
            next_step="Ship one version to ranks and driver.",
        )

    def on_step(self, step: int) -> None:
        """Show rank 0's steps in the progress bar."""
        with self._bar:
            self._step = step
            self._progress.set(step, self._note())

    def _take_metrics(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["kind"] == PACE:
                self._watch(row)
                continue
            self._metrics.add(canonical_bytes(row).decode())
            self._watch(row)
            if row["kind"] == "epoch":
                self._doubt(row)
                val_loss = row["metrics"].get("val_loss")
                if isinstance(val_loss, float):
                    self._val_note = f"val_loss {val_loss:.4f} of epoch {row['epoch'] + 1}"
                self._on_epoch(row)
            loss = row.get("loss")
            if isinstance(loss, float) and math.isfinite(loss):
                self._loss_note = f"loss {loss:.4f}"
            with self._bar:
                self._progress.add(row)
                if row["kind"] == "epoch":  # the last one follows the last step
                    self._step = max(self._step, row["step"])
                    self._progress.set(self._step, self._note())

    def _watch(self, row: dict[str, Any]) -> None:
        """Print a note on a rank that slows the others down, on memory that is running out, and on a full cache."""
        with self._watching:
            if row["kind"] == READING and "cache_failure" in row:
                self._note_cache(row["host"], row["cache_failure"])
            if row["kind"] == "time" and self._balancer is not None and (move := self._balancer.add(row)) is not None:
                notes.show([move.note()])
            if row["kind"] == USAGE:
                self._hosts[row["rank"]] = row["host"]
                notes.show(self._memory_watch.add(row, time.monotonic()))
            elif row["kind"] == BAD_RECORD and row["what"] not in self.bad_records:
                self.bad_records[row["what"]] = row.get("records", 1)
                if len(self.bad_records) <= notes.NAMED:
                    notes.show([f"weight 0: {row['what']}; next: restore the file, or build the dataset again"])
            elif row["kind"] == PACE and (found := self._stragglers.add(row)) is not None:
                host = self._hosts.get(found.rank, "an unknown host")
                slow = found.to_row(row["step"], host)
                self._metrics.add(canonical_bytes(slow).decode())
                with self._bar:
                    self._progress.add(slow)
                notes.show([found.note(host)])

    def _note_cache(self, host: str, failure: str) -> None:
        if host not in self._without_cache:
            self._without_cache.add(host)
            notes.show(
                [
                    f"the cache on {host} takes no more blocks ({failure}), and the ranks there read them from the "
                    "dataset; next: free space on that disk before the next start, or lower --cache-bytes"
                ]
            )

    def _note(self) -> str:
        return ", ".join(filter(None, [self._loss_note, self._val_note]))

    def _doubt(self, row: dict[str, Any]) -> None:
        """Print a note, once for each metric, on what makes an epoch's numbers doubtful."""
        fresh = {name: value for name, value in row["metrics"].items() if name not in self._doubted}
        found = notes.of_metrics(fresh, f"the metrics of epoch {row['epoch'] + 1}")
        self._doubted |= {name for name in fresh if notes.of_metrics({name: fresh[name]}, "")}
        if "class_counts" not in self._doubted:
            found += notes.of_classes(row.get("class_counts"), "the training data")
        self._doubted.add("class_counts")
        notes.show(found)

    def _confirm(self) -> None:
        check_newest(filesystem(self._paths.root), self._paths, self._claim.generation)

    def _upload(self) -> None:
        while not self._ended.wait(METRICS_LOOK_S):
            self._metrics.flush_if_due()
