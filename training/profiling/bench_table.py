"""A measurement of all_reduce in words: sizes as people write them, the table, the JSON file."""

from __future__ import annotations

import json
import os
import platform
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence

import numpy as np

from training.profiling.bench_comm import BenchConfig, Row

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Bytes of `4096`, `4K`, `1M` or `1G` (powers of two)."""
    match = re.fullmatch(r"([0-9]{1,10})([KMG]?)", text)
    if not match:
        raise ArgumentTypeError(f"{text!r} is no size such as 4096, 4K, 1M or 1G")
    return int(match[1]) * UNITS[match[2]]


def table(rows: Sequence[Row], num_ranks: int) -> str:
    """Columns as nccl-tests has them; bandwidths in GB/s (10^9 bytes)."""
    head = f"{'bytes':>12} {'backend':<13}{'algorithm':<24}{'time us':>12}{'from':>12}{'to':>12}"
    head += f"{'algbw GB/s':>12}{'busbw GB/s':>12}{'wrong':>7}"
    lines = [f"all_reduce (sum, float32) between {num_ranks} ranks; median of the rounds; {machine()}", head]
    for row in rows:
        algorithm = row.algorithm if row.asked != "auto" else f"auto: {row.algorithm}"
        line = f"{row.nbytes:>12} {row.backend:<13}{algorithm:<24}"
        line += "".join(f"{seconds * 1e6:>12.1f}" for seconds in (row.median_s, row.fastest_s, row.slowest_s))
        line += f"{row.algorithm_bytes_per_s / 1e9:>12.3f}{row.bus_bytes_per_s(num_ranks) / 1e9:>12.3f}{row.wrong:>7}"
        lines.append(line)
    return "\n".join(lines)


def machine() -> str:
    """The driver's machine and versions."""
    return f"driver: {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}"


def document(rows: Sequence[Row], config: BenchConfig) -> bytes:
    """The rows as JSON."""
    found = {
        "kind": "bench_comm",
        "machine": machine(),
        "num_ranks": config.num_ranks,
        "rounds": config.rounds,
        "rows": [
            {
                **{name: getattr(row, name) for name in row.__dataclass_fields__},
                "algorithm_bytes_per_s": row.algorithm_bytes_per_s,
                "bus_bytes_per_s": row.bus_bytes_per_s(config.num_ranks),
            }
            for row in rows
        ],
    }
    return json.dumps(found, indent=1).encode() + b"\n"
