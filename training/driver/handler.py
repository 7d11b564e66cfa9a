"""The driver's answers to the ranks of one generation."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any

from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import CommunicationError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.progress import Progress
from training.driver.commit import CommitHandler
from training.launch.executors import ExecutorMemory
from training.run import notes
from training.run.chain import Checkpoint
from training.run.comm_plans import freeze_plan
from training.run.lineage import Claim, check_newest
from training.run.metrics import PartWriter
from training.run.paths import RunPaths

LOOK_EVERY_S = 1.0


class RunHandler:
    """Called by the control server: `handler(rank, kind, fields)`; used as a context manager around the launch."""

    def __init__(
        self,
        paths: RunPaths,
        claim: Claim,
        tip: Checkpoint | None,
        commits: CommitHandler,
        progress: Progress,
        overtaken: Callable[[], LockstepError | None] = lambda: None,
        memory: ExecutorMemory | None = None,
    ) -> None:
        """`memory`: what an executor has for its ranks, where that is enforced; rank 0 says what a rank takes."""
        self.commits, self._memory = commits, memory
        self.overtaken = overtaken  # asked by the control server: the error with which the launch must end
        self._paths, self._claim, self._tip, self._progress = paths, claim, tip, progress
        self._metrics = PartWriter(paths.metrics(claim.generation), "jsonl", confirm=self._confirm)
        self._note = ""
        self._doubted: set[str] = set()  # what has been said of the numbers
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

    def __call__(self, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Answer one request or take one notice; an unknown kind raises CommunicationError."""
        if kind == "restore":
            return {
                "checkpoint": self._tip.url if self._tip else None,
                "step": self._tip.ref.step if self._tip else 0,
                "staging": self._paths.staging(self._claim.generation, self._claim.nonce),
                "generation": self._claim.generation,
                "parent": self._claim.parent.to_json() if self._claim.parent else None,
            }
        if kind == "checkpoint":
            if rank == 0:  # before its report, so before the commit: nobody makes these steps again
                self._metrics.try_flush()
            return self.commits.checkpoint(rank, fields)
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
        if kind == "comm_plan":
            fs = filesystem(self._paths.root)
            url = freeze_plan(fs, self._paths, self._claim.generation, fields["plan"])
            print(f"how ranks add up is frozen in {url}", file=sys.stderr, flush=True)
            return {}
        raise CommunicationError(
            f"rank {rank} asked for `{kind}`",
            got=kind,
            allowed="restore, checkpoint, metrics, model, comm_plan, memory",
            next_step="Ranks and driver run different versions; ship one.",
        )

    def on_step(self, step: int) -> None:
        """Show that rank 0 has done so many steps."""
        with self._bar:
            self._progress.set(step, self._note)

    def _take_metrics(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self._metrics.add(canonical_bytes(row).decode())
            if row["kind"] == "epoch":
                self._doubt(row)
            loss = row.get("loss")
            if isinstance(loss, float) and math.isfinite(loss):
                self._note = f"loss {loss:.4f}"

    def _doubt(self, row: dict[str, Any]) -> None:
        """Say once what puts the numbers of an epoch in doubt."""
        fresh = {name: value for name, value in row["metrics"].items() if name not in self._doubted}
        found = notes.of_metrics(fresh, f"the metrics of epoch {row['epoch'] + 1}")
        self._doubted |= {name for name in fresh if notes.of_metrics({name: fresh[name]}, "")}
        if "class_counts" not in self._doubted:
            found += notes.of_classes(row.get("class_counts"), "what is trained on")
        self._doubted.add("class_counts")
        notes.show(found)

    def _confirm(self) -> None:
        check_newest(filesystem(self._paths.root), self._paths, self._claim.generation)

    def _upload(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            self._metrics.flush_if_due()
