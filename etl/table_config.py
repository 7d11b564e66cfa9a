"""What `jobs.etl_table` is told, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from etl.write.config import WriteConfig
from lockstep.storage.flags import check_flag
from lockstep.storage.urls import several


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig(WriteConfig):
    """Exactly one of `table`, `query` and `inputs`. Raises ConfigError for values that cannot be right."""

    table: str | None = None
    """A table or view of the session's catalog."""
    query: str | None = None
    """A SQL query."""
    inputs: tuple[str, ...] = ()
    """URLs that Spark loads as `input_format`."""
    input_format: str = "parquet"
    """Any format that Spark's session knows."""
    id_columns: tuple[str, ...]
    """The columns that tell rows apart; unique together."""
    label: str | None = None
    """The column to predict."""
    exclude: tuple[str, ...] = ()
    """Columns that are not stored, though they may be ids or decide the split."""
    schema: str | None = None
    """File of a declared schema (lockstep.features.schema.declare); None takes the columns' own types
    (etl.write.frame).
    """

    def __post_init__(self) -> None:
        super(TableConfig, self).__post_init__()
        for name in ("inputs", "id_columns", "exclude"):
            object.__setattr__(self, name, several(getattr(self, name)))
        told = [flag for flag, value in self._sources().items() if value]
        check_flag(len(told) == 1, "the input", " and ".join(told) or "none", "one of --table, --query, --input")
        files = bool(self.inputs) or self.input_format == "parquet"
        check_flag(files, "--input-format", f"{self.input_format} without --input", "with --input, whose format it is")
        ids = self.id_columns
        check_flag(len(ids) > 0 and all(ids), "--id-columns", ",".join(ids) or "none", "one column or more")
        check_flag(len(set(ids)) == len(ids), "--id-columns", ",".join(ids), "each column once")
        alone = self.schema is None or not (self.exclude or self.label)
        check_flag(alone, "--schema", "--exclude or --label beside it", "what the file declares, alone")

    def to_json(self) -> dict[str, Any]:
        """What the content of the dataset follows from, besides the input and the seed."""
        own = {"job": "etl_table", "table": self.table, "query": self.query, "inputs": list(self.inputs)}
        own |= {"input_format": self.input_format if self.inputs else None, "id_columns": list(self.id_columns)}
        return {**super(TableConfig, self).to_json(), **own}

    def _sources(self) -> dict[str, object]:
        return {"--table": self.table, "--query": self.query, "--input": self.inputs}
