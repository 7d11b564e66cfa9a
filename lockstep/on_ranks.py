"""Public names for a training script of your own, which `lockstep launch` starts on each rank.

docs/models.md explain them. They load TensorFlow when first used, `communicator` does not. A script
that is started without lockstep launch is one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.process.faces import face

if TYPE_CHECKING:
    from lockstep.training.control.context import communicator
    from lockstep.training.steps.distribute import distribute, exchange_of, undistribute
    from lockstep.training.steps.model_state import derive_seeds
    from lockstep.training.steps.over_ranks import gather, mean, total
    from lockstep.training.steps.own_fit import callbacks_on_ranks, evaluate, predict, rank_step

__all__ = [
    "callbacks_on_ranks", "communicator", "derive_seeds", "distribute", "evaluate", "exchange_of", "gather", "mean",
    "predict", "rank_step", "total", "undistribute",
]  # fmt: skip

_MODULES = {
    "callbacks_on_ranks": "lockstep.training.steps.own_fit",
    "communicator": "lockstep.training.control.context",
    "derive_seeds": "lockstep.training.steps.model_state",
    "distribute": "lockstep.training.steps.distribute",
    "evaluate": "lockstep.training.steps.own_fit",
    "exchange_of": "lockstep.training.steps.distribute",
    "gather": "lockstep.training.steps.over_ranks",
    "mean": "lockstep.training.steps.over_ranks",
    "predict": "lockstep.training.steps.own_fit",
    "rank_step": "lockstep.training.steps.own_fit",
    "total": "lockstep.training.steps.over_ranks",
    "undistribute": "lockstep.training.steps.distribute",
}

if not TYPE_CHECKING:  # a type checker would assume that every name exists
    __getattr__, __dir__ = face(__name__, _MODULES, __all__)
