"""What the ETL jobs print of rejected input: against pandas, which reads the quarantine's files."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from lockstep.etl.describe.dataset import dataset_tables
from lockstep.etl.images import job as image_sets
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.jobs._etl import summary
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow  # Spark
SCHEMA = """
[[fields]]
name = "seen"
dtype = "int64"
encoding = { kind = "ignore" }

[[fields]]
name = "good"
dtype = "bool"
kind = "label"
"""


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def tree(folder: Path, bad: int, sides: int = 0) -> Path:
    """40 pictures of two classes, `bad` files that are none though their names say so, and `sides` texts."""
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            (folder / name / f"{number}.png").write_bytes(png(number + 20 * len(name)))
    for number in range(bad):
        (folder / "cat" / f"bad-{number}.png").write_bytes(png(5)[:40] if number % 3 else b"no picture")
    for number in range(sides):
        (folder / "cat" / f"readme-{number}.txt").write_bytes(b"text")
    return folder


def of_images(folder: Path, output: Path, max_bad: str, quarantine: str | None = None) -> ImagesConfig:
    return ImagesConfig(
        inputs=(str(folder),), output=str(output), source="folder", image_size=(8, 8), split="1/1",
        max_bad=max_bad, quarantine=quarantine,
    )  # fmt: skip


def configuration(dataset: str) -> dict[str, str]:
    """The table Configuration of lockstep describe."""
    (rows,) = (one.rows for one in dataset_tables(load_dataset(dataset)) if one.title == "Configuration")
    return {row[0]: row[1] for row in rows}


def said(printed: str) -> tuple[dict[str, int], list[str], str]:
    """The counts by reason, the first places and the folder that a summary names."""
    found = re.search(r"^quarantine: (.*); first (.*); all in (.*)$", printed, re.MULTILINE)
    assert found, printed
    counts = (part.split(" ", 1) for part in found[1].split(", "))
    return {why: int(count) for count, why in counts}, found[2].split(", "), found[3]


def test_rejected_pictures_are_counted_by_reason_and_named(spark: SparkSession, tmp_path: Path) -> None:
    pictures = tree(tmp_path / "in", bad=5)
    for number, quarantine in enumerate((None, str(tmp_path / "apart"))):
        output = tmp_path / f"out-{number}"
        printed = summary(image_sets.run(spark, of_images(pictures, output, "20%", quarantine)), str(output))
        counts, first, folder = said(printed)
        rows = pd.read_parquet(folder)
        configured = configuration(str(output))
        assert (configured["channels"], configured["num_classes"], configured["image_size"]) == ("3", "2", "8, 8")
        assert configured["quarantine"] == (quarantine or "_quarantine, in the dataset")
        assert len(rows) == 5 and counts == rows["reason"].value_counts().to_dict() and len(counts) == 2
        assert first == sorted(rows["source"])[:3] == [f"{pictures}/cat/bad-{number}.png" for number in range(3)]
    none = of_images(pictures, tmp_path / "out-none", "20%", "none")
    assert "not kept" in summary(image_sets.run(spark, none), none.output)
    assert configuration(none.output)["quarantine"] == "none"
    good = of_images(tree(tmp_path / "good", bad=0), tmp_path / "out-good", "0%")
    assert "quarantine:" not in summary(image_sets.run(spark, good), good.output)


def test_rejected_lines_are_counted_without_their_values_and_named(spark: SparkSession, tmp_path: Path) -> None:
    lines = ["seen,good"] + [f"{number},{'yes' if number % 2 else 'no'}" for number in range(40)]
    lines[3], lines[7], lines[9] = "soon,yes", "late,no", "1,2,3,4"
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    config = LogsConfig(
        inputs=(str(tmp_path / "log.csv"),), output=str(tmp_path / "out"), log_format="csv",
        schema=str(tmp_path / "schema.toml"), split="50/50", max_bad="20%",
    )  # fmt: skip
    counts, first, folder = said(summary(logs.run(spark, config), config.output))
    rows = pd.read_parquet(folder).sort_values("position")
    assert counts == rows["reason"].str.split(": ").str[0].value_counts().to_dict()
    assert counts == {"bad_value:seen": 2, "too_many_fields": 1}
    assert first == [f"{row.source} at byte {row.position}" for row in rows.itertuples()]
    data = (tmp_path / "log.csv").read_bytes()
    assert [data[at : at + 4] for at in rows["position"].tolist()] == [b"soon", b"late", b"1,2,"]


def test_files_that_are_left_out_do_not_thin_the_share_of_bad_pictures(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 of 42 records are bad"):
        image_sets.run(spark, of_images(tree(tmp_path / "in", bad=2, sides=60), tmp_path / "out", "4%"))
    manifest = image_sets.run(spark, of_images(tmp_path / "in", tmp_path / "out", "5%"))
    assert manifest.counts.read == 102 and manifest.counts.dropped == {"not_an_image": 60}
