"""The footers of Parquet files of others."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.formats.parquet_footer import columns_are_readable, read_footer
from lockstep.storage.fs import filesystem


def parquet_footer(url: str, size_bytes: int) -> pq.FileMetaData:
    """The metadata of the Parquet file at `url`, of which only the end is read. Raises DataError for other files."""
    fs = filesystem(url)
    try:
        footer = read_footer(lambda at, size: fs.read_range(url, at, size), size_bytes, url)
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
    except CorruptionError as error:
        raise damaged(url, "Parquet", ValueError(f"its end is {error.got}")) from None
    except (pa.ArrowException, OSError) as error:
        raise damaged(url, "Parquet", error) from None
    if not columns_are_readable(footer):
        raise damaged(url, "Parquet", ValueError("a footer over which Arrow would end the process"))
    return metadata


def damaged(url: str, file_format: str, error: Exception) -> DataError:
    """The error for a file that cannot be read as `file_format`."""
    return DataError(
        f"input {url} cannot be read as {file_format}",
        got=(str(error).strip() or type(error).__name__).splitlines()[0][:300],
        allowed=f"a whole {file_format} file",
        next_step="Fetch the file again; compare its digest with the origin's.",
    )


def column_numbers(schema: pa.Schema) -> dict[str, int | None]:
    """The number of each column, by which Iceberg knows it whatever its name is; None where the file has none."""
    texts = {field.name: (field.metadata or {}).get(b"PARQUET:field_id") for field in schema}
    return {name: None if text is None else int(text) for name, text in texts.items()}
