"""Ranks inside a Spark barrier stage: the same task, results and failures as on one host."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import InheritableThread

from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import ApplicationEndedError, LauncherGoneError, RankFailedError
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.driver.stop import EXIT_STOPPED
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.barrier import (
    BarrierSession,
    OnSpark,
    SuperviseOnTask,
    check_slots,
    classic_context,
    slots_now,
)
from lockstep.training.launch.script_driver import ScriptConfig, launch_script
from lockstep.training.run.lineage import SupersededError, read_claims, superseded
from lockstep.training.run.paths import RunPaths
from tests.horovod.test_horovod import DATA, EXAMPLES, SCRIPTS, check_loop
from tests.training._ranks import HERE, judge_when, lives, rank_path
from tests.training._tiny import write_table
from tests.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

QUICK = Limits(grace_s=1.0, silent_s=60.0)


@pytest.fixture
def session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The shared session; its workers find the entries of `_ranks`."""
    rank_path(monkeypatch)
    spark.sparkContext.addPyFile(str(Path(HERE, "_ranks.py")))
    return spark


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    write_table(tmp_path / "data")
    return TrainConfig(
        datasets=(str(tmp_path / "data"),),
        run=str(tmp_path / "run"),
        model="tiny",
        num_ranks=2,
        global_batch=8,
        epochs=2,
        checkpoint_every=10,
    )


def test_same_results_as_local(session: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")  # a local master gives its tasks none: shared out as on one host
    results = OnSpark(session)(RankTask("_ranks:hello"), 2, generation=3, handler=Handler(lambda r, k, f: {"rank": r}))
    assert [result["reply"] for result in results] == [{"rank": 0}, {"rank": 1}]
    assert results[1]["world"] == {
        "rank": 1,
        "num_ranks": 2,
        "rank_of_node": 1,
        "ranks_per_node": 2,
        "generation": 3,
    }
    seen = [line for result in results for line in result["environment"] if line.startswith("CUDA_VISIBLE_DEVICES")]
    assert seen == ["CUDA_VISIBLE_DEVICES=6", "CUDA_VISIBLE_DEVICES=7"]
    # Spark's own secrets stay with Spark's worker.
    assert not [line for line in results[0]["environment"] if line.startswith("PYTHON_WORKER_FACTORY")]


def test_each_rank_gets_its_own_certificate_with_the_key(session: SparkSession) -> None:
    session.sparkContext.addPyFile(str(Path(HERE, "_security_ranks.py")))
    results = OnSpark(session)(RankTask("_security_ranks:certificate", tls=True), 2, generation=5)
    assert [result["name"] for result in results] == [f"CN=rank-{rank}.generation-5.lockstep" for rank in range(2)]
    assert results[0]["authority"] == results[1]["authority"]
    assert not any(result["seen"] for result in results)


def test_failed_rank_ends_the_stage_and_leaves_the_slots_free(session: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="SIGKILL") as caught:
        OnSpark(session)(
            RankTask("_ranks:one_killed", logs=str(tmp_path / "logs")),
            2,
            limits=QUICK,
            handler=Handler(lambda r, k, f: {}),
        )
    assert str(caught.value).endswith("  | line 59")
    assert caught.value.host not in ("", "an unknown host")
    assert (tmp_path / "logs/rank-00001/part-00000.log").read_text().startswith("line 0\n")
    assert OnSpark(session)(RankTask("_ranks:solo"), 2)[1]["rank"] == 1


def test_final_error_comes_as_it_was_raised(session: SparkSession) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        OnSpark(session)(RankTask("_ranks:one_refuses"), 2, limits=QUICK)


def test_more_ranks_than_slots_are_refused_at_once(session: SparkSession) -> None:
    assert slots_now(session.sparkContext) == 2
    began = time.monotonic()
    with pytest.raises(ConfigError, match="3 ranks, servers and spares exceed the 2 task slots") as caught:
        OnSpark(session)(RankTask("_ranks:solo"), 3)
    assert (caught.value.exit_code, "local[3]" in caught.value.next_step) == (2, True)
    assert time.monotonic() - began < 60, "executors on their way would be waited for five times as long"


def test_two_launches_that_find_half_of_the_slots_end_by_the_deadline(session: SparkSession) -> None:
    """The cause: another job's task holds a slot for long, and Spark starts a barrier stage only when all of its slots
    are free, so both wait. Each ends by the start limit with an error that says so; the slots are free afterwards.
    """
    context = session.sparkContext
    limits = dataclasses.replace(QUICK, start_s=4.0)

    def hold() -> None:
        context.setJobGroup("half", "holds a slot", interruptOnCancel=True)
        with contextlib.suppress(Exception):  # it is cancelled
            context.parallelize([0], 1).foreach(lambda _: time.sleep(120.0))

    def launch(number: int) -> RankFailedError:
        with pytest.raises(RankFailedError, match="did not connect within 4 s of the start") as caught:
            OnSpark(session)(RankTask("_ranks:solo"), 2, generation=number, limits=limits)
        return caught.value

    holder = InheritableThread(target=hold)
    holder.start()
    try:
        until(lambda: len(context.statusTracker().getJobIdsForGroup("half")) == 1)
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            errors = [each.result(120.0) for each in [pool.submit(launch, number) for number in (1, 2)]]
        assert time.monotonic() - began < 60.0
        assert all("slot" in error.next_step for error in errors), errors[0].next_step
    finally:
        context.cancelJobGroup("half")
        holder.join(60.0)
    assert not holder.is_alive()
    assert len(OnSpark(session)(RankTask("_ranks:hello"), 2, limits=QUICK, handler=Handler(lambda *_: {}))) == 2


def test_dead_jvm_is_told_and_not_tried_again(
    session: SparkSession, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")  # what py4j raises once its JVM is gone

    launch = OnSpark(session)
    launch.ready(2, 1.0)
    monkeypatch.setattr("lockstep.training.launch.barrier.check_slots", refused)
    monkeypatch.setattr(OnSpark, "ready", lambda *_: None)
    with pytest.raises(LauncherGoneError, match="Java process"):
        train(config, launch)
    assert len(list(Path(config.run, "generations").iterdir())) == 1


def test_run_that_cannot_start_leaves_nothing(session: SparkSession, config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="exceed the 2 task slots"):
        train(config.but(num_ranks=4), OnSpark(session))
    assert not Path(config.run).exists()


def test_cancelled_stage_takes_its_ranks_along(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver loses patience: the ranks' processes end though they would wait for two minutes."""
    judge_when(monkeypatch, lambda state: len([file for file in tmp_path.iterdir() if file.read_text()]) == 2)

    def handler(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {}

    task = RankTask("_ranks:tells_pid", {"folder": str(tmp_path)})
    with pytest.raises(RankFailedError, match="no progress for 3 s"):
        OnSpark(session)(task, 2, limits=Limits(stall_s=3.0, grace_s=1.0), handler=Handler(handler))
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not [pid for pid in pids if lives(pid)]


@pytest.mark.parametrize(("killed", "level"), [("train_killed_once", 1), ("train_supervisor_killed_once", 2)])
def test_training_survives_a_killed_rank_and_a_killed_task(
    session: SparkSession, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, killed: str, level: int
) -> None:
    """A rank is started again by the tasks that are there; a lost task takes its stage along."""
    stages: list[int] = []
    real = BarrierSession._run_stage

    def run_stage(self: BarrierSession, keep: SuperviseOnTask) -> None:
        stages.append(1)
        real(self, keep)

    monkeypatch.setattr(BarrierSession, "_run_stage", run_stage)
    result = train(config, OnSpark(session), hooks=Hooks(entry=f"_ranks:{killed}", limits=QUICK))
    assert (result.generation, result.restarts, result.checkpoint) == (2, 1, "step-0000000025.g0002")
    assert [restart["level"] for restart in result.restart_log] == [level]
    assert len(stages) == level
    told = [Path(file).read_text() for file in sorted(Path(config.run, "logs").glob("g*/rank-*/part-*.log"))]
    ranks = [tuple(map(int, pair)) for text in told for pair in re.findall(r"process (\d+) under (\d+)", text)]
    assert not any(lives(pid) for pid, _ in ranks)
    if level == 1:  # a killed supervisor writes no log
        assert len(ranks) == 4 and len({supervisor for _, supervisor in ranks}) == 2


def test_a_task_that_gets_a_sigterm_lets_all_ranks_write_a_checkpoint(
    session: SparkSession, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose ranks may become fewer, or whose cluster replaces executors, continues from there with new tasks; any
    other one stops.
    """
    slots = OnSpark(session).slots()
    assert slots >= 2
    hooks = Hooks(entry="_ranks:train_supervisor_asked_once", limits=QUICK)
    elastic = config.but(min_ranks=1, max_ranks=2, checkpoint_every=1000)
    result = train(elastic, OnSpark(session), hooks=hooks)
    claims = read_claims(filesystem(config.run), RunPaths(config.run))
    assert claims[2].parent is not None and 15 < claims[2].parent.step < 25
    assert (result.steps, result.restarts, claims[2].num_ranks) == (25, 1, 2)
    fixed = config.but(run=f"{config.run}-2", checkpoint_every=1000)
    with pytest.raises(SystemExit) as caught:
        train(fixed, OnSpark(session), hooks=hooks)
    assert caught.value.code == EXIT_STOPPED
    assert not OnSpark(session).replaces()
    monkeypatch.setattr(OnSpark, "replaces", lambda self: True)
    replaced = config.but(run=f"{config.run}-3", checkpoint_every=1000)
    result = train(replaced, OnSpark(session), hooks=hooks)
    claims = read_claims(filesystem(replaced.run), RunPaths(replaced.run))
    assert claims[2].parent is not None and (result.steps, result.generation, claims[2].num_ranks) == (25, 2, 2)


def test_scripts_run_in_the_stage(session: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that calls no other rank, with its files; and Horovod's loop, equal to what one process computes."""
    for name, text in (("beside.py", "WORD = 'imported'\n"), ("words.txt", "read\n")):
        (tmp_path / name).write_text(text)
        session.sparkContext.addFile(str(tmp_path / name))  # as lockstep launch does with --files
    launch_script(ScriptConfig(script=str(SCRIPTS / "plain.py"), num_ranks=2), OnSpark(session))
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        assert f"[rank {rank}] files imported read True" in lines and f"[rank {rank}] at exit" in lines
    arguments = ("--data", str(DATA), "--out", str(tmp_path))
    launch_script(
        ScriptConfig(script=str(EXAMPLES / "horovod_script" / "custom_loop.py"), arguments=arguments, num_ranks=2),
        OnSpark(session),
    )
    check_loop(tmp_path)


def test_spark_connect_is_refused_by_name() -> None:
    session = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(ConfigError, match=r"over Spark Connect\n.*no SparkContext, and executors cannot connect"):
        classic_context(session)


class FakeContext:
    """A context whose executors appear one a second, up to `most`."""

    master = "yarn"

    def __init__(self, most: int = 2000, /, **settings: str) -> None:
        self._settings, self._asked, self._most = settings, 0, most

    def getConf(self) -> Any:
        return type("Conf", (), {"get": staticmethod(lambda key, default=None: self._settings.get(key, default))})

    @property
    def _jsc(self) -> Any:
        def slots(profile: object) -> int:
            self._asked += 1
            return min(self._asked, self._most)

        nothing = {
            "defaultResourceProfile": staticmethod(lambda: None),
            "addResourceProfile": staticmethod(lambda _: None),
        }
        manager = type("Manager", (), nothing)
        scala = type(
            "Sc",
            (),
            {
                "isStopped": staticmethod(lambda: False),
                "maxNumConcurrentTasks": staticmethod(slots),
                "resourceProfileManager": staticmethod(lambda: manager),
            },
        )
        return type("Jsc", (), {"sc": staticmethod(lambda: scala)})


def test_an_application_that_has_ended_is_named_before_anything_is_started_in_it() -> None:
    scala = SimpleNamespace(isStopped=lambda: True, applicationId=lambda: "application_1_0001")
    context: Any = SimpleNamespace(master="local[2]", _jsc=SimpleNamespace(sc=lambda: scala))
    with pytest.raises(ApplicationEndedError, match="application_1_0001 of this driver has ended") as ended:
        slots_now(context)
    assert isinstance(ended.value, LauncherGoneError) and "a new application resumes the run" in ended.value.next_step


def test_executors_on_their_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.launch.barrier.SLOTS_LOOK_S", 0.01)
    check_slots(FakeContext(**{"spark.executor.instances": "3"}), 3, 10.0)  # type: ignore[arg-type]  # a stand-in
    with pytest.raises(ConfigError, match="exceed the 2 "):  # two were asked for: three never come
        check_slots(FakeContext(**{"spark.executor.instances": "2"}), 3, 10.0)  # type: ignore[arg-type]  # a stand-in
    with pytest.raises(SupersededError, match="later lease"):  # another driver takes the run over
        asked = iter([None, None, superseded("run", "a later lease")])
        many = FakeContext(**{"spark.executor.instances": "1000"})
        check_slots(many, 1000, 10.0, lambda: next(asked))  # type: ignore[arg-type]  # same
    with pytest.raises(ConfigError, match="dynamic allocation"):
        check_slots(FakeContext(**{"spark.dynamicAllocation.enabled": "true"}), 1, 10.0)  # type: ignore[arg-type]  # same


def test_executors_that_are_never_given_are_counted_and_the_advice_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lockstep.training.launch.barrier.SLOTS_LOOK_S", 0.01)
    monkeypatch.setattr("lockstep.training.launch.barrier.SLOTS_QUIET_S", 0.1)
    few = FakeContext(2, **{"spark.executor.instances": "8", "spark.executor.cores": "2"})
    with pytest.raises(ConfigError, match="8 ranks, servers and spares exceed the 2 task slots") as caught:
        check_slots(few, 8, 0.5)  # type: ignore[arg-type]  # a stand-in
    assert caught.value.got == "2 slots on yarn: 1 of the 8 executors asked for came"
    fewer = "ower --num-ranks, servers and spares to 2 in all, or free or enlarge the cluster or its"
    assert caught.value.next_step.startswith(f"L{fewer}")
    assert "--num-executors" not in caught.value.next_step
    (waits,) = [record.getMessage() for record in caplog.records]
    who = "8 ranks, servers and spares"
    assert waits.startswith(f"{who} wait up to 0.5 s for task slots: the cluster has given 2, by 1 of the 8 executors")
    assert f"l{fewer}" in waits


def test_more_ranks_than_yarn_gives_by_default_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="3 ranks, servers and spares exceed the 2 task slots") as caught:
        check_slots(FakeContext(), 3, 600.0)  # type: ignore[arg-type]  # a stand-in
    # The first executor has come, the second is on its way.
    assert "to 2 in all, or raise --num-executors" in caught.value.next_step
