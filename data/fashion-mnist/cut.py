"""Cut the committed excerpt out of the full Fashion-MNIST: the first 1,000 (train) and 200 (test) images of each class.

Usage: python data/fashion-mnist/cut.py /usr/share/datasets/fashion-mnist [TARGET]

The order of the files is kept, so that the excerpt is as mixed as the original. Deterministic: gzip without a time
stamp.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import sys
from pathlib import Path

import numpy as np

A_CLASS = {"train": 1000, "t10k": 200}


def cut(source: Path, target: Path) -> None:
    """Write four files into `target` and print their sha256 lines."""
    for part, per_class in A_CLASS.items():
        images = _read(source / f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        labels = _read(source / f"{part}-labels-idx1-ubyte.gz", 8)
        earlier = np.zeros(len(labels), dtype=np.int64)  # how many of its class come before each image
        for label in range(10):
            of_class = labels == label
            earlier[of_class] = np.arange(of_class.sum())
        kept = earlier < per_class
        _write(
            target / f"{part}-images-idx3-ubyte.gz", struct.pack(">4I", 0x803, int(kept.sum()), 28, 28), images[kept]
        )
        _write(target / f"{part}-labels-idx1-ubyte.gz", struct.pack(">2I", 0x801, int(kept.sum())), labels[kept])


def _read(path: Path, header_bytes: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes())[header_bytes:], dtype=np.uint8)


def _write(path: Path, header: bytes, values: np.ndarray) -> None:
    path.write_bytes(gzip.compress(header + values.tobytes(), compresslevel=9, mtime=0))
    print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


if __name__ == "__main__":
    cut(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent)
