"""The notebooks run from their first to their last cell, and are stored as they should be."""

from __future__ import annotations

import gzip
import re
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


def run(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Run a notebook; returns its outputs as one text, and the number of its pictures."""
    monkeypatch.setenv("TMPDIR", str(folder))
    notebook = nbformat.read(path, as_version=4)
    # A loaded machine may take longer than nbclient's few seconds to start a kernel or to show what a cell has printed.
    limits = {"timeout": CELL_LIMIT_S, "startup_timeout": CELL_LIMIT_S, "iopub_timeout": CELL_LIMIT_S}
    NotebookClient(notebook, **limits, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join(texts), sum("image/png" in output.get("data", {}) for output in outputs)


def cut_log(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a notebook read the first LINES of the log."""
    log = target / "access.log"
    with gzip.open(ROOT / "data/weblogs/nasa_access_log_1995-07-09.log.gz") as whole:
        log.write_bytes(b"".join(line for line, _ in zip(whole, range(LINES), strict=False)))
    monkeypatch.setenv("LOCKSTEP_LOG", str(log))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_web_log_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_log(tmp_path, monkeypatch)
    text, pictures = run(ROOT / "notebooks/explore_weblog.ipynb", tmp_path, monkeypatch)
    assert "quarantined" in text and f"{LINES + 3}" in text  # read: the log and the three broken lines
    assert "steps, 2 epochs" in text and "\ndone: step " in text
    assert "rate:page" in text and "auc" in text
    assert pictures == 1  # the curve


def cut_images(target: Path, images: dict[str, int]) -> None:
    """Write the first images and labels of the committed IDX files to `target`."""
    for part, count in images.items():
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            name = f"{part}-{kind}-ubyte.gz"
            data = gzip.decompress((ROOT / "data/fashion-mnist" / name).read_bytes())
            head = data[:4] + count.to_bytes(4, "big") + data[8:header]
            (target / name).write_bytes(gzip.compress(head + data[header : header + count * size]))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_images_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_images(tmp_path, {"train": 2560, "t10k": 400})
    monkeypatch.setenv("LOCKSTEP_IMAGES", str(tmp_path))
    text, pictures = run(ROOT / "notebooks/images.ipynb", tmp_path, monkeypatch)
    assert "60 steps, 3 epochs" in text and "\ndone: step 60 of 60" in text
    wrong = re.search(r"(\d+) of 400 are wrong", text)
    assert wrong is not None and int(wrong[1]) < 200  # by chance 360
    accuracy = re.search(r"^accuracy +(\S+) +(\S+)", text, re.MULTILINE)
    assert accuracy is not None and float(accuracy[1]) == 1 - int(wrong[1]) / 400 and "Pullover" in text
    assert pictures == 2  # what the model sees, and its mistakes


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_search_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_log(tmp_path, monkeypatch)
    text, pictures = run(ROOT / "notebooks/search.ipynb", tmp_path, monkeypatch)
    assert len(re.findall(r"^done: 4 of 4, best 0\.\d+ \(trial \d\)$", text, re.MULTILINE)) == 1, text
    assert len(re.findall(r"^\d+ +\d+ +done +0\.\d+ +4 ", text, re.MULTILINE)) == 4, text
    assert re.search(r"^ +best trial +rate:page +difference +from +to *$", text, re.MULTILINE), text
    assert re.search(r"^auc( +-?0\.\d+){5} *$", text, re.MULTILINE), text
    assert pictures == 1  # the curves
