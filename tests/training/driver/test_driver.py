"""The driver's loop on real processes: restarts, resumption, refusals, the results on disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.documents import seal, unseal
from lockstep.storage.errors import ConfigError, DataError, LockstepError
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import RankFailedError
from lockstep.training.control.task import Limits
from lockstep.training.driver.stop import EXIT_STOPPED
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.run.lineage import find_tip, read_claims
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult, find_model, find_result
from tests.training import _ranks
from tests.training._driver_alone import in_this_process
from tests.training._ranks import HERE, lives, living_ranks, rank_path
from tests.training._tiny import write_images, write_table
from tests.waiting import until

pytestmark = pytest.mark.slow

QUICK = Limits(grace_s=1.0, silent_s=60.0)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    rank_path(monkeypatch)
    write_table(tmp_path / "data")  # 100 training records: 12 steps of 8 an epoch, and 4 left over after one
    return TrainConfig(
        datasets=(str(tmp_path / "data"),),
        run=str(tmp_path / "run"),
        model="tiny",
        num_ranks=2,
        global_batch=8,
        epochs=2,
        checkpoint_every=5,
        launcher="local",
        stall_limit_s=300.0,
    )


def go(config: TrainConfig, entry: str = "train", **hooks: Any) -> RunResult:
    return train(config, run_local, hooks=Hooks(entry=f"_ranks:{entry}", limits=QUICK, **hooks))


def tip_weights(config: TrainConfig) -> np.ndarray:
    tip = find_tip(filesystem(config.run), RunPaths(config.run))
    assert tip is not None
    return np.fromfile(Path(tip.url, "rank-00000.bin"))


def test_run_from_start_to_end(config: TrainConfig) -> None:
    told: list[int] = []  # rows on the disk before each rename: steps of a checkpoint are not made again
    trashed: list[int] = []

    def count() -> None:
        trashed.append(len(list(Path(config.run).glob(".trash/g0001/*"))))
        told.append(sum(len(part.read_text().splitlines()) for part in Path(config.run).glob("metrics/g0001/part-*")))

    result = go(config, before_rename=count)
    assert told == [5, 10, 15, 20, 25, 25]  # the last one is the model's
    run, paths, fs = Path(config.run), RunPaths(config.run), filesystem(config.run)
    assert (result.steps, result.epochs, result.generation, result.restarts) == (25, 2, 1, 0)
    assert result.checkpoint == "step-0000000025.g0001"
    assert len(result.left_over) == 2 * 100 - 25 * 8
    # The three newest checkpoints stay; older ones are in the trash until the next commit, or the end.
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        f"step-00000000{step}.g0001" for step in (15, 20, 25)
    ]
    assert trashed == [0, 0, 0, 0, 1, 1] and not list((run / ".trash/g0001").iterdir())
    assert verify(config.run) == []
    for url in (paths.result(1), paths.claim(1), paths.run_json, paths.model(1) + "/_manifest.json"):
        unseal(fs.read_bytes(url), url)
    assert find_model(fs, paths) == paths.model(1)
    rows = [json.loads(line) for part in sorted((run / "metrics/g0001").iterdir()) for line in part.open()]
    assert [row["step"] for row in rows] == list(range(1, 26))
    assert not list((run / ".staging").iterdir())
    assert json.loads((run / "lease.json").read_text())["closed"] is True
    assert not [f.url for f in walk(fs, config.run) if f.name.endswith(".tmp")]


def test_no_secret_is_kept(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(100, 132))
    monkeypatch.setattr("lockstep.training.launch.session.new_key", lambda: key)
    go(config)
    for file in Path(config.run).rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert key not in content and key.hex().encode() not in content, file


def test_killed_rank_goes_on_from_its_checkpoint(
    config: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = config.but(run=str(tmp_path / "whole"))
    go(whole)
    result = go(config, "train_killed_once")
    assert (result.generation, result.restarts, result.steps) == (2, 1, 25)
    claims = read_claims(filesystem(config.run), RunPaths(config.run))
    assert claims[1].parent is None
    assert claims[2].parent is not None
    assert str(claims[2].parent) == "step-0000000015.g0001"
    assert np.array_equal(tip_weights(config), tip_weights(whole))
    assert "rank 1 of 2 on 127.0.0.1 failed" in capfd.readouterr().err


def test_ranks_killed_while_a_checkpoint_is_in_flight(config: TrainConfig, tmp_path: Path) -> None:
    """In the midst of an upload: as if that checkpoint had not begun. After all reports: it is committed."""
    whole = config.but(run=str(tmp_path / "whole"), num_ranks=1)
    go(whole)
    renames = []

    def before_rename() -> None:
        renames.append(1)
        if len(renames) == 3:  # step 5, then in the second generation 10 and 15
            Path(config.run).with_name("reported").touch()
            until(lambda: len(living_ranks(os.getpid())) < 2)

    result = go(config, "train_killed_in_flight", before_rename=before_rename)
    assert (result.generation, result.restarts, result.steps) == (3, 2, 25)
    claims = read_claims(filesystem(config.run), RunPaths(config.run))
    assert [str(claims[number].parent) for number in (2, 3)] == ["step-0000000005.g0001", "step-0000000015.g0002"]
    assert np.array_equal(tip_weights(config), tip_weights(whole))
    assert verify(config.run) == []
    assert not list(Path(config.run, ".staging").iterdir())


def test_gives_up_without_progress(config: TrainConfig) -> None:
    with pytest.raises(RankFailedError, match="it never works") as caught:
        go(config.but(max_restarts=1), "train_never")
    assert "RuntimeError: it never works" in caught.value.tail and len(caught.value.tail) <= 40
    assert living_ranks(os.getpid()) == []
    assert len(read_claims(filesystem(config.run), RunPaths(config.run))) == 2


def test_what_every_rank_raises_before_its_first_step_is_not_started_again(config: TrainConfig) -> None:
    with pytest.raises(RankFailedError, match="a layer does not fit") as caught:
        go(config, "train_breaks_at_once")
    assert "every rank raised this before its first step" in caught.value.next_step
    assert len(read_claims(filesystem(config.run), RunPaths(config.run))) == 1


def test_final_errors_are_not_retried(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        go(config, "one_refuses")
    assert len(read_claims(filesystem(config.run), RunPaths(config.run))) == 1


def test_resume(config: TrainConfig, capfd: pytest.CaptureFixture[str]) -> None:
    def refuses(*_: object, **__: object) -> list[dict[str, Any]]:
        raise ConfigError("nowhere to run", got="x", allowed="y", next_step="z")

    first = go(config)
    # Complete: nothing is claimed or launched.
    assert train(config, refuses, hooks=Hooks(entry="_ranks:train", limits=QUICK)) == first
    assert len(read_claims(filesystem(config.run), RunPaths(config.run))) == 1
    longer, note = config.but(epochs=3, num_ranks=1), "3 epochs, but this run was started with 2"

    with pytest.raises(ConfigError, match="nowhere to run"):
        train(longer, refuses, hooks=Hooks(entry="_ranks:train", limits=QUICK))
    assert capfd.readouterr().err.count(note) == 1
    more = go(longer)
    assert (more.generation, more.steps, more.samples) == (3, 37, 12 * 8)
    assert capfd.readouterr().err.count(note) == 1, "no step has followed the longer schedule yet"
    assert not list(Path(config.run, ".trash/g0001").iterdir())  # emptied by the later claimant


def test_a_run_may_end_at_an_earlier_epoch_than_it_was_begun_for(
    config: TrainConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """An epoch has 12 steps and four samples of the next. The rank is this process, and dies at step 15."""

    def dies(context: Any) -> dict[str, Any]:
        def hurdle(step: int) -> None:
            if step == 15:
                raise RuntimeError("told to die")

        return _ranks._train(context, hurdle)

    def trained(epochs: int, entry: Any) -> RunResult:
        asked = config.but(num_ranks=1, epochs=epochs)
        return train(asked, in_this_process(entry), hooks=Hooks(lease_watch_s=0.1))

    with pytest.raises(RuntimeError, match="told to die"):
        trained(5, dies)
    with pytest.raises(ConfigError, match="cannot end after 1 epochs") as caught:
        trained(1, _ranks.train)
    assert caught.value.got == "epochs = 1; 1 epochs are done, and epoch 2 is under way (step 15)"
    capfd.readouterr()
    ended = trained(2, _ranks.train)
    assert (ended.steps, ended.epochs, ended.samples) == (25, 2, 80)
    assert "2 epochs, but this run was started with 5" in capfd.readouterr().err
    assert trained(2, _ranks.train) == ended
    assert trained(3, _ranks.train).steps == 37


def test_resume_with_another_field_is_refused(config: TrainConfig) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"model": "other"}, "model"),
        ({"seed": 5}, "seed"),
        ({"global_batch": 16}, "global_batch"),
        ({"lanes": 8, "batchnorm": "local", "global_batch": 8}, "batchnorm"),
        ({"precision": "float64"}, "precision"),
        ({"learning_rate": 0.5}, "learning_rate"),
        ({"audit": True}, "audit"),
    ]
    go(config.but(num_ranks=1, checkpoint_every=1000))
    for change, named in changes:
        with pytest.raises(ConfigError, match=f"another `{named}`") as caught:
            go(config.but(**change))
        assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match="cannot end after 1 epochs") as caught:
        go(config.but(epochs=1))
    got, allowed = "epochs = 1; 2 epochs are done (step 25)", "epochs = 2 or more"
    assert (caught.value.got, caught.value.allowed) == (got, allowed)
    assert len(read_claims(filesystem(config.run), RunPaths(config.run))) == 1


def test_corrected_call_is_not_refused_for_the_wrong_one_before_it(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        go(config.but(model="typo", epochs=3), "one_refuses")
    result = go(config)
    assert (result.generation, result.steps, verify(config.run)) == (2, 25, [])
    assert go(config) == result  # nor are the wrong one's epochs asked for
    with pytest.raises(ConfigError, match="another `model`"):
        go(config.but(model="typo", epochs=3))


def test_resume_with_another_dataset_is_refused_by_what_differs(config: TrainConfig, tmp_path: Path) -> None:
    go(config)
    write_table(tmp_path / "other", seed=1)
    write_table(tmp_path / "more", records={"train": 110, "late": 3})
    write_images(tmp_path / "images", fmt="tfrecord")

    def refused(*names: str) -> str:
        with pytest.raises(ConfigError, match="another `dataset_digest`") as caught:
            go(config.but(datasets=tuple(str(tmp_path / name) for name in names)))
        return caught.value.got

    data = f"{tmp_path / 'data'}: "
    for name, told in (
        ("other", "split test: as many records, but other content; split train: as many records, but other content"),
        ("more", "no split test; split train: records = 110 (not 100); split late (not there)"),
        (
            "images",
            "no field `a`; no field `b`; field `image` (not there); field `label`: dtype = 'int64' (not 'bool')",
        ),
    ):
        assert f"{data}{told}" in refused(name)
    assert "datasets in another order, or not all" not in refused("more")
    shutil.rmtree(tmp_path / "data")
    write_table(tmp_path / "data", seed=2)  # in the place of the run's own
    assert f"the difference is unknown: {tmp_path / 'data'} has been replaced since" in refused("other")
    shutil.rmtree(tmp_path / "data")
    assert f"the difference is unknown: no dataset at {tmp_path / 'data'}" in refused("other")


@pytest.mark.parametrize("changes", [{"plan": None}, {"config": []}, {"kind": "model"}, {"format_version": 99}])
def test_run_json_of_another_form_is_refused(config: TrainConfig, changes: dict[str, Any]) -> None:
    document = {"format_version": 2, "kind": "run", "plan": {}, "config": {}}
    Path(config.run).mkdir()
    Path(config.run, "run.json").write_bytes(seal(document | changes))
    with pytest.raises(DataError, match=r"run\.json"):
        go(config)
    assert [path.name for path in Path(config.run).iterdir() if path.name != "lease.json"] == ["run.json"]


def test_run_that_is_a_file_is_refused(config: TrainConfig) -> None:
    Path(config.run).write_text("mine")
    with pytest.raises(ConfigError, match="is not a directory"):
        go(config)
    assert Path(config.run).read_text() == "mine"


def test_strange_directory_is_refused(config: TrainConfig) -> None:
    Path(config.run).mkdir()
    Path(config.run, "thesis.doc").write_text("mine")
    with pytest.raises(ConfigError, match="is not a run"):
        go(config)
    assert [path.name for path in Path(config.run).iterdir()] == ["thesis.doc"]  # nothing of ours was put there


def test_flipped_tip_is_refused_and_its_parent_used(config: TrainConfig, caplog: pytest.LogCaptureFixture) -> None:
    go(config)
    weights = tip_weights(config)
    file = Path(config.run, "checkpoints/step-0000000025.g0001/rank-00000.bin")
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    result = go(config.but(epochs=3))
    assert "step-0000000025.g0001 is refused" in caplog.text
    claim = read_claims(filesystem(config.run), RunPaths(config.run))[2]
    assert str(claim.parent) == "step-0000000020.g0001"
    assert result.steps == 37
    assert not np.array_equal(tip_weights(config), weights)


def test_late_rename_of_an_older_generation_changes_nothing(config: TrainConfig, tmp_path: Path) -> None:
    """An old driver's process is stopped between upload and rename while a new driver goes on, then woken."""
    whole = config.but(run=str(tmp_path / "whole"))
    go(whole)
    held = subprocess.Popen(
        [sys.executable, "-c", HELD, json.dumps(config.to_json()), HERE],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert held.stdout is not None
        assert held.stdout.readline() == "held\n"
        os.kill(held.pid, signal.SIGSTOP)
        more = config.but(num_ranks=1)
        result = go(more, lease_watch_s=2.0)
        assert (result.generation, result.checkpoint) == (2, "step-0000000025.g0002")
        fs, paths = filesystem(config.run), RunPaths(config.run)
        before = _state(config)
        os.kill(held.pid, signal.SIGCONT)
        held.communicate("go\n", timeout=240)
        assert held.returncode == 3  # it saw that it is superseded
    finally:
        held.kill()
        held.wait()
    assert not fs.exists(paths.checkpoint(10, 1))  # it looked once more before it renamed
    assert _state(config) == before
    assert np.array_equal(tip_weights(config), tip_weights(whole))


HELD = """
import json, sys
sys.path.insert(0, sys.argv[2])
from lockstep.training.run.lineage import SupersededError
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.control.task import Limits

commits = []

def before_rename():
    commits.append(1)
    if len(commits) == 2:  # step 10
        print("held", flush=True)
        sys.stdin.readline()

try:
    train(
        TrainConfig.from_json(json.loads(sys.argv[1])),
        run_local,
        hooks=Hooks(entry="_ranks:train", before_rename=before_rename, limits=Limits(grace_s=1.0, silent_s=60.0)),
    )
except SupersededError:
    sys.exit(3)
"""


def _state(config: TrainConfig) -> object:
    fs, paths = filesystem(config.run), RunPaths(config.run)
    tip = find_tip(fs, paths)
    assert tip is not None
    kept = sorted(p.name for p in Path(config.run, "checkpoints").iterdir() if p.name.endswith(".g0002"))
    trash = sorted(p.name for p in Path(config.run, ".trash").rglob("step-*"))
    return tip.ref, tip_weights(config).tolist(), kept, trash, find_result(fs, paths), find_model(fs, paths)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_two_drivers_do_not_work_on_one_run_and_an_interrupted_one_says_what_it_saved(
    config: TrainConfig, tmp_path: Path, by: signal.Signals
) -> None:
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[2])\n"
        "from lockstep.jobs._cli import run_job\n"
        "from lockstep.training.config import TrainConfig\n"
        "from lockstep.training.driver.train import Hooks, train\n"
        "from lockstep.training.launch.local import run_local\n"
        "hooks = Hooks(entry='_ranks:train_at_a_crawl')\n"
        "run_job(lambda _: bool(train(TrainConfig.from_json(json.loads(sys.argv[1])), run_local, hooks=hooks)))\n"
    )
    slow = config.but(epochs=4, stop_grace_s=0.0)  # as after a second signal
    with (tmp_path / "told").open("wb") as told:
        first = subprocess.Popen([sys.executable, "-c", code, json.dumps(slow.to_json()), HERE], stderr=told)
    try:
        lease = Path(config.run, "lease.json")
        until(lambda: lease.exists() and len(living_ranks(first.pid)) == 2)
        if by is signal.SIGTERM:
            with pytest.raises(ConfigError, match="another driver is working"):
                go(slow)
        until(lambda: find_tip(filesystem(config.run), RunPaths(config.run)))
        # The end of the first driver: its ranks go with it, and its lease is closed.
        pids = living_ranks(first.pid)
        assert len(pids) == 2
        first.send_signal(by)
        assert first.wait(240) == EXIT_STOPPED
        lines = (tmp_path / "told").read_text().splitlines()
        saved = "the newest checkpoint is step-0000000005.g0001, step 5 of 50; the same call resumes from there"
        assert f"{config.run}: {saved}" in lines, lines
        assert not [pid for pid in pids if lives(pid)]
        assert json.loads(lease.read_text())["closed"] is True
    finally:
        first.kill()
        first.wait()


def test_dead_driver_takes_its_ranks_along_and_is_not_waited_for(config: TrainConfig) -> None:
    code = HELD.replace(
        'Hooks(entry="_ranks:train", before_rename=before_rename, ', 'Hooks(entry="_ranks:train_at_a_crawl", '
    )
    slow = config.but(epochs=4)
    first = subprocess.Popen([sys.executable, "-c", code, json.dumps(slow.to_json()), HERE], stderr=subprocess.DEVNULL)
    try:
        until(lambda: find_tip(filesystem(config.run), RunPaths(config.run)))
        pids = living_ranks(first.pid)
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGSTOP)  # it cannot see the end of its standard input: the kernel ends it
    finally:
        first.kill()
        first.wait()
    until(lambda: not any(map(lives, pids)))
    result = go(slow, lease_watch_s=60.0)  # a dead process of this host: nothing to watch
    assert (result.generation, result.steps) == (2, 50)


def test_storage_failure_names_the_missing_dataset(config: TrainConfig) -> None:
    with pytest.raises(LockstepError) as caught:
        go(config.but(datasets=("/no/such/dataset",)))
    assert caught.value.exit_code == 2
    assert not Path(config.run).exists()  # refused before anything is written
