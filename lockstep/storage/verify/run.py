"""Verification of what a run numbers from one on: closed parts of metrics and logs, and gaps in any numbering."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise

from lockstep.storage.errors import CorruptionError, NotFoundError
from lockstep.storage.verify.check import Check

SINGLY = 20  # of a gap, told one by one
_PART = re.compile(r"part-([0-9]{5,})\.(jsonl|log)")


def check_parts(check: Check, folder: str) -> None:
    """Closed parts: numbered without gaps, whole lines; those of metrics hold one JSON object a line."""
    numbers: list[int] = []
    for name in check.names(folder):
        path, found = f"{folder}/{name}", _PART.fullmatch(name)
        if found is None:
            check.unexpected(path)
            continue
        numbers.append(int(found[1]))
        try:
            data = check.fs.read_bytes(check.url(path))
        except (CorruptionError, NotFoundError) as error:
            check.caught(path, error)
            continue
        check.on_bytes(len(data))
        place = _bad_line(data, json_lines=found[2] == "jsonl")
        if place is None:
            check.on_ok(path, f"{len(data)} bytes")
        else:
            check.bad(
                path, "not a whole line" + (" of JSON" if found[2] == "jsonl" else ""), record=place[0], offset=place[1]
            )
    tell_gaps(check, numbers, 0, max(numbers, default=-1), f"{folder}/part-{{:05d}}".format)


def tell_gaps(check: Check, numbers: Iterable[int], first: int, last: int, path_of: Callable[[int], str]) -> None:
    """Note each of `first` to `last` that is not in `numbers`; of a long gap its first one and how far it goes.

    A name may hold any number: what there is to tell must not grow with it.
    """
    for before, after in pairwise([first - 1, *sorted(number for number in {*numbers} if number >= first), last + 1]):
        for number in range(before + 1, after)[:SINGLY]:
            check.bad(path_of(number), "missing")
        if after - before - 1 > SINGLY:
            check.bad(path_of(before + 1 + SINGLY), f"missing, as all are up to {path_of(after - 1)}")


def _bad_line(data: bytes, *, json_lines: bool) -> tuple[int, int] | None:
    offset, lines = 0, data.split(b"\n")
    if lines[-1]:
        return len(lines) - 1, len(data)
    for number, line in enumerate(lines[:-1] if json_lines else []):
        try:
            good = isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            good = False
        if not good:
            return number, offset
        offset += len(line) + 1
    return None
