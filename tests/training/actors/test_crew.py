"""A learner's actors, as processes: trajectories go round, the dead are replaced, old trajectories are dropped."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError, ConfigError, TrainingFailedError
from lockstep.training.actors.config import AgentConfig
from lockstep.training.actors.crew import Crew
from lockstep.training.actors.environment import Shape
from lockstep.training.actors.player import NumpyPolicy, Player
from tests.training.actors._corridor import LENGTH
from tests.training.actors._learning import small
from tests.waiting import until

pytestmark = pytest.mark.slow
WAIT_S = 60.0


def weights(config: AgentConfig, seed: int) -> Any:
    policy = NumpyPolicy(Shape(LENGTH, 2), config.widths)
    return np.random.default_rng(seed).normal(size=policy.flat.size).astype(np.float32)


def crew_of(config: AgentConfig) -> Crew:
    return Crew(config, LENGTH, learner=0, life=1, weights=weights(config, 0))


def test_an_actor_plays_what_a_player_in_this_process_plays() -> None:
    config = small("/nowhere")
    alone = Player(config.env, config.envs, config.unroll, config.widths, seed=[config.seed, 0, 0, 1, 0])
    alone.policy.flat[:] = weights(config, 0)
    with crew_of(config) as crew:
        found = [crew.take(0, WAIT_S) for _ in range(3)]
    assert [one.tobytes() for one in found] == [alone.play().tobytes() for _ in range(3)]


def test_newer_weights_reach_the_actors() -> None:
    config = small("/nowhere")
    with crew_of(config) as crew:
        crew.publish(5, weights(config, 1))
        versions = [int(crew.take(5, WAIT_S)["version"][0]) for _ in range(6)]
    assert versions[-1] == 5 and versions == sorted(versions)


def test_trajectories_that_are_too_old_are_dropped_and_counted() -> None:
    config = small("/nowhere", max_lag=3)
    with crew_of(config) as crew:
        crew.take(0, WAIT_S)
        until(lambda: crew.under_way > 1, WAIT_S)  # one of version 0 waits
        crew.publish(10, weights(config, 1))
        assert int(crew.take(10, WAIT_S)["version"][0]) == 10
        assert 1 <= crew.counts.dropped <= 3


def test_a_killed_actor_is_replaced_and_its_trajectory_counted() -> None:
    with crew_of(small("/nowhere")) as crew:
        crew.take(0, WAIT_S)
        os.kill(killed := crew.pids[0], signal.SIGKILL)
        until(lambda: crew.counts.replaced == 1, WAIT_S)
        for _ in range(4):
            crew.take(0, WAIT_S)
        assert crew.pids[0] != killed and crew.counts.lost == 1


def test_no_actor_outlives_its_learner() -> None:
    with crew_of(small("/nowhere", actors=2)) as crew:
        crew.take(0, WAIT_S)
        until(lambda: len(crew.pids) == 2, WAIT_S)
    assert [pid for pid in crew.pids.values() if os.path.exists(f"/proc/{pid}")] == []


def test_an_environment_that_crashes_each_time_ends_the_learner() -> None:
    config = small("/nowhere", env="tests.training.actors._corridor:crashing")
    with crew_of(config) as crew, pytest.raises(TrainingFailedError, match="actor 0 ended 3 times"):
        crew.take(0, WAIT_S)


def test_an_actors_own_refusal_ends_the_learner() -> None:
    config = small("/nowhere", env="tests.training.actors._corridor:not_an_env")
    with crew_of(config) as crew, pytest.raises(ConfigError, match="returned no environment"):
        crew.take(0, WAIT_S)


def test_a_wait_has_an_end_that_names_the_actors() -> None:
    config = small("/nowhere", actors=2, env="tests.training.actors._corridor:waiting")
    named = pytest.raises(CommunicationError, match="waits for a trajectory of its actors 0 to 1")
    with crew_of(config) as crew, named:
        crew.take(0, 0.5)
