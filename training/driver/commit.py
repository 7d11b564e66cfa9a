"""Commits of checkpoints: ranks upload and report, the driver writes the manifest and renames (decision 081)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from lockstep.storage.dataset.layout import safe_relative
from lockstep.storage.documents import seal, unseal
from lockstep.storage.errors import CommunicationError, CorruptionError, LockstepError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import MANIFEST_NAME, lost_write, publish_directory, read_back, write_file
from lockstep.storage.urls import join
from lockstep.training.control.messages import CheckpointReport
from lockstep.training.driver.retention import empty_trash, retire
from lockstep.training.rules import Keep, check_metric
from lockstep.training.run.best import Best, MetricValues, find_best
from lockstep.training.run.checkpoint import FORMAT_VERSION
from lockstep.training.run.checkpoint_division import merge
from lockstep.training.run.lineage import CheckpointRef, Claim, check_newest
from lockstep.training.run.paths import RunPaths, staged_checkpoint, staged_model

log = logging.getLogger(__name__)
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
        self._reports: dict[int, dict[int, CheckpointReport]] = {}
        self._failed: LockstepError | None = None
        self._busy = False
        self._changed = threading.Condition()
        self._best: Best | None = None
        self._looked = False
        self._looking = threading.Lock()

    def checkpoint(self, rank: int, report: CheckpointReport) -> dict[str, Any]:
        """Take a rank's report. Returns when all ranks' are committed.

        Raises CommunicationError naming ranks that did not report in time, or the error of the commit.
        """
        step, end = report.step, time.monotonic() + self._deadline_s
        with self._changed:
            if self.tip is not None and self.tip.step == step:
                return {"committed": True}  # a run that was resumed at its end
            if self._failed is not None:
                raise self._failed  # a late rank must not complete a checkpoint that the driver has given up
            reports = self._reports.setdefault(step, {})
            reports[rank] = report
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
        files = _files([fields["files"]], staged)
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

    def _commit(self, step: int, reports: list[CheckpointReport]) -> None:
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
        base = reports[0].base
        manifest = {
            "format_version": FORMAT_VERSION,
            "kind": "checkpoint",
            "step": step,
            "generation": generation,
            "parent": self.tip.to_json() if self.tip else None,
            "plan": self._plan,
            "next_step": step,
            "num_ranks": self._claim.num_ranks,
            "files": _files([report.files for report in reports], staged),
            "tensors": merge([report.tensors for report in reports], staged),
            "audit": audit,
            "state": reports[0].state,
            **({} if base is None else {"base": CheckpointRef(int(base), generation).to_json()}),
        }
        self._publish(staged, self._paths.checkpoint(step, generation), manifest)
        with self._changed:
            self.tip = CheckpointRef(step, generation)
            self._values.know(self.tip, manifest)
            self._changed.notify_all()
        state = reports[0].state
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

    def _audits(self, reports: list[CheckpointReport]) -> dict[str, dict[str, Any]]:
        found = {}
        for file in (file for report in reports for file in report.audit):
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


def _files(uploads: Iterable[Iterable[dict[str, Any]]], where: str) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    for upload in uploads:
        for file in upload:
            name = safe_relative(file["name"], where=where)
            if name in files:
                raise CorruptionError("two ranks uploaded files of the same name", file=join(where, name))
            files[name] = _digest(file)
    return files


def _digest(file: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": int(file["bytes"]), "sha256": str(file["sha256"])}
