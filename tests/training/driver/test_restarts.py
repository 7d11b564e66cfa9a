"""Which failures a run is started again after, when, and what it says of a batch that kills a rank twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.features.sample_id import sample_id
from lockstep.storage.errors import (
    CommunicationError,
    ConfigError,
    CorruptionError,
    DeniedError,
    DiskFullError,
    LockstepError,
    LostWriteError,
    NotFoundError,
    RetryableStorageError,
    StorageError,
    TrainingFailedError,
)
from lockstep.storage.fs import filesystem
from lockstep.training.batches.audit_log import sample_hex
from lockstep.training.batches.training_set import TrainingSet, sample_ids
from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import (
    ApplicationEndedError,
    Failure,
    LauncherError,
    LauncherGoneError,
    MemoryKillError,
    PreemptedError,
    RankFailedError,
    RankState,
    Weight,
)
from lockstep.training.control.last_words import NO_STEP, LastWords, new_page
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.driver import restarts
from lockstep.training.driver.preflight import plan_for
from lockstep.training.driver.restarts import RestartPolicy, batch_places, incurable
from lockstep.training.driver.stop import EXIT_STOPPED, EndedByCallerError
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.plan.order import Run
from lockstep.training.reading.reader import SplitReader
from lockstep.training.run.lineage import SupersededError, read_claims
from lockstep.training.run.paths import RunPaths
from lockstep.training.world import World
from tests.training._tiny import write_table
from tests.training.driver.test_driver_decisions import config_of, launches
from tests.training.results.test_audit_run import TinyRun

CRASH = "its process was killed by SIGSEGV"


def death(rank: int = 1, step: int = 7, reason: str = CRASH, **more: Any) -> RankFailedError:
    code = more.pop("code", -signal.SIGSEGV)
    weight = more.pop("weight", Weight.ENDED)
    state = RankState(rank, step=step, exit_code=code, **({"phase": "train"} | more))
    return RankFailedError(Failure(state, reason, weight), 2)


def caused(cause: LockstepError, **more: Any) -> RankFailedError:
    """The failure of a rank that raised `cause`."""
    error = death(**{"weight": Weight.RAISED, "code": 1, "reason": str(cause), **more})
    error.__cause__ = cause
    return error


def parted(step: int, sums: str = "") -> RankFailedError:
    """Ranks whose weights differ after `step`."""
    cause = LockstepError(f"the weights of rank 1 are not those of rank 0 after step {step}", got=f"CRC32C {sums}")
    vars(cause)["diverged_at"] = step  # as it comes from a rank: DivergedError's own class stays there
    return caused(cause, step=step)


@pytest.fixture
def policy(tmp_path: Path) -> RestartPolicy:
    run = TinyRun(tmp_path)
    return RestartPolicy(config_of(run, tmp_path / "mine", max_restarts=9, max_restarts_per_hour=100), run.plan)


def told(policy: RestartPolicy, *errors: LockstepError, progress: bool = False) -> list[float]:
    return [policy.failed(error, num_ranks=2, progress=progress, samples={}) for error in errors]


def test_waits_double_without_progress_up_to_half_a_minute(policy: RestartPolicy) -> None:
    assert told(policy, *[LockstepError("no")] * 8) == [0, 1, 2, 4, 8, 16, 30, 30]
    assert told(policy, LockstepError("no"), progress=True) == [0]
    assert told(policy, LockstepError("no")) == [1]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (death(), death(), "in step 8"),
        (death(code=3, reason="exit code 3"), death(code=3, reason="exit code 3"), "in step 8"),
        (death(weight=Weight.RAISED), death(weight=Weight.RAISED), "in step 8"),
        (death(step=5, reading="f, record 7"), death(step=6, reading="f, record 7"), "while it read f, record 7"),
        (death(step=5, reading=range(6, 8)), death(reading=range(6, 8)), "of steps 7 to 8"),
        (death(step=5, reading=range(6, 7)), death(reading=range(6, 7)), "in step 7"),
        (death(), death(step=8), None),
        (death(), death(rank=0), None),
        (death(rank=2), death(rank=2), None),  # a parameter server
        (death(), death(reason="its process was killed by SIGBUS"), None),
        (death(step=5, reading="f, record 7"), death(step=6, reading="f, record 8"), None),
        (death(code=-signal.SIGKILL), death(code=-signal.SIGKILL), None),
        (death(weight=Weight.SILENT), death(weight=Weight.SILENT), None),
        (death(weight=Weight.CONSEQUENCE), death(weight=Weight.CONSEQUENCE), None),
        (death(phase="restore"), death(phase="restore"), "in phase restore at step 7 with the same error"),
        (death(phase="restore"), death(phase="restore", rank=0), "in phase restore at step 7 with the same error"),
        (death(phase="restore"), death(phase="opening"), None),
        (death(phase="export"), death(phase="export", step=9), None),
        (death(phase="opening", code=-signal.SIGKILL), death(phase="opening", code=-signal.SIGKILL), None),
        (parted(100, "abc"), parted(100, "def"), "in phase train at step 100 with the same error"),
        (parted(100), parted(200), None),
    ],
)
def test_only_the_same_death_twice_in_a_row_ends_the_run(
    policy: RestartPolicy, first: RankFailedError, second: RankFailedError, words: str | None
) -> None:
    told(policy, first, LockstepError("another one"), first)  # twice, but not in a row
    if words is None:
        told(policy, second)
        return
    with pytest.raises(TrainingFailedError, match="which no restart cures") as caught:
        told(policy, second)
    assert caught.value.exit_code == 2 and words in caught.value.what


def test_a_storage_that_fails_at_the_same_step_may_be_back_the_next_time(policy: RestartPolicy) -> None:
    error = death(weight=Weight.RAISED)
    error.__cause__ = StorageError("no NameNode answers")
    told(policy, error, error)
    assert policy.suspect is None, "no batch is blamed"


ENDED = ApplicationEndedError("the application application_1_0001 of this driver has ended", got="YARN: KILLED")
ALIKE = RankFailedError(Failure(RankState(0), "ImportError: no module named x", Weight.RAISED), 2, alike=True)


@pytest.mark.parametrize(
    ("error", "ends_by", "why"),
    [
        (ENDED, ApplicationEndedError, "its executors do not come back"),
        (LauncherGoneError("Java has ended"), LauncherGoneError, "nothing is launched without Java"),
        (LauncherError("the barrier stage failed"), None, "an executor was lost: others are there"),
        (PreemptedError("taken away"), None, "executors come back"),
        (MemoryKillError("killed"), None, "once: the second time the driver says what to raise"),
        (SupersededError("another driver"), SupersededError, "the run is another driver's"),
        (EndedByCallerError("a trial was ended"), EndedByCallerError, "the caller wants no more"),
        (NotFoundError("no such file"), NotFoundError, "a missing file stays missing"),
        (ConfigError("model m cannot be imported"), ConfigError, "flags stay as they are"),
        (CorruptionError("flipped", file="f"), CorruptionError, "bytes that are wrong stay wrong"),
        (DiskFullError("the quota of names is used up"), DiskFullError, "it stays used up"),
        (caused(DiskFullError("the quota of space is used up")), DiskFullError, "a rank meets it again"),
        (DeniedError("permission denied"), DeniedError, "permissions stay"),
        (caused(DeniedError("permission denied")), DeniedError, "a rank meets it again"),
        (ALIKE, RankFailedError, "every rank would raise it again"),
        (death(), None, "one rank may die for a reason of its host"),
        (parted(100), None, "memory of one host may have failed, the first time"),
        (StorageError("no answer"), None, "the storage may be back"),
        (caused(RetryableStorageError("a DataNode died")), None, "another DataNode is there"),
        (LostWriteError("an upload of 0 bytes"), None, "it is written again"),
        (caused(LostWriteError("an upload of 0 bytes")), None, "it is written again"),
        (CommunicationError("a rank was lost"), None, "another one is started"),
    ],
)
def test_which_errors_no_restart_cures(error: LockstepError, ends_by: type[LockstepError] | None, why: str) -> None:
    found = incurable(error)
    assert (None if found is None else type(found)) is ends_by, why


def test_a_run_whose_application_has_ended_ends_with_one_error_that_says_from_where_it_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def ends(task: RankTask) -> None:
        raise ApplicationEndedError(ENDED.what, got=ENDED.got, next_step="Start again.")

    run = TinyRun(tmp_path)
    with pytest.raises(ApplicationEndedError) as caught:
        train(config_of(run, tmp_path / "mine", max_restarts=9), launches(ends, ends), hooks=Hooks(lease_watch_s=0.1))
    assert caught.value.next_step == "Start again. It resumes from the start."
    assert "resuming from" not in capfd.readouterr().err


def ids_of(reader: SplitReader) -> dict[str, int]:
    """The sample id of each record, by the words that name file and record."""
    return {
        f"{url}, record {record} ": int(sample_ids(reader, Run(number, record, 1))[0])
        for number, (_, url, shard) in enumerate(reader.stored)
        for record in range(shard.records)
    }


@pytest.mark.parametrize("mix", [None, (2, 1)])
@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_the_records_of_a_batch_are_those_that_its_rank_is_fed(
    tmp_path: Path, mix: tuple[int, ...] | None, fmt: str
) -> None:
    urls = tuple(str(tmp_path / name) for name in ("a", "b"))
    for seed, url in enumerate(urls):
        write_table(url, fmt=fmt, seed=seed)
    config = TrainConfig(
        datasets=urls, mix=mix, run=str(tmp_path / "run"), model="m", num_ranks=2, global_batch=24, epochs=3,
        batchnorm="local",
    )  # fmt: skip
    opened = TrainingSet.at(urls, "train", mix)
    plan = plan_for(opened.manifest, config)
    ids = {place: one for reader in opened.readers for place, one in ids_of(reader).items()}
    for rank in range(2):
        feed = opened.feed(plan, World.local(rank, 2))
        places = batch_places(config, plan, feed.lanes, range(9, 11))
        found = [ids[place.split("(")[0]] for place in places]
        assert found == [one for step in (9, 10) for one in feed.batch(step).sample_ids.tolist()]


def test_a_rank_says_what_it_reads_and_decodes_and_when_it_has_ended(tmp_path: Path) -> None:
    write_table(tmp_path / "data", fmt="parquet")
    opened = TrainingSet.at([str(tmp_path / "data")], "train", None)
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="m", num_ranks=1, global_batch=20,
        epochs=1, batchnorm="local",
    )  # fmt: skip
    said: list[str | range] = []
    feed = opened.feed(plan_for(opened.manifest, config), World.local(0, 1))
    feed.watch(said.append, said.append)
    feed.batch(2)
    assert said[0] != "" and said[-1] == "" and range(2, 3) in said
    assert any("part-00000.parquet, record " in words and "(row group " in words for words in map(str, said))


def test_last_words_outlive_their_writer() -> None:
    kept = new_page()
    writer = LastWords(os.dup(kept))
    page = LastWords(kept)
    assert page.read() == (NO_STEP, "")
    writer.did(41)
    writer.reads("ä" * 5000)
    step, text = page.read()
    assert step == 41 and isinstance(text, str) and text.startswith("ää") and len(text) > 2000
    writer.reads(range(3, 5))
    assert page.read() == (41, range(3, 5))
    writer.reads("")
    writer.close()
    assert page.read() == (41, "")


def test_the_driver_waits_longer_each_time_and_a_signal_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restarts, "WAIT_S", 0.05)
    run, hooks = TinyRun(tmp_path), Hooks(lease_watch_s=0.1)

    def fails(task: RankTask) -> None:
        raise LockstepError("a rank died")

    config = config_of(run, tmp_path / "mine", max_restarts=9)
    with pytest.raises(LockstepError, match="that is all"):
        train(config, launches(fails, fails, fails, lambda task: None), hooks=hooks)
    lines = [line for line in capfd.readouterr().err.splitlines() if "failed, resuming" in line]
    assert [line.partition("the start")[2] for line in lines] == [
        ": a rank died", " in 0.05 s: a rank died", " in 0.1 s: a rank died",
    ]  # fmt: skip

    monkeypatch.setattr(restarts, "WAIT_S", 30.0)
    began = time.monotonic()

    def fails_and_is_stopped(task: RankTask) -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        raise LockstepError("a rank died")

    with pytest.raises(SystemExit) as caught:
        train(config, launches(fails, fails_and_is_stopped, fails), hooks=hooks)
    assert caught.value.code == EXIT_STOPPED and time.monotonic() - began < 25
    assert "the same call starts from the beginning" in capfd.readouterr().err


@pytest.mark.slow
def test_a_sample_that_kills_its_rank_ends_the_run_at_the_second_death_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Row 61 makes the model call abort(), as a bug in a kernel would."""
    write_table(tmp_path / "data", nan_rows=[61])
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), num_ranks=2, global_batch=8, epochs=1,
        model="tests.training._models:dies_of_a_sample", launcher="local", batchnorm="local", checkpoint_every=2,
    )  # fmt: skip
    with pytest.raises(TrainingFailedError, match="twice in step") as caught:
        train(config, run_local, hooks=Hooks(lease_watch_s=0.1, limits=Limits(grace_s=1.0, silent_s=60.0)))
    (reader,) = TrainingSet.at(config.data.datasets, "train", None).readers
    row = sample_id([b"61"], 0)
    (place,) = [place for place, one in ids_of(reader).items() if one == row]
    assert "killed by SIGABRT; both times with sample " in caught.value.got
    assert f"sample {sample_hex(row)}: {place}(block" in caught.value.got and caught.value.got.count("sample ") == 4
    assert len(read_claims(filesystem(config.run), RunPaths(config.run))) == 2
    assert "generation 1 failed, resuming from" in capfd.readouterr().err
