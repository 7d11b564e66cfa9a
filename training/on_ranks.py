"""Public names for a training script of your own, which `jobs.launch` starts on each rank.

docs/models.md explain them. They load TensorFlow when first used, `communicator` does not. A script
that is started without jobs.launch is one rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.control.context import communicator
    from training.steps.distribute import distribute, exchange_of, undistribute
    from training.steps.model_state import derive_seeds
    from training.steps.over_ranks import gather, mean, total
    from training.steps.own_fit import callbacks_on_ranks, evaluate, predict, rank_step

__all__ = [
    "callbacks_on_ranks", "communicator", "derive_seeds", "distribute", "evaluate", "exchange_of", "gather", "mean",
    "predict", "rank_step", "total", "undistribute",
]  # fmt: skip

_MODULES = {
    "callbacks_on_ranks": "training.steps.own_fit",
    "communicator": "training.control.context",
    "derive_seeds": "training.steps.model_state",
    "distribute": "training.steps.distribute",
    "evaluate": "training.steps.own_fit",
    "exchange_of": "training.steps.distribute",
    "gather": "training.steps.over_ranks",
    "mean": "training.steps.over_ranks",
    "predict": "training.steps.own_fit",
    "rank_step": "training.steps.own_fit",
    "total": "training.steps.over_ranks",
    "undistribute": "training.steps.distribute",
}


if not TYPE_CHECKING:  # a type checker would assume that every name exists

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
