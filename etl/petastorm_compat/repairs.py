"""Three places where Petastorm 0.13.1 would hand out other rows or values than lie in the files, set right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pyarrow as pa


def repair(module: ModuleType) -> None:
    """Set right what is wrong in a module of Petastorm that was just imported; most are left as they are."""
    if module.__name__ == "petastorm.arrow_reader_worker":
        module.ArrowReaderWorker._load_rows_with_predicate = _load_rows_with_predicate
    elif module.__name__ == "petastorm.workers_pool.thread_pool":
        _end_late(module.ThreadPool, lambda pool: pool.all_workers_done())
    elif module.__name__ == "petastorm.workers_pool.process_pool":
        _end_late(module.ProcessPool, lambda pool: pool._ventilated_items == pool._ventilated_items_processed)


def _end_late(pool_class: Any, is_idle: Callable[[Any], bool]) -> None:
    """Let a pool end only when it is idle after its ventilator has handed out all work.

    Petastorm asks whether the pool is idle and then whether all work was handed out: where all of it is handed out in
    between, the reader ends at once and the rows are lost (2 of 99 of Petastorm's own tests on a loaded machine).
    """
    plain = pool_class.start

    def start(pool: Any, worker_class: Any, worker_args: Any = None, ventilator: Any = None) -> None:
        plain(pool, worker_class, worker_args, ventilator and _LateVentilator(ventilator, lambda: is_idle(pool)))

    pool_class.start = start


class _LateVentilator:
    def __init__(self, ventilator: Any, is_idle: Callable[[], bool]) -> None:
        self._ventilator, self._is_idle = ventilator, is_idle

    def completed(self) -> bool:
        """Whether all work was handed out and, asked after that, all of it is done."""
        return bool(self._ventilator.completed()) and self._is_idle()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ventilator, name)


def _load_rows_with_predicate(worker: Any, file: object, piece: Any, predicate: Any, drop: tuple[int, int]) -> Any:
    """The rows of a piece that a predicate takes, with the values that lie in the file.

    Petastorm sets the other rows to None before it drops them, which turns integers into floats (a sample id loses its
    last bits), and it shuffles the columns of the predicate otherwise than the rest. Returns a table, or [] where no
    row matches. Raises ValueError for fields that the schema lacks.
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
    """Rows in place of a piece of the dataset."""

    table: pa.Table

    def read(self, columns: object, partitions: object) -> pa.Table:
        """What was read and filtered already; the caller drops what it did not ask for."""
        return self.table
