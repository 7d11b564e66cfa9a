"""A small run directory in the form that a driver leaves, written by storage alone."""

from __future__ import annotations

from typing import Any

from lockstep.storage.documents import canonical_bytes, seal, sha256_hex
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join

STEPS = ((100, 1), (200, 2))


def make_run(root: str) -> None:
    """Two generations, a checkpoint each, with audits, metrics, logs, an exported model and a result."""
    _put(root, "run.json", seal({"format_version": 1, "kind": "run", "plan": {}, "config": {"audit": False}}))
    _put(root, "lease.json", canonical_bytes({"counter": 3}))
    for step, generation in STEPS:
        claim = {"format_version": 1, "kind": "claim", "generation": generation, "nonce": "ab"}
        parent = {"step": step - 100, "generation": generation - 1} if generation > 1 else None
        asked = {"parent": parent, "epochs": 1, "num_ranks": 2}
        _put(root, f"generations/{generation:06d}.json", seal(claim | asked))
        audit = f"audit/g{generation:04d}/rank-00000/step-{step:010d}.csv"
        audits = {audit: _put(root, audit, b"step,epoch,sample\n1,0,00\n")}
        _commit(root, f"checkpoints/step-{step:010d}.g{generation:04d}", "checkpoint", step, generation, audits)
        _put(root, f"metrics/g{generation:04d}/part-00000.jsonl", b'{"loss":1.5}\n{"loss":1.25}\n')
        _put(root, f"logs/g{generation:04d}/rank-00000/part-00000.log", b"a line\nanother\n")
    _commit(root, "models/g0002", "model", 200, 2, None)
    _put(root, "results/g0002.json", seal({"format_version": 1, "kind": "result", "generation": 2}))
    _put(root, "reports/g0002.html", b"<html></html>")


def _commit(root: str, path: str, kind: str, step: int, generation: int, audit: dict[str, Any] | None) -> None:
    names = ("rank-00000.safetensors", "rank-00001.safetensors") if kind == "checkpoint" else ("model.keras",)
    files = {name: _put(root, f"{path}/{name}", name.encode() * 50) for name in names}
    doc = {"format_version": 1, "kind": kind, "step": step, "generation": generation, "files": files}
    if audit is not None:
        doc["audit"] = audit
    _put(root, f"{path}/_manifest.json", seal(doc))


def _put(root: str, path: str, data: bytes) -> dict[str, Any]:
    write_file(filesystem(root), join(root, path), data)
    return {"bytes": len(data), "sha256": sha256_hex(data)}
