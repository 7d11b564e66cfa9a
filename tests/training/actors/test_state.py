"""The status of an agent's run whose driver is on another host: it counts as gone once its lease is old."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest

from lockstep.storage.errors import LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.actors.state import agent_now
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.run_json import read_run
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


def test_commands_for_runs_of_train_name_lockstep_agent(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text("{}")
    for refuses in (
        lambda: read_run(filesystem(str(tmp_path)), RunPaths(str(tmp_path))),
        lambda: verify(str(tmp_path)),
    ):
        with pytest.raises(LockstepError, match="is a run of lockstep agent") as refused:
            refuses()
        assert "lockstep status" in refused.value.next_step
