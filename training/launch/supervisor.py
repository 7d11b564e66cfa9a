"""One rank's supervisor: it starts the rank's process, stores its log, and ends it.

Runs in a thread of the driver (local launcher) or in a Spark task (barrier launcher).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import IO

from lockstep.storage.tokens import hold
from lockstep.training.control.client import RosterClient, SupervisorClient, open_channel
from lockstep.training.control.last_words import LastWords, new_page
from lockstep.training.control.protocol import Role, Tag
from lockstep.training.control.stacks import Stacks, new_stacks
from lockstep.training.control.task import RankTask, is_stopped
from lockstep.training.launch import spares
from lockstep.training.launch.output import LineBuffer, read_lines
from lockstep.training.launch.process import Order, RankProcess, SupervisorSpec, end_left, give_order, start_rank
from lockstep.training.run.metrics import PartWriter
from lockstep.training.run.paths import rank_name

TAIL_LINES = 40
TAIL_LINE_CHARS = 2000  # so that the last lines always fit into one frame
POLL_S = 0.05
STOPPED_LOOK_S = 1.0  # between two checks whether the rank is stopped by a signal
CONNECT_DEADLINE_S = 60.0
DRAIN_S = 2.0  # for the last lines of a dead rank whose children keep its output open


class Supervisor:
    """Supervises one rank; `run` returns when its process has ended and its end is reported."""

    def __init__(self, order: Order, leaving: threading.Event | None = None) -> None:
        """`leaving` is set when this process is to end: then all ranks are asked to leave."""
        self._order, self._leaving = order, leaving or threading.Event()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        logs = order.task.logs
        self._parts = PartWriter(f"{logs}/{rank_name(order.world.rank)}", "log") if logs else None
        self._stream = LineBuffer() if order.task.stream else None

    def run(self) -> int:
        """Run the rank to its end; returns its exit code (negative: the signal that killed it).

        Raises CommunicationError when the driver cannot be reached at the start.
        """
        order = self._order
        connect = partial(
            open_channel,
            order.control,
            order.key,
            order.world.generation,
            Role.SUPERVISOR,
            order.world.rank,
            min(CONNECT_DEADLINE_S, order.limits.start_s),
        )
        client = SupervisorClient(connect, order.limits.lost_s)
        try:
            process, last_words, self._stacks = self._start()
            reader = threading.Thread(target=self._read, args=(process.stdout,), name="rank-output", daemon=True)
            reader.start()
            forwarder = threading.Thread(target=self._forward, args=(client,), name="rank-output-send", daemon=True)
            forwarder.start()
            client.report(Tag.STARTED, {"host": order.host, "pid": process.pid})
            try:
                self._watch(process, client)
            finally:
                if process.poll() is None:
                    process.kill()
                code = process.wait()
                end_left(process.pid, self._order.mark)
                if process.stdin is not None:
                    process.stdin.close()
            reader.join(DRAIN_S)
            if self._stream is not None:
                self._stream.close()
            forwarder.join(DRAIN_S)
            step, reading = last_words.read()
            last_words.close()
            self._stacks.close()
            batches_or_words = [reading.start, reading.stop] if isinstance(reading, range) else reading
            last = {"tail": list(self._tail), "step": step, "reading": batches_or_words}
            client.report(Tag.EXIT, {"code": code, **last})
            if self._parts is not None:
                self._parts.try_flush()
            return code
        finally:
            client.close()

    def _start(self) -> tuple[RankProcess, LastWords, Stacks]:
        if (spare := spares.take(self._order.devices, self._order.task.entry)) is not None:
            self._order = replace(self._order, mark=spare.mark)
            self._take("[supervisor: this process was a spare, and has imported TensorFlow already]")
            give_order(spare.process, self._order, spare.page, spare.stacks)
            return spare.process, LastWords(spare.page), Stacks(spare.stacks)
        page, stacks = new_page(), new_stacks()
        try:
            return start_rank(self._order, page, stacks), LastWords(page), Stacks(stacks)
        except BaseException:
            os.close(page)
            os.close(stacks)
            raise

    def _watch(self, process: RankProcess, client: SupervisorClient) -> None:
        limits = self._order.limits
        kill_at: float | None = None
        look_at, stopped, asked = 0.0, False, False
        uploader = threading.Thread(target=self._upload, args=(process,), name="rank-log-upload", daemon=True)
        uploader.start()
        while process.poll() is None:
            now = time.monotonic()
            if kill_at is None and client.stop.is_set():
                if self._order.task.leaves and process.stdin is not None:
                    process.stdin.close()  # such a rank takes a SIGTERM for a request to leave
                process.terminate()
                process.send_signal(signal.SIGCONT)  # a stopped process handles SIGTERM only then
                kill_at = now + limits.grace_s
            elif kill_at is None and (client.dead.is_set() or client.silent_s() > limits.lost_s):
                self._tail.append(f"[supervisor: no driver for {limits.lost_s:.0f} s, the rank is killed]")
                process.kill()
                kill_at = now
            elif kill_at is not None and now >= kill_at:
                process.kill()
            if self._leaving.is_set() and not asked:
                asked = client.report(Tag.LEAVE, {})
            if client.stacks.is_set():
                client.stacks.clear()
                if stopped:
                    text = "no stacks: the process is stopped by a signal"
                else:
                    text = self._stacks.of(process.pid)
                    for line in text.splitlines():  # they belong to the log, and to the last lines of a stalled rank
                        self._take(line)
                client.report(Tag.STACKS, {"text": text})
            if now >= look_at:
                look_at = now + STOPPED_LOOK_S
                if is_stopped(process.pid) is not stopped:
                    stopped = not stopped
                    client.report(Tag.STOPPED, {"stopped": stopped})
            time.sleep(POLL_S)

    def _upload(self, process: RankProcess) -> None:
        while self._parts is not None and process.poll() is None:
            self._parts.flush_if_due()
            time.sleep(1.0)

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for line in read_lines(output.fileno()):
                text = line.decode("utf-8", "replace")
                if self._stream is not None:
                    self._stream.put(text)
                self._take(text)

    def _take(self, text: str) -> None:
        more = len(text) - TAIL_LINE_CHARS
        self._tail.append(text if more <= 0 else f"{text[:TAIL_LINE_CHARS]}... [{more} more characters]")
        if self._parts is not None:
            self._parts.add(text)

    def _forward(self, client: SupervisorClient) -> None:
        while self._stream is not None and (lines := self._stream.take()) is not None:
            while not client.report(Tag.OUTPUT, {"lines": lines}) and not client.dead.is_set():
                time.sleep(POLL_S)  # until it reconnects the buffer fills, and dropped lines are counted


@contextmanager
def leaving_on_sigterm(leaving: threading.Event, task: RankTask) -> Iterator[None]:
    """Meanwhile a first SIGTERM to this process (a Spark task's) sets `leaving`, if the ranks of `task` can leave.

    Does nothing outside the main thread: a supervisor that is a thread of the driver gets no signals.
    """
    if not task.leaves or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def leave(number: int, frame: object) -> None:
        signal.signal(number, before)  # a second one ends this process
        leaving.set()

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def supervise(spec: SupervisorSpec, prepare: Callable[[RankTask], None] | None = None) -> int:
    """Carry out the driver's orders, one generation after the other, until the driver ends the session.

    `prepare(task)` is called before each. It also returns when the driver has ended or is silent for `limits.lost_s`,
    which ends the rank too, through its own connection. Returns the last rank's exit code, 0 before the first. Raises
    CommunicationError when the driver cannot be reached at the start of the session or of a generation.
    """
    limits, code, leaving = spec.limits, 0, threading.Event()
    deadline_s = min(CONNECT_DEADLINE_S, limits.start_s)
    line = RosterClient(spec.control, spec.secret, spec.rank, deadline_s=deadline_s, lost_s=limits.lost_s)
    try:
        while (document := line.next_order()) is not None:
            hold(document["tokens"])
            order = spec.order(document)
            if prepare is not None:
                prepare(order.task)
            with leaving_on_sigterm(leaving, order.task):
                code = Supervisor(order, leaving).run()
            if leaving.is_set():
                break  # the driver starts a supervisor elsewhere
            line.say_idle()
    finally:
        line.close()
    return code
