"""Petastorm 0.13.1 on today's pyarrow and NumPy: call `enable()`, then import Petastorm as its own pages say.

docs/reading-elsewhere.md explains it. This module loads neither Petastorm nor Spark nor TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.process.faces import face

if TYPE_CHECKING:
    from lockstep.etl.petastorm.imports import enable
    from lockstep.etl.petastorm.metadata import tensors

__all__ = ["enable", "tensors"]

_MODULES = {"enable": "lockstep.etl.petastorm.imports", "tensors": "lockstep.etl.petastorm.metadata"}

if not TYPE_CHECKING:  # a type checker would assume that every name exists
    __getattr__, __dir__ = face(__name__, _MODULES, __all__)
