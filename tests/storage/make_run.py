"""A small run directory in the form that a driver leaves, written by storage alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from safetensors.numpy import save

from lockstep.storage.documents import canonical_bytes, seal, sha256_hex
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join

STEPS = ((100, 1), (200, 2))


def make_run(root: str) -> None:
    """Two generations, a checkpoint each, with audits, metrics, logs, an exported model and a result."""
    data = {"datasets": ["d"], "global_batch": 2, "epochs": 1}
    config = {"run": root, "model": {"model": "m"}, "data": data, "ranks": {"num_ranks": 2}}
    _put(root, "run.json", seal({"format_version": 2, "kind": "run", "plan": {}, "config": config}))
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
    written = {"model.keras": b"model.keras" * 50}
    doc: dict[str, Any] = {"format_version": 1, "kind": kind, "step": step, "generation": generation}
    if audit is not None:
        written = {f"rank-{rank:05d}.safetensors": save({"weights/w": np.full(9, rank)}) for rank in range(2)}
        doc |= {"audit": audit, "num_ranks": 2}
        doc["tensors"] = {"weights/w": {"dtype": "int64", "shape": [9], "parts": [[1, 0, 9]]}}
    doc["files"] = {name: _put(root, f"{path}/{name}", data) for name, data in written.items()}
    _put(root, f"{path}/_manifest.json", seal(doc))


def _put(root: str, path: str, data: bytes) -> dict[str, Any]:
    write_file(filesystem(root), join(root, path), data)
    return {"bytes": len(data), "sha256": sha256_hex(data)}
