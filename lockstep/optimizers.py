"""Optimizers and learning rates for large global batches; each loads TensorFlow when it is first used.

docs/models.md explains when they help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.process.faces import face

if TYPE_CHECKING:
    from lockstep.training.steps.optimizers import LARS, CorrectedSGD, scale_learning_rate

__all__ = ["LARS", "CorrectedSGD", "scale_learning_rate"]

if not TYPE_CHECKING:  # a type checker would assume that every name exists
    __getattr__, __dir__ = face(__name__, dict.fromkeys(__all__, "lockstep.training.steps.optimizers"), __all__)
