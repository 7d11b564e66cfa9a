"""Bytes and time of a pass over a table of 40 columns of which 3 are fed: the reader of a run against pyarrow.dataset.

    python -m benchmarks.fed_columns [--rows N] [--repeats N] [--answers-ms MS]

The same files on the local disk (in the page cache) and in moto's S3, behind a relay that holds each answer back for
--answers-ms (20, as a real store takes; 0 shows moto alone) and counts bytes. `all columns` is the reader that fetches
and decodes whole row groups, `fed columns` the one of a run, `pyarrow.dataset` scans with the same columns. Ours checks
footers and page checksums. Row groups are of 2 MiB, as the ETL jobs write them, and of 32 MiB. moto reads a whole
object for each range, so that many small ranges look dearer than they are.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from benchmarks.petastorm_read import write
from benchmarks.shared.arrays import in_order
from benchmarks.shared.shapes import interleaved, machine, print_rates, seconds, tab_rows, tab_schema
from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.training.reading.reader import SplitReader
from tests.object_stores.server import BUCKET, serving

FED = ("int_05", "int_20", "float_09")
READ = ("sample_id", *FED, "label")
GROUP_ROWS = {"2 MiB": 7_600, "32 MiB": 121_600}
ALL, OURS, PEER = "all columns", "fed columns", "pyarrow.dataset"


class Relay:
    """Forwards connections to a server, holds each answer back for some time, and counts the bytes of answers."""

    def __init__(self, endpoint: str, answers_s: float) -> None:
        parts = urlsplit(endpoint)
        self._to, self._answers_s = (str(parts.hostname), int(parts.port or 80)), answers_s
        self._door = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self.bytes = self.requests = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            caller, server = self._door.accept()[0], socket.create_connection(self._to)
            for one in (caller, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._asks, args=(caller, server), daemon=True).start()
            threading.Thread(target=self._answers, args=(server, caller), daemon=True).start()

    def _asks(self, caller: socket.socket, server: socket.socket) -> None:
        while data := caller.recv(1 << 16):
            self.requests += data.startswith(b"GET ")
            time.sleep(self._answers_s)
            server.sendall(data)
        server.close()

    def _answers(self, server: socket.socket, caller: socket.socket) -> None:
        try:
            while data := server.recv(1 << 20):
                self.bytes += len(data)
                caller.sendall(data)
        except OSError:
            return  # one of the two has closed the connection


def ours(root: str, columns: bool) -> int:
    """Read all blocks as a rank does, in order; each call opens and checks the dataset again. Returns bytes fetched."""
    manifest = load_dataset(root)
    schema = Schema.from_json(manifest.schema)
    reader = SplitReader(root, manifest, "train", Encoder(schema, {}) if columns else schema)
    for batch in in_order(reader):
        assert batch.num_rows
    reader.close()
    return reader.counts.fetched.fetched_bytes


def scan(root: str, files: pyarrow.fs.FileSystem) -> int:
    """Read the same columns by pyarrow.dataset."""
    dataset = ds.dataset(root, filesystem=files, format="parquet", exclude_invalid_files=False)
    return sum(batch.num_rows for batch in dataset.to_batches(columns=list(READ)))


@contextmanager
def store(folder: Path, answers_s: float) -> Iterator[Relay]:
    """moto's S3 behind a relay, which this process and its clients use."""
    with serving(folder) as server:
        relay = Relay(server.endpoint, answers_s)
        os.environ |= {**server.environment, "AWS_ENDPOINT_URL_S3": f"http://{relay.address}"}
        yield relay


def counted(relay: Relay, work: Callable[[], object]) -> str:
    """The bytes and requests of one call."""
    before = relay.bytes, relay.requests
    work()
    return f"{(relay.bytes - before[0]) / 1e6:,.1f} MB in {relay.requests - before[1]} requests"


def main() -> None:
    """Measure on both stores, with both sizes of row groups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=486_400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--answers-ms", type=float, default=20.0)
    args = parser.parse_args()
    print(machine("pyarrow", "obstore"))
    ignored = {"kind": "ignore"}
    schema = Schema(
        tuple(
            Field(name=field.name, dtype=field.dtype, kind=field.kind, encoding=None if field.name in READ else ignored)
            for field in tab_schema(False)
        )
    )
    rows = pa.RecordBatch.from_arrays(tab_rows(args.rows, 0.0).columns, schema=schema.arrow_schema())
    with tempfile.TemporaryDirectory() as folder, store(Path(folder), args.answers_ms / 1e3) as relay:
        for name, group_rows in GROUP_ROWS.items():
            root = Path(folder) / name.replace(" ", "")
            write(root, schema, rows, group_rows)
            whole = sum(path.stat().st_size for path in root.rglob("*.parquet"))
            print(f"\nrow groups of {name}, {whole / 1e6:,.1f} MB of shards")
            local, url = str(root), f"s3://{BUCKET}/{root.name}"
            for path in sorted(path for path in root.rglob("*") if path.is_file()):
                write_file(filesystem(url), f"{url}/{path.relative_to(root)}", path.read_bytes())
            s3 = pyarrow.fs.S3FileSystem(endpoint_override=relay.address, scheme="http", region="us-east-1")
            for place, at, files, under in (
                ("local disk", local, pyarrow.fs.LocalFileSystem(), local),
                (f"S3 that answers after {args.answers_ms:g} ms", url, s3, f"{BUCKET}/{root.name}"),
            ):
                calls: dict[str, Callable[[], object]] = {
                    ALL: partial(ours, at, False),
                    OURS: partial(ours, at, True),
                    PEER: partial(scan, f"{under}/split=train", files),
                }
                spent = interleaved({key: partial(seconds, call) for key, call in calls.items()}, args.repeats)
                print_rates(f"{place}, row groups of {name}", args.rows, spent, ALL)
                print(f"bytes fetched: {ALL} {ours(at, False) / 1e6:,.1f} MB, {OURS} {ours(at, True) / 1e6:,.1f} MB")
                if at == url:
                    for key, call in calls.items():
                        print(f"on the wire: {key} {counted(relay, call)}")


if __name__ == "__main__":
    main()
