"""Reading training data from a distant object store: the share of the link, the first batch, and what a step waits.

    python -m benchmarks.object_reading [--peers PYTHON] [--megabytes-s 25] [--rounds 3] [--steps 40]

moto's S3 (`make stores-venv`) stands behind a proxy in a process of its own (tests/object_stores/faulty_proxy.py),
which answers each request and each new connection a round trip later and carries all answers together at a fixed rate;
TCP's slow start is left out. On it are the same 20,000 images of 3,072 bytes of noise in eight shards of each format.
Contestants run in turn, each in a new process with nothing on its disk, and read one epoch in batches of 512. Printed
are, from the call that opens the dataset on, without imports: the time to the first batch, and the bytes of the images
over the time to the last batch, as a share of the link.

PYTHON is an environment with torch, tensorflow and the peers (measured with mosaicml-streaming 0.13.0, litdata 0.2.76
and s3fs 2026.9.0); without it only this project and pyarrow run. Each peer is as its documentation recommends for
training, shuffled (benchmarks/peers/object_peer.py).

With --steps, ResNet-20 then trains on Fashion-MNIST as 32 x 32 x 3 from the same store, two ranks: which share of its
steps waits for input. Takes about six minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq

from benchmarks.shared.shapes import IMAGE_BYTES, image_rows, image_schema, machine, spread
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.urls import join
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.world import World
from tests.object_stores.faulty_proxy import FaultyProxy, Link, faulty
from tests.object_stores.server import serving
from tests.training._tiny import write_rows

ROOT = Path(__file__).resolve().parent.parent
PEER = "benchmarks/peers/object_peer.py"
ROWS, SHARDS, BLOCK_RECORDS, BATCH = 20_000, 8, 512, 512
SHARE_BAR, BLOCKED_BAR = 0.9, 0.01
OURS, DISK, PYARROW = "lockstep", "lockstep, from a disk", "pyarrow S3FileSystem, Parquet in file order"
PEERS = ("streaming", "litdata", "s3fs + tf.data")
LIMIT_S = 240


def read_ours(url: str) -> Iterator[int]:
    """Shuffled batches of one epoch, as a rank reads them; yields their rows."""
    split = OpenSplit.at(url, "train")
    plan = EpochPlan.for_dataset(split.manifest, "train", seed=0, global_batch=BATCH)
    feed = RankFeed(plan, split.reader, split.encoder, World.local(0, 1))
    for batch in feed.batches(0, plan.steps(1)):
        yield len(batch.sample_ids)


def read_pyarrow(url: str) -> Iterator[int]:
    """Batches in file order by pyarrow.dataset with its own S3."""
    endpoint, bucket = os.environ["AWS_ENDPOINT_URL_S3"], url.removeprefix("s3://")
    store = pyarrow.fs.S3FileSystem(endpoint_override=endpoint, region=os.environ["AWS_REGION"])
    found = ds.dataset(bucket, filesystem=store, format="parquet")
    for batch in found.to_batches(batch_size=BATCH, columns=["image", "label"]):
        yield len(batch)


def timed(batches: Iterator[int], began: float) -> dict[str, float]:
    """Seconds to the first and to the last batch, and how many rows came."""
    rows, first = 0, 0.0
    for count in batches:
        first = first or time.perf_counter() - began
        rows += count
    return {"first_s": first, "all_s": time.perf_counter() - began, "rows": rows}


def contestant(name: str, url: str) -> None:
    """Read once in this process; prints `timed` as JSON."""
    if name != PYARROW:  # kernels are compiled or loaded once a process: no part of reading
        next(read_ours(os.environ["LOCKSTEP_WARM"]))
    began = time.perf_counter()
    print(json.dumps(timed((read_pyarrow if name == PYARROW else read_ours)(url), began)), flush=True)


def _serve(endpoint: str, link: Link, ready: Connection) -> None:
    with faulty(endpoint, FaultyProxy(link=link)) as proxy:
        ready.send(proxy.endpoint)
        ready.recv()  # EOFError ends the process with its parent


@contextmanager
def distant(endpoint: str, link: Link) -> Iterator[str]:
    """A proxy in a process of its own; yields its endpoint."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(endpoint, link, there), daemon=True)
    process.start()
    try:
        yield str(here.recv())
    finally:
        process.kill()
        process.join(10)


def write_data(folder: str, peers: str | None) -> dict[str, str]:
    """The rows in each contestant's format below a folder; its name for each contestant."""
    schema, rows = image_schema(), image_rows(ROWS)
    write_rows(join(folder, "lockstep"), schema, rows, {"train": ROWS}, "tfrecord", SHARDS, BLOCK_RECORDS, 0)
    Path(folder, "parquet").mkdir()
    for number in range(SHARDS):
        part = rows.slice(number * ROWS // SHARDS, ROWS // SHARDS)
        pq.write_table(
            pa.Table.from_batches([part]), f"{folder}/parquet/{number}.parquet", compression=None,
            row_group_size=BLOCK_RECORDS, use_dictionary=False,
        )  # fmt: skip
    names = {OURS: "lockstep", PYARROW: "parquet"}
    if peers is not None:
        made = [peers, PEER, "write", f"{folder}/parquet", folder, str(ROWS // SHARDS)]
        subprocess.run(made, cwd=ROOT, check=True, stdout=sys.stderr)
        names |= {"streaming": "streaming", "litdata": "litdata", "s3fs + tf.data": "lockstep/split=train"}
    return names


def send(folder: str, url: str) -> None:
    """Copy all files below a folder to the store."""
    source, target = filesystem(folder), filesystem(url)
    for entry in walk(source, folder):
        with target.create(join(url, entry.url.removeprefix(f"{folder}/"))) as writer:
            writer.write(source.read_bytes(entry.url))


def run_one(command: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    """One contestant in a new process with a new temporary folder."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, **environment, "TMPDIR": cache, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] > ROWS - BATCH, found
    return found


def compare(works: dict[str, Callable[[], dict[str, float]]], rounds: int, link: Link) -> bool:
    """Run all in turn and print; whether this project's bars hold."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(work())
    print(f"\n{ROWS * IMAGE_BYTES / 1e6:.0f} MB of images, {rounds} rounds in turn; median (min - max)")
    for name, times in found.items():
        shares = [one["rows"] * IMAGE_BYTES / one["all_s"] / link.bytes_s for one in times]
        share = "" if name == DISK else f"{spread(shares)} of the link"
        print(f"  {name:46} first batch {spread(one['first_s'] for one in times)} s   {share}", flush=True)
    ours = statistics.median(one["rows"] * IMAGE_BYTES / one["all_s"] for one in found[OURS]) / link.bytes_s
    later = statistics.median(
        far["first_s"] - near["first_s"] for far, near in zip(found[OURS], found[DISK], strict=True)
    )
    print(f"  {OURS}: {ours:.2f} of the link (bar {SHARE_BAR}); first batch {later:.2f} s later than from a disk")
    return ours >= SHARE_BAR


def train(url: str, steps: int) -> bool:
    """Train ResNet-20 from the store for so many steps; whether its steps wait for input less than the bar."""
    from benchmarks import resnet_input  # loads TensorFlow, which no contestant here should pay for

    resnet_input.write_data(join(url, "data"), resnet_input.BATCH * steps // resnet_input.EPOCHS)
    no_augment = argparse.Namespace(augment=[])
    blocked = resnet_input.run_steps(resnet_input.config_of(no_augment, join(url, "data"), join(url, "run")))
    print(f"blocked on input: {blocked:.2%} (bar {BLOCKED_BAR:.0%})")
    return blocked < BLOCKED_BAR


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="the peers' environment (default: none)")
    parser.add_argument("--round-trip-ms", type=float, default=30.0)
    parser.add_argument("--megabytes-s", type=float, default=25.0, help="of the link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of ResNet-20 on two ranks afterwards (default: none)")
    parser.add_argument("--contestant", nargs=2, metavar=("NAME", "URL"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.contestant:
        contestant(*args.contestant)
        return 0
    link = Link(args.round_trip_ms / 1e3, args.megabytes_s * 1e6)
    print(f"{machine('obstore', 'pyarrow', 'tensorflow')}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"a link of {args.megabytes_s:g} MB/s and {args.round_trip_ms:g} ms round trip")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        os.environ.update(server.environment)
        data = f"{folder}/data"
        names = write_data(data, args.peers)
        send(data, join(server.url, "data"))
        with distant(server.endpoint, link) as endpoint:
            os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
            works: dict[str, Callable[[], dict[str, float]]] = {}
            own = [sys.executable, "-m", "benchmarks.object_reading", "--contestant"]
            for name, part in {DISK: "lockstep", **names}.items():
                where = f"{data}/{part}" if name == DISK else join(server.url, "data", part)
                command = [args.peers, PEER, name, where] if name in PEERS else [*own, name, where]
                works[name] = partial(run_one, command, {"LOCKSTEP_WARM": f"{data}/lockstep"})
            met = compare(works, args.rounds, link)
            if args.steps:
                met &= train(join(server.url, "resnet"), args.steps)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
