"""A spare executor: its process becomes the rank whose executor was killed. Real executors, in a driver of its own."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lockstep.storage import tokens
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.control.client import RosterClient
from lockstep.training.control.failures import Marks, RankState
from lockstep.training.control.last_words import new_page
from lockstep.training.control.protocol import new_key
from lockstep.training.control.roster import Roster
from lockstep.training.control.server import Handler
from lockstep.training.control.stacks import new_stacks
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.driver.dry_run import dry_run
from lockstep.training.driver.train import train
from lockstep.training.launch import spares
from lockstep.training.launch.local import run_local
from lockstep.training.launch.process import new_mark, start_process
from lockstep.training.launch.session import Restart, Session, SessionLauncher
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import checked_restarts, find_result
from tests.training._ranks import rank_path
from tests.training._tiny import write_table
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
TOLD = "this process was a spare"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_whose_executor_is_killed_goes_on_in_the_spare(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={"train": 2000, "test": 8})
    run = tmp_path / "run"
    call = [
        sys.executable,
        "-m",
        "lockstep.jobs.train",
        "--dataset",
        str(tmp_path / "data"),
        "--run",
        str(run),
        "--audit",
    ]
    call += ["--model", "tests.training._models:sleeps_by_row", "--global-batch", "8", "--epochs", "2"]
    call += ["--num-ranks", "2", "--checkpoint-every", "20", "--master", "local-cluster[3,1,1024]"]
    call += ["--spare-executors", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    driver = subprocess.Popen(call, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        found: list[psutil.Process] = []

        def executor_of_a_rank() -> bool:
            """Java of an executor whose rank trains, once the spare waits too."""
            assert driver.poll() is None, driver.communicate()[1]
            every = below(driver.pid)
            zygotes = {one for one, words in every.items() if "lockstep.training.rank.zygote" in words}
            spare = [one for one, words in every.items() if "lockstep.training.rank" in words and words[-1] == ""]
            with contextlib.suppress(psutil.Error):  # a process has ended in the meantime
                ranks = [one for one in zygotes if one.parent() in zygotes]
                ranks += [one for one, words in every.items() if "lockstep.training.rank" in words and one not in spare]
                found[:] = [next(above for above in one.parents() if above.name() == "java") for one in ranks]
            return len(spare) == 1 and len(found) == 2 and len([*run.glob("checkpoints/*")]) > 1

        until(executor_of_a_rank)
        assert "CoarseGrainedExecutorBackend" in " ".join(found[0].cmdline())
        found[0].kill()
        _, said = driver.communicate(timeout=240)
    finally:
        driver.kill()
    assert driver.returncode == 0, said
    print(said)
    result = find_result(filesystem(str(run)), RunPaths(str(run)))
    assert result is not None and [restart["level"] for restart in result["restart_log"]] == [2]
    logs = {path: path.read_text() for path in run.glob("logs/*/*/*")}
    assert [path.parent.parent.name for path, text in logs.items() if TOLD in text] == ["g0002"], [*logs]
    assert check_run_audit(str(run)).ok


@dataclass
class Asked(SessionLauncher):
    """Records the room that is asked of it."""

    asked: list[tuple[Any, ...]]
    room: bool = False

    def ready(self, *room: Any) -> None:
        """Refuse what is asked for, unless there is room."""
        self.asked.append(room)
        if not self.room:
            raise ConfigError("no room")

    def slots(self) -> int:
        """Those of a small cluster."""
        return 5

    def session(self, num_ranks: int, limits: Limits) -> Session:
        """Not asked for."""
        raise AssertionError


def test_a_run_and_its_dry_run_ask_for_the_slots_and_the_memory_of_spares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare becomes a rank, which may come into an executor that has one: its memory counts as a rank's."""
    write_table(tmp_path / "data")
    common: dict[str, Any] = {"datasets": (str(tmp_path / "data"),), "run": str(tmp_path / "run"), "epochs": 1}
    config = TrainConfig(**common, model="logistic", global_batch=8, num_ranks=3, min_ranks=2, spare_executors=2)
    launch = Asked([])
    for call in (train, dry_run):
        with pytest.raises(ConfigError, match="no room"):
            call(config, launch)
    assert launch.asked == [(4, config.limits.start_limit_s, 5)] * 2
    names = ("rank_bytes", "kept_bytes", "gradient_bytes", "checkpoint_bytes", "parameters", "weights_bytes")
    model: dict[str, Any] = {**dict.fromkeys(names, 1), "metrics": []}
    monkeypatch.setattr("lockstep.training.driver.dry_run.run_local", lambda *_, **__: (model,))
    assert " samples a step, 2 spare executors; 5 task slots now; " in dry_run(config, Asked([], room=True))


class Context:
    """A Spark that has no slot for a spare: its jobs wait until they are cancelled."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self.waiting = threading.Semaphore(0)

    def setJobGroup(self, group: str, description: str, interruptOnCancel: bool) -> None:
        """Not recorded."""

    def cancelJobGroup(self, group: str) -> None:
        """All of them."""
        self._cancelled.set()

    def parallelize(self, rows: list[int], partitions: int) -> Any:
        """Rows of which no task can begin."""
        return SimpleNamespace(mapPartitions=lambda task: SimpleNamespace(collect=lambda: self._collect(task)))

    def _collect(self, task: spares.WaitOnTask) -> None:
        self.task = task
        self._cancelled.clear()
        self.waiting.release()
        self._cancelled.wait()
        raise RuntimeError("Job 3 cancelled")


def test_the_end_of_a_run_waits_for_no_spare_without_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.InheritableThread", threading.Thread)
    monkeypatch.setattr(spares, "rank_profile", lambda context: None)
    context: Any = Context()
    ranks: Any = SimpleNamespace(came=lambda wait_s: True)
    waiting = [spares.Spare(context, Limits(), "127.0.0.1", "127.0.0.1", ranks) for _ in range(2)]
    assert all(context.waiting.acquire(timeout=30) for _ in waiting)
    began = time.monotonic()
    spares.close_all(waiting)
    assert time.monotonic() - began < spares.END_S  # of one; they took that one after the other


def test_a_lost_spare_gets_a_job_of_its_own_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pyspark.InheritableThread", threading.Thread)
    monkeypatch.setattr(spares, "rank_profile", lambda context: None)
    monkeypatch.setattr(spares, "AGAIN_S", 0.1)
    context: Any = Context()
    ranks: Any = SimpleNamespace(came=lambda wait_s: True)
    spare = spares.Spare(context, Limits(), "127.0.0.1", "127.0.0.1", ranks)
    assert context.waiting.acquire(timeout=30)
    task = context.task
    RosterClient(task.control, task.secret, 0, deadline_s=30.0, lost_s=30.0).close()
    assert context.waiting.acquire(timeout=30)  # where Spark tried that task again, the roster refused it
    assert "a spare executor was lost (its connection broke)" in caplog.text
    assert context.task.secret != task.secret
    spare.close()


def living(ends: list[object]) -> Any:
    """A spare that lives; `ends` gets an item when it is ended."""
    process = SimpleNamespace(poll=lambda: None)
    return SimpleNamespace(process=process, devices=(), modules=tuple(sys.path), end=lambda: ends.append(1))


@pytest.fixture
def in_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a task of Spark's."""
    monkeypatch.setattr(spares, "AGAIN_S", 0.1)
    monkeypatch.setattr(spares, "KEPT_S", 1.0)
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: SimpleNamespace(resources=dict))
    monkeypatch.setattr("pyspark.SparkFiles.getRootDirectory", lambda: "")
    monkeypatch.setenv("LOCKSTEP_FILES", "")


@pytest.mark.usefixtures("in_task")
def test_a_spare_that_waits_again_is_not_ended_as_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    spare = living(ended)
    monkeypatch.setattr(spares.SpareRank, "start", lambda devices: spare)
    for lasts_s in (0.0, 2 * spares.KEPT_S):
        key = new_key()
        roster = Roster(key, 1, "127.0.0.1", lambda rank: None)
        end = threading.Timer(lasts_s, roster.close)
        threading.Thread(target=lambda roster=roster, end=end: roster.came(30) and end.start(), daemon=True).start()
        list(spares.WaitOnTask(("127.0.0.1", roster.port), key, Limits())([0]))
        assert not ended
    assert spares.take(()) is spare


@pytest.mark.usefixtures("in_task")
def test_a_spare_that_is_killed_is_replaced_and_one_that_is_not_used_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "KEPT_S", 4.0)  # a busy machine looks for it in this time

    def pids() -> list[int]:
        return [
            one.pid for one, words in below(os.getpid()).items() if words[-3:] == ["-m", "lockstep.training.rank", ""]
        ]

    key, ended = new_key(), threading.Event()
    roster = Roster(key, 1, "127.0.0.1", lambda rank: None)

    def task() -> None:
        list(spares.WaitOnTask(("127.0.0.1", roster.port), key, Limits())([0]))
        over.set()
        ended.wait(60)  # the kernel ends a spare with the thread that started it

    over = threading.Event()
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    try:
        until(lambda: len(pids()) == 1)
        first = pids()
        os.kill(first[0], signal.SIGKILL)
        until(lambda: pids() not in ([], first))
        roster.close()
        assert over.wait(30)
        assert len(pids()) == 1  # for the supervisor that may come
        until(lambda: not pids())
    finally:
        roster.close()
        ended.set()
        thread.join()


def test_a_spare_uses_the_tokens_that_came_after_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_path(monkeypatch)
    monkeypatch.setattr(tokens, "_held", "")
    monkeypatch.setattr(tokens, "_file", -1)
    monkeypatch.setenv(tokens.VARIABLE, "")  # so that what `hold` sets ends with this test
    monkeypatch.delenv(tokens.VARIABLE)
    page, stacks, mark = new_page(), new_stacks(), new_mark()
    spare = spares.SpareRank(start_process([], mark, 1, page, stacks), page, stacks, mark, (), tuple(sys.path))
    monkeypatch.setattr(spares, "_kept", [spare])
    monkeypatch.setattr(spares, "OURS", "_ranks")
    tokens.hold(base64.b64encode(b"a token of HDFS").decode())
    [result] = run_local(RankTask("_ranks:hello"), 1, handler=Handler(lambda *_: {}))
    assert result["pid"] == spare.process.pid
    assert f"{tokens.VARIABLE}={os.environ[tokens.VARIABLE]}" in result["environment"]


def test_a_spare_that_joins_before_its_supervisor_reports_it_takes_no_negative_time() -> None:
    """The run's result had such a number, and could not be read again."""
    marks = Marks(started_at=3.02, phases=[("train", 4.0)], first_step_at=5.0)
    restart = Restart(2, 2, failed_at=0.0, ended_at=1.0, waited_s=0.0, called_at=1.5, given_at=2.0)
    restart.stepped([RankState(0, joined_at=3.0, marks=marks)])
    (found,) = checked_restarts([restart.to_json()], "restart_log")
    assert found["parts"]["start the process"] == 1.0 and found["parts"]["start Python"] == 0.0
    assert sum(found["parts"].values()) == found["seconds"] == 5.0


def test_a_spare_that_began_before_the_session_shipped_a_file_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[object] = []
    monkeypatch.setattr(spares, "_kept", [living(gone)])
    monkeypatch.syspath_prepend("/shipped/model.zip")
    assert spares.take(()) is None and gone


def test_ranks_of_a_user_s_entry_get_no_process_that_has_imported_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[object] = []
    spare = living(gone)
    monkeypatch.setattr(spares, "_kept", [spare])
    assert spares.take((), "my.module:main") is None and gone
    monkeypatch.setattr(spares, "_kept", [spare])
    assert spares.take((), "lockstep.training.rank.runtime:main") is spare


def below(pid: int) -> dict[psutil.Process, list[str]]:
    """The descendants of a process that live, and their command lines."""
    found = {}
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            found[one] = one.cmdline()
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        {"spare_executors": -1},
        {"launcher": "local", "min_ranks": None},  # ranks are processes of this host
        {"max_ranks": 3},  # such a run uses every slot
        {"max_ranks": 2},  # likewise, once it has lost a rank
    ],
)
def test_spare_executors_need_slots_that_no_rank_uses(wrong: dict[str, object]) -> None:
    right = {"spare_executors": 1, "launcher": "barrier", "num_ranks": 2, "min_ranks": 1}
    given = {"datasets": ("data",), "run": "run", "model": "logistic", "global_batch": 8, "epochs": 1}
    TrainConfig(**given | right)  # type: ignore[arg-type]  # values of several types
    with pytest.raises(ConfigError, match="spare_executors"):
        TrainConfig(**given | right | wrong)  # type: ignore[arg-type]  # likewise
