"""The two shapes of data in the benchmarks, and how measurements are taken and printed."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version

import numpy as np
import pyarrow as pa

from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema

INTS, FLOATS = 26, 13
DISTINCT_FLOATS = 100_000
IMAGE_SHAPE = (32, 32, 3)
IMAGE_BYTES = 3072


def tab_schema(nullable: bool) -> Schema:
    """40 columns (26 int64, 13 float32, an int64 label) and the sample id."""
    ints = (Field(name=f"int_{n:02d}", dtype="int64", nullable=nullable) for n in range(INTS))
    floats = (Field(name=f"float_{n:02d}", dtype="float32", nullable=nullable) for n in range(FLOATS))
    return Schema((sample_id_field(), *ints, *floats, Field(name="label", dtype="int64", kind="label")))


def image_schema(num_classes: int | None = None) -> Schema:
    """A 32 x 32 x 3 image and an int64 label, and the sample id."""
    image = Field(name="image", dtype="uint8", shape=IMAGE_SHAPE)
    label = Field(name="label", dtype="int64", kind="label", num_classes=num_classes)
    return Schema((sample_id_field(), image, label))


def tab_rows(rows: int, null_share: float, seed: int = 0) -> pa.RecordBatch:
    """Rows of tab_schema: ints uniform in 0..999,999, floats of 100,000 distinct values, `null_share` of both null."""
    rng = np.random.default_rng(seed)
    schema, pool = tab_schema(null_share > 0), rng.random(DISTINCT_FLOATS, dtype=np.float32)
    columns = []
    for field in schema:
        if field.kind == "id":
            columns.append(pa.array(rng.integers(-(2**63), 2**63 - 1, rows)))
        elif field.kind == "label":
            columns.append(pa.array(rng.integers(0, 2, rows)))
        else:
            mask = rng.random(rows) < null_share if null_share else None
            whole = field.dtype == "int64"
            values = rng.integers(0, 1_000_000, rows) if whole else rng.choice(pool, rows)
            columns.append(pa.array(values, mask=mask))
    return pa.RecordBatch.from_arrays(columns, schema=schema.arrow_schema())


def image_rows(rows: int, seed: int = 0) -> pa.RecordBatch:
    """Rows of image_schema: images of noise, which no compression makes smaller."""
    rng = np.random.default_rng(seed)
    images = pixels(rng.integers(0, 256, (rows, IMAGE_BYTES), dtype=np.uint8))
    ids, labels = pa.array(rng.integers(-(2**63), 2**63 - 1, rows)), pa.array(rng.integers(0, 10, rows))
    return pa.RecordBatch.from_arrays([ids, images, labels], schema=image_schema().arrow_schema())


def pixels(images: np.ndarray) -> pa.Array:
    """Images (n, ...) uint8 as one binary value each."""
    offsets = (np.arange(len(images) + 1) * images[0].size).astype(np.int32)
    data = np.ascontiguousarray(images).reshape(-1)
    return pa.Array.from_buffers(pa.binary(), len(images), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def machine(*packages: str) -> str:
    """Processor, Python and the versions of packages, in a line."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{names[0] if names else platform.machine()}, python {platform.python_version()}, {versions}"


def interleaved(works: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What each work returns, in turn, `repeats` times after a round that is dropped."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats + 1):
        for name, work in works.items():
            value = work()
            if number:
                found[name].append(value)
    return found


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds that `work` takes in this process, all threads together."""
    start = time.process_time()
    work()
    return time.process_time() - start


def warm_cpu_seconds(work: Callable[[], object]) -> float:
    """cpu_seconds of the second of two runs in a row: the first gets its memory from the system page by page."""
    work()
    return cpu_seconds(work)


def print_rates(title: str, rows: int, spent: dict[str, list[float]], base: str) -> None:
    """Print rows/s of each work, and its speed as a multiple of that of `base`, round by round: median (min - max)."""
    print(f"\n{title}: {rows} rows, {len(spent[base])} interleaved rounds after a dropped one")
    for name, values in spent.items():
        ratios = sorted(one / own for one, own in zip(spent[base], values, strict=True))
        rates = sorted(rows / value for value in values)
        rate = f"{statistics.median(rates):12,.0f} rows/s ({rates[0]:,.0f} - {rates[-1]:,.0f})"
        print(f"{name:44}{rate:46} x {spread(ratios)}")


def spread(values: Iterable[float]) -> str:
    """median (min - max) of some numbers."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):.2f} ({ordered[0]:.2f} - {ordered[-1]:.2f})"
