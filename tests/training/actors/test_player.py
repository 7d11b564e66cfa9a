"""What an actor records, beside Keras' model and a replay of the environment by hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from lockstep.training.actors.environment import Shape
from lockstep.training.actors.player import ENDED, PLAYED, Player
from lockstep.training.actors.updates import make_model
from tests.training.actors._corridor import LENGTH, MOST_STEPS

CORRIDOR = "tests.training.actors._corridor:corridor"
WIDTHS = (6, 5)


def player(envs: int = 3, unroll: int = 40, seed: int = 1) -> tuple[Player, keras.Model]:
    made = Player(CORRIDOR, envs, unroll, WIDTHS, seed=[seed, 0, 0])
    model, variables = make_model(made.envs.shape, WIDTHS, seed=7)
    draws = np.random.default_rng(seed)
    for variable in variables:
        variable.assign(draws.normal(size=variable.shape).astype(np.float32))
    made.policy.flat[:] = np.concatenate([np.asarray(variable).reshape(-1) for variable in variables])
    return made, model


def test_the_policy_in_numpy_is_the_model_in_keras() -> None:
    made, model = player()
    seen = np.random.default_rng(0).normal(size=(9, LENGTH)).astype(np.float32)
    np.testing.assert_allclose(made.policy.logits(seen), np.asarray(model(seen)["logits"]), rtol=1e-5, atol=1e-5)


def test_probabilities_of_the_taken_actions_are_those_of_keras() -> None:
    made, model = player()
    record = made.play()[0]
    logits = model(record["observations"][:-1].reshape(-1, LENGTH))["logits"]
    whole = np.asarray(keras.ops.log_softmax(logits)).reshape(40, 3, 2)
    taken = np.take_along_axis(whole, record["actions"][..., None], axis=2)[..., 0]
    np.testing.assert_allclose(record["log_mu"], taken, rtol=1e-4, atol=1e-5)


def test_actions_are_drawn_by_their_probabilities() -> None:
    made = Player(CORRIDOR, 50, 200, WIDTHS, seed=[5])
    made.policy.flat[-WIDTHS[-1] - 3 :][:2] = [0.0, np.log(3.0)]  # the policy's bias: right with 3 / 4
    actions = made.play()[0]["actions"]
    assert abs(actions.mean() - 0.75) < 4 * np.sqrt(0.75 * 0.25 / actions.size)


def replayed(record: Any, env: int) -> tuple[list[int], list[float]]:
    """`what` and `returns` of one environment, by the rules of the corridor."""
    what, returns = [], []
    place = steps = 0
    resets = False
    for action in record["actions"][:, env]:
        if resets:
            place = steps = 0
            resets = False
            what.append(0)
            returns.append(np.nan)
            continue
        place, steps = max(0, place + (1 if action == 1 else -1)), steps + 1
        ended = place == LENGTH - 1
        resets = ended or steps == MOST_STEPS
        what.append(PLAYED + ENDED * ended)
        returns.append(float(ended) if resets else np.nan)
    return what, returns


def test_ends_cuts_and_resets_are_recorded() -> None:
    record = player()[0].play()[0]
    assert {0, PLAYED, PLAYED + ENDED} == set(record["what"].ravel().tolist())
    assert record["what"].T.tolist() == [replayed(record, env)[0] for env in range(3)]


def test_returns_are_those_of_whole_episodes() -> None:
    record = player()[0].play()[0]
    np.testing.assert_array_equal(record["returns"].T, [replayed(record, env)[1] for env in range(3)])


def test_an_episode_continues_in_the_next_trajectory() -> None:
    short, _ = player(unroll=4)
    whole, _ = player(unroll=40)
    parts = np.concatenate([short.play()[0]["returns"].copy() for _ in range(10)])
    np.testing.assert_array_equal(parts, whole.play()[0]["returns"])


def test_equal_seeds_play_alike() -> None:
    one, other = (player(seed=seed)[0].play().copy() for seed in (4, 4))
    assert one.tobytes() == other.tobytes()


def test_other_seeds_play_otherwise() -> None:
    made: list[NDArray[Any]] = []
    for seed in ([1, 0, 0], [1, 0, 1]):
        made.append(Player(CORRIDOR, 3, 40, WIDTHS, seed=seed).play()["actions"].copy())
    assert (made[0] != made[1]).any()


def test_numbered_observations_become_one_hot() -> None:
    made = Player("FrozenLake-v1", 2, 5, WIDTHS, seed=[1])
    assert made.envs.shape == Shape(16, 4)
    np.testing.assert_array_equal(made.play()[0]["observations"].sum(axis=2), np.ones((6, 2)))
