"""The driver of a run: it claims a generation, launches ranks, and restarts from the last checkpoint on a failure."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import psutil

from lockstep.features.schema.schema import Schema
from lockstep.process.signals import ended_in_order
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.documents import seal
from lockstep.storage.errors import (
    ConfigError,
    LockstepError,
    RetryableStorageError,
    StorageAwayError,
)
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.shown import counted
from lockstep.training.comm.options import CommOptions
from lockstep.training.config import TrainConfig
from lockstep.training.control.failures import MemoryKillError, PreemptedError
from lockstep.training.control.messages import RankResult, TrainOrder
from lockstep.training.control.protocol import is_final
from lockstep.training.control.task import CommOrder, Limits, RankTask
from lockstep.training.driver.balance import Balancer
from lockstep.training.driver.commit import CommitHandler
from lockstep.training.driver.elastic import Slots
from lockstep.training.driver.generation import RunHandler, Watch
from lockstep.training.driver.live import OnTerminal, RunProgress
from lockstep.training.driver.on_event import OnEvent
from lockstep.training.driver.ownership import REWRITE_EVERY_S, WATCH_S, Ownership
from lockstep.training.driver.preflight import CheckedRun, preflight
from lockstep.training.driver.restarts import RESUMED_LATER, RestartPolicy, incurable
from lockstep.training.driver.retention import drop_stagings, end_trash, tidy_up
from lockstep.training.driver.status_board import Board
from lockstep.training.driver.stop import EndedByCallerError, StopRequest, write_stopped
from lockstep.training.launch.executors import ExecutorMemory
from lockstep.training.launch.session import Launch, Launches, SessionLauncher
from lockstep.training.models import may_follow_length
from lockstep.training.plan.client_plan import RunPlan
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.mixture import MixedPlan, steps_asked
from lockstep.training.plan.privacy import privacy_of
from lockstep.training.rank.usage import container_memory
from lockstep.training.run import notes
from lockstep.training.run.comm_plans import read_plans
from lockstep.training.run.epochs import epochs_trained, steps_in_epoch
from lockstep.training.run.lineage import (
    Checkpoint,
    CheckpointRef,
    Claim,
    SupersededError,
    checkpoints,
    epochs_asked,
    find_tip,
    read_claims,
)
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult
from lockstep.training.run.run_json import keep_selection, note_first_weights, open_run
from lockstep.training.run.weights_source import located

log = logging.getLogger(__name__)
ENTRY = "lockstep.training.rank.runtime:main"
COMMIT_WAIT_S = 60.0


def limits_of(config: TrainConfig, base: Limits) -> Limits:
    """Return `base` with the configured deadlines."""
    silent = config.limits.heartbeat_limit_s
    return replace(
        base,
        start_s=config.limits.start_limit_s,
        stall_s=config.limits.stall_limit_s,
        silent_s=base.silent_s if silent is None else silent,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """Settings that tests and unusual storages change."""

    entry: str = ENTRY
    """The ranks' entry."""
    before_rename: Callable[[], None] = lambda: None
    """Called between writing the manifest and the rename of each commit."""
    lease_watch_s: float = WATCH_S
    """Seconds for which an open lease is watched."""
    lease_every_s: float = REWRITE_EVERY_S
    """Seconds between two checks of lease and claims."""
    limits: Limits = field(default_factory=Limits)
    """Deadlines other than the configured ones."""
    progress: Callable[[TrainConfig, int], RunProgress] = OnTerminal
    """Shows the run, of so many steps, while it trains."""
    model_function: str | None = None
    """The model's function for ranks that cannot import it (lockstep.training.launch.model_function)."""
    on_event: str | None = None
    """The command of --on-event."""
    on_epoch: Callable[[dict[str, Any]], None] = lambda row: None
    """Takes the row of each epoch's metrics when it ends; called by a thread that must not wait."""
    metric: str | None = None
    """--metric of a search, NAME:max or NAME:min: ranks refuse a model without it before the first step."""
    ended: Callable[[], EndedByCallerError | None] = lambda: None
    """The error with which the caller ends the run, None while it may continue; asked every 0.2 s."""


def train(
    config: TrainConfig,
    launch: Launch,
    *,
    take_over: bool = False,
    hooks: Hooks | None = None,
    checked: CheckedRun | None = None,
) -> RunResult:
    """Train to the end of `config.data.epochs`, through restarts; a run that is complete already returns its result.

    `take_over` replaces another driver of the run, which ends when it notices. `checked` is `preflight(config)` where
    the caller has it already.
    Raises ConfigError for an invalid configuration, for one that contradicts the run, and if executors were killed
    twice for their memory; DataError for a dataset or run whose bytes are wrong; TrainingFailedError when ranks failed
    more than `max_restarts` times without a new checkpoint or more than `max_restarts_per_hour` times in an hour;
    SupersededError if another driver has taken the run over; what `hooks.ended` returns. After SIGTERM or Ctrl-C the
    ranks have `config.limits.stop_grace_s` to write a checkpoint; then SystemExit or StoppedRun
    (lockstep.training.driver.stop).
    """
    hooks = hooks or Hooks()
    on_event = OnEvent(hooks.on_event, config.run)
    checked = checked or preflight(config)
    if checked.finished is not None:
        return checked.finished
    config, plan = checked.config, checked.plan
    fs, paths = filesystem(config.run), RunPaths(config.run)
    notes.show(notes.of_keep_best(config.checkpoints.keep_best))
    notes.show(notes.of_replay(config.data.replay, config.data.mix))
    memory = room_for(config, launch)
    _show_numbers(checked.numbers)
    ownership = Ownership(fs, paths, hooks.lease_watch_s, hooks.lease_every_s, take_over=take_over)
    signals = launch.signals() if isinstance(launch, SessionLauncher) else nullcontext()
    with ended_in_order(), StopRequest(config.limits.stop_grace_s).taken() as stop, signals, ownership:
        open_run(fs, paths, config, checked.manifest, plan, confirm=ownership.confirm, search_metric=hooks.metric)
        keep_selection(fs, paths, checked.selection, confirm=ownership.confirm)
        limits = limits_of(config, hooks.limits)
        steps = steps_asked(plan, config.data.epochs, config.validation.max_steps)
        board = Board(
            hooks.progress(config, steps),
            fs,
            paths,
            config,
            steps,
            stop,
            confirm=ownership.confirm,
            of_epoch=steps_in_epoch(plan.identity()),
            application=launch.application() if isinstance(launch, SessionLauncher) else None,
            on_event=on_event,
            every_s=hooks.lease_every_s,
        )
        with (
            board,
            Slots(config, [number for number, why in checked.numbers.items() if why is None], launch) as slots,
            Launches(launch, config.processes, limits, spares=config.ranks.spare_executors) as launches,
        ):
            return _Driver(config, plan, fs, paths, hooks, board, ownership, launches, slots, memory, stop).run()


def room_for(config: TrainConfig, launch: Launch) -> ExecutorMemory | None:
    """The memory of an executor for its share of the run's processes, if any is enforced.

    Raises ConfigError if a cluster has too little memory, or no slots for all of them within --start-limit.
    """
    if not isinstance(launch, SessionLauncher):
        return None
    others, possible = config.num_servers + config.ranks.spare_executors, config.ranks.possible
    return launch.ready(possible[0] + others, config.limits.start_limit_s, possible[-1] + others)


def host_bytes(num_ranks: int) -> int:
    """The bytes that this host, or this process's container, has for each of so many ranks."""
    found = container_memory()
    return (found[1] if found is not None else psutil.virtual_memory().total) // num_ranks


def _show_numbers(numbers: dict[int, str | None]) -> None:
    """Print which numbers of ranks an elastic run skips, and why."""
    for number, why in numbers.items():
        if why is not None:
            print(f"note: this run skips {number} ranks: {why}", file=sys.stderr, flush=True)


class _Driver:
    """The loop over generations."""

    def __init__(
        self,
        config: TrainConfig,
        plan: RunPlan,
        fs: FileSystem,
        paths: RunPaths,
        hooks: Hooks,
        board: Board,
        ownership: Ownership,
        launches: Launches,
        slots: Slots,
        memory: ExecutorMemory | None,
        stop: StopRequest,
    ) -> None:
        self._config, self._plan, self._fs, self._paths = config, plan, fs, paths
        self._hooks, self._board, self._ownership, self._launches = hooks, board, ownership, launches
        self._slots, self._memory, self._stop = slots, memory, stop
        self._balancer: Balancer | None = None
        if config.ranks.balance and isinstance(plan, EpochPlan | MixedPlan):
            self._balancer = Balancer(plan, config.step.lane_groups, self._steps)
        self._policy = RestartPolicy(config, plan)
        self._bad_records: dict[str, int] = {}  # words, and how many records they are for
        self._first_weights: str | None = None  # their URL, the same for all ranks and after a restart
        self._saved = "its newest checkpoint"  # in words, where the same call would resume
        self._killed_before = False  # for their memory
        self._ranks_before: int | None = None
        self._void: int | None = None  # a claim of this driver whose parent is deleted

    def run(self) -> RunResult:
        """Train to the end. Raises StorageAwayError, which says where the run resumes, if the storage is away."""
        try:
            return self._run()
        except StorageAwayError as error:
            raise self._without_storage(error) from error

    def _run(self) -> RunResult:
        while True:
            begun = self._begin()
            if begun is not None and (result := self._train(*begun)) is not None:
                return result

    def _begin(self) -> tuple[Claim, Checkpoint | None] | None:
        """Claim the next generation: its claim, and the checkpoint that it starts from.

        None where another driver's commit or retention came in between: look again.
        """
        found = find_tip(self._fs, self._paths, self._void)
        began = found.ref if found else None
        self._saved = str(began or "the start")
        self._board.resumes_from(began)
        if began is not None and self._ranks_before is None:
            self._note_earlier(began)
        try:
            num_ranks = self._slots.choose(self._ranks_before, self._ended)
        except (KeyboardInterrupt, SystemExit):
            self._say_saved(began)
            raise
        shares = None if self._balancer is None else self._balancer.begin(num_ranks)
        data = self._config.way.grid(num_ranks).data
        asked: dict[str, Any] = {"num_ranks": num_ranks, "data_ranks": data, "shares": shares}
        claim = self._ownership.claim(began, epochs=self._config.data.epochs, **asked)
        if claim is None:
            return None  # an overtaken driver has claimed in the meantime: its last commit may be a newer tip
        needed = {found.ref, found.base or found.ref} if found else set()
        if not needed <= checkpoints(self._fs, self._paths).keys():
            # Between the look-up and the claim, an older driver's retention deleted that checkpoint or its base.
            self._void = claim.generation
            return None
        self._void = None
        # Remove what a paused older driver has staged, so that it cannot publish it when it resumes; then tidy up
        # what it has published until now.
        with self._board.quiet:
            self._ownership.sweep()
        drop_stagings(self._fs, self._paths, claim.generation)
        self._fs.discard(self._paths.stopped)
        tip = tidy_up(self._fs, self._paths, claim.generation, found, self._config.checkpoints.keep)
        if tip is not None:
            before = self._ranks_before
            change = "" if before in (None, num_ranks) else f" with {num_ranks} ranks after {before}"
            print(f"resuming from checkpoint {tip.ref}{change}", file=sys.stderr, flush=True)
        self._ranks_before = num_ranks
        return claim, tip

    def _train(self, claim: Claim, tip: Checkpoint | None) -> RunResult | None:
        """Train one generation to its end: the run's result, or None if another generation follows."""
        commits = self._commits(claim)
        handler = self._handler(claim, tip, commits)
        self._board.begin(claim, commits.newest)
        try:
            with handler, self._stop.waits():
                processes = self._config.but(num_ranks=claim.num_ranks).processes  # one rank has no servers
                results = self._launches.run(self._task(claim), claim.generation, handler, processes)
            first = RankResult.from_json(results[0])
            self._board.set(first.steps)
            if not first.left:
                return self._finish(claim, commits, first)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM, a closed terminal
            commits.close(COMMIT_WAIT_S)
            self._say_saved(commits.tip)
            raise
        except LockstepError as error:
            commits.close(COMMIT_WAIT_S)
            self._after_failure(error, claim, commits.tip, handler.suspects)
        else:
            self._after_leaving(claim, commits.tip)
        return None

    def _after_leaving(self, claim: Claim, tip: CheckpointRef | None) -> None:
        """Return if the ranks left for another number of ranks, other lanes or other executors; else this call ends."""
        moves = self._balancer is not None and self._balancer.wanted is not None
        if self._stop.by is None and (self._config.ranks.elastic or moves or self._launches.replaces()):
            return
        self._stop.by = self._stop.by or "SIGTERM to a rank"
        self._stopped(claim, tip, saved=True)

    def _after_failure(
        self, error: LockstepError, claim: Claim, tip: CheckpointRef | None, suspects: dict[int, list[str]]
    ) -> None:
        """Wait for the restart of a failed generation. Raises what ends the run."""
        where = str(tip or "the start")
        self._saved = where
        if self._stop.by is not None and not isinstance(error, SupersededError) and not is_final(error):
            print(f"stopped by {self._stop.by}: {error}", file=sys.stderr)
            self._stopped(claim, tip, saved=False)
        if (last := incurable(error)) is not None:
            if isinstance(last, RESUMED_LATER) or (tip is not None and is_final(last)):
                last.next_step += f" It resumes from {where}."
            raise last from (None if last is not error else error.__cause__)
        if isinstance(error, MemoryKillError):
            if self._killed_before:
                raise self._memory_too_small(error, tip) from error
            self._killed_before = True
        words = f"generation {claim.generation} failed, resuming from {where}"
        if isinstance(error, PreemptedError):
            print(f"{words}: {error}", file=sys.stderr)
            return
        progress = tip != claim.parent
        if self._balancer is not None and not progress:
            self._balancer.failed()
        try:
            wait_s = self._policy.failed(
                error, num_ranks=claim.num_ranks, progress=progress, samples=suspects, shares=claim.shares
            )
        except LockstepError as last:
            if last is not error:
                print(f"generation {claim.generation} failed: {error}", file=sys.stderr, flush=True)
            raise
        then = f" in {wait_s:g} s" if wait_s else ""
        print(f"{words}{then}: {error}", file=sys.stderr, flush=True)
        self._board.failed(error)
        self._wait(wait_s, tip)

    def _wait(self, seconds: float, tip: CheckpointRef | None) -> None:
        """Let `seconds` pass before a restart; a signal, another driver and the caller end the run meanwhile."""
        try:
            if (error := self._launches.wait(seconds, self._ended)) is not None:
                raise error
        except (KeyboardInterrupt, SystemExit):
            self._say_saved(tip)
            raise

    def _note_earlier(self, began: CheckpointRef) -> None:
        """Take the shares of the lanes over from the earlier call, and print a note if its steps may have followed
        another schedule than the rest will.
        """
        # Later claims asked for epochs too, but no step followed them.
        claims = {g: claim for g, claim in read_claims(self._fs, self._paths).items() if g <= began.generation}
        if self._balancer is not None:
            self._balancer.shares = claims[began.generation].shares
        asked = epochs_asked(claims)
        model, epochs = self._config.model.model, counted(self._config.data.epochs, "epoch")
        if asked and asked != self._config.data.epochs and may_follow_length(model):
            print(
                f"note: {epochs}, but this run was started with {asked}. A schedule of `{model}` over the run, such as "
                f"its learning rate, spans {epochs} from now on; the steps so far followed a span of {asked}: the "
                f"result differs from that of {epochs} in one call (docs/operations.md).",
                file=sys.stderr,
                flush=True,
            )

    def _stopped(self, claim: Claim, tip: CheckpointRef | None, *, saved: bool) -> NoReturn:
        """The ranks have ended after a request to stop: tidy up, leave a marker, and end this call."""
        self._ownership.confirm()
        drop_stagings(self._fs, self._paths, claim.generation + 1)
        by, steps = str(self._stop.by), self._steps
        write_stopped(self._fs, self._paths, generation=claim.generation, by=by, tip=tip, steps=steps, saved=saved)
        if saved and tip is not None:
            words = f"stopped by {by} at step {tip.step} of {steps}, saved as {tip}; the same call resumes from there"
            self._stop.last_line = f"{self._paths.root}: {words}"
        else:
            self._say_saved(tip)
        self._stop.leave()

    @property
    def _steps(self) -> int:
        return steps_asked(self._plan, self._config.data.epochs, self._config.validation.max_steps)

    def _epochs(self, steps: int) -> float:
        of_epoch = steps_in_epoch(self._plan.identity())
        assert of_epoch is not None, "a plan counts records and batches"
        return epochs_trained(steps, of_epoch, self._config.data.epochs)

    def _leave(self, num_ranks: int) -> float | None:
        if self._stop.by is not None:
            return self._stop.grace_s
        moves = self._balancer is not None and self._balancer.wanted is not None
        return math.inf if moves or self._slots.differ(num_ranks) else None

    def _ended(self) -> LockstepError | None:
        return self._ownership.overtaken() or self._hooks.ended()

    def _say_saved(self, tip: CheckpointRef | None) -> None:
        saved = (
            f"the newest checkpoint is {tip}, step {tip.step} of {self._steps}" if tip else "there is no checkpoint yet"
        )
        then = "resumes from there" if tip else "starts from the beginning"
        self._stop.last_line = f"{self._paths.root}: {saved}; the same call {then}"

    def _task(self, claim: Claim) -> RankTask:
        hooks, source = self._hooks, self._config.model.init_from
        if claim.parent is None and source is not None and self._first_weights is None:
            self._first_weights = located(source)
            note_first_weights(self._fs, self._paths, self._first_weights, self._ownership.confirm)
            print(f"first weights: {self._first_weights}", file=sys.stderr, flush=True)
        config = self._config.but(num_ranks=claim.num_ranks)
        options = CommOptions(
            backend="tcp" if config.num_servers else config.ranks.backend,
            trust_network=config.ranks.trust_network,
            plans=read_plans(self._fs, self._paths, config.processes),  # those that are frozen already
        )
        order = TrainOrder(
            config=config,
            plan=self._plan.identity(),
            comm=CommOrder(options=options, freeze=True),
            shares=claim.shares,
            first_weights=self._first_weights,
            model_function=hooks.model_function,
            metric=hooks.metric,
            suspect=self._policy.suspect,
        )
        return RankTask(
            hooks.entry,
            order.to_json(),
            hadoop=hadoop_settings(),
            logs=self._paths.logs(claim.generation),
            tls=config.ranks.tls == "on",
            leaves=True,
        )

    def _handler(self, claim: Claim, tip: Checkpoint | None, commits: CommitHandler) -> RunHandler:
        plan, ranks, groups = self._plan, claim.num_ranks, self._config.step.lane_groups
        rows = [1] * ranks
        if isinstance(plan, EpochPlan | MixedPlan):
            grid = self._config.way.grid(ranks)
            rows = [plan.rows(grid.place(rank)[0], grid.data, groups, claim.shares) for rank in range(ranks)]
        here = host_bytes(claim.num_ranks) if self._config.ranks.launcher == "local" else None
        watch = Watch(
            rows, memory=self._memory, host_bytes=here, balancer=self._balancer, bad_records=self._bad_records
        )
        return RunHandler(
            self._paths,
            claim,
            tip,
            commits,
            self._board,
            watch,
            overtaken=self._ended,
            on_epoch=self._hooks.on_epoch,
            leave=partial(self._leave, ranks),
        )

    def _commits(self, claim: Claim) -> CommitHandler:
        return CommitHandler(
            self._fs,
            self._paths,
            claim,
            self._plan.identity(),
            keep=self._config.checkpoints.keep,
            deadline_s=self._config.limits.stall_limit_s,
            before_rename=self._hooks.before_rename,
            confirm=self._ownership.confirm,
        )

    def _finish(self, claim: Claim, commits: CommitHandler, first: RankResult) -> RunResult:
        generation, tip, best = claim.generation, commits.tip, commits.best()
        model = self._paths.model(generation)
        result = RunResult(
            run=self._paths.root,
            generation=generation,
            steps=first.steps,
            epochs=self._epochs(first.steps),
            epochs_asked=self._config.data.epochs,
            metrics=first.metrics,
            samples=first.samples,
            seconds=first.seconds,
            samples_per_s=first.samples_per_s,
            first_step_s=first.first_step_s,
            restarts=len(self._launches.restarts),
            restart_log=[restart.to_json() for restart in self._launches.restarts],
            checkpoint=str(tip) if tip else None,
            model=model if self._fs.exists(model) else None,
            keep_best=self._config.checkpoints.keep_best,
            best=None if best is None else best.to_json(),
            class_counts=first.class_counts,
            watching=first.watching,
            left_over=first.left_over,
            max_steps=self._config.validation.max_steps,
            stopped_by=first.stopped_by,
            privacy=privacy_of(self._config, first.steps, self._schema()),
            validation_s=first.validation_s,
            bad_records={
                "samples": sum(self._bad_records.values()),
                "first": list(self._bad_records)[: notes.NAMED],
            },
        )
        write_file(self._fs, self._paths.result(generation), seal(result.to_json()), confirm=self._ownership.confirm)
        drop_stagings(self._fs, self._paths, generation + 1)
        end_trash(self._fs, self._paths, generation, self._config.checkpoints.keep, self._ownership.confirm)
        return result

    def _schema(self) -> Schema:
        return Schema.from_json(load_dataset(self._config.data.datasets[0]).schema)

    def _without_storage(self, error: StorageAwayError) -> StorageAwayError:
        cause = error.__cause__
        why = f"{error.whom} has served nothing for {error.away_s:.0f} s" if error.away_s else error.what
        away = StorageAwayError(
            f"the storage could not be reached: {why}; once it is back, the same call resumes {self._paths.root} from "
            f"{self._saved}",
            got=cause.got if isinstance(cause, RetryableStorageError) else error.got,
            allowed=error.allowed,
            next_step=error.next_step,
        )
        away.whom, away.away_s = error.whom, error.away_s
        return away

    def _memory_too_small(self, error: MemoryKillError, tip: CheckpointRef | None) -> ConfigError:
        where = f"checkpoint {tip}" if tip else "the start"
        return ConfigError(
            f"executors of {self._paths.root} were killed for their memory a second time",
            got=error.got,
            allowed=error.allowed,
            next_step=f"{error.next_step} The same call then resumes from {where}.",
        )
