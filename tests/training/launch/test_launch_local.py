"""Ranks as real processes of this host: what they get, how each kind of failure is told, that nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import ConfigError, CorruptionError, LockstepError, TrainingFailedError
from lockstep.training.control.failures import RankFailedError, RankState
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.local import run_local
from lockstep.training.launch.process import Order, remove_abandoned_folders
from tests.training._ranks import judge_when, lives, living_ranks, rank_path

pytestmark = pytest.mark.slow

QUICK = Limits(grace_s=1.0, silent_s=60.0, beat_s=0.2)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_path(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    yield
    assert living_ranks(os.getpid()) == []


def test_ranks_meet_and_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    monkeypatch.setattr("lockstep.training.launch.session.new_key", lambda: key)
    seen: list[tuple[int, str, dict[str, Any]]] = []

    def handler(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        seen.append((rank, kind, fields))
        return {"doubled": 2 * fields["number"]}

    results = run_local(RankTask("_ranks:hello"), 3, generation=4, handler=Handler(handler))
    assert [result["reply"]["doubled"] for result in results] == [0, 2, 4]
    assert sorted(seen) == [(rank, "ask", {"number": rank}) for rank in range(3)]
    assert results[0]["table"] == [["127.0.0.1", 1000], ["127.0.0.1", 1001], ["127.0.0.1", 1002]]
    assert results[2]["world"] == {
        "rank": 2,
        "num_ranks": 3,
        "rank_of_node": 2,
        "ranks_per_node": 3,
        "generation": 4,
    }
    for result in results:
        assert result["session"] == os.getsid(0)  # the same session: it dies with it
        assert key.hex() not in " ".join([*result["argv"], *result["environment"]])


def test_ps_shows_the_number_of_each_rank() -> None:
    shown: set[str] = set()

    def handler(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:  # all ranks live while one asks
        pids = ",".join(map(str, living_ranks(os.getpid())))
        listed = subprocess.run(["ps", "-o", "args=", "-p", pids], capture_output=True, text=True, check=True)
        shown.update(line.rstrip() for line in listed.stdout.splitlines() if "<defunct>" not in line)
        return {}

    run_local(RankTask("_ranks:hello"), 2, handler=Handler(handler))
    assert shown == {f"python -P -m lockstep.training.rank rank {rank} of 2" for rank in range(2)}


def test_result_that_is_not_finite_arrives() -> None:
    results = run_local(RankTask("_ranks:solo", {"a": [1, "x"]}), 1)
    assert results == [{"rank": 0, "payload": {"a": [1, "x"]}, "loss": "nan"}]


def test_killed_rank_is_told_with_place_and_log(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_local(
            RankTask("_ranks:one_killed", logs=str(tmp_path / "logs")),
            2,
            limits=QUICK,
            handler=Handler(lambda r, k, f: {}),
        )
    error = caught.value
    assert (error.rank, error.host, error.step, error.phase) == (1, "127.0.0.1", 7, "train")
    text = str(error)
    assert text.startswith("rank 1 of 2 on 127.0.0.1 failed at step 7, phase train")
    assert "SIGKILL" in text
    assert text.endswith("\n".join(f"  | line {number}" for number in range(20, 60)))
    logged = "".join(p.read_text() for p in sorted((tmp_path / "logs/rank-00001").iterdir()))
    assert logged == "".join(f"line {number}\n" for number in range(60))


def test_final_error_comes_as_it_was_raised() -> None:
    with pytest.raises(ConfigError) as caught:
        run_local(RankTask("_ranks:one_refuses"), 2, limits=QUICK)
    assert (caught.value.got, caught.value.exit_code) == ("nonsense", 2)
    with pytest.raises(CorruptionError) as rot:
        run_local(RankTask("_ranks:one_reads_rot"), 1, limits=QUICK)
    assert (rot.value.file, rot.value.record, rot.value.offset) == ("/data/part-00000", 7, 812)


def test_unforeseen_error_is_a_failed_rank_with_its_trace() -> None:
    with pytest.raises(RankFailedError, match="RuntimeError: out of luck") as caught:
        run_local(RankTask("_ranks:one_breaks"), 1, limits=QUICK)
    assert "Traceback (most recent call last):" in caught.value.tail


def test_last_lines_arrive_whatever_their_length() -> None:
    with pytest.raises(RankFailedError, match="SIGKILL") as caught:
        run_local(RankTask("_ranks:one_writes_without_end"), 2, limits=QUICK)
    assert caught.value.rank == 1
    assert caught.value.tail and max(map(len, caught.value.tail)) < 3000
    assert len(str(caught.value)) < 200_000


def test_error_too_long_for_a_frame_arrives_cut() -> None:
    with pytest.raises(ConfigError, match="a model's name") as caught:
        run_local(RankTask("_ranks:one_says_too_much"), 1, limits=QUICK)
    assert caught.value.got.startswith("xxx")


def test_exit_in_the_middle_is_an_error_that_says_so() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_local(RankTask("_ranks:one_leaves"), 1, limits=QUICK)
    assert "called sys.exit" in str(caught.value) and "SystemExit(0)" in str(caught.value)


def test_what_a_killed_rank_had_started_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_local(RankTask("_ranks:one_forks", {"folder": str(tmp_path)}), 1, limits=QUICK)
    worker, end = int((tmp_path / "worker").read_text()), time.monotonic() + 30
    while lives(worker) and time.monotonic() < end:
        time.sleep(0.05)  # the signal is sent, but a loaded machine takes its time to act on it
    assert not lives(worker)


def test_unknown_entry_is_final() -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        run_local(RankTask("_ranks:no_such_function"), 1, limits=QUICK)
    with pytest.raises(ConfigError, match="module:function"):
        RankTask("no colon")


def test_stalled_rank_is_told_though_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {0: 0, 1: 0}

    def under_way(state: RankState) -> bool:
        steps[state.rank] = state.step
        return steps[0] > 5 and steps[1] == 3

    judge_when(monkeypatch, under_way)
    limits = Limits(grace_s=1.0, beat_s=0.2, stall_s=4.0)
    with pytest.raises(RankFailedError, match="no progress for 4 s") as caught:
        run_local(RankTask("_ranks:one_stalled"), 2, limits=limits)
    assert (caught.value.rank, caught.value.step) == (1, 3)
    assert "in one_stalled" in str(caught.value), "its stack is among its last lines"


def test_rank_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 breaks"):
        run_local(RankTask("_ranks:deaf"), 2, limits=QUICK)
    assert time.monotonic() - began > 1.0


def test_absent_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's process is there but never says hello: its order is never read."""
    from lockstep.training.launch import process, supervisor

    def start(order: Order, *files: int) -> Any:
        if order.world.rank == 0:
            return process.start_rank(order, *files)
        return subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    joined: set[int] = set()

    def rank_0_has_come(state: RankState) -> bool:
        if state.joined_at is not None:
            joined.add(state.rank)
        return 0 in joined

    judge_when(monkeypatch, rank_0_has_come)
    monkeypatch.setattr(supervisor, "start_rank", start)
    with pytest.raises(RankFailedError, match="did not connect within 2 s") as caught:
        run_local(RankTask("_ranks:one_stalled"), 2, limits=Limits(start_s=2.0, grace_s=1.0))
    assert (caught.value.rank, caught.value.phase) == (1, "starting")


def test_finished_rank_is_not_held_up_by_its_threads() -> None:
    began = time.monotonic()
    assert run_local(RankTask("_ranks:slow_result"), 1) == [{"rank": 0}]
    assert time.monotonic() - began < 60, "as long as its thread sleeps"


def test_temporary_files_of_a_killed_rank_are_removed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_local(RankTask("_ranks:leaves_files", {"told": str(told)}), 1, limits=QUICK)
    made = Path(told.read_text())
    assert made.parent.name.startswith("lockstep-rank-") and not made.parent.exists()
    assert str(made.parent.parent) == tempfile.gettempdir()


def test_temporary_files_of_a_rank_that_died_with_its_supervisor_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others: those of a rank that lives, and what only has such a name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, strange = (tmp_path / f"lockstep-rank-{name}" for name in ("1-dead", "2-alive", "3-strange"))
    for folder in (dead, alive, strange):
        folder.mkdir()
        (folder / "file").touch()
    (dead / "lock").touch()
    (strange / "lock").symlink_to("/dev/null")
    script = "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", script, str(alive / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        holder.stdout.readline()
        remove_abandoned_folders()
        assert (dead.exists(), alive.exists(), strange.exists()) == (False, True, True)
        holder.communicate(b"\n")
    remove_abandoned_folders()
    assert not alive.exists()


def test_error_of_the_handler_ends_the_launch() -> None:
    def handler(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        raise LockstepError("the driver's own fault")

    with pytest.raises(LockstepError, match="own fault"):
        run_local(RankTask("_ranks:hello"), 2, limits=QUICK, handler=Handler(handler))


def test_failing_log_storage_does_not_fail_the_rank() -> None:
    assert run_local(RankTask("_ranks:solo", logs="/proc/no/such/folder"), 1, limits=QUICK)[0]["rank"] == 0


def test_supervisor_kills_its_rank_when_the_driver_is_gone(tmp_path: Path) -> None:
    """The server's process goes on, but its control port closes for good: 30 s, here 5."""
    import threading

    from lockstep.training.control.server import ControlServer
    from lockstep.training.launch.supervisor import Supervisor
    from lockstep.training.world import World

    limits = Limits(lost_s=5.0, grace_s=0.5)
    server = ControlServer(bytes(32), 1, 1, limits, None, "127.0.0.1")
    task = RankTask("_ranks:tells_pid", {"folder": str(tmp_path)})
    order = Order(task, World.local(0, 1), "127.0.0.1", ("127.0.0.1", server.port), bytes(32), limits)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(Supervisor(order).run()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not (tmp_path / "pid-0").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    server._listener.close()
    for channel in (*server._supervisors.values(), *server._ranks.values()):
        channel.close()
    thread.join(120)
    assert codes == [-9]
    assert not Path(f"/proc/{(tmp_path / 'pid-0').read_text()}").exists()


def test_training_failed_error_is_the_base() -> None:
    assert issubclass(RankFailedError, TrainingFailedError)
