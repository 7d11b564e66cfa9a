"""The example's lines of Pillow and NumPy make the very pixels that a dataset of pictures holds."""

from __future__ import annotations

import io
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lockstep.etl.images import job
from lockstep.etl.images.config import ImagesConfig
from lockstep.features.images.intake import Intake
from tests.docs.steps import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pixels_of = runpy.run_path(str(ROOT / "examples" / "picture_folders" / "pixels.py"))["pixels_of"]
ORIENTATION = 0x0112  # of EXIF


def pictures() -> dict[str, bytes]:
    """Files of many kinds: colours, transparency, palettes, grey, CMYK, each of the eight orientations."""
    random = np.random.default_rng(5)
    found = {}
    for kind, suffix in (("RGB", "png"), ("RGBA", "png"), ("LA", "png"), ("L", "jpg"), ("CMYK", "jpg"), ("P", "png")):
        height, width = random.integers(5, 60, 2)
        bands = {"L": (), "P": ()}.get(kind, (len(kind),))
        pixels = random.integers(0, 256, (height, width, *bands)).astype(np.uint8)
        target = io.BytesIO()
        Image.fromarray(pixels, kind).save(target, {"png": "PNG", "jpg": "JPEG"}[suffix])
        found[f"{kind}.{suffix}"] = target.getvalue()
    for orientation in range(1, 9):
        exif, target = Image.Exif(), io.BytesIO()
        exif[ORIENTATION] = orientation
        picture = Image.fromarray(random.integers(0, 256, (31, 14, 3)).astype(np.uint8))
        picture.save(target, "JPEG", exif=exif)
        found[f"turned-{orientation}.jpg"] = target.getvalue()
    return found


@pytest.mark.parametrize("fit", ["resize", "crop", "pad"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_lines_make_the_pixels_of_the_etl(fit: str, channels: int) -> None:
    for size in ((16, 16), (9, 40), (70, 65)):
        intake = Intake(size=size, channels=channels, how=fit)
        for name, data in pictures().items():
            expected = np.frombuffer(intake.take(data), np.uint8).reshape(*size, channels)
            np.testing.assert_array_equal(pixels_of(io.BytesIO(data), *size, channels, fit), expected, name)


@pytest.mark.slow  # Spark
def test_the_lines_make_the_pixels_of_a_dataset(spark: SparkSession, tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "in" / label).mkdir(parents=True)
        for name, data in pictures().items():
            (tmp_path / "in" / label / name).write_bytes(data)
    config = ImagesConfig(
        inputs=(str(tmp_path / "in"),), output=str(tmp_path / "out"), source="folder", image_size=(12, 20), fit="pad",
        fmt="parquet", split="1/1",
    )  # fmt: skip
    job.run(spark, config)
    places: dict[int, str] = {}
    for part in (tmp_path / "out" / "_files").rglob("*.parquet"):
        places |= {row["sample_id"]: row["file"] for row in pq.read_table(part).to_pylist()}
    rows = [row for part in (tmp_path / "out").glob("split=*/*") for row in pq.read_table(part).to_pylist()]
    assert len(rows) == 2 * len(pictures())
    for row in rows:
        file = places[row["sample_id"]]
        stored = np.frombuffer(row["image"], np.uint8).reshape(12, 20, 3)
        np.testing.assert_array_equal(pixels_of(file, 12, 20, fit="pad"), stored, file)
