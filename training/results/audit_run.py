"""The audit of a whole run: which files count along its chain of claims, held against its data set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import is_temporary
from lockstep.storage.urls import join
from training.batches.training_set import TrainingSet
from training.plan.planning import LANE_GROUPS
from training.results.audit import AuditReport, Rows, all_ids, check_audit, parse_audit
from training.results.audit_places import Part, Span, misplaced
from training.run.chain import chain_of, find_tip
from training.run.lineage import CheckpointRef, epochs_asked, read_claims
from training.run.paths import RunPaths, audit_step_of
from training.run.run_json import read_run


class NotAuditedError(DataError):
    """There is nothing to hold a run against: it has no audit, no checkpoint yet, or its dataset is not there."""


def audit_files(fs: FileSystem, paths: RunPaths, tip: CheckpointRef) -> list[str]:
    """URLs of the audit files that lead to `tip`, oldest first.

    Those of its generation up to its step, then those of that claim's parent up to the parent's step, and so back.
    The claims decide, since retention removes old checkpoints but no audit; a part that was uploaded for a checkpoint
    that was never committed lies past the step from which the next generation began, and does not count.
    """
    claims = read_claims(fs, paths)
    found: list[list[str]] = []
    place: CheckpointRef | None = tip
    while place is not None:
        if place.generation not in claims:
            raise DataError(
                f"{paths.root} has no claim of generation {place.generation}",
                got=f"claims {sorted(claims)}",
                allowed="a claim for each generation of the chain",
                next_step=f"Run `python -m jobs.verify {paths.root}`.",
            )
        found.append(_files_of(fs, paths, place))
        place = claims[place.generation].parent
    return [url for urls in reversed(found) for url in urls]


def audit_spans(fs: FileSystem, paths: RunPaths, tip: CheckpointRef) -> list[Span]:
    """The steps that each generation did on the way to `tip`, oldest first, and its number of ranks."""
    claims, found = read_claims(fs, paths), []
    place: CheckpointRef | None = tip
    while place is not None:
        claim = claims[place.generation]
        first = claim.parent.step + 1 if claim.parent else 1
        found.append(Span(place.generation, claim.num_ranks, first, place.step))
        place = claim.parent
    return found[::-1]


def check_run_audit(run_url: str, dataset_url: str | None = None) -> AuditReport:
    """Check the audits of a run up to its tip. `dataset_url` where the dataset has moved since the run began.

    Raises NotAuditedError for a run without `--audit` or a checkpoint and where its dataset is not there, DataError
    where the chain is broken, CorruptionError for what cannot be read.
    """
    fs, paths = filesystem(run_url), RunPaths(run_url)
    chain_of(fs, paths)  # first: what is lost of it is a fault without an audit too
    document = read_run(fs, paths)
    config: dict[str, Any] = document["config"]
    if not config["audit"]:
        raise _unchecked(run_url, "a run without --audit")
    tip = find_tip(fs, paths)
    if tip is None:
        raise _unchecked(run_url, "a run without a checkpoint")
    try:
        # A run from before `mix` was there has none.
        datasets = [dataset_url] if dataset_url else config["datasets"]
        opened = TrainingSet.at(datasets, config["split"], config.get("mix"))
        plan = opened.plan(document["plan"], f"{paths.run_json}: plan")
    except CorruptionError:
        raise
    except (ConfigError, DataError) as error:
        raise _unchecked(run_url, error.what) from error
    # Of a thousand epochs that were asked for, those that the steps so far, and one more, reach: memory goes with them.
    epochs = min(epochs_asked(read_claims(fs, paths)), plan.epoch_of_step(tip.ref.step) + 1)
    files = audit_files(fs, paths, tip.ref)
    contents = [(url, fs.read_bytes(url)) for url in files]
    report = check_audit(plan, opened.readers, contents, steps=tip.ref.step, epochs=epochs)
    parts = [_part(url, parse_audit(data, file=url)) for url, data in contents]
    groups = LANE_GROUPS if config["batchnorm"] == "ghost" else None
    ids = all_ids(opened.readers[0])
    return replace(report, places=tuple(misplaced(plan, groups, ids, audit_spans(fs, paths, tip.ref), parts)))


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
            raise CorruptionError("a folder that is no rank's", file=join(directory, strange), got=strange)
    except NotFoundError:
        return []
    for rank in ranks:
        for entry in fs.list(join(directory, rank)):
            step = audit_step_of(entry.name)
            if step is None and is_temporary(entry.name):  # its rank was killed while it wrote; no checkpoint names it
                continue
            if step is None:
                raise CorruptionError("a file that is no part of an audit", file=entry.url, got=entry.name)
            if step <= upto.step:
                urls.append((step, entry.url))
    return [url for _, url in sorted(urls)]


def _unchecked(run_url: str, got: str) -> NotAuditedError:
    return NotAuditedError(
        f"{run_url} has no audit to check",
        got=got,
        allowed="a run with `audit` in its config and at least one checkpoint, and its dataset where it was",
        next_step="Train with --audit, and keep the dataset.",
    )
