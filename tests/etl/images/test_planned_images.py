"""Shards that are planned on the driver: what they come to is what it would be, had their rows gone through Spark."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import PropertyMock, patch

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl import columns as c
from lockstep.etl.columns import LENGTH
from lockstep.etl.images import job, planned_task
from lockstep.etl.images import tar as tar_images
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.images.planned import on_two_sides, shards_of
from lockstep.etl.images.source import OFFSET, RECORD, ImagePlan
from lockstep.features.images.decode import Limits
from lockstep.features.sample_id import shard_of
from lockstep.storage.dataset.manifest_entries import Counts
from lockstep.storage.errors import DataError
from lockstep.storage.verify import verify
from tests.etl.conftest import tree

from .test_image_pieces import make_tar, rows
from .test_late_images import SIDE, cut, photo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIMITS = Limits(max_file_bytes=5000)


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=20), st.sampled_from([1, 2, 3, 1000, (1 << 31) - 1]))
def test_the_shards_of_many_keys(keys: list[int], count: int) -> None:
    assert shards_of(np.array(keys, dtype=np.uint64), count).tolist() == [shard_of(key, count) for key in keys]


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), max_size=20))
def test_keys_on_two_sides(pairs: list[tuple[int, int]]) -> None:
    sides = {key: {side for other, side in pairs if other == key} for key, _ in pairs}
    keys, places = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    found = on_two_sides(keys, places)
    assert found.shared == sum(len(sides[key]) > 1 for key, _ in pairs)
    assert found.counts == Counter(Counter(key for key, _ in pairs).values())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
@settings(max_examples=50)
def test_what_is_read_together(files: list[tuple[int, int]]) -> None:
    """`files` are (gap before, length): each is read once, no read is longer than allowed or goes over a wide gap."""
    offsets, at = [], 0
    for gap, length in files:
        offsets.append(at + gap)
        at += gap + length
    lengths = [length for _, length in files]
    with patch.multiple(planned_task, GAP_BYTES=4, READ_BYTES=12):
        reads = list(planned_task._joined(np.array(offsets), np.array(lengths)))
    assert [n for first, last in reads for n in range(first, last)] == list(range(len(files)))
    for first, last in reads:
        assert last == first + 1 or offsets[last - 1] + lengths[last - 1] - offsets[first] <= 12
        assert all(files[n][0] <= 4 for n in range(first + 1, last))


def listed(*paths: Path) -> ImagePlan:
    return tar_images.plan([str(path) for path in paths], split_bytes=3000, listed=LIMITS)


def test_the_list_is_what_tasks_read(tmp_path: Path) -> None:
    files = {f"train/{name}/{n}.jpg": photo(n) for n in range(9) for name in "ab"}
    paths = [make_tar(tmp_path / f"{n}.tar", {**files, "train/x.txt": b"", "../x.jpg": b""}) for n in (1, 2)]
    plan = listed(*paths)
    assert plan.files is not None
    found = plan.files.files.to_pylist()
    read = [row for row in rows(plan) if row["kind"] == RECORD]
    same = (c.SOURCE, c.POSITION, c.SPLIT, "class", "name")
    assert [[row[name] for name in same] for row in found] == [[row[name] for name in same] for row in read]
    for row in found:
        data = paths[row[c.SOURCE]].read_bytes()[row[OFFSET] : row[OFFSET] + row[LENGTH]]
        assert data == files[row["name"]]
    others = [row for batch in plan.files.other for row in batch.to_pylist()]
    assert [(row[c.SOURCE], row["_reason"]) for row in others] == [
        (n, reason) for n in (0, 1) for reason in ("not_an_image", "unsafe_name")
    ]


def test_an_archive_that_is_cut_meanwhile(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "set.tar", {f"a/{n}.jpg": photo(n) for n in range(3)})
    plan = listed(path)
    assert plan.files is not None
    last = plan.files.files.to_pylist()[-1]
    path.write_bytes(path.read_bytes()[: last[OFFSET] + last[LENGTH] - 1])
    with pytest.raises(DataError, match=f"cannot be read on at byte {last[c.POSITION]}"):
        planned_task.read_files([str(path)], plan.files.files)


@pytest.mark.parametrize(
    "more",
    [
        {"no_class.jpg": photo(1)},  # rejected with a digest of its bytes
        {"a/long.jpg": bytes(LIMITS.max_file_bytes + 1)},
    ],
)
def test_what_is_not_known_by_headers_alone(tmp_path: Path, more: dict[str, bytes]) -> None:
    good = make_tar(tmp_path / "good.tar", {"a/1.jpg": photo(1)})
    assert listed(good).files is not None
    assert listed(good, make_tar(tmp_path / "more.tar", more)).files is None
    assert listed(make_tar(tmp_path / "packed.tar.gz", {"a/1.jpg": photo(1)}, "w:gz")).files is None


def test_not_more_files_are_listed_than_the_driver_holds(tmp_path: Path) -> None:
    paths = [make_tar(tmp_path / f"{n}.tar", {f"a/{n}.jpg": photo(n) for n in range(3)}) for n in (1, 2)]
    for most, known in ((6, True), (5, False)):
        with patch.object(tar_images, "MAX_FILES", most):
            assert (listed(*paths).files is not None) == known


def archive(path: Path, *, split: bool) -> Path:
    """100 images, some of them equal; two broken behind their header and one in it, a class of its own among these;
    what is unsafe, no file, no image, or decoded early since it is large.
    """
    files = {f"{name}/{n}.jpg": photo(n % 30 + (name == "b")) for n in range(50) for name in ("a", "b")}
    files |= {"a/3.jpg": cut(photo(3)), "b/7.jpg": cut(photo(8)), "gone/1.jpg": b"none", "b/big.jpg": photo(1, 240)}
    files |= {"a/notes.txt": b"", "../b/1.jpg": photo(1)}
    sides = {name: "test/" if n % 5 == 0 else "train/" for n, name in enumerate(sorted(files))}
    make_tar(path, {(sides[name] if split else "") + name: data for name, data in files.items()})
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("a/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "gone.jpg"
        tar.addfile(link)
        hard = tarfile.TarInfo(("train/" if split else "") + "a/hard.jpg")
        hard.type, hard.linkname = tarfile.LNKTYPE, (sides["a/9.jpg"] if split else "") + "a/9.jpg"
        tar.addfile(hard)
        for name in ("a/3.jpg", "a/8.jpg"):  # of which one was broken
            again = tarfile.TarInfo((sides[name] if split else "") + name)
            again.size = len(photo(99))
            tar.addfile(again, io.BytesIO(photo(99)))
        tar.addfile(tarfile.TarInfo("a/.hidden"), io.BytesIO())
    return path


def config(place: Path, output: Path, **more: Any) -> ImagesConfig:
    told = {"image_size": (SIDE, SIDE), "max_bad": "10%", "source": "tar", **more}
    return ImagesConfig(inputs=(str(place),), output=str(output), **told)


def general() -> Any:
    return patch.object(ImagesConfig, "may_be_planned", PropertyMock(return_value=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fmt", "split", "shard_bytes", "shards"),
    [("tfrecord", "80/20", 60_000, 4), ("parquet", "given", 1 << 20, 2)],
)
def test_the_bytes_are_those_of_the_general_way(
    spark: SparkSession, tmp_path: Path, fmt: str, split: str, shard_bytes: int, shards: int
) -> None:
    path = archive(tmp_path / "set.tar", split=split == "given")
    more = {"fmt": fmt, "split": split, "shard_bytes": shard_bytes}
    with patch.object(job, "tally_of", side_effect=AssertionError("rows went through Spark")):
        manifest = job.run(spark, config(path, tmp_path / "planned", **more))
    with general():
        job.run(spark, config(path, tmp_path / "general", **more))
    assert tree(tmp_path / "planned") == tree(tmp_path / "general")
    assert manifest.counts == Counts(109, 101, 4, {"not_an_image": 2, "replaced": 2})
    assert sum(len(split.shards) for split in manifest.splits.values()) == shards
    assert manifest.leakage is not None and manifest.leakage["found"]["content"] > 0
    assert manifest.created_by["config"]["class_names"] == ["a", "b"]
    assert not list(verify(str(tmp_path / "planned")))
    rejected = pq.read_table(tmp_path / "planned" / "_quarantine").column("reason").to_pylist()
    assert sorted(rejected) == ["broken_image", "not_a_regular_file", "unknown_format", "unsafe_name"]
    if fmt == "tfrecord":
        return
    with pytest.raises(DataError, match="3 of 105 records are bad"):  # as told of those that headers tell
        job.run(spark, config(path, tmp_path / "refused", **{**more, "max_bad": "2%"}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["_quarantine-refused", "general", "planned", "set.tar"]
