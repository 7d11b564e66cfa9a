"""Lets `fit` of Keras 3 train under MultiWorkerMirroredStrategy in a script that ranks run.

Keras 3.15 has two faults there, both in one private module. To make an example of a batch it averages the batch's whole
structure in one call, which takes single values only; and it averages the numbers that workers return along axis 0,
which numbers do not have. docs/decisions/071-pytorch.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TRAINER = "keras.src.backend.tensorflow.trainer"


def mend_keras_when_imported() -> None:
    """Mend the faults as soon as the script imports Keras with TensorFlow; a script without them imports neither."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the module as Python does, and lets `_Mending` load it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TRAINER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Mending(spec.loader)
        return spec


class _Mending(Loader):
    """Runs a module by its own loader, then mends it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        mend(module)


def mend(trainer: Any) -> None:
    """Replace the two functions of Keras' module, for several workers; a Keras without them stays as it is."""
    model: Any = getattr(trainer, "TensorFlowTrainer", None)
    several = "_collective_all_reduce_multi_worker"
    names = (several, "reduce_per_replica")
    if not all(hasattr(trainer, name) for name in names) or not hasattr(model, "_maybe_symbolic_build"):
        return
    plain_build, plain_reduce, of_several = (
        model._maybe_symbolic_build,
        trainer.reduce_per_replica,
        getattr(trainer, several),
    )

    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self._distribute_strategy
        if iterator is None or strategy is None or not of_several(strategy):
            plain_build(self, iterator=iterator, data_batch=data_batch)
            return
        for _, _, batches in iterator:
            batch = trainer.tree.map_structure(lambda x: strategy.experimental_local_results(x)[0], next(batches))
            with strategy.scope():
                self._symbolic_build(data_batch=batch)
            return

    def reduce(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean", "sum") or not of_several(strategy):
            return plain_reduce(values, strategy, reduction)
        op = "SUM" if reduction == "sum" else "MEAN"
        return trainer.tree.map_structure(lambda value: strategy.reduce(op, value, axis=None), values)

    model._maybe_symbolic_build, trainer.reduce_per_replica = build, reduce
