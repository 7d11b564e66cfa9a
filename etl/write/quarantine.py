"""The quarantine: rejected input in Parquet files, with source, position, reason and raw bytes."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.etl import columns as c
from lockstep.etl.spark.session import job_description
from lockstep.etl.spark.tasks import by_partition, mapped, partition_of_task, upload
from lockstep.etl.write.checks import refuse_existing
from lockstep.etl.write.config import NOT_KEPT, WriteConfig
from lockstep.etl.write.shards import RUN_AGAIN, move
from lockstep.etl.write.staging import Staging, clean, clean_quarantine
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import FileInfo, SourceInfo
from lockstep.storage.digest import digest_of
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.binary(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
    ]
)
_RESULT = pa.schema(
    [("part", pa.int32()), ("path", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64()), ("sha256", pa.string())]
)
PART_BYTES = 128 << 20
GROUP_ROWS = 1024
FIRST_PLACES = 3
_SHOWN = ["source", "position", "reason"]
_INSIDE = "_quarantine/"


def write_quarantine(
    rows: DataFrame, *, count: int, raw_bytes: int, attempts: str, source_urls: tuple[str, ...]
) -> list[tuple[str, FileInfo]]:
    """Write `rows`, whose columns are lockstep.etl.columns.REJECTED; returns attempt URLs and digests in order.

    The number of files follows from `raw_bytes`, a row's file from a hash of where it comes from, and rows are sorted
    by source, position and place: the same bytes however Spark cuts the work. No rows give one empty file.
    """
    from pyspark.sql import functions as f

    if count == 0:
        table = WriteQuarantine(attempts, source_urls).write(0, iter(()))
        results = table.to_pylist()
    else:
        parts = -(-max(raw_bytes, 1) // PART_BYTES)
        part = f.pmod(f.xxhash64(c.SOURCE, c.POSITION, c.PLACE), f.lit(parts)).cast("int")
        placed = by_partition(rows.select(*c.REJECTED.names), parts, part)
        ordered = placed.sortWithinPartitions(c.SOURCE, c.POSITION, c.PLACE)
        write = WriteQuarantine(attempts, source_urls)
        with job_description(rows.sparkSession, "write the rejected input"):
            results = [row.asDict() for row in mapped(ordered, write, _RESULT).collect()]
    results.sort(key=lambda row: row["part"])
    found = sum(row["rows"] for row in results)
    if found != count:
        raise DataError(
            "the rejected records that were written are not those that were counted",
            got=f"{found} written",
            allowed=str(count),
            next_step=RUN_AGAIN,
        )
    return [(row["path"], FileInfo(row["bytes"], row["sha256"])) for row in results]


@dataclass(frozen=True)
class WriteQuarantine:
    """The function for mapInArrow: a partition's sorted rows in, one row of _RESULT out."""

    attempts: str
    source_urls: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the file of this partition, also an empty one."""
        yield self.write(partition_of_task(), batches)

    def write(self, part: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        """Write the file of partition `part`; returns its row."""
        count = 0
        with tempfile.TemporaryFile(prefix="lockstep-quarantine-") as file:
            with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
                for rows in _groups(batches, self.source_urls):
                    writer.write_table(rows, row_group_size=GROUP_ROWS)
                    count += rows.num_rows
            file.seek(0)
            digest = digest_of(file)
            path = upload(self.attempts, f"quarantine-{part:05d}", file)
        return pa.RecordBatch.from_pylist(
            [{"part": part, "path": path, "rows": count, "bytes": digest.bytes, "sha256": digest.sha256}],
            schema=_RESULT,
        )


def _groups(batches: Iterable[pa.RecordBatch], urls: tuple[str, ...]) -> Iterator[pa.Table]:
    """Rows in groups of GROUP_ROWS for any batches that Spark delivers: the bytes of the file depend on the groups."""
    held: list[dict[str, object]] = []
    for batch in batches:
        for row in batch.to_pylist():
            values = {name: row[f"_{name}"] for name in SCHEMA.names}
            held.append({**values, "source": file_of(urls, row)})
            if len(held) == GROUP_ROWS:
                yield pa.Table.from_pylist(held, schema=SCHEMA)
                held = []
    if held:
        yield pa.Table.from_pylist(held, schema=SCHEMA)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a data frame's rows come from, for counts, quarantine and manifest; `read` None: the number of its rows."""

    sources: tuple[SourceInfo, ...] = ()
    read: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    quarantined: int = 0
    quarantined_raw_bytes: int = 0
    quarantine: DataFrame | None = None
    created_config: Mapping[str, Any] = field(default_factory=dict)


def quarantine_apart(config: WriteConfig) -> Staging:
    """The folder of rejected input at the separate URL that `config` names; with `clean`, after removing what killed
    jobs left there. Raises ExistsError if the URL is taken.
    """
    apart = Staging(str(config.quarantine), mode=0o700, part_of=config.output)
    if config.clean:
        with Staging(apart.url) as clock:  # the time of its sign is the time of that file system
            now_ms = clock.signed_ms()
            clean(apart.fs, apart.url, now_ms)
            clean_quarantine(apart.fs, apart.url, config.output, now_ms)
        refuse_existing(apart.url)
    return apart


def place_quarantine(staging: Staging, folder: str, origin: Origin, urls: tuple[str, ...]) -> dict[str, FileInfo]:
    """Write the rejected input of `origin` to `folder`, which only its owner may read; returns the digests."""
    assert origin.quarantine is not None
    staging.fs.mkdirs(folder, mode=0o700)
    written = write_quarantine(
        origin.quarantine,
        count=origin.quarantined,
        raw_bytes=origin.quarantined_raw_bytes,
        attempts=staging.attempts,
        source_urls=urls,
    )
    files = {}
    for number, (attempt, info) in enumerate(written):
        name = f"part-{number:05d}.parquet"
        move(staging.fs, attempt, join(folder, name))
        files[f"{_INSIDE}{name}"] = info
    return files


def file_of(urls: Sequence[str], row: Row | Mapping[str, Any]) -> str:
    """The URL of the file that a rejected record comes from."""
    url = urls[row[c.SOURCE]]
    return url if row[c.PLACE] is None else join(url, row[c.PLACE])


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """What a quarantine holds: the URL of its folder, the records of each reason, most frequent first, and the places
    of the first FIRST_PLACES, `FILE` or `FILE at byte POSITION`.
    """

    url: str
    reasons: Mapping[str, int]
    first: tuple[str, ...]


def rejected_of(url: str, manifest: DatasetManifest, *, apart: bool = False) -> Rejected | None:
    """Read what was rejected when the dataset at `url` was made, without its bytes; None if nothing was kept.

    A reason counts without the values that follow it, which may be different in each record. With `apart` the folder of
    --quarantine URL is read too. Raises CorruptionError for a damaged file, NotFoundError for one that is gone.
    """
    folder = manifest.created_by["config"].get("quarantine")
    if folder in (None, NOT_KEPT):
        folder = join(url, _INSIDE.rstrip("/"))
        files = [join(url, path) for path in sorted(manifest.files) if path.startswith(_INSIDE)]
    else:
        listed = filesystem(folder).list(folder) if apart else []
        files = sorted(entry.url for entry in listed if entry.name.endswith(".parquet"))
    if not files:
        return None
    reasons: Counter[str] = Counter()
    places: list[tuple[str, int]] = []
    for file in files:
        for batch in _rejected_rows(file):
            reasons.update(str(reason).partition(": ")[0] for reason in batch.column("reason").to_pylist())
            ends = zip(batch.column("source").to_pylist(), batch.column("position").to_pylist(), strict=True)
            places = sorted([*places, *ends])[:FIRST_PLACES]
    first = tuple(f"{source} at byte {position}" if position else str(source) for source, position in places)
    return Rejected(url=folder, reasons=dict(reasons.most_common()), first=first)


def _rejected_rows(url: str) -> Iterator[pa.RecordBatch]:
    """The rows of a quarantine file without their bytes, of which only these columns are read."""
    with filesystem(url).open_read(url) as file:
        try:
            opened = pq.ParquetFile(file, page_checksum_verification=True)
            if missing := set(_SHOWN) - set(opened.schema_arrow.names):
                raise KeyError(f"no column {', '.join(sorted(missing))}")
            yield from opened.iter_batches(columns=_SHOWN)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise CorruptionError(
                "a quarantine file cannot be read",
                file=url,
                got=str(error).splitlines()[0],
                allowed=f"Parquet with the columns {', '.join(_SHOWN)}",
            ) from None
