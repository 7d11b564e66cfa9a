"""A model's function that ranks cannot import, such as one of a notebook's cell, as text that the driver sends them.

The text is base64 of a pickle by PySpark's cloudpickle. It goes to the ranks only, in the authenticated order of each
launch, as a script of lockstep launch does; no file keeps it. `lockstep.training.models` loads it.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any

from lockstep.storage.errors import ConfigError

MAX_BYTES = 1 << 20  # an order of a launch holds 4 MiB


def as_text(function: Callable[..., Any]) -> str:
    """Pickle a function by value with what it refers to; modules are pickled by name, so ranks must have them.

    Raises ConfigError for a function that cannot be pickled, or of more than MAX_BYTES.
    """
    from pyspark import cloudpickle

    try:
        data = cloudpickle.dumps(function)
    except (TypeError, ValueError, AttributeError, RecursionError, pickle.PicklingError) as error:
        raise _refused(function, " ".join(str(error).split())[:500] or type(error).__name__) from error
    if len(data) > MAX_BYTES:
        raise _refused(function, f"{len(data)} bytes with all that it refers to")
    return base64.b64encode(data).decode()


def _refused(function: Callable[..., Any], got: str) -> ConfigError:
    return ConfigError(
        f"the model's function {getattr(function, '__name__', function)!r} cannot be sent to the ranks",
        got=got,
        allowed=f"a function that refers to modules and small values, up to {MAX_BYTES} bytes",
        next_step="Build what it needs inside the function, or move it into a file: `mymodel:build`.",
    )
