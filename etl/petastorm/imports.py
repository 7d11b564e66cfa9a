"""How Petastorm's modules, and no others, see names that pyarrow, numpy and Python have dropped."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from lockstep.storage.errors import ConfigError

PETASTORM = "petastorm"


def enable() -> None:
    """Make `import petastorm` work in this process and in the workers of its process pool; a second call does nothing.

    Raises ConfigError where parts of Petastorm were imported before.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = sorted(name for name in sys.modules if name.partition(".")[0] == PETASTORM)
    if early:
        raise ConfigError(
            "Petastorm was imported before etl.petastorm.enable()",
            got=", ".join(early[:3]),
            allowed="enable() first, then `import petastorm`",
            next_step="Move the call to the top of the program.",
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds Petastorm's modules as Python does, and has them run with an `import` of their own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PETASTORM:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        # Python takes `import` from the `__builtins__` of the module whose code runs; its functions keep them.
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)
        from etl.petastorm.repairs import repair

        repair(module)


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    given, top = _given(), name.partition(".")[0]
    if level or not any(key.partition(".")[0] == top for key in given):
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    if name not in given or _is_there(name):
        builtins.__import__(name, globals, locals, fromlist or ())  # loads what is there, complains of what is not
    if not fromlist:
        return names_of(top)
    return names_of(name) if name in given else sys.modules[name]


@cache
def names_of(name: str) -> ModuleType:
    """The module `name` as Petastorm sees it: all that is in it, and what was given to it."""
    return _Names(name)


class _Names(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        given = _given()
        if _is_there(name):
            self.__dict__.update(vars(importlib.import_module(name)))
        self.__dict__.update(given.get(name, {}))
        for key in given:
            if key.rpartition(".")[0] == name:
                self.__dict__[key.rpartition(".")[2]] = names_of(key)

    def __getattr__(self, name: str) -> Any:
        # What the module has got since then, such as a part of it that was imported later.
        return getattr(importlib.import_module(self.__name__), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return names_of, (self.__name__,)  # Petastorm's functions travel to Spark's tasks with the names they use


@cache
def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


@cache
def _given() -> dict[str, dict[str, Any]]:
    """The names that are missing, by module."""
    import numpy as np
    from packaging.version import Version

    from etl.petastorm import old_pyarrow, parquet, workers

    return {
        "distutils.version": {"LooseVersion": Version},
        "numpy": {
            "float": float,
            "in1d": lambda values, among: np.isin(np.ravel(values), among),
            "string_": np.bytes_,
            "unicode_": np.str_,
        },
        "pyarrow": {"LocalFileSystem": old_pyarrow.LocalFileSystem, "localfs": old_pyarrow.LocalFileSystem()},
        "pyarrow.filesystem": {"LocalFileSystem": old_pyarrow.LocalFileSystem},
        "pyarrow.hdfs": {"HadoopFileSystem": old_pyarrow.HadoopFileSystem, "connect": old_pyarrow.connect},
        "pyarrow.parquet": {
            "ParquetDataset": parquet.ParquetDataset,
            "ParquetDatasetPiece": parquet.ParquetDatasetPiece,
            "PartitionSet": parquet.PartitionSet,
        },
        "subprocess": {"Popen": workers.start_worker},
    }
