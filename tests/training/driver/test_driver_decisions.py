"""What the driver decides between generations, with launches that are made up: no ranks, no processes."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lockstep.storage.errors import (
    ConfigError,
    LockstepError,
    RetryableStorageError,
    StorageAwayError,
    StorageError,
    TrainingFailedError,
)
from lockstep.storage.files import deadlines
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import LauncherError
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.driver import preflight
from lockstep.training.driver.dry_run import dry_run
from lockstep.training.driver.elastic import Slots
from lockstep.training.driver.ownership import Ownership
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.session import Launches, Session, SessionLauncher
from lockstep.training.plan.datasets import open_data
from lockstep.training.run.lineage import CheckpointRef, Claim, SupersededError, read_claims, superseded
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import read_status
from tests.training import _ranks
from tests.training._driver_alone import in_this_process
from tests.training._tiny import write_table
from tests.training.results.test_audit_run import TinyRun
from tests.waiting import until


def launches(*generations: Callable[[RankTask], None]) -> Any:
    """A launcher that does one of these things a generation; each ends by an error."""
    left = list(generations)

    def launch(task: RankTask, num_ranks: int, **options: Any) -> list[dict[str, Any]]:
        left.pop(0)(task)
        raise LockstepError("a rank died") if left else ConfigError("that is all")

    return launch


def config_of(run: TinyRun, folder: Path, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"num_ranks": 2, "global_batch": 20, "epochs": 2, "batchnorm": "local"}
    options |= {"launcher": "local", "datasets": (run.dataset,), "run": str(folder), "model": "logistic"}
    return TrainConfig(**{**options, **more})


def test_first_weights_of_a_run_that_still_trains_are_the_same_for_all_ranks_and_after_a_restart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, given = TinyRun(tmp_path), []
    first = source.generation(None, 1, [2, 4])
    at_4, at_6 = (source.paths.checkpoint(step, generation) for step, generation in ((4, first), (6, first + 1)))

    def goes_on(task: RankTask) -> None:
        given.append(task.payload["first_weights"])
        source.generation(CheckpointRef(4, first), 1, [6])

    def ends(task: RankTask) -> None:
        given.append(task.payload["first_weights"])

    config = config_of(source, tmp_path / "mine", init_from=source.paths.root)
    with pytest.raises(ConfigError, match="that is all"):
        train(config, launches(goes_on, ends), hooks=Hooks(lease_watch_s=0.1))
    assert given == [at_4, at_4]
    with pytest.raises(ConfigError, match="that is all"):
        train(config, launches(ends), hooks=Hooks(lease_watch_s=0.1))  # another call: nothing rests on the first yet
    assert given[2:] == [at_6]
    assert [line for line in capfd.readouterr().err.splitlines() if "first weights" in line] == [
        f"first weights: {url}" for url in (at_4, at_6)
    ]


def test_a_run_is_opened_and_planned_once_before_its_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, opened, read = TinyRun(tmp_path), 0, []
    source.generation(None, 1, [2])
    real_read = LocalFileSystem.open_read

    def open_counted(*given: Any, tasks: bool) -> Any:
        nonlocal opened
        opened += 1
        return open_data(*given, tasks=tasks)

    def read_noted(fs: LocalFileSystem, url: str) -> Any:
        read.append(url)
        return real_read(fs, url)

    monkeypatch.setattr(preflight, "open_data", open_counted)
    monkeypatch.setattr(LocalFileSystem, "open_read", read_noted)
    config = config_of(source, tmp_path / "mine", init_from=source.paths.checkpoint(2, 1))
    checked = preflight.preflight_before_spark(config)
    assert checked is not None and checked.finished is None and not (tmp_path / "mine").exists()
    # The ranks check the weights' bytes; here it is enough that they are there.
    assert not [url for url in read if url.endswith(".safetensors")]
    with pytest.raises(ConfigError, match="that is all"):
        train(config, launches(lambda task: None), hooks=Hooks(lease_watch_s=0.1), checked=checked)
    assert opened == 1
    assert preflight.preflight_before_spark(config.but(run="hdfs://nowhere:1/run")) is None
    for wrong in ("nothing", "data"):
        with pytest.raises(ConfigError, match="holds no weights"):
            preflight.preflight(config.but(run=str(tmp_path / "new"), init_from=str(tmp_path / wrong)))


def dies_after_each_checkpoint(context: Any) -> dict[str, Any]:
    """An entry whose generations each come as far as one more checkpoint."""
    start = int(context.control.request("restore", 600.0)["step"])

    def hurdle(step: int) -> None:
        if step == start + 6:
            raise LockstepError("a rank died")

    return _ranks._train(context, hurdle)


def test_a_run_that_only_creeps_ends(tmp_path: Path) -> None:
    """Each generation makes a checkpoint, so no two failures in a row are without one; they are too many in an hour."""
    write_table(tmp_path / "data")
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="tiny", num_ranks=1, global_batch=8,
        epochs=2, checkpoint_every=5, launcher="local", max_restarts=0, max_restarts_per_hour=2,
    )  # fmt: skip
    launch = in_this_process(dies_after_each_checkpoint)
    with pytest.raises(LockstepError, match="a rank died"):
        train(config, launch, hooks=Hooks(lease_watch_s=0.1))
    with pytest.raises(TrainingFailedError, match="failed more often than 2 times in an hour") as caught:
        train(config.but(max_restarts=1), launch, hooks=Hooks(lease_watch_s=0.1))
    assert "a rank died" in caught.value.got and "--max-restarts-per-hour" in caught.value.allowed
    claims = read_claims(filesystem(config.run), RunPaths(config.run))
    assert [claim.parent.step if claim.parent else 0 for claim in claims.values()] == [0, 5, 10, 15]
    more = config.but(max_restarts=1, max_restarts_per_hour=20)
    assert train(more, launch, hooks=Hooks(lease_watch_s=0.1)).steps == 25


def test_a_claim_whose_checkpoint_an_older_driver_has_deleted_since_is_followed_by_a_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look-up of the tip and the claim the older driver commits once more, and its retention deletes."""
    write_table(tmp_path / "data")
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="tiny", num_ranks=1, global_batch=8,
        epochs=1, checkpoint_every=5, launcher="local",
    )  # fmt: skip
    launch, paths = in_this_process(_ranks.train), RunPaths(config.run)
    assert train(config, launch, hooks=Hooks(lease_watch_s=0.1)).steps == 12
    late, claimed = tmp_path / "late", Ownership.claim
    Path(paths.checkpoint(12, 1)).rename(late)

    def claim_late(ownership: Ownership, parent: CheckpointRef | None, **asked: Any) -> Claim | None:
        if late.exists():
            assert parent == CheckpointRef(10, 1)
            late.rename(paths.checkpoint(12, 1))
            for step in (5, 10):
                shutil.rmtree(paths.checkpoint(step, 1))
        return claimed(ownership, parent, **asked)

    monkeypatch.setattr(Ownership, "claim", claim_late)
    result = train(config.but(epochs=2), launch, hooks=Hooks(lease_watch_s=0.1))
    assert (result.steps, result.samples, result.generation) == (25, 13 * 8, 3)
    claims = read_claims(filesystem(config.run), paths)
    assert [str(claims[generation].parent) for generation in (2, 3)] == [
        "step-0000000010.g0001",
        "step-0000000012.g0001",
    ]
    assert verify(config.run) == []


class NeverThere(Session):
    """A session whose supervisors have no place to begin."""

    def __init__(self) -> None:
        super().__init__(1, Limits(), "127.0.0.1", "127.0.0.1")
        self.waits = threading.Event()

    def _check(self, task: RankTask, ended: Callable[[], BaseException | None]) -> None:
        self.waits.set()
        until = time.monotonic() + 120
        while (error := ended()) is None:
            assert time.monotonic() < until, "nobody has said that the wait is over"
            time.sleep(0.01)
        raise error

    def _begin(self, control: tuple[str, int], secret: bytes) -> None:
        raise AssertionError("there is no place")

    def _end(self) -> None:
        """Nothing has begun."""


@pytest.mark.parametrize("by", ["the lease", "fail"])
def test_a_driver_that_waits_for_slots_hears_that_it_must_end(by: str) -> None:
    class Overtaken(Handler):
        error: BaseException | None = None

        def overtaken(self) -> BaseException | None:
            return self.error

    error, handler, session = superseded("run", "a later lease"), Overtaken(), NeverThere()

    def tell() -> None:
        assert session.waits.wait(20)
        if by == "fail":
            session.fail(error)
        else:
            handler.error = error

    with session:
        thread = threading.Thread(target=tell)
        thread.start()
        with pytest.raises(SupersededError, match="a later lease"):
            session.run(RankTask("m:f"), 1, handler)
        thread.join()


class NoRoom(NeverThere):
    """A session that finds no slots."""

    def _check(self, task: RankTask, ended: Callable[[], BaseException | None]) -> None:
        raise ConfigError("2 ranks exceed the 1 task slots", got="1 slot", next_step="Lower --num-ranks.")


class Full(SessionLauncher):
    """Launches in such sessions."""

    def session(self, num_ranks: int, limits: Limits) -> Session:
        return NoRoom()


def test_no_room_is_a_wrong_call_at_the_start_and_a_failed_run_later() -> None:
    """Who repeats what failed (exit 1), as a schedule does, goes on with the run; a wrong call (2) nobody repeats."""
    with Launches(Full(), 1, Limits()) as made:
        with pytest.raises(ConfigError, match="exceed the 1 task slots"):
            made.run(RankTask("m:f"), 1)
        with pytest.raises(LauncherError, match="cannot be started again: 2 ranks exceed") as caught:
            made.run(RankTask("m:f"), 2)
    assert caught.value.exit_code == 1 and "start again" in caught.value.next_step


def test_a_storage_that_is_away_does_not_hide_why_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(fs: LocalFileSystem, url: str) -> NoReturn:
        raise StorageError("no NameNode answers")

    fs, paths = filesystem(str(tmp_path)), RunPaths(str(tmp_path))
    with pytest.raises(LockstepError, match="rank 1 of 2 failed"), Ownership(fs, paths):
        monkeypatch.setattr(LocalFileSystem, "open_read", away)
        raise LockstepError("rank 1 of 2 failed")
    assert "no NameNode answers" in caplog.text


def test_a_storage_that_stays_away_ends_the_run_with_one_error_that_says_where_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver asks once more after its ranks have failed, for the whole time; then it ends without asking again."""
    source, asked, gone = TinyRun(tmp_path), [], threading.Event()
    first = source.generation(None, 1, [2, 4])
    whom = "the NameNode at nn:8020"

    def refused(left_s: float) -> NoReturn:
        raise RetryableStorageError("cannot list it", got="Connection refused")

    def through(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(fs: LocalFileSystem, *args: Any, **more: Any) -> Any:
            if gone.is_set():
                asked.append(threading.current_thread() is threading.main_thread())
                deadlines.with_retries(refused, what=f"`{args}`", whom=whom, give_up_s=1.0)
            return method(fs, *args, **more)

        return call

    def loses_its_storage(task: RankTask) -> None:
        gone.set()

    for name in ("list", "stat", "open_read", "create", "mkdirs", "delete", "rename_new", "replace"):
        monkeypatch.setattr(LocalFileSystem, name, through(getattr(LocalFileSystem, name)))
    monkeypatch.setattr(LocalFileSystem, "away", property(lambda fs: deadlines.given_up(whom)))
    config = config_of(source, Path(source.paths.root), audit=True, window_bytes=3000)
    with pytest.raises(StorageAwayError) as caught:
        train(config, launches(loses_its_storage, loses_its_storage), hooks=Hooks(lease_watch_s=0.1))
    gone.clear()
    assert re.fullmatch(
        rf"the storage could not be reached: {whom} has served nothing for \d+ s; once it is back, the same call "
        rf"resumes {source.paths.root} from {CheckpointRef(4, first)}",
        caught.value.what,
    )
    assert caught.value.got == "Connection refused" and caught.value.next_step
    assert asked.count(True) == 1, "the driver asks for the newest checkpoint, and for nothing else"


def test_a_storage_that_only_refuses_to_write_is_not_said_to_serve_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a NameNode in safe mode."""
    source, gone, whom = TinyRun(tmp_path), threading.Event(), "the NameNode at nn:8020"
    first = source.generation(None, 1, [2, 4])

    def refused(left_s: float) -> NoReturn:
        deadlines.with_retries(lambda left_s: None, what="a read of another thread", whom=whom)
        raise RetryableStorageError("cannot create it", got="Name node is in safe mode")

    def create(fs: LocalFileSystem, url: str, *, exclusive: bool = True) -> Any:
        if gone.is_set():
            deadlines.with_retries(refused, what=f"`create {url}`", whom=whom, give_up_s=0.5)
        return plain(fs, url, exclusive=exclusive)

    plain = LocalFileSystem.create
    monkeypatch.setattr(LocalFileSystem, "create", create)
    config = config_of(source, Path(source.paths.root), audit=True, window_bytes=3000)
    with pytest.raises(StorageAwayError) as caught:
        train(config, launches(lambda task: gone.set(), lambda task: None), hooks=Hooks(lease_watch_s=0.1))
    gone.clear()
    assert re.fullmatch(
        rf"the storage could not be reached: {whom} did not serve `create .*` within [0-9.]+ s \(\d+ attempts\); once "
        rf"it is back, the same call resumes {source.paths.root} from {CheckpointRef(4, first)}",
        caught.value.what,
    )


@pytest.mark.parametrize(
    ("more", "least", "most"),
    [({"min_ranks": 1}, 1, 2), ({"spare_executors": 2}, 4, 4)],  # a spare may become a rank
)
def test_a_dry_run_asks_for_the_slots_and_the_memory_of_the_run(
    tmp_path: Path, more: dict[str, Any], least: int, most: int
) -> None:
    asked: list[tuple[int, float, int | None]] = []

    class Small(SessionLauncher):
        def session(self, num_ranks: int, limits: Limits) -> NoReturn:
            raise AssertionError

        def ready(self, num_ranks: int, wait_s: float, most: int | None = None) -> NoReturn:
            asked.append((num_ranks, wait_s, most))
            raise ConfigError("no room")

    config = config_of(TinyRun(tmp_path), tmp_path / "mine", launcher="barrier", **more)
    for call in (train, dry_run):
        with pytest.raises(ConfigError, match="no room"):
            call(config, Small())
    assert asked == [(least, config.limits.start_limit_s, most)] * 2


def test_the_status_names_the_checkpoint_of_a_run_that_waits_for_its_first_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the driver is killed now, the status says that the run resumes, and not that it begins again."""
    source = TinyRun(tmp_path)
    first = source.generation(None, 1, [2, 4])
    fs, paths = filesystem(source.paths.root), source.paths

    def waits(slots: Slots, before: int | None, ended: Callable[[], BaseException | None]) -> NoReturn:
        until(lambda: fs.exists(paths.status) and read_status(fs, paths).checkpoint is not None, 10.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(Slots, "choose", waits)
    config = config_of(source, Path(source.paths.root), audit=True, window_bytes=3000)
    with pytest.raises(KeyboardInterrupt):
        train(config, launches(lambda task: None), hooks=Hooks(lease_watch_s=0.1, lease_every_s=0.1))
    assert read_status(fs, paths).checkpoint == str(CheckpointRef(4, first))
