"""The driver's control server: it answers ranks, and watches by their heartbeats whether they live."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from lockstep.storage.errors import CommunicationError
from lockstep.training.control.failures import (
    Failure,
    LauncherError,
    NotLeftError,
    RankFailedError,
    RankState,
    Weight,
    all_alike,
    failure_of,
)
from lockstep.training.control.listener import Listener
from lockstep.training.control.protocol import (
    HOROVOD,
    SCRIPT,
    STARTING,
    Channel,
    Role,
    Tag,
    error_from_json,
    error_to_json,
    is_final,
    try_send,
)
from lockstep.training.control.task import Limits

log = logging.getLogger(__name__)
PING_EVERY_S = 2.0
SETTLE_S = 1.0  # neighbours of a dead rank sometimes report first: wait for the cause
SAME_S = 3.0  # before the first step all ranks may raise the same error: a mistake in a user's model
UNCOUNTED = (SCRIPT, HOROVOD)  # a user's script, which counts no steps
STACKS_S = 3.0  # for supervisors to send the stacks of their ranks, before all are stopped
EXIT_REPORT_S = 10.0  # for a supervisor to report how its rank ended: it waits for the rank's last lines
Answer = Callable[[int, str, dict[str, Any]], dict[str, Any]]
"""Called as answer(rank, kind, fields); returns the reply."""


class Handler:
    """The driver's side of one generation. Its methods are called by several threads.

    This one answers by a function, if it has one, and ignores all else; others override the methods.
    """

    def __init__(self, answer: Answer | None = None) -> None:
        self._answer = answer

    def answer(self, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The reply to a rank's request; for a notice it is dropped. What it raises ends the launch."""
        if self._answer is None:
            raise CommunicationError(
                f"rank {rank} asked for `{kind}`, which this launch does not serve",
                got=kind,
                allowed="rendezvous",
                next_step="Give the launcher a handler.",
            )
        return self._answer(rank, kind, fields)

    def on_step(self, step: int) -> None:
        """Called when rank 0 has made its step `step`."""

    def on_output(self, rank: int, lines: list[str]) -> None:
        """A rank of a task with `stream` has printed these lines."""

    def overtaken(self) -> BaseException | None:
        """The error with which the launch must end, since another driver has taken over; asked every 0.2 s."""
        return None

    def leave(self) -> float | None:
        """The seconds in which all ranks must have written a checkpoint and ended, maybe infinitely many; None while
        they train on. Asked every 0.2 s.
        """
        return None

    def orders(self) -> Sequence[Tag]:
        """What all ranks are to be asked now: SAVE, a checkpoint; STACKS. Asked every 0.2 s; each is returned once."""
        return ()

    def on_stacks(self, rank: int, text: str) -> None:
        """A supervisor has sent the stacks of its rank's threads."""


class Rendezvous:
    """Ranks exchange addresses in rounds: the n-th call of a rank belongs to the n-th round."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._rounds: list[dict[int, tuple[str, int]]] = []
        self._calls = [0] * num_ranks
        self._changed = threading.Condition()
        self._aborted: str | None = None

    def meet(self, rank: int, host: str, port: int, within_s: float) -> list[tuple[str, int]]:
        """Add one rank's address and wait for all; raises CommunicationError naming the absent ranks."""
        end = time.monotonic() + within_s
        with self._changed:
            number = self._calls[rank]
            self._calls[rank] += 1
            while len(self._rounds) <= number:
                self._rounds.append({})
            table = self._rounds[number]
            table[rank] = (host, port)
            self._changed.notify_all()
            while len(table) < self._num_ranks:
                left = end - time.monotonic()
                if left <= 0 or self._aborted is not None:
                    absent = ", ".join(str(r) for r in range(self._num_ranks) if r not in table)
                    raise CommunicationError(
                        f"rank {rank} waited in vain for rank {absent} at the rendezvous",
                        got=self._aborted or f"{len(table)} of {self._num_ranks} ranks within {within_s:.0f} s",
                        allowed="all ranks",
                        next_step="Look at the absent ranks' logs.",
                    )
                self._changed.wait(left)
            return [table[r] for r in range(self._num_ranks)]

    def abort(self, reason: str) -> None:
        """Wake all waiting ranks with an error."""
        with self._changed:
            self._aborted = reason
            self._changed.notify_all()


class Answers:
    """The replies of one generation; `fault(error)` gets what the handler raises. Thread-safe if the handler is."""

    def __init__(self, handler: Handler, num_ranks: int, fault: Callable[[BaseException], None]) -> None:
        self._handler, self._fault = handler, fault
        self._rendezvous = Rendezvous(num_ranks)

    def reply(self, rank: int, channel: Channel, document: dict[str, Any]) -> None:
        """Answer one request, however long that takes; an error is sent to the rank."""
        kind, fields = str(document["kind"]), dict(document["fields"])
        answer: dict[str, Any] = {"id": int(document["id"])}
        try:
            if kind == "rendezvous":
                within_s = float(fields["within_s"])
                table = self._rendezvous.meet(rank, str(fields["host"]), int(fields["port"]), within_s)
                answer["reply"] = {"table": table}
            else:
                answer["reply"] = self.handle(rank, kind, fields)
        except Exception as error:  # sent to the rank; a fault of the driver also ends the launch, in `handle`
            answer["error"] = error_to_json(error)
        try_send(channel, Tag.REPLY, answer)

    def handle(self, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The handler's answer. An error that it raises ends the launch too."""
        try:
            return self._handler.answer(rank, kind, fields)
        except Exception as error:
            self._fault(error)
            raise

    def abort(self, reason: str) -> None:
        """Wake all ranks that wait for others, with an error."""
        self._rendezvous.abort(reason)


def not_begun(handler: Handler) -> NotLeftError | None:
    """The error of a launch without a step whose ranks must leave soon; None while they need not."""
    grace_s = handler.leave()
    if grace_s is None or math.isinf(grace_s):
        return None
    return NotLeftError("ranks were ended before their first step, which had nothing to save")


class ControlServer:
    """Serves one launch of one generation; used as a context manager, which stops the ranks at its end."""

    def __init__(
        self,
        key: bytes,
        generation: int,
        num_ranks: int,
        limits: Limits,
        handler: Handler | None,
        bind_host: str,
        on_steps: Callable[[Sequence[RankState]], None] | None = None,
    ) -> None:
        self._limits = limits
        self._handler = handler or Handler()
        self._on_steps = on_steps  # called once, when every rank has made a step
        self._states = [RankState(rank) for rank in range(num_ranks)]
        self._ranks: dict[int, Channel] = {}
        self._supervisors: dict[int, Channel] = {}
        self._changed = threading.Condition()
        self._answers = Answers(self._handler, num_ranks, self._fault_of_handler)
        self._fault: BaseException | None = None  # of the driver's own side: a handler, the launcher
        self._stopping = False
        self._asked_to_leave = False
        self._leave_by: float | None = None
        self._started = time.monotonic()
        self.failed_at: float | None = None
        """When the failure that ended the launch was first seen (monotonic seconds)."""
        self._listener = Listener(bind_host, key, generation, num_ranks, self._serve)
        self.port = self._listener.port
        threading.Thread(target=self._ping, name="control-ping", daemon=True).start()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop("the launch ended" if error is None else str(error))
        self._listener.close()
        with self._changed:
            channels = [*self._ranks.values(), *self._supervisors.values()]
        for channel in channels:
            channel.close()

    def started(self, rank: int) -> bool:
        """Whether the supervisor of `rank` has reported that its process was started."""
        with self._changed:
            return self._states[rank].marks.started_at is not None

    def all_ended(self) -> bool:
        """Whether every supervisor has reported the end of its rank."""
        with self._changed:
            return all(state.ended for state in self._states)

    def fail(self, error: BaseException) -> None:
        """End the launch with an error of the driver; `wait` raises it."""
        with self._changed:
            self._fault = self._fault or error
            self._changed.notify_all()

    def wait(self) -> list[dict[str, Any]]:
        """Wait for every rank's result, in order of rank.

        Raises the error of the rank that failed first: the same ConfigError or DataError if the rank raised one,
        else RankFailedError; or an error of the driver. All ranks are stopped by then.
        """
        done_at: float | None = None  # all have given their results
        with self._changed:
            while True:
                now = time.monotonic()
                if self._fault is None:
                    self._fault = self._handler.overtaken()
                if self._fault is None and (grace_s := self._handler.leave()) is not None:
                    self._let_leave(now, grace_s)
                for order in self._handler.orders():
                    self._order(order)
                failures = self._failures(now)
                if self._fault is None and not failures:
                    # No failure, or none any more: a silent rank was heard again before anything was done.
                    self.failed_at = None
                elif self.failed_at is None:
                    self.failed_at = now
                elif now - self.failed_at > self._settle_s(failures) or all(
                    s.ended and s.heard_out for s in self._states
                ):
                    break
                if self.failed_at is None and all(s.result is not None for s in self._states):
                    done_at = now if done_at is None else done_at
                    # The report of a rank's end may be lost with a connection; `stop` ends its remaining processes.
                    if now - done_at > self._limits.lost_s or all(s.ended for s in self._states):
                        return [dict(s.result or {}) for s in self._states]
                self._changed.wait(0.2)
        first = min(failures, key=lambda failure: failure.weight) if failures else None
        if first is not None and first.weight is Weight.SILENT:
            self._look_where_they_are()
        self.stop(first.reason if first else str(self._fault))
        # A lost executor ends its rank and the launcher's stage: the rank's own error says more than the stage's.
        if self._fault is not None and (first is None or not isinstance(self._fault, LauncherError)):
            raise self._fault
        assert first is not None
        if first.state.error is not None and is_final(first.state.error):
            raise first.state.error
        raise RankFailedError(first, len(self._states), alike=all_alike(self._states)) from first.state.error

    def stop(self, reason: str) -> None:
        """Order every supervisor to end its rank, and wait until all have reported its end (grace and 5 s).

        A second call does nothing: a host that is cut off from the network would not answer it either.
        """
        self._answers.abort(reason)
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            supervisors = dict(self._supervisors)
        for rank, channel in supervisors.items():
            if not self._states[rank].ended:
                try_send(channel, Tag.STOP, {"reason": reason[:1000]})
        end = time.monotonic() + self._limits.grace_s + 5.0
        with self._changed:
            # Supervisors whose connection is lost are not waited for: their hosts are gone, and their ranks with them.
            while any(not self._states[r].ended for r in self._supervisors) and time.monotonic() < end:
                self._changed.wait(0.2)

    def _let_leave(self, now: float, grace_s: float) -> None:
        """Ask the ranks to leave, once; ranks that make no step, or need longer than `grace_s`, are ended."""
        if not any(state.marks.first_step_at for state in self._states):
            self._fault = not_begun(self._handler)
            return
        self._ask_to_leave()
        if self._leave_by is None and math.isfinite(grace_s):
            self._leave_by = now + grace_s
        if self._leave_by is not None and now > self._leave_by:
            where = ", ".join(f"rank {s.rank}: step {s.step}, {s.phase}" for s in self._states if s.result is None)
            self._fault = NotLeftError(f"ranks wrote no checkpoint within {grace_s:g} s ({where})")

    def _order(self, order: Tag) -> None:
        with self._changed:
            channels = dict(self._ranks if order is Tag.SAVE else self._supervisors)
        for channel in channels.values():
            try_send(channel, order, {})

    def _look_where_they_are(self) -> None:
        """Have the stacks of all ranks added to their logs, whose last lines the error of a stalled rank shows."""
        self._order(Tag.STACKS)
        end = time.monotonic() + STACKS_S
        with self._changed:
            while time.monotonic() < end and not all(self._states[rank].stacks for rank in self._supervisors):
                self._changed.wait(0.2)

    def _ask_to_leave(self) -> None:
        if not self._asked_to_leave:
            self._asked_to_leave = True
            for channel in self._ranks.values():
                try_send(channel, Tag.LEAVE, {})

    def _fault_of_handler(self, error: BaseException) -> None:
        if not self._stopping:
            self.fail(error)

    def _failures(self, now: float) -> list[Failure]:
        found = (failure_of(state, now, self._started, self._limits) for state in self._states)
        return [failure for failure in found if failure is not None]

    def _settle_s(self, failures: Sequence[Failure]) -> float:
        """How long after the first failure another one may still arrive that explains it."""
        if self._fault is not None and not isinstance(self._fault, LauncherError):
            return 0.0  # `wait` raises it, whatever else arrives
        first = min(failures, key=lambda failure: failure.weight) if failures else None
        began = any(state.marks.first_step_at for state in self._states)
        if first is not None and first.weight is Weight.RAISED and not began and first.state.phase not in UNCOUNTED:
            return SAME_S
        unexplained = first is not None and first.weight is Weight.LOST and first.state.rank in self._supervisors
        return EXIT_REPORT_S if unexplained and self._fault is None else SETTLE_S

    def _serve(self, role: Role, rank: int, channel: Channel) -> None:
        if role is Role.RANK:
            self._serve_rank(rank, channel)
        else:
            self._serve_supervisor(rank, channel)

    def _serve_rank(self, rank: int, channel: Channel) -> None:
        state = self._states[rank]
        with self._changed:
            if rank in self._ranks:
                log.warning("refused a second connection as %s", channel.whom)
                channel.close()
                return
            self._ranks[rank] = channel
            state.joined_at = state.beat_at = state.moved_at = time.monotonic()
            state.phase = STARTING
            if self._asked_to_leave:
                try_send(channel, Tag.LEAVE, {})
        try:
            while True:
                self._rank_frame(state, channel, *channel.receive())
        except CommunicationError as error:
            if state.result is None and not self._stopping:
                log.info("%s", str(error).replace("\n", ";"))
        except Exception as error:  # a frame with the right key and wrong content: end the launch, not only this thread
            self.fail(error)
        finally:
            with self._changed:
                state.lost_at = time.monotonic()
                self._changed.notify_all()
            channel.close()

    def _rank_frame(self, state: RankState, channel: Channel, tag: Tag, document: dict[str, Any]) -> None:
        with self._changed:
            state.beat_at = time.monotonic()
            step = int(document["step"])
            moved = step != state.step
            first = state.moves_to(step, str(document["phase"]), state.beat_at)
            counted = first and state.phase not in UNCOUNTED
            if counted and self._on_steps is not None and all(other.marks.first_step_at for other in self._states):
                threading.Thread(target=self._on_steps, args=(tuple(self._states),), daemon=True).start()
            if moved and state.rank == 0:
                self._handler.on_step(step)
            if tag is Tag.RESULT:
                state.result_parts.append(str(document["part"]))
                if not document["more"]:
                    state.result = dict(json.loads("".join(state.result_parts)))
                    state.result_parts.clear()
                    self._changed.notify_all()
            elif tag is Tag.ERROR:
                state.error = error_from_json(document["error"])
                self._changed.notify_all()
        if tag is Tag.NOTICE:
            self._answers.handle(state.rank, str(document["kind"]), dict(document["fields"]))
        elif tag is Tag.REQUEST:
            # In its own thread: a request may wait for all ranks while this rank's heartbeats continue.
            threading.Thread(target=self._answers.reply, args=(state.rank, channel, document), daemon=True).start()

    def _serve_supervisor(self, rank: int, channel: Channel) -> None:
        state = self._states[rank]
        with self._changed:
            previous, self._supervisors[rank] = self._supervisors.get(rank), channel
            stopping = self._stopping
        if previous is not None:
            previous.close()
        if stopping:
            try_send(channel, Tag.STOP, {"reason": "the launch ends"})
        try:
            while True:
                tag, document = channel.receive()
                if tag is Tag.STACKS:
                    self._handler.on_stacks(rank, str(document["text"]))
                if tag is Tag.OUTPUT:
                    self._handler.on_output(rank, [str(line) for line in document["lines"]])
                with self._changed:
                    if tag is Tag.OUTPUT:
                        state.spoke_at = time.monotonic()
                    elif tag is Tag.STOPPED:
                        state.stopped_at = time.monotonic() if document["stopped"] else None
                    elif tag is Tag.STARTED:
                        state.host, state.pid = str(document["host"]), int(document["pid"])
                        state.marks.started_at = state.marks.started_at or time.monotonic()
                        state.phase = "starting" if state.joined_at is None else state.phase
                    elif tag is Tag.LEAVE:
                        self._ask_to_leave()
                    elif tag is Tag.STACKS:
                        state.stacks = str(document["text"])
                    elif tag is Tag.EXIT:
                        state.exit_code, state.tail = int(document["code"]), [str(line) for line in document["tail"]]
                        state.step = max(state.step, int(document.get("step", 0)))
                        reading = document.get("reading", "")
                        state.reading = range(*reading) if isinstance(reading, list) else str(reading)
                    self._changed.notify_all()
        except CommunicationError:
            pass  # it may reconnect; if not, its rank ends too, and its own connection shows that
        finally:
            with self._changed:
                if self._supervisors.get(rank) is channel:
                    del self._supervisors[rank]
                self._changed.notify_all()
            channel.close()

    def _ping(self) -> None:
        while self._listener.open:
            with self._changed:
                channels = [c for r, c in self._supervisors.items() if not self._states[r].ended]
            for channel in channels:
                try_send(channel, Tag.PING, {})
            time.sleep(PING_EVERY_S)
