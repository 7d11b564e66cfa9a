"""Spark jobs from raw input to rows, splits and shards; imports nothing of training. `write_dataset` takes any data
frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etl.write.dataset import write_dataset

__all__ = ["VERSION", "write_dataset"]

VERSION = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded on first use: tasks import modules of this package, and each would load all of the writer's modules too.
    if name == "write_dataset":
        from etl.write.dataset import write_dataset

        return write_dataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
