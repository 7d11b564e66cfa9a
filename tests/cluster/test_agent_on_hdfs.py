"""`lockstep agent` whose run is on a real HDFS: stopped, killed, and resumed, on this host and in a barrier stage."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from tests.cluster.daemons import Cluster
from tests.training._ranks import lives
from tests.training.actors._command import WAIT_S, agent, learners_and_actors, progress, saved
from tests.waiting import until

BARRIER = ["--launcher", "barrier", "--master", "local[2]", "--learners", "2"]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("more", [[], pytest.param(BARRIER, id="barrier")])
def test_a_stopped_and_then_a_killed_run_resume_from_hdfs(hadoop: Cluster, more: list[str]) -> None:
    run = join(hadoop.hdfs_url, f"agent-{uuid.uuid4().hex}")
    environment = {**os.environ, **hadoop.env}
    with agent(run, *more, environment=environment) as first:
        saved(run, first)
        first.send_signal(signal.SIGTERM)
        said = first.communicate(timeout=WAIT_S)[0]
    stopped = progress(run)
    assert first.returncode == 75 and stopped is not None and f"{run}: {stopped.steps} steps" in said, said
    with agent(run, *more, environment=environment) as second:
        until(lambda: second.poll() is not None or saved(run, second).updates > stopped.updates, WAIT_S)
        started = [pid for kind in learners_and_actors(second.pid) for pid in kind]
        second.kill()
        until(lambda: not any(map(lives, started)), WAIT_S)
    killed = progress(run)
    assert killed is not None and killed.updates > stopped.updates and len(started) == (4 if more else 2)
    with agent(run, *more, steps=killed.steps + 1000, environment=environment) as third:
        said = third.communicate(timeout=WAIT_S)[0]
    ended = progress(run)
    assert third.returncode == 0 and ended is not None and ended.steps >= killed.steps + 1000, said
    assert filesystem(run).exists(join(run, "models"))
