"""Where Petastorm 0.13.1 would hand out other rows or values than lie in the files, or in another order: set right."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pyarrow as pa


def repair(module: ModuleType) -> None:
    """Set right what is wrong in a module of Petastorm that was just imported; most are left as they are."""
    if module.__name__ == "petastorm.arrow_reader_worker":
        module.ArrowReaderWorker._load_rows_with_predicate = _load_rows_with_predicate
    elif module.__name__ == "petastorm.workers_pool.thread_pool":
        _wait_for_work(module.ThreadPool)
    elif module.__name__ == "petastorm.workers_pool.process_pool":
        _end_late(module.ProcessPool)


def _wait_for_work(pool_class: Any) -> None:
    """Let a worker of the thread pool be done only once all work was handed out.

    Petastorm asks whether its threads are idle and then whether all work was handed out: where all of it is handed out
    in between, the reader ends at once and the rows are lost. And it passes over a thread that has no work yet, so that
    one seed gives several orders. On a loaded machine each of the two made tests of Petastorm's own fail.
    """
    plain = pool_class.current_worker_done

    def current_worker_done(pool: Any, worker_id: int) -> bool:
        # Work and results go round the threads in one order: who has no work yet is the next to get some.
        handed_out = pool._ventilator is None or pool._ventilator.completed()
        return handed_out and plain(pool, worker_id)

    pool_class.current_worker_done = current_worker_done


def _end_late(pool_class: Any) -> None:
    """The same for the end of the process pool, which looks at its own counts first."""
    plain = pool_class.start

    def start(pool: Any, worker_class: Any, worker_args: Any = None, ventilator: Any = None) -> None:
        plain(pool, worker_class, worker_args, ventilator and _LateVentilator(pool, ventilator))

    pool_class.start = start


class _LateVentilator:
    def __init__(self, pool: Any, ventilator: Any) -> None:
        self._pool, self._ventilator = pool, ventilator

    def completed(self) -> bool:
        """Whether all work was handed out and, asked after that, all of it is done."""
        handed_out = bool(self._ventilator.completed())
        return handed_out and self._pool._ventilated_items == self._pool._ventilated_items_processed

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
