"""Write pictures of garments as PNG files, with a folder for each class: `train/Bag/0001.png`."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot")
COUNTS = {"train": ("train", 2000), "test": ("t10k", 600)}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", required=True, help="the folder of the IDX files, such as data/fashion-mnist")
parser.add_argument("--out", required=True)
args = parser.parse_args()

for split, (name, count) in COUNTS.items():
    with gzip.open(Path(args.data, f"{name}-images-idx3-ubyte.gz")) as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)[:count]
    with gzip.open(Path(args.data, f"{name}-labels-idx1-ubyte.gz")) as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[:count]
    for kind in CLASSES:
        Path(args.out, split, kind).mkdir(parents=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(Path(args.out, split, CLASSES[label], f"{number:04d}.png"))
print(f"{args.out}: {sum(count for _, count in COUNTS.values())} pictures of {len(CLASSES)} classes")
