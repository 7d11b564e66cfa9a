"""Why rows of a batch are refused, as small numbers; the first reason that a row is given stays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

NOT_UTF8 = "not_utf8"
_SHOWN = 60  # characters of a value
_TYPES = {"float": "float32", "double": "float64", "binary": "bytes"}


def bad_value(name: str) -> str:
    """The reason of a record whose column `name` says no value of its type."""
    return f"bad_value:{name}"


def not_of(kind: pa.DataType, value: str) -> str:
    """The detail of `bad_value`: a value, as it is written in the record, that is none of the type wanted."""
    return f"{value if len(value) <= _SHOWN else value[:_SHOWN] + '...'} is no {_called(kind)}"


def _called(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {_called(kind.value_type)}"
    if pa.types.is_timestamp(kind):
        return "time in ISO 8601"
    if pa.types.is_decimal(kind):
        whole = f"number of up to {kind.precision - kind.scale} digits"
        return f"{whole} and {kind.scale} after the point" if kind.scale else f"whole {whole}"
    return _TYPES.get(str(kind), str(kind))


def missing_value(name: str) -> str:
    """The reason of a record whose column `name` says nothing, though it must."""
    return f"missing_value:{name}"


class Reasons:
    """One reason, or none, for each of n rows; a row may add a detail to its reason."""

    def __init__(self, count: int) -> None:
        self._codes = np.zeros(count, dtype=np.int32)
        self._names: list[str | None] = [None]
        self._details: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, where: NDArray[np.bool_], reason: str, details: Mapping[int, str] | None = None) -> None:
        """Refuse the rows `where` (n,) for `reason`, unless they are refused already; `details` by row."""
        if not where.any():
            return
        if reason not in self._names:
            self._names.append(reason)
        where = where & (self._codes == 0)
        self._codes[where] = self._names.index(reason)
        if details:
            self._details |= {row: details[row] for row in np.flatnonzero(where).tolist() if row in details}

    def where(self, reason: str) -> NDArray[np.bool_]:
        """Which rows are refused for `reason`: (n,) bool."""
        if reason not in self._names:
            return np.zeros(len(self), dtype=bool)
        return self._codes == self._names.index(reason)

    def replace(self, other: Reasons, where: NDArray[np.bool_]) -> None:
        """Forget what the rows `where` (n,) are refused for, and refuse what `other` does, whose rows they are."""
        self._codes[where] = 0
        self._details = {row: detail for row, detail in self._details.items() if not where[row]}
        self.take_from(other, np.flatnonzero(where))

    @property
    def good(self) -> NDArray[np.bool_]:
        """Which rows nothing was said against: (n,) bool."""
        return self._codes == 0

    def names(self, where: NDArray[np.bool_]) -> pa.Array:
        """The reasons of the rows `where` with their details, as strings; null for good rows."""
        names = pa.DictionaryArray.from_arrays(
            pa.array(self._codes[where]), pa.array(self._names, type=pa.string())
        ).dictionary_decode()
        if not self._details:
            return names
        details = pa.array([self._details.get(row) for row in np.flatnonzero(where).tolist()], pa.string())
        return pc.coalesce(pc.binary_join_element_wise(names, details, ": "), names)

    def counts(self, where: NDArray[np.bool_] | None = None) -> dict[str, int]:
        """How many rows, of all or of those `where`, each reason refuses."""
        codes = self._codes if where is None else self._codes[where]
        found = np.bincount(codes, minlength=len(self._names)).tolist()
        return {name: n for name, n in zip(self._names, found, strict=True) if name is not None and n}

    def tolist(self) -> list[str | None]:
        """The reason of each row, None for a good one."""
        return [self._names[code] for code in self._codes.tolist()]

    def take_from(self, other: Reasons, places: NDArray[np.int64]) -> None:
        """Refuse what `other` refuses; its rows lie at `places` (m,) among these."""
        details = {int(places[row]): detail for row, detail in other._details.items()}
        for code, name in enumerate(other._names):
            if name is not None:
                mine = np.zeros(len(self), dtype=bool)
                mine[places[other._codes == code]] = True
                self.add(mine, name, details)
