"""`lockstep agent` is stopped, its learners and its driver are killed: nothing is left over, and the call resumes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs import status, watch
from lockstep.storage.errors import NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.training.results.report import write_report
from lockstep.training.results.runs import read_runs
from lockstep.training.run.lineage import read_claims
from lockstep.training.run.paths import RunPaths
from tests.training._ranks import lives
from tests.training.actors._command import WAIT_S, agent, learners_and_actors, progress, saved
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
BARRIER = ["--launcher", "barrier", "--master", "local[2]", "--learners", "2"]


def shown(run: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `lockstep status --json` prints."""
    capsys.readouterr()
    assert status.main([run, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("more", [[], pytest.param(BARRIER, id="barrier")])
def test_sigterm_leads_to_a_checkpoint_and_the_same_call_resumes(
    tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    with agent(run, *more) as first:
        saved(run, first)
        assert shown(run, capsys)["state"] == "playing"
        learners, actors = learners_and_actors(first.pid)
        first.send_signal(signal.SIGTERM)
        said = first.communicate(timeout=WAIT_S)[0]
    stopped = progress(run)
    assert first.returncode == 75 and said.splitlines()[-1] == "stopped; the same call resumes it", said
    assert stopped is not None and f"{stopped.steps} steps" in said.splitlines()[-2]
    assert len(learners) == (2 if more else 1) and not any(map(lives, learners + actors))
    seen = shown(run, capsys)
    assert (seen["state"], seen["steps"], seen["mean_return"]) == ("stopped", stopped.steps, stopped.mean_return)
    assert watch.main([run]) == 75 and f"stopped, {stopped.steps} steps" in capsys.readouterr().out
    with agent(run, *more, steps=stopped.steps + 1000) as second:
        said = second.communicate(timeout=WAIT_S)[0]
    ended = progress(run)
    assert second.returncode == 0 and ended is not None, said
    assert ended.steps >= stopped.steps + 1000 and ended.updates > stopped.updates
    assert shown(run, capsys)["state"] == "finished" and watch.main([run]) == 0
    assert ended.words() in capsys.readouterr().out and ended.words() in said
    for command in (write_report, lambda one: read_runs([one])):
        with pytest.raises(NotFoundError, match="run of lockstep agent" if command is write_report else "no run at"):
            command(run)


@pytest.mark.parametrize("more", [["--learners", "2"], pytest.param(BARRIER, id="barrier")])
def test_learners_start_again_when_one_is_killed(tmp_path: Path, more: list[str]) -> None:
    run = str(tmp_path / "run")
    with agent(run, *more) as process:
        saved(run, process)
        before, actors = learners_and_actors(process.pid)
        os.kill(before[-1], signal.SIGKILL)
        until(lambda: process.poll() is not None or not any(map(lives, before + actors)), WAIT_S)
        reached = saved(run, process).updates
        until(lambda: process.poll() is not None or saved(run, process).updates > reached, WAIT_S)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 75 and "learners start again from step-" in said, said
    assert len(before) == 2 and len(read_claims(filesystem(run), RunPaths(run))) == 2


def test_the_same_call_resumes_when_the_driver_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    with agent(run) as first:
        reached = saved(run, first)
        learners, actors = learners_and_actors(first.pid)
        first.kill()
        until(lambda: not any(map(lives, learners + actors)), WAIT_S)
    stopped = progress(run)
    assert stopped is not None and stopped.updates >= reached.updates and len(learners) == len(actors) == 1
    assert shown(run, capsys)["state"] == "interrupted"
    with agent(run, steps=stopped.steps + 1000) as second:
        said = second.communicate(timeout=WAIT_S)[0]
    ended = progress(run)
    assert second.returncode == 0 and ended is not None and ended.steps >= stopped.steps + 1000, said
    assert ended.lost >= stopped.under_way > 0
