"""Whole runs with ranks as threads of this process: the real driver, sockets, plan and `model.fit`, one TensorFlow.

A process that imports TensorFlow costs five seconds; a thread costs none. What differs from a process: threads of
arithmetic and the seed are set here once, and models are built one after another, since Keras' seed is global.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Read when TensorFlow makes its threads, which no import does. An await blocks one; several ranks wait at once.
os.environ["TF_NUM_INTEROP_THREADS"] = "12"
os.environ["TF_NUM_INTRAOP_THREADS"] = "1"

from lockstep.storage.errors import ConfigError, DataError, TrainingFailedError
from lockstep.storage.fs import filesystem
from lockstep.training.comm import Communicator, SoloCommunicator
from lockstep.training.comm.tcp.communicator import connect_tcp
from lockstep.training.config import TrainConfig
from lockstep.training.control.protocol import json_safe
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.driver.train import Hooks, train
from lockstep.training.exchange.agreement import NonFiniteError
from lockstep.training.rank.runtime import set_precision
from lockstep.training.results.predict import ENTRY as PREDICT
from lockstep.training.run.checkpoint import Tensors, read_rank_file
from lockstep.training.run.checkpoint_division import read_whole
from lockstep.training.run.lineage import find_tip
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult
from lockstep.training.world import World
from tests.training._ring import KEY, PATIENCE_S, Table

LEAVE_AFTER: dict[int, Callable[[], object]] = {}
"""Set by a test: after such a step the last rank is asked to leave, once the function is called."""


class Control:
    """The control client of a thread: requests are calls of the driver's handler."""

    host = "127.0.0.1"

    def __init__(self, rank: int, handler: Handler | None, num_ranks: int) -> None:
        self._rank, self._handler, self._num_ranks = rank, handler, num_ranks
        self.leaving, self.saving = threading.Event(), threading.Event()

    def beat(self, step: int, phase: str) -> None:
        """Nothing watches, but a rank is asked to leave by `LEAVE_AFTER`."""
        self.step = step
        if self._rank == self._num_ranks - 1 and step in LEAVE_AFTER:
            LEAVE_AFTER.pop(step)()
            self.leaving.set()

    def reads(self, what: str | range) -> None:
        """Threads share one life."""

    def request(self, kind: str, deadline_s: float, **fields: Any) -> dict[str, Any]:
        """The handler's answer."""
        assert self._handler is not None
        return self._handler.answer(self._rank, kind, json_safe(fields))

    def notify(self, kind: str, **fields: Any) -> None:
        """As `request`, without an answer."""
        self.request(kind, 0, **fields)


class Context:
    """The part of RankContext that an entry uses."""

    def __init__(self, world: World, control: Control, payload: dict[str, Any], comm: Communicator) -> None:
        self.world, self.control, self.payload, self._comm = world, control, payload, comm

    def communicator(self, arena_bytes: int | None = None) -> Communicator:
        """Connected before."""
        return self._comm


def run_threads(
    task: RankTask,
    num_ranks: int,
    *,
    generation: int = 1,
    limits: Limits | None = None,
    handler: Handler | None = None,
) -> list[dict[str, Any]]:
    """`run_local` with threads: same signature, same results; a failed rank is a TrainingFailedError."""
    import keras

    from lockstep.training.profiling.profile import ProfileOrder
    from lockstep.training.profiling.profile_rank import ProfileRank
    from lockstep.training.rank.fit import Fit
    from lockstep.training.results import evaluate_rank, export_run, policy_rank, predict_rank
    from lockstep.training.strategies.server_process import Server

    about = task.payload if "config" in task.payload else task.payload["members"][0]
    config = TrainConfig.from_json(about["config"])
    makers: dict[str, Any] = {"lockstep.training.rank.runtime:main": Fit}
    makers["lockstep.training.profiling.profile:main"] = lambda context, config: ProfileRank(
        context, ProfileOrder.from_json(context.payload)
    )
    set_precision(config.step.precision)
    comms = _join(num_ranks, generation)
    contexts: list[Any] = []
    fits: list[Any] = []
    servers = config.num_servers if task.entry in makers else 0
    for comm in comms[: num_ranks - servers]:
        keras.utils.clear_session()
        set_precision(config.step.precision)
        keras.utils.set_random_seed(config.data.seed)
        world = World.local(comm.rank, num_ranks - servers, generation)
        context: Any = Context(world, Control(comm.rank, handler, num_ranks - servers), task.payload, comm)
        contexts.append(context)
        if task.entry in makers:
            fits.append(makers[task.entry](context, config))

    def one(comm: Communicator) -> dict[str, Any]:
        try:
            if comm.rank >= len(contexts):
                return Server(comm, len(contexts), config.options()["staleness"] or 0, lambda step, phase: None).run()
            if not fits:
                others = {"lockstep.training.results.export_run:main": export_run.run, PREDICT: predict_rank.run}
                others["lockstep.training.results.policy_value:main"] = policy_rank.run
                return others.get(task.entry, evaluate_rank.run)(contexts[comm.rank])
            with fits[comm.rank] as fit:
                return fit.run()
        except BaseException as error:
            comm.abort(str(error))
            raise
        finally:
            comm.close()

    try:
        with ThreadPoolExecutor(num_ranks) as pool:
            futures = [pool.submit(one, comm) for comm in comms]
        errors = [future.exception() for future in futures]
        final = [error for error in errors if isinstance(error, ConfigError | DataError)]
        if final:
            if isinstance(final[0], NonFiniteError):
                assert len({str(error) for error in errors}) == 1, errors  # every rank stops by itself, at one step
            raise final[0]
        if any(errors):
            raise TrainingFailedError("; ".join(f"rank {r}: {error}" for r, error in enumerate(errors)))
        return [future.result() for future in futures]
    finally:
        set_precision("float32")


def run(config: TrainConfig, hooks: Hooks | None = None) -> RunResult:
    """A whole run by the real driver."""
    return train(config, run_threads, hooks=hooks or Hooks(lease_watch_s=0.1))


def final_tensors(run_url: str, rank: int = 0) -> Tensors:
    """What all ranks hold alike, and the rank's own, in the chain's newest checkpoint."""
    tip = find_tip(filesystem(run_url), RunPaths(run_url))
    assert tip is not None
    alike = ("weights", "optimizer")
    own = read_rank_file(tip.url, rank, tip.manifest)
    own = {name: value for name, value in own.items() if name.split("/")[0] not in alike}
    return read_whole(tip.url, tip.manifest, alike) | own


def final_state(run_url: str) -> dict[str, Any]:
    """The JSON state in the chain's newest checkpoint."""
    tip = find_tip(filesystem(run_url), RunPaths(run_url))
    assert tip is not None
    return dict(tip.manifest["state"])


def rows_of(run_url: str, kind: str) -> dict[int, dict[str, Any]]:
    """Step -> the newest row of this kind in the run's metrics."""
    import json
    from pathlib import Path

    parts = sorted(Path(run_url, "metrics").glob("g*/part-*.jsonl"))
    rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    return {row["step"]: row for row in rows if row["kind"] == kind}


def _join(num_ranks: int, generation: int) -> list[Communicator]:
    if num_ranks == 1:
        return [SoloCommunicator(generation)]
    table = Table(num_ranks)

    def join(rank: int) -> Communicator:
        return connect_tcp(rank, num_ranks, generation, table.of(rank), KEY, PATIENCE_S, "127.0.0.1", 5 * PATIENCE_S)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(join, range(num_ranks)))
