"""Whole runs: they learn, resume, keep learners equal, and refuse what they cannot continue."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.storage.errors import ConfigError, DataError, TrainingFailedError
from lockstep.training.actors.agent import play
from lockstep.training.actors.config import AgentConfig
from lockstep.training.actors.learner import Learner, Progress
from lockstep.training.actors.player import PLAYED, Player
from lockstep.training.actors.updates import Updates, columns_of
from lockstep.training.comm import SoloCommunicator
from lockstep.training.launch.local import run_local
from lockstep.training.run.checkpoint import read_manifest
from tests.training import _threads
from tests.training.actors._learning import in_turns, run_learners, small

pytestmark = pytest.mark.slow


def played(config: AgentConfig) -> Any:
    return play(config, run_learners, report=lambda line: None, lease_watch_s=0.1)


def test_cart_pole_is_learned() -> None:
    returns = in_turns(AgentConfig(env="CartPole-v1", run="/nowhere", steps=60_000))
    assert np.mean(returns[:100]) < 40 and np.mean(returns[-50:]) > 100


def test_a_run_ends_with_a_model_that_keras_loads(tmp_path: Path) -> None:
    found = played(small(str(tmp_path / "run")))
    model = keras.saving.load_model(f"{found.model}/model.keras")
    assert found.progress.steps >= 400 and model(np.zeros((3, 5)))["logits"].shape == (3, 2)


def test_a_longer_run_resumes_and_counts_on(tmp_path: Path) -> None:
    first = played(small(str(tmp_path / "run"), steps=200)).progress
    manifest = read_manifest(str(next((tmp_path / "run" / "checkpoints").iterdir())))
    assert Progress.from_json(manifest["state"]["agent"]) == first
    second = played(small(str(tmp_path / "run"), steps=400)).progress
    assert second.steps >= 400 and second.updates > first.updates and second.episodes > first.episodes


def test_two_learners_have_equal_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    run = Learner.run

    def kept(self: Learner) -> dict[str, Any]:
        found = run(self)
        seen.append(self._updates.weights().tobytes())
        return found

    monkeypatch.setattr(Learner, "run", kept)
    found = played(small(str(tmp_path / "run"), learners=2))
    assert seen[0] == seen[1] and found.progress.trajectories == 2 * found.progress.updates


def test_learners_whose_weights_differ_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Updates.weights

    def spoilt(self: Updates) -> Any:
        return weights(self) + np.float32(self._comm.rank)

    monkeypatch.setattr(Updates, "weights", spoilt)
    with pytest.raises(TrainingFailedError, match="the weights of learners differ"):
        played(small(str(tmp_path / "run"), learners=2))


def test_one_update_of_two_learners_is_that_of_both_batches(tmp_path: Path) -> None:
    config = small(str(tmp_path))
    player = Player(config.env, config.envs, config.unroll, config.widths, seed=[1])
    batches = [player.play().copy() for _ in range(2)]
    alone = Updates(config, player.envs.shape, SoloCommunicator())
    gradients = []
    for batch in batches:
        learner = Updates(config, player.envs.shape, SoloCommunicator())
        gradients.append(learner._gradient(columns_of([batch]))[0].numpy())
    comms = _threads._join(2, 1)
    pair = [Updates(config, player.envs.shape, comm) for comm in comms]
    with ThreadPoolExecutor(2) as pool:
        sums = list(pool.map(lambda at: pair[at].update([batches[at]], 0.0, [at + 1]), range(2)))
    alone._apply((gradients[0] + gradients[1]) / 2)
    assert [one.tolist() for one in sums] == [[3], [3]]
    np.testing.assert_allclose(pair[0].weights(), alone.weights(), rtol=0, atol=1e-7)


def test_rho_says_how_far_a_batch_is_off_the_policy(tmp_path: Path) -> None:
    """Beside the ratios of two policies in NumPy; resets, which no policy played, do not count."""
    config = small(str(tmp_path), unroll=30)
    player = Player(config.env, config.envs, config.unroll, config.widths, seed=[1])
    old = np.random.default_rng(2).normal(scale=0.5, size=player.policy.flat.size).astype(np.float32)
    player.policy.flat[:] = old
    record = player.play().copy()
    updates = Updates(config, player.envs.shape, SoloCommunicator())
    player.policy.flat[:] = updates.weights()
    logits = player.policy.logits(record[0]["observations"][:-1].reshape(-1, player.envs.shape.inputs))
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    actions, played = record[0]["actions"].reshape(-1), record[0]["what"].reshape(-1) & PLAYED > 0
    ratios = chances[np.arange(actions.size), actions] / np.exp(record[0]["log_mu"].reshape(-1))
    updates.update([record], 0.0, [])
    assert 0 < played.sum() < actions.size and updates.rho < 0.99 < 1.1 < ratios[played].max()
    assert updates.rho == pytest.approx(np.minimum(ratios, 1.0)[played].mean(), abs=1e-5)


def test_advantages_are_divided_by_their_size_over_many_batches(tmp_path: Path) -> None:
    """A larger batch is a hundredth of the mean, a smaller one as many three hundred thousandths as it has steps. The
    mean square of each by itself is that of a learner which has seen no other."""
    config = small(str(tmp_path), learning_rate=1e-9)
    player = Player(config.env, config.envs, config.unroll, config.widths, seed=[1])
    small_batch, large = (player.play().copy() for _ in range(2))
    large[0]["rewards"] += 100.0

    def size_after(*records: Any) -> float:
        updates = Updates(config, player.envs.shape, SoloCommunicator())
        for record in records:
            updates.update([record], 0.0, [])
        return float(updates.tensors()["optimizer/square"])

    low, high = size_after(small_batch), size_after(large)
    assert high > 2 * low > 0
    assert size_after(small_batch, large) == pytest.approx(0.99 * low + 0.01 * high, rel=1e-4)
    kept = np.exp(-small_batch[0]["actions"].size / 300_000)
    assert size_after(large, small_batch) == pytest.approx(kept * high + (1 - kept) * low, rel=1e-4)


def test_the_size_of_advantages_is_that_of_all_learners_and_is_resumed(tmp_path: Path) -> None:
    config = small(str(tmp_path))
    player = Player(config.env, config.envs, config.unroll, config.widths, seed=[1])
    batches = [player.play().copy() for _ in range(3)]
    batches[1][0]["rewards"] += 100.0
    pair = [Updates(config, player.envs.shape, comm) for comm in _threads._join(2, 1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda at: pair[at].update([batches[at]], 0.0, []), range(2)))
    stored = pair[0].tensors()
    assert stored["optimizer/square"] == pair[1].tensors()["optimizer/square"] > 0
    again = Updates(config, player.envs.shape, SoloCommunicator())
    again.load(stored)
    kept = Updates(config, player.envs.shape, SoloCommunicator())
    kept.load(pair[1].tensors())
    for one in (again, kept):
        one.update([batches[2]], 0.0, [])
    fresh = Updates(config, player.envs.shape, SoloCommunicator())
    fresh.load({**stored, "optimizer/square": np.zeros((), np.float32)})
    fresh.update([batches[2]], 0.0, [])
    assert (again.weights() == kept.weights()).all() and (again.weights() != fresh.weights()).any()


def test_a_run_reports_how_far_it_was_off_the_policy(tmp_path: Path) -> None:
    found = played(small(str(tmp_path / "run"))).progress
    assert 0.5 < found.rho_sum / found.trajectories < 1.0


def test_what_was_under_way_at_a_checkpoint_is_lost_and_counted(tmp_path: Path) -> None:
    """The stored progress of a run that was killed has trajectories under way."""
    stored = Progress(updates=4, lost=2, under_way=3)
    assert (stored.resumed().lost, stored.resumed().under_way) == (5, 0)


def test_a_run_that_is_complete_returns_its_result(tmp_path: Path) -> None:
    first = played(small(str(tmp_path / "run")))
    assert play(small(str(tmp_path / "run")), None, lease_watch_s=0.1) == first  # type: ignore[arg-type] # no launch


def test_other_options_are_refused(tmp_path: Path) -> None:
    played(small(str(tmp_path / "run")))
    with pytest.raises(DataError, match="begun with other options") as refused:
        played(small(str(tmp_path / "run"), seed=7))
    assert refused.value.got == "seed = 7 (not 0)"


def test_a_run_of_train_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a run of lockstep train"):
        played(small(str(tmp_path)))


@pytest.mark.parametrize(("name", "value"), [("actors", 0), ("discount", 1.0), ("max_lag", -1), ("widths", ())])
def test_an_invalid_option_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        small("/nowhere", **{name: value})


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_cart_pole_is_solved_within_half_a_million_steps(tmp_path: Path, seed: int) -> None:
    config = AgentConfig(env="CartPole-v1", run=str(tmp_path / "run"), seed=seed)
    found = play(config, run_local, report=lambda line: None)
    assert found.progress.mean_return is not None and found.progress.mean_return >= 450
