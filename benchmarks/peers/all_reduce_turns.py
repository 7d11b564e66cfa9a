"""What the contestants of benchmarks.all_reduce have in common: each waits on stdin for its turn, measures, answers.

Needs nothing but Python, since peers run in environments of their own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

Run = Callable[[int], None]
"""All-reduce so many times in place, without a pause between."""


def serve(about: str, prepare: Callable[[int], Run], barrier: Callable[[], None]) -> None:
    """Answer lines of "BYTES REPEATS" by seconds a call, until stdin ends; `prepare` makes the buffer of a size."""
    print(json.dumps(about), flush=True)
    prepared: dict[int, Run] = {}
    for line in sys.stdin:
        size, repeats = map(int, line.split())
        if size not in prepared:
            prepared.clear()  # one size at a time lies in memory
            prepared[size] = prepare(size)
            prepared[size](repeats)  # the first time compiles, traces, maps memory
        run = prepared[size]
        run(1)
        barrier()
        began = time.perf_counter()
        run(repeats)
        print(json.dumps((time.perf_counter() - began) / repeats), flush=True)


def repeatedly(call: Callable[[], object]) -> Run:
    """A Run of single calls."""

    def run(repeats: int) -> None:
        for _ in range(repeats):
            call()

    return run
