"""A Spark session of ours, which undoes what starting it has changed: in a `with` block, by `stop`, or at exit.

Import this where a session starts only: it loads pyspark.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from types import TracebackType
from typing import cast

from pyspark import SparkContext
from pyspark.sql import SparkSession


class OwnSession(SparkSession):
    """What `SparkSession.builder` has made, with an end of its own."""

    _ends: ExitStack | None = None

    @classmethod
    def of(cls, spark: SparkSession, ends: ExitStack) -> OwnSession:
        """Turn the session itself into one whose end closes `ends`, which stops it."""
        spark.__class__ = cls
        own = cast("OwnSession", spark)
        own._ends = ends
        atexit.register(own._close)
        return own

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(kind, error, trace)

    def stop(self) -> None:
        """Stop the session and its context."""
        if self._ends is not None:
            self._close()
        else:
            super().stop()

    def _close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        ends, self._ends = self._ends, None  # closing it calls `stop`
        atexit.unregister(self._close)
        if ends is not None:
            ends.__exit__(kind, error, trace)


def running() -> SparkSession | None:
    """Our session of this process that has not ended."""
    found = SparkSession._instantiatedSession
    alive = isinstance(found, OwnSession) and found._ends is not None and SparkContext._active_spark_context is not None
    return found if alive else None
