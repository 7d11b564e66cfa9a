"""The import hook through which only Petastorm's modules see names that pyarrow, numpy and Python dropped."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

import pyarrow as pa

from lockstep.process.installed import ROOT
from lockstep.storage.errors import ConfigError, LockstepError

PETASTORM = "petastorm"
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from lockstep.etl.petastorm.imports import main; main()"


def enable() -> None:
    """Make `import petastorm` work in this process and in the workers of its process pool; a second call does nothing.

    Raises ConfigError if parts of Petastorm were imported before.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = sorted(name for name in sys.modules if name.partition(".")[0] == PETASTORM)
    if early:
        raise ConfigError(
            "Petastorm was imported before lockstep.etl.petastorm.enable()",
            got=", ".join(early[:3]),
            allowed="enable() first, then `import petastorm`",
            next_step="Move the call to the top of the program.",
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds Petastorm's modules as Python does, and runs them with their own `import`."""

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
        builtins.__import__(name, globals, locals, fromlist or ())  # loads the module, or raises if there is none
    if not fromlist:
        return names_of(top)
    return names_of(name) if name in given else sys.modules[name]


@cache
def names_of(name: str) -> ModuleType:
    """The module `name` as Petastorm sees it: its own names and the added ones."""
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
        # Names that the module got later, such as a submodule that was imported since.
        return getattr(importlib.import_module(self.__name__), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return names_of, (
            self.__name__,
        )  # Petastorm's functions are pickled for Spark's tasks with the names that they use


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

    from lockstep.etl.petastorm import old_pyarrow
    from lockstep.etl.petastorm import old_pyarrow as parquet

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
        "subprocess": {"Popen": start_worker},
    }


def repair(module: ModuleType) -> None:
    """Repair a module of Petastorm that was just imported; most need nothing."""
    if module.__name__ == "petastorm.arrow_reader_worker":
        module.ArrowReaderWorker._load_rows_with_predicate = _load_rows_with_predicate
    elif module.__name__ == "petastorm.workers_pool.thread_pool":
        _wait_for_work(module.ThreadPool)
    elif module.__name__ == "petastorm.workers_pool.process_pool":
        _end_late(module.ProcessPool)


def _wait_for_work(pool_class: Any) -> None:
    """Let a worker of the thread pool count as done only after all work was handed out.

    Petastorm checks whether its threads are idle and then whether all work was handed out: if all of it is handed out
    in between, the reader ends at once and rows are lost. It also skips a thread that has no work yet, so one seed
    gives several orders. On a loaded machine both made Petastorm's own tests fail.
    """
    plain = pool_class.current_worker_done

    def current_worker_done(pool: Any, worker_id: int) -> bool:
        # Work and results pass through the threads in one order: a thread without work yet is the next to get some.
        handed_out = pool._ventilator is None or pool._ventilator.completed()
        return handed_out and plain(pool, worker_id)

    pool_class.current_worker_done = current_worker_done


def _end_late(pool_class: Any) -> None:
    """Let a worker of the process pool count as done only after all work was handed out; this pool checks its own
    counts first.
    """
    plain = pool_class.start

    def start(pool: Any, worker_class: Any, worker_args: Any = None, ventilator: Any = None) -> None:
        plain(pool, worker_class, worker_args, ventilator and _LateVentilator(pool, ventilator))

    pool_class.start = start


class _LateVentilator:
    def __init__(self, pool: Any, ventilator: Any) -> None:
        self._pool, self._ventilator = pool, ventilator

    def completed(self) -> bool:
        """Whether all work was handed out and then, in this order of checks, all of it is done."""
        handed_out = bool(self._ventilator.completed())
        return handed_out and self._pool._ventilated_items == self._pool._ventilated_items_processed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ventilator, name)


def _load_rows_with_predicate(worker: Any, file: object, piece: Any, predicate: Any, drop: tuple[int, int]) -> Any:
    """The rows of a piece that match a predicate, with the values of the file.

    Petastorm sets the other rows to None before it drops them, which turns integers into floats (a sample id loses its
    last bits), and it shuffles the predicate's columns differently from the others. Returns a table, or [] if no row
    matches. Raises ValueError for fields that the schema does not have.
    """
    known = {field.name for field in worker._schema.fields.values()}
    wanted = set(predicate.get_fields())
    if not wanted or wanted - known:
        raise ValueError(
            f"At least one field of the schema must be named by a predicate, and no others that are not valid schema"
            f" names: got {sorted(wanted)}, the schema has {sorted(known)}"
        )
    partitions = worker._dataset.partitions
    in_files = known - (partitions.partition_names if partitions else set())
    mask = predicate.do_include(piece.read(columns=wanted & in_files, partitions=partitions).to_pandas())
    if not mask.any():
        return []
    rows = piece.read(columns=in_files, partitions=partitions).filter(pa.array(mask, type=pa.bool_()))
    return worker._load_rows(file, _Rows(rows), drop)


@dataclass(frozen=True)
class _Rows:
    """Rows that stand in for a piece of the dataset."""

    table: pa.Table

    def read(self, columns: object, partitions: object) -> pa.Table:
        """The filtered rows; the caller drops columns that it did not ask for."""
        return self.table


def start_worker(args: Sequence[str], executable: str) -> subprocess.Popen[bytes]:
    """Petastorm's `Popen([PYTHON, "-m", MODULE, FILE])` for a worker of its process pool, with the names enabled."""
    if args[1] != "-m":
        raise LockstepError(
            "Petastorm starts a process that is not one of its workers",
            got=" ".join(args)[:200],
            allowed="PYTHON -m MODULE FILE, as Petastorm 0.13.1 does",
            next_step="Install petastorm==0.13.1, or read without its process pool.",
        )
    return subprocess.Popen([executable, "-c", _BOOT, str(ROOT), *args[2:]])


def main() -> None:
    """Run the module that the command line names, as `python -m` would."""

    enable()
    module = sys.argv[1]
    del sys.argv[0]
    runpy.run_module(module, run_name="__main__")
