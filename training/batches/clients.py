"""The clients of a split: who they are, and the samples of those that one rank trains, in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.features.encode.encoder import Encoded, Encoder
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.comm.base import Communicator, SoloCommunicator
from lockstep.training.plan.client_plan import ClientTable
from lockstep.training.reading.reader import SplitReader

CLIENT_DTYPES = ("int64", "string")


def check_client_field(schema: Schema, name: str) -> None:
    """Raise ConfigError unless field `name` is a scalar of one of CLIENT_DTYPES."""
    usable = [field.name for field in schema if field.dtype in CLIENT_DTYPES and not field.shape and field.kind != "id"]
    if name not in usable:
        found = next((field for field in schema if field.name == name), None)
        raise ConfigError(
            f"the dataset has no clients in `{name}`",
            got="no such field" if found is None else f"a field of {found.dtype}, shape {found.shape}",
            allowed=", ".join(usable) or "a dataset with a scalar int64 or string field",
            next_step="Correct --clients, or build the dataset with such a field, encoded as `ignore`.",
        )


def read_table(reader: SplitReader, field: str, communicator: Communicator | None = None) -> ClientTable:
    """The table of a split's clients; ranks read a part of the blocks each. A collective.

    Raises DataError for records without a client.
    """
    comm = communicator or SoloCommunicator()
    blocks = reader.table.num_blocks
    mine = range(comm.rank * blocks // comm.num_ranks, (comm.rank + 1) * blocks // comm.num_ranks)
    parts: list[pa.Array] = []
    for rows in reader.sequence(map(reader.table.run, mine)):
        column = rows.column(field)
        if column.null_count:
            raise DataError(
                f"records of split `{reader.split}` have no client",
                got=f"{column.null_count} of {len(column)} records of a block with null in `{field}`",
                allowed="a value in each record",
                next_step="Fill the column before the dataset is built, or choose another field for --clients.",
            )
        parts.append(column)
    column = pa.chunked_array(parts, type=reader.schema.arrow_schema().field(field).type)
    encoded = column.combine_chunks().dictionary_encode()
    known = comm.all_gather_bytes(json.dumps(encoded.dictionary.to_pylist()).encode())
    places = comm.all_gather_ragged(np.asarray(encoded.indices).astype(np.int32))
    return ClientTable.of([(json.loads(one), place) for one, place in zip(known, places, strict=True)])


class ClientRows:
    """The encoded samples of some clients, each client's in file order.

    Reads only blocks that have such samples. Raises ConfigError naming the bytes if they are more than `most_bytes`;
    one block is in memory in addition.
    """

    def __init__(
        self,
        reader: SplitReader,
        encoder: Encoder,
        table: ClientTable,
        clients: Iterable[int],
        most_bytes: int,
        on_block: Callable[[int, str], None] = lambda block, what: None,
    ) -> None:
        mine = np.zeros(len(table.counts), bool)
        mine[list(clients)] = True
        wanted = mine[table.of_row]
        starts = np.concatenate([[0], np.cumsum([reader.table.run(i).count for i in range(reader.table.num_blocks)])])
        blocks = [i for i in range(reader.table.num_blocks) if wanted[starts[i] : starts[i + 1]].any()]
        parts: list[Encoded] = []
        of_row: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
        self.bytes = 0
        """The size of all arrays."""
        for i, rows in zip(blocks, reader.sequence(map(reader.table.run, blocks)), strict=True):
            chosen = np.flatnonzero(wanted[starts[i] : starts[i + 1]])
            parts.append(encoder.encode(rows.take(pa.array(chosen))))
            of_row.append(table.of_row[starts[i] + chosen])
            self.bytes += sum(array.nbytes for array in _arrays(parts[-1]))
            if self.bytes > most_bytes:
                share = len(np.concatenate(of_row)) / max(1, int(wanted.sum()))
                raise ConfigError(
                    "the samples of a rank's clients do not fit into its memory",
                    got=f"about {round(self.bytes / share)} bytes of {int(wanted.sum())} samples",
                    allowed=f"{most_bytes} bytes: a quarter of what is free on this host, divided by its ranks",
                    next_step="Use more hosts, or a dataset of fewer samples or narrower columns.",
                )
            on_block(i, "block")
        owner = np.concatenate(of_row)
        order = np.argsort(owner, kind="stable")
        bounds = np.searchsorted(owner[order], np.arange(len(table.counts) + 1))
        self._at = {client: order[bounds[client] : bounds[client + 1]] for client in np.flatnonzero(mine).tolist()}
        self._all = _joined(parts) if parts else None

    def of(self, client: int, order: npt.NDArray[np.int64]) -> Encoded:
        """The client's samples number `order` (n,), counted in file order."""
        assert self._all is not None
        return _taken(self._all, self._at[client][order])


def _arrays(rows: Encoded) -> list[npt.NDArray[Any]]:
    others = (rows.y, rows.sample_id, rows.weight)
    return [*rows.x.values(), *(array for array in others if array is not None)]


def _joined(parts: list[Encoded]) -> Encoded:
    first = parts[0]
    return Encoded(
        {name: np.concatenate([part.x[name] for part in parts]) for name in first.x},
        None if first.y is None else np.concatenate([part.y for part in parts if part.y is not None]),
        np.concatenate([part.sample_id for part in parts]),
        None if first.weight is None else np.concatenate([part.weight for part in parts if part.weight is not None]),
    )


def _taken(rows: Encoded, at: npt.NDArray[np.int64]) -> Encoded:
    return Encoded(
        {name: array[at] for name, array in rows.x.items()},
        None if rows.y is None else rows.y[at],
        rows.sample_id[at],
        None if rows.weight is None else rows.weight[at],
    )
