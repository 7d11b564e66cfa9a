"""Players and updates in turns in one process, and whole runs whose learners are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from lockstep.training.actors.config import AgentConfig, LearnerOrder
from lockstep.training.actors.learner import Learner, opened
from lockstep.training.actors.player import PLAYED, Player
from lockstep.training.actors.updates import Updates
from lockstep.training.comm import SoloCommunicator
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.world import World
from tests.training import _threads

CORRIDOR = "tests.training.actors._corridor:corridor"


def small(run: str, **more: Any) -> AgentConfig:
    """A run that ends in a moment."""
    chosen: dict[str, Any] = {"env": CORRIDOR, "actors": 1, "envs": 2, "unroll": 8, "widths": (8,), "steps": 400}
    return AgentConfig(run=run, **(chosen | more))


def in_turns(config: AgentConfig) -> list[float]:
    """Play and update in turns, with the newest weights; returns the returns of all episodes."""
    player = Player(config.env, config.envs, config.unroll, config.widths, seed=[config.seed])
    updates = Updates(config, player.envs.shape, SoloCommunicator())
    returns: list[float] = []
    steps = 0
    while steps < config.steps:
        player.policy.flat[:] = updates.weights()
        record = player.play()
        updates.update([record], steps / config.steps, [0])
        steps += int((record["what"] & PLAYED > 0).sum())
        returns += record["returns"][~np.isnan(record["returns"])].tolist()
    return returns


def run_learners(
    task: RankTask,
    num_ranks: int,
    *,
    generation: int = 1,
    limits: Limits | None = None,
    handler: Handler | None = None,
) -> list[dict[str, Any]]:
    """Launch learners as threads of this process; their actors are processes."""
    order = LearnerOrder.from_json(task.payload)
    made: list[Learner] = []
    for comm in _threads._join(num_ranks, generation):
        keras.utils.clear_session()
        world = World.local(comm.rank, num_ranks, generation)
        context: Any = _threads.Context(world, _threads.Control(comm.rank, handler, num_ranks), task.payload, comm)
        made.append(opened(context, order, comm))

    def one(learner: Learner) -> dict[str, Any]:
        try:
            return learner.run()
        except BaseException as error:
            learner.comm.abort(str(error))
            raise
        finally:
            learner.comm.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, made))
