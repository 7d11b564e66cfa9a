"""Numbers of ranks that change while a run trains: which are used, and that they change no bit of a canonical run."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_kills import faults, fingerprint
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import LauncherError
from lockstep.training.control.task import Limits
from lockstep.training.driver import elastic
from lockstep.training.driver.elastic import Slots
from lockstep.training.driver.generation import RunHandler
from lockstep.training.driver.preflight import numbers_of_ranks, plan_for, preflight
from lockstep.training.launch.session import Session, SessionLauncher
from lockstep.training.run.lineage import read_claims
from lockstep.training.run.paths import RunPaths
from tests.training._threads import LEAVE_AFTER, run
from tests.training._tiny import write_table


def config_of(folder: Path, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"num_ranks": 2, "global_batch": 32, "lanes": 8, "epochs": 3, "seed": 7}
    options |= {"run": str(folder / "run"), "model": "logistic"} | more
    return TrainConfig(datasets=(str(folder / "data"),), **options)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"max_ranks": 10}, [2, 3, 4, 5, 6, 7, 8]),  # lane groups
        ({"min_ranks": 1, "max_ranks": 9, "batchnorm": "local"}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"min_ranks": 1, "max_ranks": 8, "canonical": True}, [1, 2, 4, 8]),
        ({"min_ranks": 1, "max_ranks": 4, "compression": "topk:1%"}, [2, 3, 4]),
        ({"min_ranks": 1, "max_ranks": 4, "batchnorm": "local", "micro_batches": 8}, [1, 2, 4]),
        ({}, [2]),
    ],
)
def test_numbers_that_do_not_fit_are_skipped(tmp_path: Path, options: dict[str, Any], numbers: list[int]) -> None:
    manifest = write_table(tmp_path / "data", records={"train": 400})
    config = config_of(tmp_path, **options)
    found = numbers_of_ranks(config, plan_for(manifest, config))
    assert [number for number, why in found.items() if why is None] == numbers
    assert all(found[number] for number in found.keys() - set(numbers))


def test_what_cannot_change_its_ranks_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={"train": 400})
    with pytest.raises(ConfigError, match=r"can only train on \[2\]") as caught:
        preflight(config_of(tmp_path, max_ranks=3, canonical=True))
    assert "3 ranks: " in caught.value.got
    for wrong in (
        {"min_ranks": 3},
        {"max_ranks": 1},
        {"min_ranks": 0},
        {"max_ranks": 4, "launcher": "local"},
        {"slots_file": "slots", "launcher": "local"},
        {"max_ranks": 4, "slots_file": "slots"},
    ):
        with pytest.raises(ConfigError):
            config_of(tmp_path, **wrong)
    (tmp_path / "slots").write_text("many")
    with pytest.raises(ConfigError, match="has no number"):
        preflight(config_of(tmp_path, max_ranks=4, launcher="local", slots_file=str(tmp_path / "slots")))


class Executors(SessionLauncher):
    """Slots as a cluster has them, look by look; the last number stays."""

    def __init__(self, *slots: int) -> None:
        self._slots = list(slots)

    def slots(self) -> int:
        return self._slots.pop(0) if len(self._slots) > 1 else self._slots[0]

    def session(self, num_ranks: int, limits: Limits) -> Session:
        raise AssertionError("starts nothing")


def test_a_lost_slot_has_a_moment_to_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "LOST_S", 0.5)
    config = config_of(tmp_path, min_ranks=2, max_ranks=4, num_ranks=3, start_limit_s=1.5)

    def chosen(before: int | None, *slots: int) -> int:
        return Slots(config, [2, 3, 4], Executors(*slots)).choose(before, lambda: None)

    assert chosen(None, 8) == 3, "begins with --num-ranks"
    assert chosen(3, 8) == 4
    assert chosen(3, 2, 3) == 3, "an executor's replacement came"
    assert chosen(3, 2) == 2, "none came"
    assert chosen(3, 0, 0, 0, 0, 2) == 2
    with pytest.raises(LauncherError, match="too few slots for 2 ranks"):
        chosen(3, 1)
    with pytest.raises(KeyError, match="superseded"):
        Slots(config, [2, 3, 4], Executors(1)).choose(3, lambda: KeyError("superseded"))


def faults_after(tmp_path: Path, order: dict[int, int], epochs: int) -> list[str]:
    """Train with other ranks after the steps of `order`, {step: ranks}; how the run differs from one rank's, bit for
    bit, and what is wrong in its audit.
    """
    write_table(tmp_path / "data", records={"train": 400, "test": 30})
    slots = tmp_path / "slots"
    slots.write_text("2")
    options: dict[str, Any] = {"launcher": "local", "canonical": True, "audit": True, "epochs": epochs}
    options |= {"model": "tests.training._models:momentum", "checkpoint_every": 1000, "lanes": 4, "batchnorm": "local"}
    alone = config_of(tmp_path, **options | {"num_ranks": 1, "run": str(tmp_path / "alone")})
    run(alone)
    for step, ranks in order.items():
        LEAVE_AFTER[step] = partial(slots.write_text, str(ranks))
    config = config_of(tmp_path, **options, min_ranks=1, max_ranks=4, slots_file=str(slots))
    result = run(config)
    claims = read_claims(filesystem(config.run), RunPaths(config.run)).values()
    assert [claim.num_ranks for claim in claims] == [2, *order.values()] and not LEAVE_AFTER
    assert result.restarts == len(order)
    return faults(config.run, fingerprint(alone.run))


@pytest.mark.slow
def test_two_changes_of_the_ranks_change_no_bit(tmp_path: Path) -> None:
    """After the last step of an epoch (12), and asked before a last step (25)."""
    assert faults_after(tmp_path, {12: 1, 24: 4}, epochs=3) == []


@pytest.mark.soak
@pytest.mark.slow
def test_twenty_random_changes_of_the_ranks_change_no_bit(tmp_path: Path) -> None:
    rng = random.Random(5)
    # Two steps apart or more: ranks that are asked after a step leave after the next one.
    steps = [3 * third + rng.randrange(2) for third in sorted(rng.sample(range(1, 48), 20))]
    assert faults_after(tmp_path, {step: rng.choice((1, 2, 4)) for step in steps}, epochs=12) == []


@pytest.mark.soak
@pytest.mark.slow
def test_from_two_ranks_to_one_and_back_twenty_times_with_one_decision_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause: ranks that each looked for the newest checkpoint could find different ones. The driver decides once a
    generation, in its claim, and all ranks restore that checkpoint: the one that the ranks before them left with.
    """
    told: dict[int, list[str]] = {}
    answer = RunHandler.answer

    def spy(self: RunHandler, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        reply = answer(self, rank, kind, fields)
        if kind == "restore":
            told.setdefault(reply["generation"], []).append(str(reply["checkpoint"]).rpartition("/")[2])
        return reply

    monkeypatch.setattr(RunHandler, "answer", spy)
    assert faults_after(tmp_path, {7 * number: 1 + number % 2 for number in range(1, 21)}, epochs=12) == []
    run_url = str(tmp_path / "run")
    claims = read_claims(filesystem(run_url), RunPaths(run_url))
    files = sorted(int(path.stem) for path in Path(run_url, "generations").iterdir())
    assert sorted(claims) == files == list(range(1, 22))
    for generation in range(2, 22):
        parent, ranks = claims[generation].parent, claims[generation].num_ranks
        assert parent is not None and parent.generation == generation - 1
        assert told[generation] == [str(parent)] * ranks
    steps = [claim.parent.step for claim in claims.values() if claim.parent is not None]
    assert steps == sorted(set(steps)) and len(steps) == 20
