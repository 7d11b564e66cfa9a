"""The notebooks run from their first to their last cell, and are stored as they should be."""

from __future__ import annotations

import gzip
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINES = 4_000  # of the log: enough visitors for both splits
CELL_LIMIT_S = 1500


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_without_output_and_equals_its_text_twin(path: Path) -> None:
    notebook, twin = nbformat.read(path, as_version=4), jupytext.read(path.with_suffix(".py"))
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in twin.cells]


def test_every_text_notebook_has_its_ipynb() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "access.log"
    with gzip.open(ROOT / "data/weblogs/nasa_access_log_1995-07-09.log.gz") as whole:
        log.write_bytes(b"".join(line for line, _ in zip(whole, range(LINES), strict=False)))
    monkeypatch.setenv("LOCKSTEP_LOG", str(log))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    # A loaded machine may take longer than nbclient's few seconds to start a kernel or to show what a cell has printed.
    limits = {"timeout": CELL_LIMIT_S, "startup_timeout": CELL_LIMIT_S, "iopub_timeout": CELL_LIMIT_S}
    NotebookClient(notebook, **limits, resources={"metadata": {"path": str(path.parent)}}).execute()
    text = "\n".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    pictures = sum(
        "image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "quarantined" in text and f"{LINES + 3}" in text  # read: the log and the three broken lines
    assert "steps, 2 epochs" in text
    assert "rate:page" in text and "auc" in text
    assert pictures == 1  # the curve
