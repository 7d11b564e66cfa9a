"""Generated tables of several files, and the rows that they hold by pyarrow."""

from __future__ import annotations

import datetime as dt
import json
import random
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - Spark gives times without a zone so
# By format: the types of columns. Those that Spark cannot read are marked.
PARQUET = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(), "uint8": pa.uint8(),
    "uint32": pa.uint32(), "uint64": pa.uint64(), "float": pa.float32(), "double": pa.float64(), "bool": pa.bool_(),
    "text": pa.string(), "large text": pa.large_string(), "category": pa.dictionary(pa.int8(), pa.string()),
    "bytes": pa.binary(), "date": pa.date32(), "decimal": pa.decimal128(9, 2), "list": pa.list_(pa.int64()),
    "texts": pa.list_(pa.string()), "struct": pa.struct([("a", pa.int64()), ("b", pa.string())]),
    "us": pa.timestamp("us"), "ns": pa.timestamp("ns"), "ns utc": pa.timestamp("ns", "UTC"), "half": pa.float16(),
    "time": pa.time64("us"),
}  # fmt: skip
ORC = {
    name: PARQUET[name]
    for name in ("int8", "int32", "int64", "float", "double", "bool", "text", "bytes", "date", "decimal", "list")
}
JSON = {name: PARQUET[name] for name in ("int64", "double", "bool", "text", "list")}
TYPES = {"parquet": PARQUET, "orc": ORC, "json": JSON}
UNREADABLE = ("half", "time")


@dataclass(frozen=True)
class Case:
    """A table: its format, its rows by id as Spark should give them, or the words that a refusal must have."""

    file_format: str
    rows: dict[int, dict[str, Any]]
    refused: tuple[str, ...]


def make(folder: Path, seed: int) -> Case:
    """Write the files of the case with this number."""
    chance = random.Random(seed)
    file_format = chance.choice(["parquet", "parquet", "orc", "json"])
    types = TYPES[file_format]
    names = {f"c{n}": chance.choice(sorted(types)) for n in range(chance.randint(1, 6))}
    if file_format == "parquet" and chance.random() < 0.7:  # else most tables would be refused
        names = {name: kind for name, kind in names.items() if kind not in UNREADABLE}
    kinds: dict[str, dict[str, str]] = {}
    rows: dict[int, dict[str, Any]] = {}
    folder.mkdir()
    for number in range(chance.randint(1, 4)):
        there = {name: kind for name, kind in names.items() if not number or chance.random() < 0.7}
        if file_format != "json" and there and chance.random() < 0.1:
            there[chance.choice(sorted(there))] = chance.choice(sorted(types))
        path = folder / f"part {number}.{file_format}"
        order = chance.sample(sorted(there), len(there))
        count = chance.choice([0, 1, 3, 20]) if number else 5
        ids = range(1000 * number, 1000 * number + count)
        columns = {name: [_value(there[name], chance) for _ in ids] for name in order}
        for name in order:
            kinds.setdefault(name, {}).setdefault(there[name], path.name)
        for place, one in enumerate(ids):
            rows[one] = {name: _read(there[name], values[place]) for name, values in columns.items()}
        _write(path, file_format, list(ids), {name: (types[there[name]], columns[name]) for name in order})
    return Case(file_format, rows, _refusal(kinds))


def _refusal(kinds: dict[str, dict[str, str]]) -> tuple[str, ...]:
    for name, found in kinds.items():
        alike = {
            {"large text": "text", "category": "text", "uint8": "int16", "uint32": "int64"}.get(k, k) for k in found
        }
        if len(alike) > 1 or alike & set(UNREADABLE):
            return (f"`{name}`", next(iter(found.values())))
    return ()


def _value(kind: str, chance: random.Random) -> Any:
    if chance.random() < 0.2:
        return None
    whole = chance.choice([0, 1, -1, 7, chance.randint(-100, 100)])
    match kind:
        case "uint8" | "uint32":
            return abs(whole)
        case "uint64":
            return chance.choice([0, 5, 2**64 - 1, 2**63])
        case "float" | "double" | "half":
            return whole / 4
        case "bool":
            return whole > 0
        case "text" | "large text" | "category":
            return chance.choice(["", "a", "007", "ü", 'x"y', "1"])
        case "bytes":
            return chance.choice([b"", b"\0\xff", b"a"])
        case "date":
            return dt.date(2020, 1, 1) + dt.timedelta(days=whole)
        case "decimal":
            return Decimal(whole) / 4
        case "list":
            return [whole, whole + 1][: chance.randint(0, 2)]
        case "texts":
            return ["a", "b"][: chance.randint(0, 2)]
        case "struct":
            return {"a": whole, "b": "x"}
        case "us":
            return whole * 10**6 + 1
        case "ns" | "ns utc":
            return whole * 10**9 + 1999
        case "time":
            return abs(whole)
    return whole


def _read(kind: str, value: Any) -> Any:
    """The value as Spark's rows have it; a time with a zone as microseconds."""
    if value is None:
        return None
    if kind in ("us", "ns"):
        return EPOCH + dt.timedelta(microseconds=value if kind == "us" else value // 1000)
    return value // 1000 if kind == "ns utc" else Decimal(value) if kind == "uint64" else value


def _write(path: Path, file_format: str, ids: list[int], columns: dict[str, tuple[pa.DataType, list[Any]]]) -> None:
    if file_format == "json":
        found = [{"id": one, **{n: v[at] for n, (_, v) in columns.items() if v[at] is not None or at % 2}}
                 for at, one in enumerate(ids)]  # fmt: skip
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        return
    arrays = {name: pa.array(values, kind) for name, (kind, values) in columns.items()}
    table = pa.table({"id": pa.array(ids, pa.int64()), **arrays})
    (pq if file_format == "parquet" else orc).write_table(table, path)
