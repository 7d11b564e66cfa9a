"""JPEGs of a dataset to shuffled training batches, against only decoding the same files.

    python -m benchmarks.jpeg_batches DATASET [--split NAME] [--threads N ...] [--rounds N]

DATASET comes from `lockstep etl_images --store encoded`. Each round runs these in turn; the first round is dropped:
  alone  lockstep.features.images.decode of each file, from memory, with nothing kept: in one thread, or in N threads
         that share the files
  many   lockstep.features.images.decode_many on the same files in memory, 512 at a time: the decoder of `ours`
  ours   lockstep.training.batches.planned: shards read and checked, lanes, windows, decoded by N threads into batch
  arrays plain  `ours` without decoding (lockstep.features.images.decode_many returns arrays of zeros): the rest of the
  work
`alone` and `many` over `ours` are the shares of decoding speed that remain: of wall time, and of CPU time, which other
work on the machine changes less. For one thread run it on one core, under `taskset -c 0`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import PIL

from benchmarks.shared.arrays import in_order
from lockstep.features.images import decode_many
from lockstep.features.images.decode import decode
from lockstep.features.images.decode_many import aligned_empty
from lockstep.training.batches.planned import PlannedBatches
from lockstep.training.reading.open import OpenSplit

BATCH = 128


def files_of(dataset: str, split: str, count: int) -> list[bytes]:
    """The first files of a split, as they lie."""
    rows = in_order(OpenSplit.at(dataset, split).reader)
    images = (value.as_py() for batch in rows for value in batch.column("image"))
    return list(islice(images, count))


def alone(files: list[bytes], threads: int) -> None:
    """Decode all files, nothing kept."""

    def share(number: int) -> None:
        for data in files[number::threads]:
            decode(data, 3)

    others = [threading.Thread(target=share, args=(number,)) for number in range(1, threads)]
    for thread in others:
        thread.start()
    share(0)
    for thread in others:
        thread.join()


def many(files: list[bytes], sides: tuple[int, int]) -> None:
    """Decode all files by the batches' own decoder, nothing kept."""
    for start in range(0, len(files), 512):
        part = files[start : start + 512]
        offsets = np.concatenate([[0], np.cumsum([len(data) for data in part])]).astype(np.int64)
        decode_many.decode_files(np.frombuffer(b"".join(part), dtype=np.uint8), offsets, sides, 3)


def batches(planned: PlannedBatches) -> None:
    """One epoch."""
    for batch in planned.batches():
        assert len(batch.x["image"])


def zeros(_data: Any, offsets: Any, size: tuple[int, int], channels: int, *_: Any) -> Any:
    """In place of decoding."""
    out = aligned_empty((len(offsets) - 1, *size, channels))
    out[:] = 0
    return out


def without_decoding(planned: PlannedBatches) -> None:
    """One epoch of which no file is decoded."""
    with mock.patch("lockstep.features.encode.transforms.decode_files", zeros):
        batches(planned)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall and of processors."""
    wall, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - used


def main(argv: list[str]) -> int:
    """Print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--split", default="train")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after a dropped one")
    args = parser.parse_args(argv)
    planned = PlannedBatches.open(args.dataset, args.split, global_batch=BATCH, epochs=1)
    assert planned.steps is not None
    count = planned.steps * BATCH
    files = files_of(args.dataset, args.split, count)
    print(
        f"python {platform.python_version()}, pillow {PIL.__version__}, {len(os.sched_getaffinity(0))} cores,", end=" "
    )
    print(f"load {os.getloadavg()[0]:.1f} at the start")
    print(f"{count} JPEGs of {sum(map(len, files)) / count:.0f} bytes, {args.rounds} rounds, median (lowest - highest)")
    height, width, _ = planned.signature.features["image"].shape
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(args.rounds + 1):
        for threads in args.threads:
            decode_many.set_decode_threads(threads)
            works: dict[str, Callable[[], object]] = {
                "alone": lambda threads=threads: alone(files, threads),  # type: ignore[misc]  # bound now
                "many": lambda: many(files, (height, width)),
                "ours": lambda: batches(planned),
                "plain": lambda: without_decoding(planned),
            }
            for name, work in works.items():
                took = timed(work)
                if number:
                    times.setdefault((name, threads), []).append(took)
    for (name, threads), rows in times.items():
        walls, processors = zip(*rows, strict=True)
        line = f"{name:6s} {threads} threads: {count / statistics.median(walls):8.0f} images/s"
        line += f" ({count / max(walls):.0f} - {count / min(walls):.0f})"
        print(f"{line}, processors {1e6 * statistics.median(processors) / count:.1f} us an image")
    for threads, way in itertools.product(args.threads, ("alone", "many")):
        pairs = list(zip(times[way, threads], times["ours", threads], strict=True))
        shares = [[mine[n] / whole[n] for mine, whole in pairs] for n in (0, 1)]
        wall, used = (f"{statistics.median(share):.2f} ({min(share):.2f} - {max(share):.2f})" for share in shares)
        print(f"{threads} threads: `{way}` takes {wall} of the wall time of ours, {used} of its processors' time")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
