"""Modules of public names whose parts are loaded when they are first used: `import lockstep` loads no TensorFlow."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def face(
    module: str, names: Mapping[str, str], public: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `module`, which lists the names `public`.

    `names` gives the module that a name comes from; a name that comes from `module` itself is a module of it.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if names[name] == module:
            return importlib.import_module(f"{module}.{name}")
        return getattr(importlib.import_module(names[name]), name)

    def __dir__() -> list[str]:
        return list(public)

    return __getattr__, __dir__
