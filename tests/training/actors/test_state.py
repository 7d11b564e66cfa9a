"""The status of an agent's run whose driver is on another host: it counts as gone once its lease is old."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest

from lockstep.storage.fs import filesystem
from lockstep.training.actors.state import agent_now
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import SILENT_S

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("age_s", "closed", "stopped", "state"),
    [
        (SILENT_S - 5, False, False, "playing"),
        (SILENT_S + 5, False, False, "interrupted"),
        (SILENT_S - 5, True, False, "interrupted"),  # it failed
        (SILENT_S - 5, True, True, "stopped"),
        (SILENT_S + 5, True, True, "stopped"),
    ],
)
def test_the_state_follows_lease_and_marker(
    tmp_path: Path, age_s: float, closed: bool, stopped: bool, state: str
) -> None:
    paths, lease = RunPaths(str(tmp_path)), tmp_path / "lease.json"
    lease.write_text(json.dumps({"kind": "lease", "host": "elsewhere", "pid": 1, "counter": 7, "closed": closed}))
    os.utime(lease, (NOW.timestamp() - age_s,) * 2)
    if stopped:
        Path(paths.stopped).write_text("{}")
    found = agent_now(filesystem(str(tmp_path)), paths, NOW)
    assert found.state == state and found.ended == (state == "stopped")
    assert (found.silent_s(NOW) is None) == (age_s < SILENT_S or stopped)
    assert "none yet" in found.words("run") and ("resumes" in found.words("run")) is False
