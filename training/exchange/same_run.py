"""Before the first step: all ranks must run the same programs on the same data and weights."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from lockstep.storage.documents import canonical_bytes, parse_canonical
from lockstep.storage.errors import ConfigError
from training.comm.base import Communicator

PACKAGES = ("numpy", "keras", "tensorflow", "pyarrow")


def versions() -> dict[str, str]:
    """Python's version and those of the packages that every weight depends on."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def processor() -> str:
    """`GPU` or `CPU`: what this rank computes on. A rank without the others' GPUs would be waited for in each step."""
    import tensorflow as tf

    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def compare_runs(communicator: Communicator, mine: Mapping[str, Any]) -> None:
    """Raise ConfigError, on every rank alike, naming the first entry of JSON in which a rank differs from rank 0."""
    gathered = communicator.all_gather_bytes(canonical_bytes(dict(mine)))
    everyone = [parse_canonical(data, file="a rank") for data in gathered]
    for name, value in everyone[0].items():
        for rank, other in enumerate(everyone):
            if other.get(name) != value:
                raise ConfigError(
                    f"rank {rank} differs from rank 0 in `{name}`",
                    got=f"{other.get(name)}",
                    allowed=f"{value}",
                    next_step="Ship the same packages and files to every host; draw weights by the seed alone.",
                )
