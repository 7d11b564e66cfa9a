"""Decode many image files into one array, in threads: Pillow decodes without the GIL.

The process has one pool of threads, created at the first use: as many as `set_decode_threads` set, by default one for
each core. The caller's thread is one of them, so that a rank with one core hands nothing over.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.features.images.decode import FORMATS, ImageError, decode, decode_plain
from lockstep.features.images.resize import fit
from lockstep.storage.errors import ConfigError, DataError

ALIGNMENT = 64
# A thread decodes about so many bytes of pixels at a time: milliseconds of work, for microseconds of hand-over.
_PART_BYTES = 1 << 20
# Up to these sizes lockstep.features.images.decode.Limits refuses no header.
_PLAIN_BYTES = 16 << 20
_PLAIN_RATIO = 256


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An uninitialised array of bytes aligned to 64 bytes; NumPy aligns to 16 only.

    Handing a batch of 39 MB to TensorFlow took 0.3 ms from such an array and 3 ms from others (one thread, 2 cores).
    """
    size = math.prod(shape)
    data = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -data.ctypes.data % ALIGNMENT
    return data[start : start + size].reshape(shape)


class BadImageError(DataError):
    """A file of a dataset that is not an image: `row` among the rows decoded together and, if known, the sample's id
    and its place (shard and record).
    """

    def __init__(self, row: int, detail: str, sample_id: int | None = None, place: str = "") -> None:
        where = "" if sample_id is None else f": sample id {sample_id % (1 << 64):016x}"
        super().__init__(
            f"an image of the dataset cannot be decoded{where}{', ' if place else ''}{place}",
            got=detail,
            allowed=FORMATS,
            next_step="Build the dataset again without the file, or train with --bad-images skip.",
        )
        self.row, self.detail, self.sample_id = row, detail, sample_id

    def of(self, sample_id: int) -> BadImageError:
        """Return this error with the name of the sample."""
        return BadImageError(self.row, self.detail, sample_id)

    def at(self, place: str) -> BadImageError:
        """Return this error with the name of the place."""
        return BadImageError(self.row, self.detail, self.sample_id, place)


_kept: ContextVar[list[BadImageError] | None] = ContextVar("bad images", default=None)


@contextmanager
def keeping_bad() -> Iterator[list[BadImageError]]:
    """Within this context, files that are not images become zeros and are added to the list, in any order."""
    found: list[BadImageError] = []
    token = _kept.set(found)
    try:
        yield found
    finally:
        _kept.reset(token)


class _Pool:
    """The process's decoding threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: int | None = None
        self._made: tuple[int, int, ThreadPoolExecutor] | None = None

    @property
    def threads(self) -> int:
        return self._wanted or len(os.sched_getaffinity(0))

    def set(self, threads: int) -> None:
        if threads < 1:
            raise ConfigError(
                "the number of decoding threads is too small",
                got=str(threads),
                allowed="1 or more",
                next_step="Correct the number.",
            )
        self._wanted = threads

    def executor(self) -> ThreadPoolExecutor:
        with self._lock:
            key = os.getpid(), self.threads  # threads do not follow a fork
            if self._made is None or self._made[:2] != key:
                # One less than `threads`: the caller works, too.
                self._made = *key, ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix="decode")
            return self._made[2]


_pool = _Pool()


def set_decode_threads(threads: int) -> None:
    """Decode in so many threads of this process, including the caller's: a rank's share of the host's cores."""
    _pool.set(threads)


def decode_files(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], size: tuple[int, int], channels: int, how: str = "resize"
) -> NDArray[np.uint8]:
    """Decode n image files and `fit` each to (height, width) in the way `how`.

    File i is data[offsets[i]:offsets[i + 1]], offsets (n + 1,). Returns (n, height, width, channels) uint8, the same
    for any number of threads. Memory: the result and one decoded file for each thread. Raises BadImageError for the
    first file that is not an image, except within `keeping_bad`.
    """
    out = aligned_empty((len(offsets) - 1, *size, channels))
    work = partial(_decode_part, data, offsets, size, channels, how, out, _kept.get())
    rows = max(1, _PART_BYTES // max(1, out[:1].nbytes))
    parts = [(start, min(start + rows, len(out))) for start in range(0, len(out), rows)]
    if len(parts) < 2 or _pool.threads < 2:
        for part in parts:
            work(*part)
        return out
    _share(work, parts)
    return out


def _share(work: Any, parts: list[tuple[int, int]]) -> None:
    """Process all parts in the pool and in the caller's thread, starting them in order; raise the first error."""
    rest, lock = iter(parts), threading.Lock()
    failed: list[BadImageError] = []

    def turns() -> None:
        while not failed:
            with lock:
                part = next(rest, None)
            if part is None:
                return
            try:
                work(*part)
            except BadImageError as error:
                failed.append(error)

    executor = _pool.executor()
    others: list[Future[None]] = [executor.submit(turns) for _ in range(min(len(parts), _pool.threads) - 1)]
    try:
        turns()
    finally:
        for other in others:
            other.cancel()  # if it has not begun: the pool may be busy for another caller
        for other in others:
            if not other.cancelled():
                other.result()  # ends soon: it decodes files in memory
    if failed:
        raise min(failed, key=lambda error: error.row)


def _decode_part(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    size: tuple[int, int],
    channels: int,
    how: str,
    out: NDArray[np.uint8],
    bad: list[BadImageError] | None,
    start: int,
    stop: int,
) -> None:
    """Decode rows start..stop-1 into `out`; adds files that are not images to `bad` if it is given."""
    plain = _plain(data, offsets[start : stop + 1], size, channels)
    places = offsets[start : stop + 1].tolist()
    bytes_of_row = out[:1].nbytes
    flat = memoryview(out.reshape(-1))  # type: ignore[arg-type]  # NumPy's arrays are buffers
    mode, sides = "L" if channels == 1 else "RGB", (size[1], size[0])
    for row in range(start, stop):
        file = data[places[row - start] : places[row - start + 1]].tobytes()
        try:
            if plain[row - start]:
                flat[row * bytes_of_row : (row + 1) * bytes_of_row] = decode_plain(mode, sides, file)
                continue
            pixels = decode(file, channels)
        except ImageError as error:
            if bad is None:
                raise BadImageError(row, str(error)) from None
            bad.append(BadImageError(row, str(error)))
            out[row] = 0
            continue
        out[row] = pixels if pixels.shape[:2] == size else fit(pixels[None], *size, how)[0]


def _plain(data: NDArray[np.uint8], offsets: NDArray[np.int64], size: tuple[int, int], channels: int) -> list[bool]:
    """Which files are JPEGs of the wanted size and channels, of a harmless size. `decode` checks all others in full."""
    (height, width), count = size, len(offsets) - 1
    if 3 * height * width > _PLAIN_BYTES or max(size) > _PLAIN_RATIO * min(size):
        return [False] * count
    from lockstep.features.images.kernels import plain_components

    found = np.empty(count, dtype=np.int64)
    plain_components(data, offsets, height, width, found)
    return (found == channels).tolist()
