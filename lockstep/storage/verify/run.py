"""Verification of a run: claims, results, plans, checkpoints, models, and the closed parts of metrics and logs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from lockstep.storage import documents, run_layout
from lockstep.storage.dataset.layout import safe_relative
from lockstep.storage.documents import unseal
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from lockstep.storage.formats.safetensors import check_part, read_divided, read_header
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME
from lockstep.storage.urls import basename, parent
from lockstep.storage.verify.check import Check

SINGLY = 20  # missing numbers of a gap that get a finding each
_GENERATION = re.compile(r"(?:^|\.)g([0-9]{4,})")  # in names of any room


def check_parts(check: Check, folder: str) -> None:
    """Closed parts: numbered without gaps, whole lines; those of metrics hold one JSON object a line."""
    numbers: list[int] = []
    for name in check.names(folder):
        path, found = f"{folder}/{name}", run_layout.part_of(name)
        if found is None:
            check.unexpected(path)
            continue
        number, suffix = found
        numbers.append(number)
        try:
            data = check.fs.read_bytes(check.url(path))
        except (CorruptionError, NotFoundError) as error:
            check.caught(path, error)
            continue
        check.on_bytes(len(data))
        place = _bad_line(data, json_lines=suffix == "jsonl")
        if place is None:
            check.on_ok(path, f"{len(data)} bytes")
        else:
            what = "not a whole line of JSON" if suffix == "jsonl" else "not a whole line"
            check.bad(path, what, record=place[0], offset=place[1])
    note_gaps(check, folder, numbers, 0, max(numbers, default=-1), "part-{:05d}".format)


def note_gaps(
    check: Check, folder: str, numbers: Iterable[int], first: int, last: int, name_of: Callable[[int], str]
) -> None:
    """Note each of `first` to `last` that is missing in `numbers`; of a long gap, the first SINGLY and its end.

    A name may hold any number, and the findings must not grow with it.
    """
    for before, after in pairwise([first - 1, *sorted(number for number in {*numbers} if number >= first), last + 1]):
        for number in range(before + 1, after)[:SINGLY]:
            check.bad(f"{folder}/{name_of(number)}", "missing")
        if after - before - 1 > SINGLY:
            what = f"missing, as are all up to {folder}/{name_of(after - 1)}"
            check.bad(f"{folder}/{name_of(before + 1 + SINGLY)}", what)


def _bad_line(data: bytes, *, json_lines: bool) -> tuple[int, int] | None:
    offset, lines = 0, data.split(b"\n")
    if lines[-1]:
        return len(lines) - 1, len(data)
    for number, line in enumerate(lines[:-1] if json_lines else []):
        try:
            good = isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            good = False
        if not good:
            return number, offset
        offset += len(line) + 1
    return None


def check_checkpoint(check: Check) -> None:
    """Check one checkpoint directory, and its audit files if it is inside a run."""
    manifest = _check_sealed_directory(check, "", "checkpoint")
    run = parent(parent(check.root))
    if manifest["audit"] and filesystem(run).exists(f"{run}/{run_layout.RUN_JSON}"):
        around = Check(check.fs, run, check.on_ok, check.on_bytes)
        _check_files(around, "", manifest["audit"])
        check.findings += around.findings


def check_model(check: Check) -> None:
    """Check one exported model directory."""
    _check_sealed_directory(check, "", "model")


def check_predictions(check: Check) -> None:
    """Check one directory of predictions."""
    _check_sealed_directory(check, "", "predictions")


def check_run(check: Check) -> None:
    """Check a run directory. Raises DataError or NotFoundError where run.json is unusable."""
    unseal(check.fs.read_bytes(check.url(run_layout.RUN_JSON)), check.url(run_layout.RUN_JSON))
    check.on_ok(run_layout.RUN_JSON, "sealed")
    for name in (run_layout.STOPPED, run_layout.SELECTION):
        if check.fs.exists(check.url(name)) and _sealed(check, name) is not None:
            check.on_ok(name, "sealed")
    _check_claims(check)
    for name in check.names(run_layout.RESULTS):
        path, generation = f"{run_layout.RESULTS}/{name}", run_layout.result_of(name)
        if generation is None:
            check.unexpected(path)
        elif (doc := _sealed(check, path)) is not None:
            if doc.get("generation") != generation:
                check.bad(path, f"the generation inside is {doc.get('generation')!r}")
            else:
                check.on_ok(path, "sealed")
    for name in check.names(run_layout.COMM_PLANS):
        path = f"{run_layout.COMM_PLANS}/{name}"
        if run_layout.comm_plan_ranks_of(name) is None:
            check.unexpected(path)
        elif _sealed(check, path) is not None:
            check.on_ok(path, "sealed")
    for name in check.names(run_layout.BASELINES):
        if _sealed(check, path := f"{run_layout.BASELINES}/{name}") is not None:
            check.on_ok(path, "sealed")
    for name in check.names(run_layout.CHECKPOINTS):
        _check_commit(check, f"{run_layout.CHECKPOINTS}/{name}", "checkpoint")
    for name in check.names(run_layout.MODELS):
        _check_commit(check, f"{run_layout.MODELS}/{name}", "model")
    _check_trashed_audits(check)
    for folder, rooms in (
        (run_layout.METRICS, check.names(run_layout.METRICS)),
        (run_layout.LOGS, _log_folders(check)),
    ):
        for room in rooms:
            check_parts(check, f"{folder}/{room}")


def _check_claims(check: Check) -> None:
    # A driver claims its generation before it writes. Listed before the claims: a running driver may add one meanwhile.
    written = [
        int(g) for room in run_layout.BY_GENERATION for name in check.names(room) for g in _GENERATION.findall(name)
    ]
    numbers = []
    for name in check.names(run_layout.CLAIMS):
        path, generation = f"{run_layout.CLAIMS}/{name}", run_layout.claim_of(name)
        if generation is None:
            check.unexpected(path)
            continue
        numbers.append(generation)
        doc = _sealed(check, path)
        if doc is not None and doc.get("generation") != generation:
            check.bad(path, f"the generation inside is {doc.get('generation')!r}")
        elif doc is not None:
            check.on_ok(path, "sealed")
    note_gaps(check, run_layout.CLAIMS, numbers, 1, max([0, *numbers, *written]), run_layout.claim_name)


def _check_commit(check: Check, path: str, kind: str) -> None:
    try:
        manifest = _check_sealed_directory(check, path, kind)
        _check_base(check, path, manifest)
    except (DataError, NotFoundError) as error:
        check.caught(f"{path}/{MANIFEST_NAME}", error)
        return
    if kind == "checkpoint":
        _check_files(check, "", manifest["audit"])


def _check_base(check: Check, path: str, manifest: dict[str, Any]) -> None:
    """The checkpoint of which this one holds the difference must be there; it is checked as every other."""
    if manifest.get("base") is None:
        return
    where = check.url(f"{path}/{MANIFEST_NAME}")
    base = documents.obj(manifest["base"], ("step", "generation"), where=f"{where}: base")
    step, generation = (documents.count(base[part], where=f"{where}: base") for part in ("step", "generation"))
    if (step, generation) not in map(run_layout.checkpoint_of, check.names(run_layout.CHECKPOINTS)):
        check.bad(f"{path}/{MANIFEST_NAME}", f"the checkpoint of step {step}, whose difference it holds, is missing")


def _check_sealed_directory(check: Check, path: str, kind: str) -> dict[str, Any]:
    below = f"{path}/" if path else ""
    where = check.url(f"{below}{MANIFEST_NAME}")
    manifest = unseal(check.fs.read_bytes(where), where)
    documents.string(manifest.get("kind"), where=f"{where}: kind", choices=(kind,))
    files = _listed(manifest, "files", where)
    if kind == "checkpoint":
        manifest["audit"] = _listed(manifest, "audit", where)
        directory = basename(parent(where))
        of_name = run_layout.checkpoint_of(directory)
        if of_name is not None and of_name != (manifest.get("step"), manifest.get("generation")):
            found = f"step {manifest.get('step')}, generation {manifest.get('generation')}"
            what = "a manifest that contradicts its directory's name"
            raise CorruptionError(what, file=where, got=found, allowed=f"those of {directory}")
    check.on_ok(f"{below}{MANIFEST_NAME}", f"{len(files)} files")
    before = len(check.findings)
    _check_files(check, below, files)
    if kind == "checkpoint" and len(check.findings) == before:
        _check_tensors(check, below, manifest, files)
    check.extra_files({f"{below}{MANIFEST_NAME}", *(below + name for name in files)}, path)
    return manifest


def _check_tensors(check: Check, below: str, manifest: dict[str, Any], files: dict[str, tuple[int, str]]) -> None:
    """Compare the manifest's `tensors` with the headers of the ranks' files, as resuming from the checkpoint does."""
    where, headers = check.url(f"{below}{MANIFEST_NAME}"), {}
    for name, (size, _) in files.items():
        rank = run_layout.rank_of(name)
        if rank is not None and name == _rank_file(rank):
            try:
                with check.fs.open_read(check.url(below + name)) as file:
                    headers[rank] = read_header(file, size, check.url(below + name))
            except CorruptionError as error:
                check.caught(below + name, error)
                return
    ranks = documents.count(manifest.get("num_ranks"), where=f"{where}: num_ranks", least=1)
    wrote = {rank for name in files if (rank := run_layout.rank_of(name)) is not None}
    if len(wrote) != ranks or max(wrote, default=-1) != ranks - 1:
        check.bad(f"{below}{MANIFEST_NAME}", f"files of ranks {sorted(wrote)} where num_ranks is {ranks}")
        return
    for name, entry in documents.mapping(manifest.get("tensors"), where=f"{where}: tensors").items():
        tensor = read_divided(name, entry, where)
        for part in tensor.parts:
            file_name = _rank_file(part[0])
            try:
                check_part(name, tensor, part, headers.get(part[0], {}), check.url(below + file_name))
            except CorruptionError as error:
                check.caught(below + file_name, error)


def _rank_file(rank: int) -> str:
    return f"{run_layout.rank_name(rank)}.safetensors"


def _listed(manifest: dict[str, Any], key: str, where: str) -> dict[str, tuple[int, str]]:
    listed = {}
    for name, value in documents.mapping(manifest.get(key), where=f"{where}: {key}").items():
        info = documents.obj(value, ("bytes", "sha256"), where=f"{where}: {name}")
        size = documents.count(info["bytes"], where=f"{where}: {name}")
        listed[safe_relative(name, where=where)] = (size, documents.sha256(info["sha256"], where=f"{where}: {name}"))
    return listed


def _check_files(check: Check, below: str, files: dict[str, tuple[int, str]]) -> None:
    for name, (size, digest) in files.items():
        if check.file(below + name, size, digest):
            check.on_ok(below + name, f"{size} bytes")


def _check_trashed_audits(check: Check) -> None:
    # Retention moves old checkpoints to the trash, but their audits remain part of the run's record.
    for trash in check.names(run_layout.TRASHES):
        for name in check.names(f"{run_layout.TRASHES}/{trash}"):
            where = check.url(f"{run_layout.TRASHES}/{trash}/{name}/{MANIFEST_NAME}")
            try:
                files = _listed(unseal(check.fs.read_bytes(where), where), "audit", where)
            except (DataError, NotFoundError):
                continue  # trash may be half deleted
            _check_files(check, "", files)


def _log_folders(check: Check) -> Iterable[str]:
    for generation in check.names(run_layout.LOGS):
        for rank in check.names(f"{run_layout.LOGS}/{generation}"):
            yield f"{generation}/{rank}"


def _sealed(check: Check, path: str) -> dict[str, Any] | None:
    try:
        return unseal(check.fs.read_bytes(check.url(path)), check.url(path))
    except (DataError, ConfigError) as error:
        check.caught(path, error)
        return None
