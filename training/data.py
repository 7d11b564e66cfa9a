"""Public names for any program that reads the batches of an epoch plan, as NumPy arrays or PyTorch tensors.

docs/batches.md explains them. None of them loads TensorFlow; `loader` needs PyTorch, which Lockstep does not install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.batches.planned import PlannedBatches, numpy_batches
    from training.batches.torch_data import loader

__all__ = ["PlannedBatches", "loader", "numpy_batches"]

_MODULES = {
    "PlannedBatches": "training.batches.planned",
    "loader": "training.batches.torch_data",
    "numpy_batches": "training.batches.planned",
}


if not TYPE_CHECKING:  # a type checker would assume that every name exists

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
