"""Signals that come to Spark's Java process: this process decides what they mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from lockstep.process.signals import ENDING


class _PassedOn:
    """A signal handler of Java, which sends the signal to this process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def handle(self, _signal: object) -> None:
        os.kill(os.getpid(), self._number)

    class Java:
        implements: ClassVar[list[str]] = ["sun.misc.SignalHandler"]


@contextmanager
def signals_of_java(gateway: Any) -> Iterator[None]:
    """Let this process decide what signals to its Java process mean; `gateway` is that of a SparkContext.

    `timeout`, systemd, a terminal and batch systems send a signal to both, and Java would end at once, under a job that
    still needs it. Meanwhile it ignores signals; if it is spark-submit, which is the process that a user knows, it
    passes SIGTERM and SIGHUP on. Does nothing if Java has ended, or takes no signals (-Xrs).
    """
    from py4j.protocol import Py4JError
    from pyspark.java_gateway import ensure_callback_server_started

    before = {}
    with suppress(OSError, Py4JError):
        java = gateway.jvm.sun.misc
        handlers: dict[str, Any] = dict.fromkeys(("INT", "TERM", "HUP"), java.SignalHandler.SIG_IGN)
        if "PYSPARK_GATEWAY_PORT" in os.environ:
            ensure_callback_server_started(gateway)
            handlers |= {number.name[3:]: _PassedOn(number) for number in ENDING}
        for name, handler in handlers.items():
            before[name] = java.Signal.handle(java.Signal(name), handler)
    try:
        yield
    finally:
        with suppress(OSError, Py4JError):
            for name, handler in before.items():
                java.Signal.handle(java.Signal(name), handler)
