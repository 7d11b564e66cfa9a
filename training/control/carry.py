"""Errors as JSON, so that one raised in a rank is raised in the driver as the same class, and the other way round."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.storage import errors
from lockstep.storage.errors import ConfigError, DataError, LockstepError

_PLAIN = (str, int, float, bool, type(None))
MAX_PART_CHARS = 20_000  # of one part of an error: all of it must fit into a frame
RESULT_PART_CHARS = 512 << 10  # all ASCII, in a frame two bytes each at the most


def error_to_json(error: BaseException) -> dict[str, Any]:
    """The class and four parts of an error of ours; any other error becomes a LockstepError naming its class."""
    if not isinstance(error, LockstepError):
        first = (str(error).strip() or repr(error)).splitlines()[0][:MAX_PART_CHARS]
        return {"class": "LockstepError", "parts": [f"{type(error).__name__}: {first}", "", "", ""], "more": {}}
    names = ("what", "got", "allowed", "next_step")
    more = {k: v for k, v in vars(error).items() if isinstance(v, _PLAIN) and k not in names}
    kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return {"class": kind, "parts": [getattr(error, name)[:MAX_PART_CHARS] for name in names], "more": more}


def error_from_json(document: Mapping[str, Any]) -> LockstepError:
    """The inverse of `error_to_json`; an unknown class becomes a LockstepError."""
    kind = getattr(errors, str(document.get("class")), None)
    if not (isinstance(kind, type) and issubclass(kind, LockstepError)):
        kind = LockstepError
    what, got, allowed, next_step = (str(part) for part in document["parts"])
    error: LockstepError = kind.__new__(kind)  # not every class is built from the four parts alone
    LockstepError.__init__(error, what, got=got, allowed=allowed, next_step=next_step)
    vars(error).update(document.get("more", {}))
    return error


def json_safe(value: Any) -> Any:
    """`value` with what JSON cannot hold, infinities and NaN, as the strings "inf", "-inf" and "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def result_parts(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a rank's entry returned, as documents for one frame each: the samples that a run leaves over may be as many
    as a global batch has.
    """
    text = json.dumps(json_safe(result), allow_nan=False)
    for start in range(0, len(text), RESULT_PART_CHARS):
        stop = start + RESULT_PART_CHARS
        yield {"part": text[start:stop], "more": stop < len(text)}


def is_final(error: BaseException) -> bool:
    """True for an error that a restart cannot mend: the call or the data is at fault."""
    return isinstance(error, ConfigError | DataError)
