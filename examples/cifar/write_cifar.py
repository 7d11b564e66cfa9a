"""Write pictures of garments in the layout of CIFAR-10's binary version: a byte of class, three planes of 32 x 32."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np

FILES = {"data_batch_1.bin": ("train", 1600), "test_batch.bin": ("t10k", 400)}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", required=True, help="the folder of the IDX files, such as data/fashion-mnist")
parser.add_argument("--out", required=True)
args = parser.parse_args()

Path(args.out).mkdir(parents=True)
for target, (name, count) in FILES.items():
    with gzip.open(Path(args.data, f"{name}-images-idx3-ubyte.gz")) as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)[:count]
    with gzip.open(Path(args.data, f"{name}-labels-idx1-ubyte.gz")) as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[:count]
    grey = np.pad(images, ((0, 0), (2, 2), (2, 2))).reshape(count, 1024)  # a margin of two pixels
    records = np.concatenate([labels[:, None], grey, grey, grey], axis=1)
    Path(args.out, target).write_bytes(records.tobytes())
    print(f"{args.out}/{target}: {count} pictures, {records.nbytes} bytes")
