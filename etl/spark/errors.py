"""Errors across Spark: a task's error reaches the user with its class and four parts, without Java's stack."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from lockstep.etl.spark.session import held_setting
from lockstep.spark.node_python import wrong_python
from lockstep.storage import errors
from lockstep.storage.errors import DataError, LockstepError

if TYPE_CHECKING:
    from py4j.java_gateway import JVMView
    from pyspark.sql import SparkSession

P = TypeVar("P")
S = TypeVar("S")
T = TypeVar("T")

_MARK = re.compile(r"LOCKSTEP-ERROR:([A-Za-z0-9+/=]+):END")
_PART_CHARACTERS = 4000  # a message crosses several logs on its way
_CLASS = re.compile(r"\[([A-Z][A-Z0-9_.]+)\][^\n]*")
_FULL = re.compile(r"[\w.]+: [^\n]*(?:No space left on device|Disk quota exceeded)[^\n]*")
_LOUD = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.scheduler.DAGScheduler",
    "org.apache.spark.sql.execution.adaptive.AdaptiveSparkPlanExec",
    "org.apache.spark.util.Utils",
)
_NOTES = "_enable_debugging_cache"
_LOUD_IN_PYTHON = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


class TaskError(RuntimeError):
    """Carries a LockstepError through Spark, which keeps only the text."""


class SameIdError(DataError):
    """Two records have one sample id."""


def to_wire(error: LockstepError) -> str:
    """The error as one line of text."""
    parts = {
        "class": type(error).__name__,
        "what": error.what,
        "got": error.got,
        "allowed": error.allowed,
        "next": error.next_step,
    }
    text = json.dumps({key: value[:_PART_CHARACTERS] for key, value in parts.items()})
    return f"LOCKSTEP-ERROR:{base64.b64encode(text.encode()).decode()}:END"


def from_text(text: str) -> LockstepError | None:
    """The error that to_wire wrote into `text`, or None."""
    found = _MARK.search(text)
    if found is None:
        return None
    parts = json.loads(base64.b64decode(found.group(1)))
    kind = SameIdError if parts["class"] == SameIdError.__name__ else getattr(errors, parts["class"], LockstepError)
    error: LockstepError = kind.__new__(kind)
    LockstepError.__init__(error, parts["what"], got=parts["got"], allowed=parts["allowed"], next_step=parts["next"])
    return error


def in_task(function: Callable[[S, P], Iterator[T]]) -> Callable[[S, P], Iterator[T]]:
    """Make a generator method that runs in a task send its LockstepErrors through Spark."""

    def wrapped(self: S, batches: P) -> Iterator[T]:
        try:
            yield from function(self, batches)
        except LockstepError as error:
            raise TaskError(to_wire(error)) from None

    return wrapped


@contextmanager
def translating_errors(spark: SparkSession, what: str) -> Iterator[None]:
    """Run Spark jobs. A task's LockstepError is raised here; any other error of Spark becomes a LockstepError that
    names `what`.

    The loggers of Java and pyspark that print each failed attempt with its stack are silenced meanwhile, and pyspark
    notes no lines of code for them, which takes half of its calls of Java.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        with _hushed(spark):
            yield
    except (PySparkException, Py4JError) as error:
        text = str(error)
        # An AnalysisException prints the plan: a mark in it is an error that a task could raise, not one that was
        # raised.
        ours = None if isinstance(error, AnalysisException) else from_text(text)
        if ours is not None:
            raise ours from error
        if (wrong := wrong_python(text)) is not None:
            raise wrong from error
        if (full := _FULL.search(text)) is not None:  # of a shuffle, a spill or a temporary file
            raise errors.DiskFullError(
                f"a disk of Spark is full: it failed while {what}",
                got=full.group(0),
                allowed="room in Spark's local folders (spark.local.dir, under YARN the NodeManager's) and in TMPDIR",
                next_step="Free space there, or name a larger disk; then run the job again.",
            ) from error
        found = _CLASS.search(text)
        raise LockstepError(
            f"Spark failed while {what}",
            got=(found.group(0) if found else text.strip().splitlines()[0])[:500],
            allowed="a Spark job that succeeds",
            next_step="Run again with --debug for the full trace, and read the executors' logs.",
        ) from error


@contextmanager
def _hushed(spark: SparkSession) -> Iterator[None]:
    from pyspark.errors import utils

    try:
        from pyspark.logger import PySparkLogger

        ours = [PySparkLogger.getLogger(name) for name in _LOUD_IN_PYTHON]
    except ImportError:  # Spark 3.5 has no such loggers
        ours = []
    with ExitStack() as stack:
        for logger in ours:
            silent = str(logging.CRITICAL + 1)
            stack.enter_context(
                held_setting(("python", logger.name), silent, partial(_level, logger), partial(_set_level, logger))
            )
        if hasattr(utils, _NOTES):
            get, put = partial(_notes, utils), partial(_take_notes, utils)
            stack.enter_context(held_setting(("python", _NOTES), "False", get, put))
        jvm = spark.sparkContext._jvm  # pyspark has no public way to a single logger
        if jvm is not None:
            levels = _JavaLevels(jvm)
            for name in _LOUD:
                stack.enter_context(
                    held_setting(("java", name), "OFF", partial(levels.get, name), partial(levels.set, name))
                )
        yield


def _level(logger: logging.Logger) -> str | None:
    return str(logger.level)


def _set_level(logger: logging.Logger, level: str | None) -> None:
    logger.setLevel(int(level or logging.NOTSET))


def _notes(module: ModuleType) -> str | None:
    """Whether pyspark notes the line of code of each call, as text; None before it has looked at its settings."""
    found = getattr(module, _NOTES)
    return None if found is None else str(found)


def _take_notes(module: ModuleType, value: str | None) -> None:
    setattr(module, _NOTES, None if value is None else value == "True")


class _JavaLevels:
    """The levels of Java's loggers; what they are reached by is asked for once, since each call takes a while."""

    def __init__(self, jvm: JVMView) -> None:
        log4j = jvm.org.apache.logging.log4j
        self._level, self._configurator = log4j.Level, log4j.core.config.Configurator
        self._context = log4j.LogManager.getContext(False)
        self._loggers = self._context.getConfiguration().getLoggers()

    def get(self, name: str) -> str | None:
        """The level set on a logger, None if it inherits its parent's."""
        own = self._loggers.get(name)
        return None if own is None else str(own.getLevel().name())

    def set(self, name: str, level: str | None) -> None:
        """Set the level of a logger; None has it inherit its parent's."""
        if level is not None:
            self._configurator.setLevel(name, self._level.toLevel(level))
            return
        self._context.getConfiguration().removeLogger(name)
        self._context.updateLoggers()
