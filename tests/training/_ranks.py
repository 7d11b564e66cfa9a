"""Entries for ranks without TensorFlow; tests put this folder on the ranks' import path (`rank_path`)."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError, CorruptionError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import temporary_name, write_file
from lockstep.storage.urls import join
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.failures import RankState, failure_of
from lockstep.training.driver.preflight import plan_for
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.run.paths import staged_checkpoint, staged_model

HERE = str(Path(__file__).parent)


def rank_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks import this module by its name `_ranks`."""
    monkeypatch.syspath_prepend(HERE)


def judge_when(monkeypatch: pytest.MonkeyPatch, ready: Callable[[RankState], object]) -> None:
    """Let the driver find no rank failed before `ready` of one: a loaded machine may need longer to come so far."""
    monkeypatch.setattr(
        "lockstep.training.control.server.failure_of",
        lambda state, *rest: failure_of(state, *rest) if ready(state) else None,
    )


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie has ended, only its parent has not looked yet."""
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def living_ranks(parent: int) -> list[int]:
    """The rank processes that `parent` started, or had its zygote fork."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    lines = {pid: _told(pid, "cmdline").split(b"\0") for pid in pids if lives(pid)}
    parents = {pid: _stat(pid)[1:2] for pid in lines}
    zygotes = [
        [str(pid)] for pid in lines if b"lockstep.training.rank.zygote" in lines[pid] and parents[pid] == [str(parent)]
    ]
    started = [pid for pid in lines if b"lockstep.training.rank" in lines[pid] and parents[pid] == [str(parent)]]
    return sorted(started + [pid for pid in lines if parents[pid] in zygotes])


def _stat(pid: int) -> list[str]:
    return _told(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _told(pid: int, name: str) -> bytes:
    """What the kernel tells of a process; empty once it has ended, which it may at any moment."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def hello(context: RankContext) -> dict[str, Any]:
    """Meets the others and asks the driver."""
    print(f"rank {context.world.rank} says hello")
    context.control.beat(1, "hello")
    table = context.control.rendezvous(context.host, 1000 + context.world.rank)
    return {
        "world": context.world.to_json(),
        "table": table,
        "reply": context.control.request("ask", 60.0, number=context.world.rank),
        "argv": sys.argv,
        "environment": sorted(f"{k}={v}" for k, v in os.environ.items()),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
    }


def steps_then_killed(context: RankContext) -> dict[str, Any]:
    """Makes steps until the file payload["go"] is there; rank 1 of generation 1 is killed then, others `hello`."""
    go, step = Path(context.payload["go"]), 0
    while not go.exists():
        step += 1
        context.control.beat(step, "train")
        time.sleep(0.02)
    if context.world.generation == 1 and context.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return hello(context)


def solo(context: RankContext) -> dict[str, Any]:
    """Only returns."""
    return {"rank": context.world.rank, "payload": context.payload, "loss": float("nan")}


def one_killed(context: RankContext) -> dict[str, Any]:
    """Rank 1 writes 60 lines and is killed at step 7; the others wait for it."""
    if context.world.rank == 1:
        context.control.beat(7, "train")
        for number in range(60):
            print(f"line {number}")
        sys.stdout.flush()
        context.control.notify("remark")  # whatever is sent says the step
        os.kill(os.getpid(), signal.SIGKILL)
    context.control.rendezvous("nowhere", 1)
    return {}


def one_refuses(context: RankContext) -> dict[str, Any]:
    """Rank 0 raises an error that no restart can mend."""
    if context.world.rank == 0:
        raise ConfigError("no such model", got="nonsense", allowed="logistic", next_step="Correct --model.")
    context.control.rendezvous("nowhere", 1)
    return {}


def one_reads_rot(context: RankContext) -> dict[str, Any]:
    """Raises an error whose class has fields of its own."""
    raise CorruptionError("a checksum is wrong", file="/data/part-00000", record=7, offset=812)


def one_breaks(context: RankContext) -> dict[str, Any]:
    """Raises what nobody foresaw."""
    raise RuntimeError("out of luck")


def one_writes_without_end(context: RankContext) -> dict[str, Any]:
    """Rank 1 writes lines that JSON makes six times as long, and one that never ends, and is killed."""
    if context.world.rank == 1:
        for _ in range(50):
            print("\x01" * 100_000)
        sys.stdout.write("the last words" + "x" * 5_000_000)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    context.control.rendezvous("nowhere", 1)
    return {}


def one_says_too_much(context: RankContext) -> dict[str, Any]:
    """Raises an error that fits into no frame."""
    raise ConfigError("a model's name", got="x" * 10_000_000)


def one_leaves(context: RankContext) -> dict[str, Any]:
    """Calls sys.exit as a script would."""
    sys.exit(0)


def one_forks(context: RankContext) -> dict[str, Any]:
    """Starts a worker of its own and is killed."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    Path(context.payload["folder"], "worker").write_text(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def one_stopped(context: RankContext) -> dict[str, Any]:
    """Rank 0 stops its own process, heartbeats and all."""
    context.control.beat(0, "train")
    if context.world.rank == 0:
        time.sleep(0.5)  # a heartbeat says that it has started
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
    return {}


def one_stalled(context: RankContext) -> dict[str, Any]:
    """Rank 1 lives and makes no step; rank 0 goes on."""
    for step in range(600):
        context.control.beat(step if context.world.rank == 0 else 3, "train")
        time.sleep(0.1)
    return {}


def deaf(context: RankContext) -> dict[str, Any]:
    """Ignores SIGTERM; rank 1 breaks."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if context.world.rank == 1:
        time.sleep(0.5)
        raise RuntimeError("rank 1 breaks")
    time.sleep(60)
    return {}


def tells_pid(context: RankContext) -> dict[str, Any]:
    """Writes its process number into payload["folder"] and waits."""
    Path(context.payload["folder"], f"pid-{context.world.rank}").write_text(str(os.getpid()))
    time.sleep(120)
    return {}


def slow_result(context: RankContext) -> dict[str, Any]:
    """Leaves a thread behind that would keep a Python process alive."""
    threading.Thread(target=time.sleep, args=(60,)).start()
    return {"rank": context.world.rank}


def leaves_files(context: RankContext) -> dict[str, Any]:
    """Makes a temporary file as a rank that trains does, and is killed."""
    from lockstep.training.rank.runtime import keep_temporary_files_apart

    keep_temporary_files_apart()
    Path(context.payload["told"]).write_text(tempfile.mkstemp()[1])
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def train(context: RankContext) -> dict[str, Any]:
    """A training run in miniature: `weights` is a pure function of the steps done, kept by checkpoints."""
    return _train(context, lambda step: None)


def train_killed_once(context: RankContext) -> dict[str, Any]:
    """`train`, but rank 1 of generation 1 is killed at step 15."""

    def perhaps(step: int) -> None:
        if context.world.generation == 1 and context.world.rank == context.world.num_ranks - 1 and step == 15:
            os.kill(os.getpid(), signal.SIGKILL)

    return _train(context, perhaps)


def train_supervisor_asked_once(context: RankContext) -> dict[str, Any]:
    """`train` whose ranks can leave, and the supervisor of the last rank of generation 1 gets a SIGTERM at step 15."""

    def perhaps(step: int) -> None:
        if context.world.generation == 1 and context.world.rank == context.world.num_ranks - 1 and step == 15:
            os.kill(os.getppid(), signal.SIGTERM)
        if context.world.generation == 1 and step >= 15:
            context.control.leaving.wait(0.5)

    return _train(context, perhaps, agrees=True)


def train_supervisor_killed_once(context: RankContext) -> dict[str, Any]:
    """`train`, but the supervisor of the last rank of generation 1, a Spark task's process, is killed at step 15."""

    def perhaps(step: int) -> None:
        if context.world.generation == 1 and context.world.rank == context.world.num_ranks - 1 and step == 15:
            os.kill(os.getppid(), signal.SIGKILL)

    return _train(context, perhaps)


def executor_killed_once(context: RankContext) -> dict[str, Any]:
    """Rank 1 of generation 1 kills the Java process that its supervisor comes from, and waits to go with it."""
    if context.world.generation == 1 and context.world.rank == 1:
        executor_killed(context)
    context.control.rendezvous("nowhere", 1)
    return {"generation": context.world.generation}


def executor_killed(context: RankContext) -> dict[str, Any]:
    """`executor_killed_once`, in each generation and rank."""
    pid = os.getppid()
    while Path(f"/proc/{pid}/comm").read_text() != "java\n":
        pid = int(_stat(pid)[1])
    os.kill(pid, signal.SIGKILL)
    time.sleep(120.0)  # a rank that went on could be done before anybody heard of it
    return {}


def where(context: RankContext) -> dict[str, Any]:
    """The folder in which it runs: its executor's."""
    return {"folder": os.getcwd()}


def train_never(context: RankContext) -> dict[str, Any]:
    """`train`, but it breaks at its third step in every generation."""
    start = int(context.control.request("restore", 600.0)["step"])

    def always(step: int) -> None:
        if step == start + 3:
            raise RuntimeError("it never works")

    return _train(context, always)


def tells_pid_and_waits(context: RankContext) -> dict[str, Any]:
    """Never makes a step."""
    context.control.beat(0, "restore")
    time.sleep(600.0)
    return {}


def train_breaks_at_once(context: RankContext) -> dict[str, Any]:
    """Raises before the first step, as a user's model does; rank 1 later than rank 0, which waits for it."""
    context.control.beat(0, "build the model")
    time.sleep(0.5 * context.world.rank)
    raise RuntimeError("a layer does not fit")


def train_slowly(context: RankContext) -> dict[str, Any]:
    """`train` with 50 ms a step."""
    return _train(context, lambda step: time.sleep(0.05))


def train_and_leave(context: RankContext) -> dict[str, Any]:
    """`train` whose ranks agree after each step and leave together; the file `stepped` beside the run says that they
    have made steps.
    """
    return _train(context, partial(_wait_for_test, context), agrees=True)


def _wait_for_test(context: RankContext, step: int) -> None:
    run, began = Path(context.payload["config"]["run"]), context.control.request("restore", 600.0)["step"]
    if step == began + 3:
        run.with_name("stepped").touch()
    if step >= began + 3 and not context.control.leaving.is_set() and not run.with_name("go").exists():
        time.sleep(0.5)


def train_and_never_leave(context: RankContext) -> dict[str, Any]:
    """`train_and_leave`, but rank 1 hangs after step 5, as in a long validation."""

    def hurdle(step: int) -> None:
        time.sleep(600.0 if context.world.rank == 1 and step == 5 else 0.0)

    return _train(context, hurdle, agrees=True)


def train_at_a_crawl(context: RankContext) -> dict[str, Any]:
    """`train` with 50 ms a step, and 5 s once it has a checkpoint: whoever is to end it has minutes."""
    return _train(context, lambda step: time.sleep(0.05 if step <= 6 else 5.0))


def train_killed_in_flight(context: RankContext) -> dict[str, Any]:
    """`train` with checkpoints beside its steps. Rank 1 is killed in the midst of its upload of step 10, and in the
    second generation once the file `reported` beside the run says that the commit of step 15 has begun.
    """
    flight = _Beside()
    generation, last = context.world.generation, context.world.rank == context.world.num_ranks - 1

    def killed_by(sign: Path) -> None:
        while not sign.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def part(config: TrainConfig, staging: str, step: int, weights: Any) -> None:
        if last and (generation, step) == (1, 10):
            folder = staged_checkpoint(staging, step)
            half = filesystem(folder).create(temporary_name(join(folder, _file(context.world.rank))))
            half.write(weights.tobytes()[:10])
            os.kill(os.getpid(), signal.SIGKILL)
        if last and (generation, step) == (2, 15):
            threading.Thread(target=killed_by, args=(Path(config.run).with_name("reported"),), daemon=True).start()
        _checkpoint(context, config, staging, step, weights)

    def beside(_context: RankContext, config: TrainConfig, staging: str, step: int, weights: Any) -> None:
        flight.wait()  # for the previous one: ranks without a communicator cannot agree to skip
        flight.begin(partial(part, config, staging, step, weights))

    def hurdle(_step: int) -> None:
        flight.look()
        time.sleep(0.01)

    return _train(context, hurdle, beside, flight.wait)


class _Beside:
    """Work in a thread that ends with the process: lockstep.training.rank.saver.InFlight without TensorFlow, which
    takes 5 s.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Raise what the work raised, if it has."""
        if self._errors:
            raise self._errors[0]

    def wait(self) -> None:
        """Wait for the work's end."""
        if self._thread is not None:
            self._thread.join(120.0)
            assert not self._thread.is_alive(), "the work has not ended within two minutes"
        self.look()


def _train(
    context: RankContext, hurdle: Any, checkpoint: Any = None, finish: Any = lambda: None, agrees: bool = False
) -> dict[str, Any]:
    world, control = context.world, context.control
    print(f"process {os.getpid()} under {os.getppid()}", flush=True)
    config = TrainConfig.from_json(context.payload["config"])
    plan = plan_for(load_dataset(config.data.datasets[0]), config)
    assert isinstance(plan, EpochPlan) and plan.identity() == context.payload["plan"]
    place = control.request("restore", 600.0)
    weights = np.zeros(4)
    if place["checkpoint"]:
        weights = np.frombuffer(filesystem(config.run).read_bytes(join(place["checkpoint"], _file(0))), np.float64)
    began, total = time.monotonic(), plan.steps(config.data.epochs)
    for step in range(int(place["step"]), total):
        hurdle(step)
        weights = np.sqrt(weights + step + 1)
        done = step + 1
        control.beat(done, "train")
        if world.is_leader:
            row = {"kind": "step", "step": done, "epoch": plan.epoch_of_step(step), "loss": float(weights[0])}
            control.notify("metrics", rows=[row])
        leaves = False
        if agrees:  # in place of the control word of an exchange
            leaves = any(flag for _, flag in control.rendezvous("", control.leaving.is_set()))
        if done % int(config.checkpoints.checkpoint_every) == 0 or done == total or leaves:
            (checkpoint or _checkpoint)(context, config, str(place["staging"]), done, weights)
        if leaves and done < total:
            return {"left": True, "steps": done}
    finish()
    if world.is_leader:
        url = join(staged_model(str(place["staging"])), "model.bin")
        control.request("model", 600.0, files=[_upload(url, weights.tobytes())])
    return {
        "steps": total,
        "metrics": {"loss": float(weights[0])},
        "samples": (total - int(place["step"])) * config.data.global_batch,
        "seconds": time.monotonic() - began,
        "left_over": [f"{position:016x}" for _, position in plan.leftover(config.data.epochs)],
    }


def _checkpoint(context: RankContext, config: TrainConfig, staging: str, step: int, weights: Any) -> None:
    file = _upload(join(staged_checkpoint(staging, step), _file(context.world.rank)), weights.tobytes())
    state: dict[str, Any] = {"callbacks": {}} if context.world.is_leader else {}
    reply = context.control.request("checkpoint", 600.0, step=step, files=[file], audit=[], state=state)
    assert reply == {"committed": True}


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def _upload(url: str, data: bytes) -> dict[str, Any]:
    write_file(filesystem(url), url, data)
    return {"name": url.rpartition("/")[2], "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
