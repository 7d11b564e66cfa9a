"""What a run is doing, seen and controlled from other processes: status, watch, control, stacks, --on-event."""

from __future__ import annotations

import datetime
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs import control, status, watch
from lockstep.jobs._cli import _code_of
from lockstep.storage.documents import seal
from lockstep.storage.errors import (
    ConfigError,
    CorruptionError,
    DataError,
    LockstepError,
    NotFoundError,
    TrainingFailedError,
)
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.control.protocol import Tag
from lockstep.training.driver.on_event import OnEvent
from lockstep.training.driver.ownership import Ownership
from lockstep.training.driver.status_board import Board
from lockstep.training.driver.stop import StoppedRun, StopRequest
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.run import requests
from lockstep.training.run.lineage import CheckpointRef, Claim
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import INTERRUPTED, STARTING, RankStatus, RunStatus, now_utc, read_status, words
from tests.training import _threads
from tests.training._tiny import write_table
from tests.waiting import until

NOON = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)
TRAINS = RunStatus(
    state="training",
    written_at=NOON.isoformat(),
    host="a",
    pid=7,
    generation=2,
    num_ranks=2,
    step=30,
    steps=120,
    epochs_done=1,
    epochs_trained=1.25,
    epochs=4,
    samples_per_s=1234.5,
    left_s=61.2,
    loss=0.25,
    metrics={"auc": 0.75, "nan_metric": None},
    checkpoint="step-0000000020.g0002",
    restarts=1,
    ranks=[RankStatus(rank=0), RankStatus(rank=1, host="b", step_s=0.012, rss_bytes=3 << 20, cores=0.5)],
    slow={"rank": 1, "host": "b", "what": "input"},
)


def test_a_status_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    fs, paths = filesystem(str(tmp_path)), RunPaths(str(tmp_path))
    with pytest.raises(NotFoundError, match=r"is not a run\n  got: no run\.json"):
        read_status(fs, paths)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(NotFoundError, match=r"has no status[\s\S]*ended in its first seconds[\s\S]*lockstep report"):
        read_status(fs, paths)
    Path(paths.status).write_bytes(TRAINS.to_bytes())
    assert read_status(fs, paths) == TRAINS
    for damaged in (b"", b"[]", b"{}", b'{"kind": "status", "ranks": 1}', TRAINS.to_bytes()[:-9], b"[" * 100_000):
        Path(paths.status).write_bytes(damaged)
        with pytest.raises(CorruptionError, match="a status is damaged"):
            read_status(fs, paths)


def test_the_words_of_a_status() -> None:
    lines = words(TRAINS, "RUN", NOON).splitlines()
    assert lines[0] == "RUN: training, step 30 of 120 (25%), epoch 2 of 4, 1,234 samples/s, about 0:01:01 left"
    assert lines[1:5] == [
        "  driver 7 on a, generation 2, 1 restarts",
        "  loss 0.2500",
        "  epoch 1: auc 0.7500",
        "  newest checkpoint: step-0000000020.g0002",
    ]
    assert lines[7].split() == ["1", "b", "12.0", "-", "-", "-", "-", "3", "0.5"]
    assert lines[-1] == "  rank 1 on b is slow: input"


@pytest.mark.parametrize(
    ("state", "age_s", "silent"),
    [
        ("training", 29, False),
        ("training", 31, True),
        ("training", -5, False),  # a driver whose clock is ahead
        ("finished", 1e6, False),
    ],
)
def test_a_driver_that_writes_no_more_is_named(state: str, age_s: float, silent: bool) -> None:
    text = words(replace(TRAINS, state=state), "RUN", NOON + datetime.timedelta(seconds=age_s))
    assert ("no driver has written for" in text) is silent


def test_a_run_whose_driver_ended_without_a_word_shows_the_checkpoint_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fs, paths = filesystem(str(tmp_path)), RunPaths(str(tmp_path))
    (tmp_path / "run.json").write_text("{}")
    Path(paths.status).write_bytes(TRAINS.to_bytes())  # an hour ago; later ones found no room
    for generation, parent in ((1, None), (2, CheckpointRef(10, 1))):
        claim = Claim(generation=generation, parent=parent, nonce="ab", epochs=4, num_ranks=2)
        write_file(fs, paths.claim(generation), seal(claim.to_json()))
    for step in (20, 40):
        Path(paths.checkpoint(step, 2)).mkdir(parents=True)
    assert status.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "interrupted" in said and "newest checkpoint: step-0000000040.g0002" in said
    assert "it was killed, is paused or cannot write; the same lockstep train resumes" in said
    here = words(replace(TRAINS, state=INTERRUPTED), "RUN", NOON)  # on this host it is known to have ended
    assert "its driver ended without a word: it was killed, or could not write its status" in here
    shutil.rmtree(paths.checkpoints)
    Path(paths.claim(2)).unlink()
    assert status.main([str(tmp_path)]) == 0 and "newest checkpoint: none yet" in capsys.readouterr().out


def test_what_is_no_request_is_ignored_and_a_run_without_a_driver_is_refused(tmp_path: Path) -> None:
    fs, paths = filesystem(str(tmp_path)), RunPaths(str(tmp_path))
    assert requests.open_requests(fs, paths) == []
    (tmp_path / "control").mkdir()
    for name, content in {"a.json": "[]", "b.json": "{", "c.json": "x" * 5000, "d": "{}"}.items():
        (tmp_path / "control" / name).write_text(content)
    (tmp_path / "control" / "e.json").write_text('{"kind": "stop", "by": "host"}')
    (tmp_path / "control" / "f.json").write_text('{"kind": "stop", "by": "host"}')
    (tmp_path / "control" / "f.answer.json").write_text("{}")
    assert [request.nonce for request in requests.open_requests(fs, paths)] == ["e"]
    Path(paths.status).write_bytes(replace(TRAINS, state="stopped").to_bytes())
    with pytest.raises(ConfigError, match=r"no driver that could follow `stop`[\s\S]*a run that is stopped"):
        requests.ask(fs, paths, requests.STOP, 1.0)
    Path(paths.status).write_bytes(TRAINS.to_bytes())
    with pytest.raises(TrainingFailedError, match=r"did not answer `stop`[\s\S]*no answer within 0 s"):
        requests.ask(fs, paths, requests.STOP, 0.2)
    assert len(list((tmp_path / "control").iterdir())) == 7, "the request is withdrawn"


class Silent:
    """A RunProgress that shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set(self, done: int, note: str | None = None) -> None:
        pass

    def add(self, row: Mapping[str, Any]) -> None:
        pass


def board_of(run: Path) -> Board:
    config = TrainConfig(datasets=("d",), run=str(run), model="m", num_ranks=2, global_batch=8, epochs=1)
    fs, paths = filesystem(str(run)), RunPaths(str(run))
    return Board(Silent(), fs, paths, config, 100, StopRequest(), confirm=lambda: None)


def test_a_status_that_is_being_written_is_not_swept_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(fs: FileSystem, url: str, data: bytes, *, exclusive: bool, confirm: Callable[[], None]) -> None:
        def late() -> None:  # its temporary file is there
            confirm()
            if not swept:
                writing.set()
                time.sleep(0.5)  # for a driver that would not wait

        write_file(fs, url, data, exclusive=exclusive, confirm=late)

    def sweep(ownership: Ownership) -> None:
        of_ownership(ownership)
        swept.append(True)

    swept, writing, of_ownership = list[bool](), threading.Event(), Ownership.sweep
    claim = Ownership.claim
    monkeypatch.setattr("lockstep.training.driver.status_board.write_file", slow)
    monkeypatch.setattr(Ownership, "sweep", sweep)
    monkeypatch.setattr(Ownership, "claim", lambda *given, **more: (writing.wait(60), claim(*given, **more))[1])
    write_table(tmp_path / "data", records={"train": 16})
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="logistic", num_ranks=1, global_batch=8,
        epochs=1, launcher="local",
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        train(config, run_local)
    assert swept and not [record for record in caplog.records if "status was not written" in record.message]


def test_a_checkpoint_asked_for_before_a_restart_is_asked_of_the_new_ranks(tmp_path: Path) -> None:
    board = board_of(tmp_path)
    board.begin(Claim(1, "a", None, 1, 2), lambda: None)
    board.set(3)
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "a.json").write_text('{"kind": "checkpoint", "by": "host"}')
    board._follow()
    assert board.orders() == [Tag.SAVE]
    board.failed(LockstepError("a rank failed before the checkpoint was committed"))
    board.begin(Claim(2, "b", None, 1, 2), lambda: None)
    board.set(0)
    assert board.orders() == [], "no rank has begun"
    board.set(1)
    assert board.orders() == [Tag.SAVE]
    board.set(2)
    assert board.orders() == []


def test_a_request_that_was_withdrawn_gets_no_answer(tmp_path: Path) -> None:
    """The process that asked waited long enough, and nobody would remove the answer."""
    board, tips = board_of(tmp_path), [CheckpointRef(2, 1)]
    board.begin(Claim(1, "a", None, 1, 2), lambda: tips[-1])
    board.set(3)
    request = tmp_path / "control" / "a.json"
    request.parent.mkdir()
    request.write_text('{"kind": "checkpoint", "by": "host"}')
    board._follow()
    request.unlink()
    board._follow()
    tips.append(CheckpointRef(4, 1))
    board._follow()
    assert list(request.parent.iterdir()) == []


def test_a_command_that_fails_or_is_none_never_holds_up_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for command in ("", "  ", "'open"):
        with pytest.raises(ConfigError, match="--on-event cannot be called"):
            OnEvent(command, "RUN")
    for command, said in {
        "/nowhere/x --token=SECRET": "FileNotFoundError of /nowhere/x",
        "false": "exit code 1",
    }.items():
        event = OnEvent(command, "RUN")
        event("finished")
        event.finish()
        assert said in caplog.text and "SECRET" not in caplog.text
    event = OnEvent(f"sh -c 'cat >> {tmp_path}/seen; echo >> {tmp_path}/seen'", "RUN")
    for number in range(5):
        event("restart", number=number)
    event.finish()
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [each["number"] for each in seen] == list(range(5)) and {each["run"] for each in seen} == {"RUN"}


@contextmanager
def driver(call: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as target:
        started = subprocess.Popen([sys.executable, "-m", *call], stdout=target, stderr=target)
        try:
            yield started
        finally:
            started.kill()
            started.wait()


def job(*call: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", *call], capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_is_seen_saved_and_stopped_from_another_process(tmp_path: Path) -> None:
    run, events = str(tmp_path / "run"), tmp_path / "events"
    write_table(tmp_path / "data")
    train = [
        "lockstep.jobs.train",
        "--dataset",
        str(tmp_path / "data"),
        "--run",
        run,
        "--model",
        "mlp",
        "--num-ranks",
        "2",
    ]
    train += ["--global-batch", "8", "--launcher", "local", "--checkpoint-every", "1000000"]
    train += ["--on-event", f"sh -c 'cat >> {events}; echo >> {events}'"]

    code, text = job(*train, "--epochs", "3", "--dry-run")
    assert code == 0 and "37 steps of 8 samples (3 epochs of 12.5 steps)" in text and "17,025 parameters" in text, text
    assert not Path(run).exists(), "nothing is written"

    def status() -> RunStatus:
        return read_status(filesystem(run), RunPaths(run))

    def trains() -> bool:
        return Path(run, "status.json").exists() and status().ranks[-1:] != [] and status().ranks[-1].step_s is not None

    with driver([*train, "--epochs", "100000"], tmp_path / "log") as first:
        until(lambda: first.poll() is not None or trains())
        code, text = job("lockstep.jobs.status", run)
        assert code == 0 and f"{run}: training, step" in text and text.splitlines()[-1].split()[0] == "1", text
        before = status().step
        code, text = job("lockstep.jobs.control", run, "checkpoint")
        assert code == 0 and text.startswith("checkpoint step-"), text
        saved = Path(run, "checkpoints", text.split()[1])
        assert saved.is_dir() and int(saved.name[5:15]) > before
        code, text = job("lockstep.jobs.stacks", run)
        assert code == 0 and text.startswith("rank 0:\n") and "\nrank 1:\n" in text, text
        assert text.count("training/rank/__main__.py") > 2 and "fit.py" in text
        with subprocess.Popen(
            [sys.executable, "-m", "lockstep.jobs.watch", run], stdout=subprocess.PIPE, text=True
        ) as watch:
            code, text = job("lockstep.jobs.control", run, "stop")
            assert code == 0 and text.startswith("the ranks write a checkpoint"), text
            assert first.wait(120) == 75
            told = watch.communicate(timeout=60)[0]
        assert watch.returncode == 75 and f"{run}: stopped, step" in told, told
    assert "stopped by lockstep control on" in (tmp_path / "log").read_text()
    assert job("lockstep.jobs.control", run, "stop")[0] == 2
    assert verify(run) == [] and not os.listdir(tmp_path / "run" / "control")
    assert '"event": "stopped"' in events.read_text()


@pytest.mark.slow
def test_how_a_run_ended_is_in_its_status_and_its_last_event(tmp_path: Path) -> None:
    run, events = str(tmp_path / "run"), tmp_path / "events"
    write_table(tmp_path / "data")
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=run, model="logistic", num_ranks=2, global_batch=8, epochs=2,
        launcher="local",
    )  # fmt: skip
    hooks = Hooks(lease_watch_s=0.1, on_event=f"sh -c 'cat >> {events}; echo >> {events}'")
    before = config.but(model="logistic", epochs=1, max_restarts=0)
    with pytest.raises(TrainingFailedError, match="broken"):
        train(before, broken, hooks=hooks)
    now = read_status(filesystem(run), RunPaths(run))
    assert (now.state, now.step, now.steps) == ("failed", 0, 12) and "broken" in str(now.why)
    _threads.run(config, hooks)
    now = read_status(filesystem(run), RunPaths(run))
    assert (now.state, now.step, now.epochs_done, now.why) == ("finished", 25, 2, None)
    assert now.checkpoint is not None and set(now.metrics) >= {"loss", "accuracy"}
    ended = [json.loads(line) for line in events.read_text().splitlines()]
    assert [each["event"] for each in ended] == ["failed", "finished"] and ended[1]["metrics"] == now.metrics


@pytest.mark.parametrize(
    "end",
    [
        None, TrainingFailedError("a rank failed"), DataError("a shard is damaged"), ConfigError("no model"),
        RuntimeError("a bug"), StoppedRun(), KeyboardInterrupt(), SystemExit(75), SystemExit(143),
    ],
)  # fmt: skip
def test_the_status_and_watch_have_the_exit_code_of_the_command(tmp_path: Path, end: BaseException | None) -> None:
    fs, paths = filesystem(str(tmp_path)), RunPaths(str(tmp_path))
    (tmp_path / "run.json").write_text("{}")

    def main(argv: Sequence[str]) -> int:
        with board_of(tmp_path):
            if end is not None:
                raise end
        return 0

    try:
        code = _code_of(main, [])
    except SystemExit as left:
        code = int(str(left.code))
    assert read_status(fs, paths).exit_code == code == watch.main([paths.root])


def broken(*call: Any, **more: Any) -> list[dict[str, Any]]:
    """A launch that fails."""
    raise TrainingFailedError("a broken launch")


@pytest.mark.parametrize("job", ["status", "watch", "control", "stacks", "report"])
def test_a_path_that_is_no_run_is_named_by_what_is_there(tmp_path: Path, job: str) -> None:
    more = ["stop"] if job == "control" else []
    write_table(str(tmp_path / "data"))
    main = importlib.import_module(f"lockstep.jobs.{job}").main
    with pytest.raises(NotFoundError, match=r"is not a run\n  got: nothing at this path\n.*\n  next: Check the path"):
        main([str(tmp_path / "nothing"), *more])
    with pytest.raises(
        NotFoundError, match=r"is not a run\n  got: .*a dataset.*\n.*\n  next: .*lockstep describe .*/data`"
    ):
        main([str(tmp_path / "data"), *more])


def test_a_run_whose_driver_was_killed_before_a_rank_started_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fs, paths = filesystem(str(tmp_path)), RunPaths(str(tmp_path))
    long_ago = (now_utc() - datetime.timedelta(seconds=90)).isoformat(timespec="milliseconds")
    write_file(fs, paths.run_json, b"{}")
    write_file(fs, paths.status, RunStatus(state=STARTING, written_at=long_ago, steps=10, epochs=1).to_bytes())
    assert watch.main([str(tmp_path), "--silent-limit", "60"]) == 1
    first, last = capsys.readouterr().out.split("no driver has written for 9")[1:]
    assert all(
        "the same lockstep train begins again, since there is no checkpoint yet" in text for text in (first, last)
    )
    with pytest.raises(
        TrainingFailedError, match=r"no driver has written its status for 9\d s\n[\s\S]*the same\s+lockstep"
    ):
        control.main([str(tmp_path), "stop", "--within", "0.1"])
