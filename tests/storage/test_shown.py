"""Results in a notebook: at most 20 lines, whatever their size, and dicts in all else."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.lib.pretty import pretty

from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage import progress
from lockstep.storage.progress import CellBlock, Progress
from lockstep.storage.shown import MOST_LINES, Shown, ShownList, counted, short
from lockstep.storage.verify import Finding
from lockstep.training.results.evaluate import summary
from lockstep.training.run.metrics import History
from tests.training._tiny import write_table


@given(st.lists(st.text(st.characters(blacklist_categories=["Cc", "Zl", "Zp", "Cs"]))), st.integers(2, 30))
def test_a_text_is_cut_to_whole_lines(lines: list[str], most: int) -> None:
    found = short("\n".join(lines), most).splitlines()
    whole = "\n".join(lines).splitlines()
    if len(whole) <= most:
        assert found == whole
    else:
        assert found == [*whole[: most - 1], f"... {len(whole) - most + 1} more lines"]


def test_no_result_fills_a_page(tmp_path_factory: pytest.TempPathFactory) -> None:
    metrics = {f"metric_{number}": 0.5 for number in range(40)}
    result = {
        "run": "/r", "dataset": "/d", "split": "test", "samples": 9, "metrics": metrics, "intervals": {},
        "class_counts": [4, 5], "baseline": None, "difference": {}, "compared_by": None, "calibration": None,
        "chosen_on": [],
        "confusion": None, "slices": {}, "roc": {"model": [[0.01 * n, 0.02 * n] for n in range(100)]},
    }  # fmt: skip
    shown = Shown(result, summary)
    fields = [Field(name=f"c{number}", dtype="float32") for number in range(500)]
    rows: list[dict[str, Any]] = [{"step": n, "epoch": n, "loss": 0.1, "metrics": metrics} for n in range(1000)]
    manifest = write_table(tmp_path_factory.mktemp("shown"), records={f"fold-{n}": 4 for n in range(60)})
    for each, words in (
        (shown, "test of d: 9 samples, 4 of 0, 5 of 1"),
        (Schema((sample_id_field(), *fields)), "schema of 501 fields"),
        (History(rows, rows, rows, 3), "history: 1000 steps, 1000 epochs, 3 generations"),
        (manifest, "dataset of tfrecord, digest "),
        (ShownList([Finding(f"part-{n}", n, None, "changed") for n in range(500)]), "part-0, record 0: changed"),
        (ShownList[Finding]([]), "[]"),
    ):
        text = pretty(each)  # what a notebook shows
        assert text == repr(each) and text.startswith(words)
        assert len(text.splitlines()) <= MOST_LINES, text
    assert shown == result and json.loads(json.dumps(shown)) == json.loads(json.dumps(result))
    assert pickle.loads(pickle.dumps(shown)) == result and {**shown} == result  # noqa: S301


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SimpleNamespace, list[tuple[int, str]]]]:
    """(The kernel's shell, what its outputs show: number of the output, and the text of each update)."""
    outputs: list[tuple[int, str]] = []
    shell = SimpleNamespace(execution_count=1)
    made = 0

    class Handle:
        def __init__(self, number: int) -> None:
            self.number = number

        def update(self, bundle: dict[str, str], *, raw: bool) -> None:
            outputs.append((self.number, bundle["text/plain"]))

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        nonlocal made
        made += 1
        outputs.append((made, bundle["text/plain"]))
        return Handle(made)

    for name, functions in (("IPython.display", {"display": display}),
                            ("IPython.core.getipython", {"get_ipython": lambda: shell})):  # fmt: skip
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "CELL_EVERY_S", 0.0)
    monkeypatch.setattr(CellBlock, "_newest", None)
    yield shell, outputs


def test_the_work_of_a_cell_is_one_block_that_is_updated_in_place(
    cells: tuple[SimpleNamespace, list[tuple[int, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    shell, outputs = cells
    for work in range(12):
        with Progress(f"work {work}", 3, "files") as shown:
            for _ in range(3):
                shown.update()
    assert {number for number, _ in outputs} == {1}, "one output"
    last = outputs[-1][1].splitlines()
    assert len(last) == CellBlock.MOST and last[-1].startswith("work 11: 3/3 files (100%)")
    shell.execution_count = 2
    with Progress("next", 1, "files"):
        pass
    assert outputs[-1][0] == 2 and outputs[-1][1].startswith("next: 0/1 files")
    captured = capsys.readouterr()
    assert captured.out == captured.err == "", "and no lines of a log beside it"


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 epochs"), (1, "1 epoch"), (2, "2 epochs"), (11, "11 epochs"), ("0.54 of 1", "0.54 of 1 epoch")],
)
def test_one_epoch_is_no_epochs(number: int | str, words: str) -> None:
    assert counted(number, "epoch") == words
