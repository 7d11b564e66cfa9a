"""How many calls of the storage a training run makes while nothing happens but steps: docs/operations.md has them."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.files.local import LocalFileSystem
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks
from lockstep.training.run import metrics
from tests.training import _models
from tests.training._threads import run
from tests.training._tiny import write_table

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
FASTER = 60  # times: what a run does every 5 or 30 seconds
# What a call costs a NameNode of HDFS: to write a file is create, addBlock, fsync and complete.
CALLS = {"create": 4, "open_read": 1, "read_range": 1, "rename_new": 1, "replace": 1, "list": 1, "stat": 1}
CALLS |= {"mkdirs": 1, "delete": 1}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of the local file system by method and the name of the file, those that it makes itself left out."""
    found: Counter[str] = Counter()
    inside = threading.local()

    def counting(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def call(self: LocalFileSystem, url: str, *more: Any, **options: Any) -> Any:
            if getattr(inside, "call", False):
                return plain(self, url, *more, **options)
            inside.call = True
            try:
                found[f"{name} {_kind(url)}"] += 1
                return plain(self, url, *more, **options)
            finally:
                inside.call = False

        return call

    for name in CALLS:
        monkeypatch.setattr(LocalFileSystem, name, counting(name, getattr(LocalFileSystem, name)))
    return found


def _kind(url: str) -> str:
    return next((name for name in ("lease", "status", "control", "generations", "metrics") if name in url), "other")


def test_a_run_makes_few_calls_an_hour(tmp_path: Path, counted: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of the page are held as a bound; a checkpoint, which a user schedules, is not among them."""
    write_table(tmp_path / "data")
    monkeypatch.setattr(metrics, "PART_EVERY_S", metrics.PART_EVERY_S / FASTER)
    seen: list[tuple[float, Counter[str]]] = []
    hooks = Hooks(
        lease_watch_s=0.1, lease_every_s=5.0 / FASTER,
        on_epoch=lambda row: seen.append((time.monotonic(), Counter(counted))),
    )  # fmt: skip
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model=f"{_models.__name__}:slowly", num_ranks=2,
        global_batch=8, epochs=4, launcher="local", checkpoint_every=10_000,
    )  # fmt: skip
    run(config, hooks)
    (began, before), (ended, after) = seen[0], seen[-1]
    hours = (ended - began) * FASTER / 3600
    calls: Counter[str] = Counter()
    for key, count in (after - before).items():
        name, kind = key.split()
        calls[kind] += CALLS[name] * count
    an_hour = {kind: round(count / hours) for kind, count in calls.items()}
    files = round(((after - before)["create metrics"] - 1) / hours)  # one may fall on the edge of so short a time
    page = (ROOT / "docs/operations.md").read_text()
    most = re.search(r"at most ([0-9,]+) calls of the NameNode an hour", page)
    parts = re.search(r"([0-9,]+) parts of metrics an hour", page)
    assert most is not None and parts is not None
    assert sum(an_hour.values()) <= int(most[1].replace(",", "")), an_hour
    assert files <= int(parts[1].replace(",", "")), "more parts of metrics than the page says"
