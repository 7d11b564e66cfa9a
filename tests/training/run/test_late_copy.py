"""A copy of a table that changes meanwhile is the table of one moment."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from lockstep.training.run import late_copy
from lockstep.training.run.late_copy import LateCopy


@pytest.mark.parametrize("rows", [0, 1, 777])
def test_steps_that_change_rows_meanwhile_do_not_show(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_copy, "CHUNK_BYTES", 160)  # a few rows
    rng = np.random.default_rng(rows)
    columns: dict[str, Any] = {
        "rows": rng.standard_normal((rows, 3)).astype(np.float32),
        "squares": np.zeros(rows, np.float64),
    }
    then = {name: column.copy() for name, column in columns.items()}
    targets = {name: np.full(column.size, -1, column.dtype) for name, column in columns.items()}
    copy = LateCopy(columns, targets)
    thread = threading.Thread(target=copy.run)
    for step in range(60):
        chosen = np.unique(rng.integers(0, rows, 40)) if rows else np.empty(0, np.int64)
        copy.before(chosen)
        for column in columns.values():
            column[chosen] += 1
        if step == 3:
            thread.start()
    thread.join(60)
    assert copy.done
    for name, column in columns.items():
        np.testing.assert_array_equal(targets[name].reshape(column.shape), then[name])
        assert not rows or not np.array_equal(column, then[name])


def test_rows_that_change_without_a_word_do_show() -> None:
    """So the test above can fail."""
    columns = {"rows": np.zeros((5, 2))}
    copy = LateCopy(columns, targets := {"rows": np.empty(10)})
    columns["rows"][3] = 1
    copy.run()
    assert targets["rows"].tolist() == [0.0] * 6 + [1.0, 1.0, 0.0, 0.0]
