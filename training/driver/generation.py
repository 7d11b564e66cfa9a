"""One generation of a run as the driver sees it: it answers the ranks' requests and takes their metrics."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import CommunicationError, ConfigError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.training.control.messages import (
    BestCheckpoint,
    CheckpointReport,
    MadePlan,
    MetricRows,
    RankMemory,
    Restore,
    Suspect,
)
from lockstep.training.control.protocol import Tag
from lockstep.training.control.server import Handler
from lockstep.training.driver.balance import Balancer
from lockstep.training.driver.commit import CommitHandler
from lockstep.training.driver.memory_plan import Size, smaller
from lockstep.training.driver.memory_watch import MemoryWatch
from lockstep.training.driver.status_board import Board
from lockstep.training.driver.stragglers import Stragglers
from lockstep.training.launch.executors import ExecutorMemory
from lockstep.training.run import notes
from lockstep.training.run.comm_plans import freeze_plan
from lockstep.training.run.lineage import Checkpoint, Claim, check_newest
from lockstep.training.run.metrics import BAD_RECORD, PACE, READING, USAGE, PartWriter
from lockstep.training.run.paths import RunPaths

METRICS_LOOK_S = 1.0


class Watch:
    """Prints a note on what ranks report that the user should know: slow ranks, memory, a full cache, odd numbers."""

    def __init__(
        self,
        rows: Sequence[int],
        *,
        memory: ExecutorMemory | None = None,
        host_bytes: int | None = None,
        balancer: Balancer | None = None,
        bad_records: dict[str, int] | None = None,
    ) -> None:
        """`rows`: how many rows of a global batch each rank has. `memory`: an executor's memory for its ranks, if it is
        enforced. `host_bytes`: this host's memory for each rank, if all run here. `balancer` takes the ranks' times.
        `bad_records` gets the words for what ranks skip, and how many records these are.
        """
        self.memory, self.bad_records = memory, {} if bad_records is None else bad_records
        self._num_ranks, self._host_bytes = len(rows), host_bytes
        self._stragglers, self._balancer = Stragglers(rows), balancer
        self._memory_watch = MemoryWatch(memory.rank_limit_mib() << 20 if memory else None)
        self._hosts: dict[int, str] = {}
        self._without_cache: set[str] = set()  # hosts that a note was printed about
        self._doubted: set[str] = set()  # metrics that a note was printed about
        self._lock = threading.Lock()

    def add(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Take a row of metrics; returns the row that names a rank as slow, if this one shows it."""
        with self._lock:
            kind = row["kind"]
            if kind == READING and "cache_failure" in row:
                self._note_cache(row["host"], row["cache_failure"])
            elif kind == "time" and self._balancer is not None and (move := self._balancer.add(row)) is not None:
                notes.show([move.note()])
            elif kind == USAGE:
                self._hosts[row["rank"]] = row["host"]
                notes.show(self._memory_watch.add(row, time.monotonic()))
            elif kind == BAD_RECORD and row["what"] not in self.bad_records:
                self.bad_records[row["what"]] = row.get("records", 1)
                if len(self.bad_records) <= notes.NAMED:
                    notes.show([f"weight 0: {row['what']}; next: restore the file, or build the dataset again"])
            elif kind == "epoch":
                self._doubt(row)
            elif kind == PACE and (found := self._stragglers.add(row)) is not None:
                host = self._hosts.get(found.rank, "an unknown host")
                notes.show([found.note(host)])
                return found.to_row(row["step"], host)
        return None

    def judge(self, need: RankMemory) -> None:
        """Print a note if an executor's memory, or this host's, is too small or nearly so for ranks that need so much.
        Raises ConfigError if an executor's is too small. Both say which `--zero` would fit, if one would.
        """
        limit = self.memory.rank_limit_mib() << 20 if self.memory else self._host_bytes
        if limit is None:
            return
        size = Size(weights=need.weights_bytes, gradients=need.gradient_bytes, state=need.state_bytes)
        better = smaller(size, self._num_ranks, need.rank_mib << 20, limit)
        hint = f"does not fit: {better}" if better else "does not fit: more memory, or a smaller model"
        if self.memory is None:
            if need.rank_mib << 20 > limit:
                notes.show([f"a rank needs about {need.rank_mib} MiB of this host's {limit >> 20} for each; {hint}"])
            return
        try:
            near = self.memory.judge(need.rank_mib, "a rank of this model")
        except ConfigError as error:
            next_step = f"{hint}. {error.next_step}" if better else error.next_step
            raise ConfigError(error.what, got=error.got, allowed=error.allowed, next_step=next_step) from error
        if near is not None:
            print(near, file=sys.stderr, flush=True)

    def _note_cache(self, host: str, failure: str) -> None:
        if host not in self._without_cache:
            self._without_cache.add(host)
            notes.show(
                [
                    f"the cache on {host} takes no more blocks ({failure}), and the ranks there read them from the "
                    "dataset; next: free space on that disk before the next start, or lower --cache-bytes"
                ]
            )

    def _doubt(self, row: dict[str, Any]) -> None:
        """Print a note, once for each metric, on what makes an epoch's numbers doubtful."""
        fresh = {name: value for name, value in row["metrics"].items() if name not in self._doubted}
        found = notes.of_metrics(fresh, f"the metrics of epoch {row['epoch'] + 1}")
        self._doubted |= {name for name in fresh if notes.of_metrics({name: fresh[name]}, "")}
        if "class_counts" not in self._doubted:
            found += notes.of_classes(row.get("class_counts"), "the training data")
        self._doubted.add("class_counts")
        notes.show(found)


class RunHandler(Handler):
    """The driver's side of one generation of a run; used as a context manager around the launch."""

    def __init__(
        self,
        paths: RunPaths,
        claim: Claim,
        tip: Checkpoint | None,
        commits: CommitHandler,
        board: Board,
        watch: Watch,
        *,
        overtaken: Callable[[], LockstepError | None] = lambda: None,
        on_epoch: Callable[[dict[str, Any]], None] = lambda row: None,
        leave: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`tip` is the checkpoint that the generation starts from; `board` shows the run and has requests to the ranks;
        `on_epoch` takes the row of each epoch's metrics; `leave` is `Handler.leave`.
        """
        super().__init__()
        self.commits = commits
        self.suspects: dict[int, list[str]] = {}
        """The sample ids (hex) of each rank's part of the batch in which a rank of the generation before died."""
        self._paths, self._claim, self._tip, self._board, self._watch = paths, claim, tip, board, watch
        self._overtaken, self._leave, self._on_epoch = overtaken, leave, on_epoch
        self._metrics = PartWriter(paths.metrics(claim.generation), "jsonl", confirm=self._confirm)
        self._step, self._loss_note, self._val_note = 0, "", ""
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
        return self._board.orders()

    def on_stacks(self, rank: int, text: str) -> None:
        """Hand a rank's stacks on to the process that asked."""
        self._board.stacks(rank, text)

    def answer(self, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Answer one request or take one notice. Raises CommunicationError for an unknown kind."""
        if kind == "restore":
            return Restore(
                checkpoint=self._tip.url if self._tip else None,
                step=self._tip.ref.step if self._tip else 0,
                staging=self._paths.staging(self._claim.generation, self._claim.nonce),
                generation=self._claim.generation,
                parent=self._claim.parent.to_json() if self._claim.parent else None,
            ).to_json()
        if kind == "checkpoint":
            if rank == 0:  # before its report, so before the commit, after which these steps are never repeated
                self._metrics.try_flush()
            return self.commits.checkpoint(rank, CheckpointReport.from_json(fields))
        if kind == "best":
            best = self.commits.best()
            return BestCheckpoint(checkpoint=None if best is None else best.url).to_json()
        if kind == "model":
            return self.commits.model(rank, fields)
        if kind == "metrics":
            self._take_metrics(MetricRows.from_json(fields).rows)
            return {}
        if kind == "memory":
            self._watch.judge(RankMemory.from_json(fields))
            return {}
        if kind == "suspect":
            self.suspects[rank] = Suspect.from_json(fields).samples
            return {}
        if kind == "comm_plan":
            fs = filesystem(self._paths.root)
            url = freeze_plan(fs, self._paths, self._claim.generation, MadePlan.from_json(fields).plan)
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
            self._board.set(step, self._note())

    def _take_metrics(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["kind"] != PACE:
                self._metrics.add(canonical_bytes(row).decode())
            if (slow := self._watch.add(row)) is not None:
                self._metrics.add(canonical_bytes(slow).decode())
                with self._bar:
                    self._board.add(slow)
            if row["kind"] != PACE:
                self._show(row)

    def _show(self, row: dict[str, Any]) -> None:
        if row["kind"] == "epoch":
            val_loss = row["metrics"].get("val_loss")
            if isinstance(val_loss, float):
                self._val_note = f"val_loss {val_loss:.4f} of epoch {row['epoch'] + 1}"
            self._on_epoch(row)
        loss = row.get("loss")
        if isinstance(loss, float) and math.isfinite(loss):
            self._loss_note = f"loss {loss:.4f}"
        with self._bar:
            self._board.add(row)
            if row["kind"] == "epoch":  # the last one follows the last step
                self._step = max(self._step, row["step"])
                self._board.set(self._step, self._note())

    def _note(self) -> str:
        return ", ".join(filter(None, [self._loss_note, self._val_note]))

    def _confirm(self) -> None:
        check_newest(filesystem(self._paths.root), self._paths, self._claim.generation)

    def _upload(self) -> None:
        while not self._ended.wait(METRICS_LOOK_S):
            self._metrics.flush_if_due()
