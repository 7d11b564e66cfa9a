"""A driver as a process: `python -m tests.training._driver_alone CONFIG METHOD PATTERN ENTRY`.

It stops itself by SIGSTOP just before the call `METHOD` of its file system on a path that matches PATTERN, once, as a
driver that is stopped from outside at the worst moment. One rank runs in this process, several as processes by the
local launcher. Ends with the exit code of its error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import Any

from lockstep.storage.errors import LockstepError
from lockstep.storage.files.deadlines import end_process
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.run.result import RunResult
from lockstep.training.world import World
from tests.training import _ranks


class _Control:
    """What a rank calls of its control client, answered by the driver's handler without a socket between."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def request(self, kind: str, _within_s: float, **fields: Any) -> dict[str, Any]:
        return dict(self._handler.answer(0, kind, fields))

    def notify(self, kind: str, **fields: Any) -> None:
        self._handler.answer(0, kind, fields)

    def beat(self, step: int, _phase: str) -> None:
        self._handler.on_step(step)
        if (error := self._handler.overtaken()) is not None:  # the control server asks every 0.2 s
            raise error


class _Context:
    def __init__(self, task: RankTask, generation: int, handler: Any) -> None:
        self.world, self.payload = World.local(0, 1, generation), task.payload
        self.control = _Control(handler)


def in_this_process(entry: Any) -> Any:
    """A launcher of one rank that calls `entry` here and now."""

    def launch(task: RankTask, _: int, *, generation: int = 1, handler: Any = None, **__: Any) -> list[dict[str, Any]]:
        return [entry(_Context(task, generation, handler))]

    return launch


def drive(config: TrainConfig, *, take_over: bool = False, entry: Any = _ranks.train) -> RunResult:
    """Train in this process; another driver's lease is watched for 30 s, and this one's rewritten every 0.2 s."""
    limits = Limits(grace_s=1.0, lost_s=6.0)  # three pings of the driver's
    hooks = Hooks(entry=f"_ranks:{entry.__name__}", lease_watch_s=30.0, lease_every_s=0.2, limits=limits)
    launch = in_this_process(entry) if config.ranks.num_ranks == 1 else run_local
    return train(config, launch, take_over=take_over, hooks=hooks)


def stop_before(backend: type[FileSystem], method: str, pattern: str) -> None:
    """Stop this process before the first call of that method whose last path (the last text among its arguments)
    matches.
    """
    real, stopped = getattr(backend, method), False

    def called(self: FileSystem, *args: Any, **options: Any) -> Any:
        nonlocal stopped
        if not stopped and re.search(pattern, [arg for arg in args if isinstance(arg, str)][-1]):
            stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(self, *args, **options)

    setattr(backend, method, called)


def main(config: str, method: str, pattern: str, pace: str) -> int:
    """Run the driver; returns its exit code."""
    made = TrainConfig.from_json(json.loads(config))
    stop_before(type(filesystem(made.run)), method, pattern)
    sys.path.insert(0, _ranks.HERE)  # where ranks find their entry
    try:
        drive(made, entry=getattr(_ranks, pace))
    except LockstepError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    end_process(main(*sys.argv[1:]))
