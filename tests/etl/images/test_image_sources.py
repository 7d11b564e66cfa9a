"""From folders, archives and columns of image files to published datasets, on Spark."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from lockstep.etl.images import job
from lockstep.etl.images.config import ImagesConfig
from lockstep.features.encode.encoder import Encoder
from lockstep.features.images.decode import decode
from lockstep.features.images.resize import fit
from lockstep.features.sample_id import sample_id
from lockstep.features.schema.schema import Schema
from lockstep.jobs._etl import finished
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError, ExistsError
from lockstep.storage.verify import verify
from tests.etl.conftest import large_offsets

from .test_image_pieces import FILES, GOOD, REASONS, make_tar, make_tree, picture, pixels

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def config(given: Path, output: Path, **more: Any) -> ImagesConfig:
    told = {"inputs": (str(given),), "output": str(output), "image_size": (4, 4), "fmt": "parquet"}
    return ImagesConfig(**{**told, "max_bad": "60%", "split": "given", "source": "tar", **more})


def table(dataset: Path, manifest: DatasetManifest) -> list[tuple[str, dict[str, Any]]]:
    shards = [(name, shard.path) for name, split in manifest.splits.items() for shard in split.shards]
    return [(name, row) for name, path in shards for row in pq.ParquetFile(dataset / path).read().to_pylist()]


def test_a_folder_and_its_archive_are_one_dataset(spark: SparkSession, tmp_path: Path) -> None:
    root = make_tree(tmp_path / "set", FILES)
    with large_offsets(spark):
        of_folder = job.run(spark, config(root, tmp_path / "a", source="folder"))
    archive = make_tar(tmp_path / "set.tar", FILES)
    of_archive = job.run(spark, config(archive, tmp_path / "b", split_bytes=700))
    assert of_folder.digest == of_archive.digest  # whatever it lay in, and in however many pieces it was read
    for folder, manifest in ((tmp_path / "a", of_folder), (tmp_path / "b", of_archive)):
        counts = manifest.counts
        assert (counts.read, counts.written, counts.quarantined) == (len(FILES), len(GOOD), len(REASONS))
        assert dict(counts.dropped) == {"not_an_image": 2}
        assert manifest.created_by["config"]["class_names"] == ["cat", "dog"]
        found = {(split, row["label"], row["image"]) for split, row in table(folder, manifest)}
        assert found == {(split, ["cat", "dog"].index(name), pixels(seed)) for split, name, seed in GOOD.values()}
        assert not list(verify(str(folder)))
    # The same call again, as a scheduler makes it, finds its dataset; after a change of the input it does not.
    for given, output, more in ((root, "a", {"source": "folder"}), (archive, "b", {"split_bytes": 700})):
        again, keep = config(given, tmp_path / output, **more), Namespace(if_exists="keep")
        sources = job.plan_of(again).sources
        kept = finished(keep, again, lambda sources=sources: sources)  # type: ignore[misc] # bound now
        assert kept is not None and kept.digest == of_folder.digest
    (root / "train" / "cat" / "more.png").write_bytes(picture(9))
    changed = config(root, tmp_path / "a", source="folder")
    with pytest.raises(ExistsError, match="--input"):
        finished(Namespace(if_exists="keep"), changed, lambda: job.plan_of(changed).sources)
    (root / "train" / "cat" / "more.png").unlink()
    rejected = pq.read_table(tmp_path / "a" / "_quarantine" / "part-00000.parquet").to_pylist()
    assert {row["source"]: row["reason"] for row in rejected} == {
        str(root / name): {"too_many_bytes": "unknown_format"}.get(reason, reason) for name, reason in REASONS.items()
    }
    assert {row["source"] for row in pq.read_table(tmp_path / "b" / "_quarantine").to_pylist()} == {str(archive)}
    (source,) = of_folder.source
    left_out = {"train/cat/notes.txt", "train/cat/.hidden.png"}
    assert source.bytes == sum(len(data) for name, data in FILES.items() if name not in left_out)


def test_encoded_images_and_names_that_come_twice(spark: SparkSession, tmp_path: Path) -> None:
    files = {f"{name}/{n}.png": picture(n) for n in range(12) for name in ("a", "b")}
    first, again = make_tar(tmp_path / "1.tar", files), make_tar(tmp_path / "2.tar", dict(list(files.items())[:4]))
    told = {"inputs": (str(first), str(again)), "split": "1/1", "store": "encoded", "fit": "pad", "image_size": (2, 6)}
    with pytest.raises(DataError, match=r"1.tar and .*2.tar hold images of one path") as caught:
        job.run(spark, config(first, tmp_path / "out", **told))
    assert "--input-root" in caught.value.next_step
    told["input_root"] = str(tmp_path)
    manifest = job.run(spark, config(first, tmp_path / "out", **told))
    rows = [row for _, row in table(tmp_path / "out", manifest)]
    assert len({row["sample_id"] for row in rows}) == len(rows) == 28
    assert {sample_id([f"1.tar/{name}".encode(), b"0"], 0) for name in files} < {row["sample_id"] for row in rows}
    assert sorted(row["image"] for row in rows) == sorted([*files.values(), *list(files.values())[:4]])
    schema = Schema.from_json(manifest.schema)
    shard = next(iter(manifest.splits.values())).shards[0].path
    (batch,) = pq.ParquetFile(tmp_path / "out" / shard).read().combine_chunks().to_batches()
    fed = Encoder(schema, {}).encode(batch)
    for pixels_fed, data in zip(fed.x["image"], batch.column("image").to_pylist(), strict=True):
        assert pixels_fed.shape == (2, 6, 3) and (pixels_fed == fit(decode(data, 3)[None], 2, 6, "pad")[0]).all()
    # An image is the same sample whether or not another archive holds one of its name.
    shutil.rmtree(tmp_path / "out")
    alone = job.run(spark, config(first, tmp_path / "out", **{**told, "inputs": (str(first),)}))
    ids = {row["sample_id"] for _, row in table(tmp_path / "out", alone)}
    assert len(ids) == 24 and ids < {row["sample_id"] for row in rows}
    # More images of the second class alone, continuing the first: their label stays 1.
    more = make_tar(tmp_path / "3.tar", {f"b/{n}.png": picture(n) for n in range(50, 62)})
    told = {**told, "inputs": (str(more),), "append_to": str(tmp_path / "out")}
    job.run(spark, config(more, tmp_path / "more", **told))
    assert {row["label"] for row in pq.read_table(tmp_path / "more", columns=["label"]).to_pylist()} == {1}
    other = make_tar(tmp_path / "4.tar", {"c/1.png": picture(1)})
    with pytest.raises(DataError, match="does not have all classes"):
        job.run(spark, config(other, tmp_path / "other", **{**told, "inputs": (str(other),)}))


def test_what_cannot_be_a_dataset(spark: SparkSession, tmp_path: Path) -> None:
    one_class = make_tar(tmp_path / "one.tar", {"a/1.png": picture(1), "a/2.png": picture(2)})
    with pytest.raises(DataError, match="do not name their split"):
        job.run(spark, config(one_class, tmp_path / "out"))
    with pytest.raises(DataError, match="1 classes were found"):
        job.run(spark, config(one_class, tmp_path / "out", split="80/20"))
    unique = make_tar(tmp_path / "unique.tar", {f"{n}/1.png": picture(n) for n in range(40)})
    with pytest.raises(DataError, match="more than 2 classes were found"):  # told without all of them
        job.run(spark, config(unique, tmp_path / "out", split="80/20", num_classes=2))
    unique.unlink()
    one_class.write_bytes(one_class.read_bytes()[:512])
    with pytest.raises(DataError, match="cannot be read on at byte"):
        job.run(spark, config(one_class, tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.tar"]


def test_a_folder_of_links_and_of_names_in_two_forms(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_tree(tmp_path / "store", {f"{n}.png": picture(n) for n in range(24)})
    for n, name in enumerate(["bar", "caf\u00e9", "cafe\u0301"]):
        (tmp_path / "set" / name).mkdir(parents=True)
        for image in range(8):  # of one name in both forms of the class
            (tmp_path / "set" / name / f"{image}.png").symlink_to(store / f"{8 * n + image}.png")
    (tmp_path / "set" / "train").mkdir()
    (tmp_path / "set" / "train" / "0.png").symlink_to(store / "0.png")
    manifest = job.run(spark, config(tmp_path / "set", tmp_path / "out", source="folder", split="1/1"))
    assert manifest.created_by["config"]["class_names"] == ["bar", "caf\u00e9"]
    rows = [row for _, row in table(tmp_path / "out", manifest)]
    assert sorted((row["label"], row["image"]) for row in rows) == sorted((int(n > 7), pixels(n)) for n in range(24))
    assert len({row["sample_id"] for row in rows}) == 24 and manifest.counts.quarantined == 1
    assert "1 files are in no class folder: a folder called train" in caplog.text


def test_what_would_shift_the_labels_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    files = {f"train/{name}/images/{n}.png": picture(n) for name in ("cat", "owl") for n in range(4)}
    files |= {f"val/images/{n}.png": picture(9 + n) for n in range(2)}  # as in Tiny ImageNet
    root, archive = make_tree(tmp_path / "set", files), make_tar(tmp_path / "set.tar", files)
    for source, place, split in (("folder", root, "given"), ("tar", archive, "80/20")):
        with pytest.raises(DataError, match="classes without an image in train") as caught:
            job.run(spark, config(place, tmp_path / "out", source=source, split=split))
        assert caught.value.got == "images (2 images, as val/images/0.png)" and caught.value.exit_code == 2
    empty = make_tree(tmp_path / "empty", {f"{name}/{n}.png": b"" for name in "ab" for n in range(3)})
    with pytest.raises(DataError, match="6 of 6 records are bad") as caught:
        job.run(spark, config(empty, tmp_path / "out", source="folder", split="1/1"))
    assert "empty/a/0.png at byte 0: unknown_format" in caught.value.got
    flat = make_tree(tmp_path / "flat", {f"{name}/{n}.png": picture(n) for name in ("bus", "train") for n in range(3)})
    told = {"source": "folder", "split": "1/1", "max_bad": "1%"}
    with pytest.raises(DataError, match="3 of 6 records are bad") as caught:
        job.run(spark, config(flat, tmp_path / "out", **told))
    assert "called train, val, test, ... is a split" in caught.value.next_step
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("_staging*"))
    manifest = job.run(spark, config(flat, tmp_path / "out", **told, classes=("bus", "train")))
    assert {row["label"] for _, row in table(tmp_path / "out", manifest)} == {0, 1}


def test_named_classes_come_later_and_others_never(spark: SparkSession, tmp_path: Path) -> None:
    classes = ("owl", "dog", "cat")
    for day, names in ((1, ("cat",)), (2, ("dog", "cat")), (3, ("emu", "cat"))):
        make_tree(tmp_path / f"{day}", {f"{name}/{day}.{n}.png": picture(n) for name in names for n in range(8)})
    told = {"source": "folder", "split": "80/20", "classes": classes}
    first = job.run(spark, config(tmp_path / "1", tmp_path / "a", **told))
    then = job.run(spark, config(tmp_path / "2", tmp_path / "b", append_to=str(tmp_path / "a"), **told))
    for folder, manifest, labels in ((tmp_path / "a", first, {2}), (tmp_path / "b", then, {1, 2})):
        assert Schema.from_json(manifest.schema)["label"].num_classes == 3
        assert {row["label"] for _, row in table(folder, manifest)} == labels
        assert manifest.created_by["config"]["class_names"] == list(classes)
    with pytest.raises(DataError, match="classes that --classes does not name"):
        job.run(spark, config(tmp_path / "3", tmp_path / "c", append_to=str(tmp_path / "b"), **told))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"image_size": None}, "--image-size"),  # files may have any size
        ({"source": "idx", "store": "encoded"}, "--store"),
        ({"store": "encoded", "rotate": 90}, "--rotate"),
        ({"rotate": 45}, "--rotate"),
        ({"fit": "stretch"}, "--fit"),
        ({"channels": 4}, "--channels"),
        ({"source": "cifar10", "num_classes": 11}, "--num-classes"),
        ({"source": "cifar10", "classes": ("cat", "dog")}, "--classes"),  # its labels are numbers
        ({"num_classes": 2, "classes": ("cat", "dog")}, "--classes"),
        ({"classes": ("cat",)}, "--classes"),
        ({"classes": ("cat", "dog", "cat")}, "--classes"),
        ({"classes": ("cat", "")}, "--classes"),
        ({"max_pixels": 0}, "--max-pixels"),
        ({"split": "group:name:80/20"}, "--split"),
        ({"source": "idx", "image_size": None, "fit": "crop"}, "--fit"),  # to which size?
        ({"source": "idx", "max_pixels": 100}, "--max-pixels"),  # its pixels are not packed
        ({"image_column": "picture"}, "--image-column"),  # a folder has none
        ({"label_column": "kind"}, "--label-column"),
    ],
)
def test_calls_that_cannot_be_right(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what} is invalid"):
        config(Path("in"), Path("out"), **wrong)
