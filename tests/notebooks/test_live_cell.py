"""Cells that train and search, in a real kernel: one output, updated in place, and an interrupt that can be resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.training._ranks import living_ranks
from tests.training._tiny import write_table
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
STEPS = 3000
CELL = """
import os
import lockstep
print(os.getpid(), flush=True)
result = lockstep.train("data", "run", "logistic", global_batch=8, epochs=3, num_ranks=2, checkpoint_every=20)
print(result.steps)
"""
SEARCH = """
found = lockstep.tune(
    "data", "search", "logistic", {"learning_rate": {"choices": [0.01, 0.1]}},
    metric="auc:max", sampler="grid", parallel=2, global_batch=512, epochs=2,
)
print(found["trial"])
"""


class Outputs:
    """The messages of one cell, read until it ends; `interrupt` is asked after each whether to interrupt the kernel."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient, code: str, interrupt: Any) -> None:
        self.shown: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.texts = {"stdout": "", "stderr": ""}
        self.error = ""
        cell, interrupted = client.execute(code), False
        while True:
            message = client.get_iopub_msg(timeout=LIMIT_S)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != cell:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return
            if kind == "display_data":
                self.shown.append(content)
            elif kind == "update_display_data":
                self.updates.append(content)
            elif kind == "stream":
                self.texts[content["name"]] += content["text"]
            elif kind == "error":
                self.error = content["ename"]
            if not interrupted and interrupt():
                manager.interrupt_kernel()
                interrupted = True

    def last_text(self) -> str:
        """The progress that the cell keeps; checks that it has one output."""
        (shown,) = self.shown
        assert {update["transient"]["display_id"] for update in self.updates} == {shown["transient"]["display_id"]}
        return str(self.updates[-1]["data"]["text/plain"])


@pytest.mark.soak  # `make test` runs a whole notebook, and the parts of a cell's output in tests/training/driver
@pytest.mark.slow
def test_a_cell_shows_curves_in_one_output_and_resumes_after_an_interrupt(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={"train": 8 * STEPS // 3, "test": 30})
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), env={**os.environ, "PYTHONPATH": str(ROOT)})
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=LIMIT_S)
        first = Outputs(manager, client, CELL, lambda: any((tmp_path / "run/checkpoints").glob("step-*")))
        assert first.error == "StoppedRun"
        assert first.last_text().startswith("interrupted; the same call resumes the run: step ")
        assert "the same call resumes from there" in first.texts["stderr"]
        until(lambda: not living_ranks(int(first.texts["stdout"])), 30.0)
        again = Outputs(manager, client, CELL, lambda: False)
        assert again.error == "" and again.texts["stdout"].endswith(f"\n{STEPS}\n")
        assert "resuming from checkpoint" in again.texts["stderr"] and "training:" not in again.texts["stderr"]
        lines = [update["data"]["text/plain"] for update in again.updates]
        assert any("samples/s" in line and "left" in line for line in lines), lines
        assert again.last_text().startswith(f"done: step {STEPS} of {STEPS}, loss ")
        assert "data:image/png;base64," in again.updates[-1]["data"]["text/html"]
        search = Outputs(manager, client, SEARCH, lambda: False)
        assert search.error == "" and "trial" not in search.texts["stderr"]
        line, head, *rows = search.last_text().splitlines()
        best = int(search.texts["stdout"])
        assert line.startswith("done: 2 of 2, best 0.") and line.endswith(f"(trial {best})")
        assert head.split() == ["trial", "state", "epochs", "auc", "learning_rate"]
        assert [row.split()[:2] for row in rows] == [["0", "done"], ["1", "done"]] and "done (best)" in rows[best]
        texts = [update["data"]["text/plain"] for update in search.updates]
        assert any("starting" in text or " step " in text for text in texts), texts
        assert "data:image/png;base64," in search.updates[-1]["data"]["text/html"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
