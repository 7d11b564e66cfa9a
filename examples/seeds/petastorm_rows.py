"""The pictures of a Parquet dataset by Petastorm's reader, which `enable()` lets run on today's pyarrow and NumPy."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from lockstep.petastorm import enable

enable()  # before anything of Petastorm is imported
from petastorm import make_batch_reader  # noqa: E402 - after enable()

from lockstep import data  # noqa: E402 - with the others
from lockstep.petastorm import tensors  # noqa: E402 - with the others

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", required=True)
parser.add_argument("--split", default="train")
args = parser.parse_args()

url, names = Path(args.dataset).resolve().as_uri(), ["image", "label"]
transform = tensors(data.dataset_schema(url), names)
counts, brightness = np.zeros(10, np.int64), 0
with make_batch_reader(
    f"{url}/split={args.split}", schema_fields=names, transform_spec=transform, num_epochs=1, workers_count=2
) as reader:
    for batch in reader:  # a row group: image (n, height, width, channels) uint8, label (n,) int64
        counts += np.bincount(batch.label, minlength=10)
        brightness += int(batch.image.sum(dtype=np.int64))
print("rows", counts.sum(), "of classes", *counts, "sum of pixels", brightness)
