"""Labels of Parquet image sets in every form that pandas, polars and pyarrow write."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lockstep.etl.images import parquet
from lockstep.features.images.intake import Intake
from lockstep.storage.errors import ConfigError

NAMES = ["cat", "dog", "cat", "bird", "dog"]


def picture() -> bytes:
    """A small PNG."""
    data = io.BytesIO()
    Image.new("RGB", (2, 2)).save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize(
    "labels",
    [
        pa.array(NAMES).dictionary_encode(),
        pa.array(NAMES, pa.large_string()).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([1, 2, 1, 0, 2], pa.uint32()), ["bird", "cat", "dog"], ordered=True),
        pa.array(pd.Categorical(NAMES)),
        pa.array([5, 6, 5, 0, 6]).dictionary_encode(),
        pa.array(NAMES),
        pa.array(NAMES, pa.string_view()),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_categories_are_labels(labels: pa.Array, nested: bool, tmp_path: Path) -> None:
    path, pictures = tmp_path / "c.parquet", pa.array([picture()] * len(NAMES), pa.large_binary())
    struct = pa.StructArray.from_arrays([pictures, labels], ["image", "label"])
    pq.write_table(pa.table({"row": struct} if nested else {"image": pictures, "label": labels}), path)
    prefix = "row." if nested else ""
    plan = parquet.plan([str(path)], image=f"{prefix}image", label=f"{prefix}label", given=False, num_classes=7)
    intake = Intake(size=(2, 2), channels=3)
    rows = [row for piece in plan.pieces for batch in piece.read(intake, plan.num_classes) for row in batch.to_pylist()]
    column = "label" if pa.types.is_integer(getattr(labels.type, "value_type", labels.type)) else "class"
    assert [row[column] for row in rows] == pd.Series(labels.to_pylist()).tolist()


def test_categories_of_other_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"image": [picture()], "label": pa.array([0.5]).dictionary_encode()}), path)
    with pytest.raises(ConfigError, match="does not have the columns"):
        parquet.plan([str(path)], image="image", label="label", given=False, num_classes=None)
