"""Public names for any program that reads a dataset: the batches of an epoch plan, or its records with TensorFlow.

docs/batches.md and docs/reading-elsewhere.md explain them. Only `parse_spec`, `parse_sequence_spec` and `decode_parsed`
load TensorFlow; `loader` and `PlannedDataset` need PyTorch, which Lockstep does not install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.process.faces import face

if TYPE_CHECKING:
    from lockstep.features.parse_spec import dataset_schema, decode_parsed, parse_sequence_spec, parse_spec
    from lockstep.training.batches.planned import PlannedBatches, numpy_batches
    from lockstep.training.batches.torch_data import PlannedDataset, loader

__all__ = [
    "PlannedBatches", "PlannedDataset", "dataset_schema", "decode_parsed", "loader", "numpy_batches",
    "parse_sequence_spec", "parse_spec",
]  # fmt: skip

_MODULES = {
    "PlannedBatches": "lockstep.training.batches.planned",
    "PlannedDataset": "lockstep.training.batches.torch_data",
    "dataset_schema": "lockstep.features.parse_spec",
    "decode_parsed": "lockstep.features.parse_spec",
    "loader": "lockstep.training.batches.torch_data",
    "numpy_batches": "lockstep.training.batches.planned",
    "parse_sequence_spec": "lockstep.features.parse_spec",
    "parse_spec": "lockstep.features.parse_spec",
}

if not TYPE_CHECKING:  # a type checker would assume that every name exists
    __getattr__, __dir__ = face(__name__, _MODULES, __all__)
