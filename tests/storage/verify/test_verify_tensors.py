"""A checkpoint's list of tensors against the headers of its files: what loading would refuse is found before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from lockstep.storage.documents import seal, sha256_hex
from lockstep.storage.verify import verify

WHOLE = {"dtype": "float32", "shape": [2, 3], "parts": [[0, 0, 6]]}
CUT = {"dtype": "int64", "shape": [4], "parts": [[0, 0, 3], [1, 3, 4]]}
TENSORS: dict[str, Any] = {"model/a": WHOLE, "model/b": CUT}


def write(root: Path, tensors: object, more: bytes = b"", num_ranks: object = 2) -> None:
    files = [
        save({"model/a": np.ones((2, 3), np.float32), "model/b[0:3]": np.arange(3), "rank/own": np.zeros(2)}),
        save({"model/b[3:4]": np.arange(1)}) + more,
    ]
    listed = {}
    root.mkdir()
    for rank, data in enumerate(files):
        name = f"rank-{rank:05d}.safetensors"
        (root / name).write_bytes(data)
        listed[name] = {"bytes": len(data), "sha256": sha256_hex(data)}
    manifest: dict[str, Any] = {"format_version": 1, "kind": "checkpoint", "step": 5, "generation": 1, "audit": {}}
    manifest["num_ranks"] = num_ranks
    (root / "_manifest.json").write_bytes(seal({**manifest, "files": listed, "tensors": tensors}))


def test_a_manifest_that_fits_its_files(tmp_path: Path) -> None:
    write(tmp_path / "step-0000000005.g0001", TENSORS)
    assert verify(str(tmp_path / "step-0000000005.g0001")) == []


@pytest.mark.parametrize(
    ("change", "path", "told"),
    [
        ({"model/c": WHOLE}, "rank-00000.safetensors", "not in its file"),
        ({"model/a": {**WHOLE, "dtype": "float64"}}, "rank-00000.safetensors", "float32, 6 elements"),
        ({"model/a": {**WHOLE, "shape": [3, 2]}}, "rank-00000.safetensors", "shape [2, 3]"),
        ({"model/a": {**WHOLE, "parts": [[1, 0, 6]]}}, "rank-00001.safetensors", "no model/a"),
        ({"model/a": {**WHOLE, "parts": [[7, 0, 6]]}}, "rank-00007.safetensors", "no model/a"),  # a rank without a file
        ({"model/b": {**CUT, "parts": [[0, 0, 2], [1, 2, 4]]}}, "rank-00000.safetensors", "no model/b[0:2]"),
        ({"model/b": {**CUT, "parts": [[0, 0, 3]]}}, "_manifest.json", "do not make up the whole"),
        ({"model/b": {**CUT, "parts": [[0, 0, 3], [1, 2, 4]]}}, "_manifest.json", "do not make up the whole"),
        ({"model/a": {"dtype": "float32"}}, "_manifest.json", "model/a"),
        (None, "_manifest.json", "tensors"),
    ],
)
def test_a_forged_manifest(tmp_path: Path, change: dict[str, Any] | None, path: str, told: str) -> None:
    write(tmp_path / "c", None if change is None else {**TENSORS, **change})
    findings = verify(str(tmp_path / "c"))
    assert findings and findings[0].path == path and told in findings[0].what


@pytest.mark.parametrize("num_ranks", [1, 3, 10**30, "2", None])  # loading would leave out a file, or look for more
def test_a_number_of_ranks_that_is_not_that_of_the_files(tmp_path: Path, num_ranks: object) -> None:
    write(tmp_path / "c", TENSORS, num_ranks=num_ranks)
    (finding,) = verify(str(tmp_path / "c"))
    assert finding.path == "_manifest.json" and "num_ranks" in finding.what


def test_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    write(tmp_path / "c", TENSORS, more=b"x")
    (finding,) = verify(str(tmp_path / "c"))
    assert finding.path == "rank-00001.safetensors" and "not safetensors" in finding.what
