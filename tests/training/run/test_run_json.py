"""Whether a call may go on with a run: each field of the configuration has its answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.documents import seal
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.training.config import TrainConfig, flag_of, option_names
from lockstep.training.driver.preflight import plan_for
from lockstep.training.plan.client_plan import ClientPlan, RunPlan
from lockstep.training.run import run_json
from lockstep.training.run.paths import RunPaths
from lockstep.training.ways import Federated
from tests.training._tiny import write_table

REFUSED: dict[str, Any] = {
    "where": "a > 0",
    "model": "tests.training._models:momentum",
    "split": "test",
    "global_batch": 16,
    "lanes": 4,
    "seed": 1,
    "extra": {"width": 2},
    "window_bytes": 2048,
    "interleave": 2,
    "cache_groups": 2,
    "augment": "crop:2 flip",
    "bad_images": "skip",
    "init_from": "/models/first.keras",
    "lora_rank": 4,
    "ewc": 10.0,
    "batchnorm": "sync",
    "precision": "mixed_float16",
    "learning_rate": 0.5,
    "learning_rate_scaling": "sqrt",
    "base_batch": 8,
    "warm_up_epochs": 1.5,
    "micro_batches": 2,
    "delay": 1,
    "sync_every": 4,
    "compression": "bf16",
    "shard_embeddings": 1,
    "canonical": True,
    "backend": "tcp",
    "audit": True,
}
# What decides where and how a run goes on, not what comes out.
FREE: dict[str, Any] = {
    "num_ranks": 3,
    "epochs": 2,  # no step is done
    "since": "/data/2026-01-31",  # what counts is which datasets this gives
    "replay": 0.25,  # likewise
    "stop_grace_s": 5.0,
    "checkpoint_every": 7,
    "keep_checkpoints": 9,
    "keep_every": 100,
    "keep_best": "loss:min",
    "validate": "test",
    "validate_every": 2,
    "early_stop": "loss:min:3",
    "max_steps": 5,
    "max_restarts_per_hour": 3,
    "read_ahead_bytes": 1 << 20,
    "cache": "/var/cache/blocks",
    "cache_bytes": 1 << 20,
    "verify": "full",
    "non_finite": "skip",  # what a run that stopped so may go on with
    "on_bad_record": "skip",  # likewise
    "launcher": "barrier",
    "min_ranks": 1,
    "max_ranks": 3,
    "spare_executors": 1,
    "slots_file": None,
    "tls": "on",
    "trust_network": "lo",
    "start_limit_s": 1.0,
    "stall_limit_s": 1.0,
    "heartbeat_limit_s": 60.0,
    "max_restarts": 9,
    "zero": 2,  # which changes no bit
    "tensor_parallel": 2,  # which changes rounding alone
    "pipeline_stages": 2,  # which changes a result by rounding, as other ranks do
}
OF_STAGES: dict[str, Any] = {"schedule": "gpipe", "cut_after": "layer", "micro_batches": 2}
"""Free with --pipeline-stages."""
OF_MEETINGS = {"sync_every": 4, "sync_until_epoch": 1, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
OF_ASYNC = {"staleness": 3, "gradient_noise": 0.1}
OF_CLIENTS = {
    "clients": "b",
    "client_fraction": 0.5,
    "local_epochs": 2,
    "update_clip": 2.0,
    "noise_multiplier": 2.0,
    "privacy_delta": 0.01,
}


def test_each_field_is_compared_or_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = set(option_names())
    several = {"run", "datasets", "mix", "tasks"}  # of a mixture: tests/training/results/test_weights.py
    ways = (
        OF_MEETINGS.keys()
        | OF_ASYNC.keys()
        | OF_CLIENTS.keys()
        | OF_STAGES.keys()
        | {"strategy", "servers", "devices", "balance"}
    )
    answered = REFUSED.keys() | FREE.keys() | ways
    assert named - several == answered, "a new field: may a later call change it?"
    manifest = write_table(tmp_path / "data", records={"train": 96, "test": 64})
    given = TrainConfig(
        datasets=(str(tmp_path / "data"),),
        run=str(tmp_path / "run"),
        num_ranks=2,
        model="logistic",
        global_batch=24,
        lanes=8,
        batchnorm="local",
        epochs=3,
        learning_rate_scaling="linear",
        base_batch=4,
        window_bytes=1 << 16,
        cache_groups=4,
    )
    fs, paths = filesystem(given.run), RunPaths(given.run)
    run_json.open_run(fs, paths, given, manifest, plan_for(manifest, given))
    monkeypatch.setattr(run_json, "checkpoints", lambda *_: ["step-1"])  # a run that got so far
    monkeypatch.setattr(run_json, "epochs_asked", lambda _: given.data.epochs)

    def plan_of(config: TrainConfig) -> RunPlan:
        return (
            ClientPlan.for_dataset(manifest, config)
            if isinstance(config.way, Federated)
            else plan_for(manifest, config)
        )

    def goes_on(config: TrainConfig) -> bool:
        return run_json.check_run(fs, RunPaths(config.run), config, plan_of(config))

    def refuses(begun: TrainConfig, changes: dict[str, Any]) -> None:
        for name, value in changes.items():
            with pytest.raises(ConfigError) as caught:
                goes_on(begun.but(**{name: value}))
            assert "begun with another" in caught.value.what and flag_of(name) in caught.value.next_step, name
            if name not in ("model", "extra", "init_from", "shard_embeddings"):  # other weights than the run's
                assert f"--init-from {begun.run}" in caught.value.next_step, name

    assert goes_on(given)
    refuses(given, REFUSED)
    other = write_table(tmp_path / "other", records={"train": 96, "test": 64}, seed=5)
    elsewhere = given.but(datasets=(str(tmp_path / "other"),))
    with pytest.raises(ConfigError, match="dataset_digest") as caught:
        run_json.check_run(fs, paths, elsewhere, plan_for(other, elsewhere))
    assert f"--init-from {given.run}" in caught.value.next_step
    apart = given.but(run=str(tmp_path / "apart"), sync_every=2)
    run_json.open_run(fs, RunPaths(apart.run), apart, manifest, plan_for(manifest, apart))
    refuses(apart, OF_MEETINGS)
    late = given.but(run=str(tmp_path / "late"), strategy="async", staleness=2)
    run_json.open_run(fs, RunPaths(late.run), late, manifest, plan_for(manifest, late))
    refuses(late, OF_ASYNC)
    lanes: dict[str, Any] = {"lanes": None, "cache_groups": None, "learning_rate_scaling": "none", "base_batch": None}
    noisy: dict[str, Any] = {"update_clip": 1.0, "noise_multiplier": 1.0, "privacy_delta": 0.02}
    rounds = given.but(run=str(tmp_path / "rounds"), strategy="federated", clients="a", **lanes, **noisy)
    run_json.open_run(fs, RunPaths(rounds.run), rounds, manifest, plan_of(rounds))
    refuses(rounds, OF_CLIENTS)
    with pytest.raises(ConfigError, match="begun with another"):
        goes_on(late.but(strategy="sync", staleness=None))
    moves = given.but(run=str(tmp_path / "moves"), batchnorm="ghost", cache_groups=None)
    run_json.open_run(fs, RunPaths(moves.run), moves, manifest, plan_for(manifest, moves))
    assert goes_on(moves.but(balance=True, num_ranks=3))
    alone = given.but(run=str(tmp_path / "alone"), num_ranks=1, strategy="mirrored", devices=2)
    run_json.open_run(fs, RunPaths(alone.run), alone, manifest, plan_for(manifest, alone))
    assert goes_on(alone.but(devices=4))
    served = late.but(run=str(tmp_path / "served"), strategy="parameter-server", servers=1)
    run_json.open_run(fs, RunPaths(served.run), served, manifest, plan_for(manifest, served))
    refuses(served, {"staleness": 3})
    with pytest.raises(ConfigError, match="begun with another"):
        goes_on(served.but(strategy="async", servers=None))
    assert goes_on(served.but(servers=3, num_ranks=3)), "servers keep nothing"
    stages = given.but(run=str(tmp_path / "stages"), pipeline_stages=2)
    run_json.open_run(fs, RunPaths(stages.run), stages, manifest, plan_for(manifest, stages))
    for name, value in OF_STAGES.items():
        assert goes_on(stages.but(**{name: value})), name
    for name, value in FREE.items():
        assert goes_on(given.but(**{name: value})), name


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("learning_rate", "--learning-rate"),
        ("start_limit_s", "--start"),
        ("stall_limit_s", "--stall"),
        ("heartbeat_limit_s", "--heartbeat-limit"),
    ],
)
def test_a_number_without_end_is_told_by_its_flag(name: str, flag: str) -> None:
    endless: dict[str, Any] = {name: math.inf}
    with pytest.raises(ConfigError) as caught:
        TrainConfig(datasets=("d",), run="r", model="m", num_ranks=1, global_batch=1, epochs=1, **endless)
    assert flag in caught.value.next_step


@pytest.mark.parametrize("name", ["window_bytes", "interleave", "epochs"])
def test_a_number_beyond_64_bits_is_told_by_its_flag(name: str) -> None:
    numbers: dict[str, Any] = {"num_ranks": 1, "global_batch": 1, "epochs": 1, "cache_groups": 1, name: 1 << 63}
    with pytest.raises(ConfigError) as caught:
        TrainConfig(datasets=("d",), run="r", model="m", **numbers)
    assert flag_of(name) in caught.value.next_step


def small_run(folder: Path) -> tuple[DatasetManifest, TrainConfig]:
    """A dataset of 96 training records, and a run of one epoch over it."""
    manifest = write_table(folder / "data", records={"train": 96, "test": 64})
    data, run = str(folder / "data"), str(folder / "run")
    return manifest, TrainConfig(datasets=(data,), run=run, model="logistic", num_ranks=2, global_batch=24, epochs=1)


def test_a_stored_configuration_has_known_fields_and_defaults() -> None:
    """What a version writes, a later one with more fields reads; a field that nobody knows is refused by name."""
    plain = TrainConfig(datasets=("d",), run="r", model="m", num_ranks=1, global_batch=1, epochs=1)
    stored = plain.to_json()
    ranks = {name: value for name, value in stored["ranks"].items() if name != "backend"}
    fewer = {**{name: value for name, value in stored.items() if name != "way"}, "ranks": ranks}
    assert TrainConfig.from_json(fewer) == plain
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("ranks.algorithm", {**fewer, "ranks": {**ranks, "algorithm": "ring"}}),
        ("data.delay", {**fewer, "data": {**stored["data"], "delay": 1}}),
        ("num_ranks", {**fewer, "num_ranks": 2}),
        ("'model'", {name: value for name, value in fewer.items() if name != "model"}),
    ]
    for named, document in wrong:
        with pytest.raises(ConfigError, match="stored training configuration") as caught:
            TrainConfig.from_json(document)
        assert named in caught.value.got


def test_a_run_without_a_field_has_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, given = small_run(tmp_path)
    fs, paths, plan = filesystem(given.run), RunPaths(given.run), plan_for(manifest, given)
    document = run_json._document(given, manifest, plan)
    del document["config"]["step"]["micro_batches"]
    fs.mkdirs(paths.root)
    write_file(fs, paths.run_json, seal(document))
    monkeypatch.setattr(run_json, "checkpoints", lambda *_: ["step-1"])  # a run that got so far
    assert run_json.check_run(fs, paths, given, plan)
    with pytest.raises(ConfigError, match="another `micro_batches`") as caught:
        run_json.check_run(fs, paths, given.but(micro_batches=2), plan)
    assert caught.value.allowed == "micro_batches = 1"
