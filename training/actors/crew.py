"""The actors of one learner: their processes, the bounded queue of their trajectories, and who replaces the dead.

An actor is a child of its learner, on the same host, and no rank: its end costs the trajectory that it was playing.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError, LockstepError, TrainingFailedError
from lockstep.training.actors.actor import ACTOR, JOIN_S, LEARNER, LOOPBACK, STOP, ActorOrder
from lockstep.training.actors.config import AgentConfig
from lockstep.training.actors.player import trajectory_dtype
from lockstep.training.comm.tcp.communicator import TcpCommunicator, connect_tcp
from lockstep.training.control.protocol import error_from_json, new_key

START_S = 60.0  # for an actor's imports and its environments
ACTOR_LIMIT_S = 300.0  # for one trajectory; then the actor is replaced
IDLE_S = 0.2
MOST_FRUITLESS = 3  # lives of an actor in a row without a trajectory: its environment is at fault
END_S = 5.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of trajectories."""

    dropped: int = 0
    """Trajectories whose weights were too old."""
    lost: int = 0
    """Trajectories that died with their actor, or waited in the queue when the learner ended."""
    replaced: int = 0
    """Actors that were started in place of dead ones."""


class Crew:
    """Actors that play while `with` lasts."""

    def __init__(self, config: AgentConfig, inputs: int, learner: int, life: int, weights: NDArray[np.float32]) -> None:
        """`life` is the number of the learner's start, so that no draws repeat; `weights` are the first ones."""
        self._config, self._learner, self._life = config, learner, life
        self._dtype = trajectory_dtype(config.unroll, config.envs, inputs)
        self._queue: queue.Queue[NDArray[Any]] = queue.Queue(config.batch)
        self._published = (0, weights)
        self._lock = threading.Lock()
        self.counts = Counts()
        self.pids: dict[int, int] = {}
        """The process of each actor that plays."""
        self._error: LockstepError | None = None
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, args=(actor,), name=f"actor-{actor}", daemon=True)
            for actor in range(config.actors)
        ]

    def __enter__(self) -> Crew:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        end = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._add(lost=self._queue.qsize())

    def publish(self, version: int, weights: NDArray[np.float32]) -> None:
        """Let actors play with these weights from their next trajectory on."""
        self._published = version, weights

    @property
    def under_way(self) -> int:
        """Trajectories that are being played or wait in the queue; 0 after the end."""
        return 0 if self._ending.is_set() else self._config.actors + self._queue.qsize()

    def take(self, version: int, limit_s: float) -> NDArray[Any]:
        """The next trajectory, a record (1,), that is not more than max_lag updates older than `version`.

        Raises CommunicationError naming the actors if none comes within `limit_s`, and what an actor's start raised.
        """
        end = time.monotonic() + limit_s
        while True:
            if self._error is not None:
                raise self._error
            try:
                record = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                if time.monotonic() < end:
                    continue
                raise CommunicationError(
                    f"learner {self._learner} waits for a trajectory of its actors 0 to {self._config.actors - 1}",
                    got=f"none for {limit_s:.0f} s",
                    allowed="a trajectory",
                    next_step="Look at what the environment does, or play shorter trajectories (--unroll).",
                ) from None
            if version - int(record["version"][0]) <= self._config.max_lag:
                return record
            self._add(dropped=1)

    def _add(self, **more: int) -> None:
        with self._lock:
            self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in more.items()})

    def _keep(self, actor: int) -> None:
        """Start actor after actor until the end."""
        fruitless = turn = 0
        while not self._ending.is_set():
            received = 0
            try:
                for _ in self._life_of(actor, turn):
                    received += 1
                return
            except LockstepError as error:
                if self._ending.is_set():
                    return
                fruitless = 0 if received else fruitless + 1
                if getattr(error, "exit_code", 1) == 2 or fruitless == MOST_FRUITLESS:
                    self._error = self._error or _hopeless(actor, error)
                    return
                turn += 1
                self._add(lost=1, replaced=1)
                print(f"learner {self._learner}: actor {actor} is replaced: {error.what}", flush=True)

    def _life_of(self, actor: int, turn: int) -> Iterator[None]:
        """Serve one process of an actor; yields for each of its trajectories, and ends at the learner's end. Raises
        CommunicationError at the actor's."""
        key = new_key()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep.training.actors.actor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
        )
        self.pids[actor] = process.pid
        link: TcpCommunicator | None = None
        try:
            config = self._config
            order = ActorOrder(
                env=config.env, envs=config.envs, unroll=config.unroll, widths=config.widths,
                seed=[config.seed, self._learner, actor, self._life, turn], port=0, key=key.hex(),
            )  # fmt: skip

            def exchange(host: str, port: int) -> list[tuple[str, int]]:
                return [(LOOPBACK, _start(process, actor, replace(order, port=port))), (host, port)]

            link = connect_tcp(LEARNER, 2, 1, exchange, key, JOIN_S, LOOPBACK, ACTOR_LIMIT_S)
            yield from self._serve(link)
        except CommunicationError:
            _raise_said(process, END_S)
            raise
        finally:
            if link is not None:
                link.close()
            _end(process, ACTOR if self._ending.is_set() else None)

    def _serve(self, link: TcpCommunicator) -> Iterator[None]:
        sent = STOP
        while not self._ending.is_set():
            version, weights = self._published
            link.send(np.array([version], np.int64), ACTOR)
            if version != sent:
                link.send(weights, ACTOR)
                sent = version
            record = np.empty(1, self._dtype)
            link.recv(record.view(np.uint8), ACTOR)
            yield
            while not self._ending.is_set():
                with contextlib.suppress(queue.Full):
                    self._queue.put(record, timeout=IDLE_S)
                    break
            else:
                self._add(lost=1)
        link.send(np.array([STOP], np.int64), ACTOR)


def _environment() -> dict[str, str]:
    paths = [os.path.abspath(path or os.getcwd()) for path in sys.path]
    # An actor's products are small: threads would only take the learner's core.
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **one, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _start(process: subprocess.Popen[bytes], actor: int, order: ActorOrder) -> int:
    """Give an actor its order; returns its port. Raises the actor's error, CommunicationError if it says nothing."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has died, as its silence shows
        process.stdin.write(json.dumps(order.to_json()).encode() + b"\n")
        process.stdin.flush()
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    line = process.stdout.readline() if ready else b""
    if not line:
        raise CommunicationError(
            f"actor {actor} did not start",
            got=f"its end, exit code {process.poll()}" if ready else f"silence for {START_S:.0f} s",
            allowed="the port at which it listens",
            next_step="Look at the learner's log, which has what the actor printed.",
        )
    said = json.loads(line)
    if "error" in said:
        raise error_from_json(said["error"])
    return int(said["port"])


def _raise_said(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Raise the error that an actor has said at its end, if it has said one."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    if ready and (line := process.stdout.readline()):
        raise error_from_json(json.loads(line)["error"])


def _end(process: subprocess.Popen[bytes], patience: int | None) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # which ends it
    try:
        process.wait(END_S / 2 if patience is not None else 0.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _hopeless(actor: int, error: LockstepError) -> LockstepError:
    if error.exit_code == 2:
        return error
    return TrainingFailedError(
        f"actor {actor} ended {MOST_FRUITLESS} times without a trajectory",
        got=f"{error.what}: {error.got}",
        allowed="an environment that can be played",
        next_step="Look at the learner's log, which has what the actor printed; play the environment by itself.",
    )
