"""Images that travel as files: what they come to is what it would be, had they been decoded at once."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import PropertyMock, patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lockstep.etl import columns as c
from lockstep.etl.columns import PACKED, PLACE
from lockstep.etl.images import job
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.write.late import AssignLate, LateImages, WriteLate
from lockstep.etl.write.refusal import check_bad
from lockstep.etl.write.shards import ShardTable, WriteShards
from lockstep.features.images.intake import Intake
from lockstep.storage.errors import DataError
from lockstep.storage.verify import verify

from .test_image_pieces import make_tar, make_tree

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIDE = 24
INTAKE = Intake(size=(SIDE, SIDE), channels=3, late=True)
SCHEMA = ImagesConfig(inputs=("x",), output="y", source="tar", image_size=(SIDE, SIDE)).fields(None, 200)
LATE = LateImages(SCHEMA["image"], INTAKE, content=True)
BROKEN = ("a/3.jpg", "b/7.jpg")


def photo(seed: int, side: int = SIDE) -> bytes:
    """A JPEG shorter than its pixels."""
    slope = np.add.outer(np.arange(side), np.arange(side) * (seed % 5 + 1)) + seed * 7
    file = io.BytesIO()
    Image.fromarray((np.stack([slope, slope // 2, slope // 3], axis=-1) % 256).astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


def cut(data: bytes) -> bytes:
    """The same header, and not all of the image."""
    return data[: data.rindex(b"\xff\xda") + 20]


@pytest.mark.parametrize(
    ("data", "size", "packed"),
    [
        (photo(1), SIDE, True),
        (cut(photo(1)), SIDE, True),  # the header is all that is looked at
        (photo(1, 240), 64, False),  # made much smaller: all tasks read, but few write
        (photo(1, 8), 8, False),  # longer than its pixels
    ],
)
def test_what_travels_as_a_file(data: bytes, size: int, packed: bool) -> None:
    now = Intake(size=(size, size), channels=3)
    assert replace(now, late=True).hand_on(data) == ((data, True) if packed else (now.take(data), False))


def given(files: list[bytes]) -> pa.RecordBatch:
    count, handed = len(files), [INTAKE.hand_on(data) for data in files]
    return pa.RecordBatch.from_pydict(
        {
            "name": [f"n{n}" for n in range(count)],
            "label": pa.array(range(0, 3 * count, 3), pa.int64()),  # of one byte and of two
            "image": pa.array([image for image, _ in handed], pa.binary()),
            PACKED: [packed for _, packed in handed],
            PLACE: [f"at/{n}" for n in range(count)],
            c.SOURCE: pa.array([0] * count, pa.int32()),
            c.POSITION: pa.array(range(count), pa.int64()),
            c.OCCURRENCE: pa.array([0] * count, pa.int64()),
            c.LEAK: pa.nulls(count, pa.int64()),
        }
    )


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_sizes_and_records_are_those_of_pixels(tmp_path: Path, fmt: str) -> None:
    files = [photo(n) for n in range(90)]
    plain = Assign(SCHEMA, ("name",), SplitSpec.parse("kfold:2"), 0, fmt)
    now = given(files)
    pixels = pa.array([INTAKE.take(data) for data in files], pa.binary())
    wanted = plain.rows(now.set_column(now.schema.get_field_index("image"), "image", pixels))
    found = AssignLate.of(plain, LATE).rows(now)
    thin = replace(AssignLate.of(plain, LATE), carry=False).rows(now.drop_columns(["image", PACKED, PLACE]))
    for name in (c.SPLIT, c.KEY, c.POSITION, "sample_id"):
        assert wanted.column(name) == found.column(name) == thin.column(name)
    assert wanted.column(c.BYTES) == thin.column(c.BYTES) and found.column(c.BYTES).null_count == len(files)
    write = WriteShards(SCHEMA, fmt, ShardTable((("train", 1, 16),)), tmp_path.as_uri(), ("in.tar",))
    (early,) = write.write(0, [in_order(wanted)]).to_pylist()
    told = pa.Table.from_batches(
        WriteLate(write, LATE).rows(0, pa.Table.from_batches([in_order(found)]).to_batches(7))
    ).to_pylist()
    shard = told[0]["shard"]
    assert shard["rejected"] == 0 and len(told) == 1 + len(files)
    same = [name for name in early if "path" not in name]
    assert {name: shard[name] for name in same} == {name: early[name] for name in same}


def in_order(rows: pa.RecordBatch) -> pa.RecordBatch:
    whole = rows.append_column(c.SHARD, pa.array([0] * len(rows), pa.int32()))
    return whole.take(pc.sort_indices(whole, sort_keys=[(c.KEY, "ascending")]))


def test_broken_images_are_missing_in_their_shard_and_told_once(tmp_path: Path) -> None:
    files = [photo(1), cut(photo(2)), photo(1), photo(3), cut(photo(4))]
    assign = AssignLate.of(Assign(SCHEMA, ("name",), SplitSpec.parse("1/1"), 0, "tfrecord"), LATE)
    rows = in_order(assign.rows(given(files)))
    write = WriteShards(SCHEMA, "tfrecord", ShardTable((("train", 1, 2),)), tmp_path.as_uri(), ("in.tar",))
    first, *told = pa.Table.from_batches(WriteLate(write, LATE).rows(0, [rows])).to_pylist()
    shard = first["shard"]
    assert (shard["records"], shard["rejected"], shard["rejected_bytes"]) == (3, 2, len(files[1]) + len(files[4]))
    bad = {row[c.POSITION]: row for row in told if row[c.REASON] is not None}
    assert sorted(bad) == [1, 4] and all(row[c.REASON] == "broken_image" for row in bad.values())
    assert [bad[n][key] for n in (1, 4) for key in (c.RAW, PLACE)] == [files[1], "at/1", files[4], "at/4"]
    keys = {row[c.POSITION]: row[c.LEAK] for row in told if row[c.REASON] is None}
    assert sorted(keys) == [0, 2, 3] and keys[0] == keys[2] != keys[3]  # equal pixels, equal key


@pytest.mark.soak
@pytest.mark.slow
def test_a_set_with_broken_images(spark: SparkSession, tmp_path: Path) -> None:
    files = {f"{name}/{n}.jpg": photo(n + 9 * (name == "a")) for n in range(20) for name in ("a", "b")}
    whole = {place: data for place, data in files.items() if place not in BROKEN}
    files |= {place: cut(files[place]) for place in BROKEN} | {"b/big.jpg": photo(1, 240), "b/none.jpg": b"none"}
    root, told = make_tree(tmp_path / "set", files), {"image_size": (SIDE, SIDE), "max_bad": "10%", "split_bytes": 9000}
    archive = make_tar(tmp_path / "set.tar", files)

    def check_without_cache(*args: Any, **more: Any) -> None:
        spark.catalog.clearCache()  # as if executors were lost: what was cached is made again, as other tasks
        check_bad(*args, **more)

    with (
        patch("lockstep.etl.write.job.check_bad", check_without_cache),
        patch("lockstep.etl.write.late.check_bad", check_without_cache),
    ):
        manifest = job.run(spark, config(root, tmp_path / "folder", source="folder", **told))
    counts = manifest.counts
    assert (counts.read, counts.written, counts.quarantined) == (42, 39, 3)
    assert manifest.leakage is not None and manifest.leakage["found"]["content"] > 0  # a/n is b/(n + 9)
    assert not list(verify(str(tmp_path / "folder")))
    rejected = pq.read_table(tmp_path / "folder" / "_quarantine").to_pylist()
    assert {row["source"]: (row["reason"], row["raw"]) for row in rejected} == {
        **{str(root / place): ("broken_image", files[place]) for place in BROKEN},
        str(root / "b/none.jpg"): ("unknown_format", b"none"),
    }
    # Without what is broken, travelling as pixels gives the same bytes.
    good = make_tar(tmp_path / "good.tar", whole)
    late = job.run(spark, config(good, tmp_path / "late", **told))
    with patch.object(ImagesConfig, "late", PropertyMock(return_value=False)):
        early = job.run(spark, config(good, tmp_path / "early", **told))
    assert late.to_bytes() == early.to_bytes()
    with pytest.raises(DataError, match="3 of 42 records are bad"):  # the tally alone had found one
        job.run(spark, config(archive, tmp_path / "refused", **{**told, "max_bad": "5%"}))
    assert not (tmp_path / "refused").exists() and not list(tmp_path.glob("_staging*"))


def config(place: Path, output: Path, **more: Any) -> ImagesConfig:
    return ImagesConfig(**{"inputs": (str(place),), "output": str(output), "split": "1/1", "source": "tar", **more})
