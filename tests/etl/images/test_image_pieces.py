"""What each source of images gives a task, read without Spark: places, labels, and every record accounted for."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.etl.images import cifar, folders, parquet
from lockstep.etl.images import tar as tar_images
from lockstep.etl.images.job import from_json, to_json
from lockstep.etl.images.source import BAD, DROPPED, RECORD, ImagePlan, Place, place_of, split_word
from lockstep.features.images.decode import Limits
from lockstep.features.images.intake import Intake, is_left_out
from lockstep.storage.errors import ConfigError, DataError, NotFoundError

INTAKE = Intake(size=(4, 4), channels=3, limits=Limits(max_file_bytes=5000))
STEP = 1 << 20


def rows(plan: ImagePlan, intake: Intake = INTAKE) -> list[dict[str, Any]]:
    """The rows of all pieces, which travel as text on their way to a task."""
    texts = [json.dumps(to_json(piece)) for piece in plan.pieces]
    pieces = [from_json(json.loads(text)) for text in texts]
    assert [json.dumps(to_json(piece)) for piece in pieces] == texts
    assert len(plan.piece_bytes()) == len(pieces)
    return [row for piece in pieces for batch in piece.read(intake, plan.num_classes) for row in batch.to_pylist()]


def picture(seed: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def pixels(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8).tobytes()


FILES = {
    "train/cat/1.png": picture(1),
    "train/cat/deeper/2.png": picture(2),
    "train/dog/no_suffix": picture(3),
    "test/dog/1.png": picture(4),
    "train/dog/cut.png": picture(5)[:40],
    "train/dog/noise.jpg": b"noise",
    "train/dog/empty.jpg": b"",
    "train/long/x.jpg": bytes(5001),
    "train/none.png": picture(6),
    "train/cat/notes.txt": b"text",
    "train/cat/.hidden.png": picture(7),
}
REASONS = {
    "train/dog/cut.png": "broken_image",
    "train/dog/noise.jpg": "unknown_format",
    "train/dog/empty.jpg": "unknown_format",
    "train/long/x.jpg": "too_many_bytes",
    "train/none.png": "no_class",
}
LEFT_OUT = 2
GOOD = {
    "train/cat/1.png": ("train", "cat", 1),
    "train/cat/deeper/2.png": ("train", "cat", 2),
    "train/dog/no_suffix": ("train", "dog", 3),
    "test/dog/1.png": ("test", "dog", 4),
}


def make_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    # the types want a literal mode
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload] # any mode
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def make_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def check_rows(found: list[dict[str, Any]], at: str) -> None:
    assert Counter(row["kind"] for row in found) == {RECORD: len(GOOD), BAD: len(REASONS), DROPPED: LEFT_OUT}
    good = {row["name"]: (row["_split"], row["class"], row["image"]) for row in found if row["kind"] == RECORD}
    assert good == {name: (split, label, pixels(seed)) for name, (split, label, seed) in GOOD.items()}
    for row in (row for row in found if row["kind"] == BAD):
        assert len(row["_raw"]) == min(row["_length"], 64 << 10)
    assert {row["_reason"] for row in found if row["kind"] == DROPPED} == {"not_an_image"}
    assert all(row[at] is not None for row in found)


def test_a_folder_of_class_folders(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "set", FILES)
    (root / "train" / "cat" / "link.png").symlink_to(root / "train" / "cat" / "gone.png")
    plan = folders.plan([str(root)], split_bytes=STEP)
    found = rows(plan)
    links = [row for row in found if row["_reason"] == "not_a_regular_file"]
    assert [row["_place"] for row in links] == ["train/cat/link.png"]
    found.remove(links[0])
    check_rows(found, "_place")
    bad = {row["_place"]: row for row in found if row["kind"] == BAD}
    assert {place: row["_reason"] for place, row in bad.items()} == REASONS
    for place, row in bad.items():
        assert row["_sha256"] == hashlib.sha256(FILES[place]).hexdigest() and row["_length"] == len(FILES[place])
    small = folders.plan([str(root)], split_bytes=100)
    assert len(small.pieces) > 5 and sorted(map(str, rows(small))) == sorted(map(str, rows(plan)))


def test_linked_files_are_read_and_linked_folders_refused(tmp_path: Path) -> None:
    store = make_tree(tmp_path / "out", {"2.png": picture(2), "3.png": picture(3)})
    root = make_tree(tmp_path / "set", {"cat/1.png": picture(1)})
    (root / "cat" / "2.png").symlink_to("../../out/2.png")
    (root / "cat" / "3.png").symlink_to(store / "3.png")
    (root / "cat" / "4.png").symlink_to("3.png")  # a link to a link
    (root / "cat" / "circle.png").symlink_to("circle.png")
    os.mkfifo(root / "cat" / "pipe.png")
    found = rows(folders.plan([str(root)], split_bytes=STEP))
    assert [(row["_place"], row["image"]) for row in found if row["kind"] == RECORD] == [
        (f"cat/{number}.png", pixels(min(number, 3))) for number in (1, 2, 3, 4)
    ]
    assert [(row["_place"], row["_reason"]) for row in found if row["kind"] == BAD] == [
        ("cat/circle.png", "not_a_regular_file"),
        ("cat/pipe.png", "not_a_regular_file"),
    ]
    for name, target in (("dog", store), ("loop", root)):
        (root / name).symlink_to(target)
        with pytest.raises(DataError, match=f"{name} is a link to a folder"):
            folders.plan([str(root)], split_bytes=STEP)
        (root / name).unlink()


def test_folders_that_overlap_are_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "set", {"train/cat/1.png": picture(1), "test/cat/2.png": picture(2)})
    make_tree(tmp_path / "set2", {"cat/3.png": picture(3)})  # a longer name is not a folder below
    (tmp_path / "link").symlink_to(root / "train")
    one, inside, link = str(root), str(root / "train"), str(tmp_path / "link")
    pairs = [(one, one), (one, f"file://{one}/"), (one, inside), (inside, one), (inside, link), (link, one)]
    for inputs in pairs:
        with pytest.raises(ConfigError, match="would be read twice") as caught:
            folders.plan(inputs, split_bytes=STEP)
        assert caught.value.exit_code == 2 and caught.value.got and caught.value.next_step
    apart = (inside, str(root / "test"), str(tmp_path / "set2"))
    assert len(rows(folders.plan(apart, split_bytes=STEP))) == 3


@pytest.mark.parametrize("packed", [False, True])
def test_a_tar_of_class_folders(tmp_path: Path, packed: bool) -> None:
    path = make_tar(tmp_path / "set.tar", FILES, "w:gz" if packed else "w")
    check_rows(rows(tar_images.plan([str(path)], split_bytes=STEP)), "_position")
    with tarfile.open(path) as tar:
        places = {info.name: info.offset_data - 512 for info in tar}
    small = rows(tar_images.plan([str(path)], split_bytes=600))
    check_rows(small, "_position")
    bad = {row["_position"]: row for row in small if row["kind"] == BAD}
    assert {position: row["_reason"] for position, row in bad.items()} == {
        places[name]: reason for name, reason in REASONS.items()
    }
    assert all(bad[places[name]]["_sha256"] == hashlib.sha256(FILES[name]).hexdigest() for name in REASONS)


def test_names_that_reach_outside_and_links_are_no_images(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", {"../train/cat/1.png": picture(1), "/train/cat/2.png": picture(2)})
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("train/cat/3.png")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    found = rows(tar_images.plan([str(path)], split_bytes=STEP))
    assert [row["_reason"] for row in found] == ["unsafe_name", "unsafe_name", "not_a_regular_file"]
    assert found[0]["_raw"] == b"../train/cat/1.png" and not any(row["image"] for row in found)


def test_a_split_told_by_the_root_or_the_archive(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "train", {"cat/1.png": picture(1)})
    archive = make_tar(tmp_path / "my_train.tar", {"cat/1.png": picture(1)})
    for plan in (folders.plan([str(root)], split_bytes=STEP), tar_images.plan([str(archive)], split_bytes=STEP)):
        (row,) = rows(plan)
        assert (row["_split"], row["class"], row["name"]) == ("train", "cat", "train/cat/1.png")


def test_a_file_that_changes_under_the_job(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "set", {"a/1.png": picture(1)})
    plan = folders.plan([str(root)], split_bytes=STEP)
    (root / "a" / "1.png").write_bytes(picture(1) + b"more")
    with pytest.raises(DataError, match="changed while it was read"):
        rows(plan)
    with pytest.raises(NotFoundError, match="is not a folder"):
        folders.plan([str(root / "a" / "1.png")], split_bytes=STEP)


def test_an_archive_that_is_cut_ends_the_job(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "set.tar.gz", FILES, "w:gz")
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:5000]))
    with pytest.raises(DataError, match="cannot be read on at byte"):
        rows(tar_images.plan([str(path)], split_bytes=STEP))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="damaged gzip"):
        rows(tar_images.plan([str(path)], split_bytes=STEP))


@pytest.mark.parametrize(
    ("path", "hint", "place"),
    [
        ("cat/1.jpg", None, Place(None, "cat", "cat/1.jpg")),
        ("cat/1.jpg", "train", Place("train", "cat", "train/cat/1.jpg")),
        ("train/cat/1.jpg", "test", Place("train", "cat", "train/cat/1.jpg")),  # the nearer name wins
        ("set/Train/cat/images/1.jpg", None, Place("train", "cat", "set/Train/cat/images/1.jpg")),
        ("set/flowers/rose/1.jpg", None, Place(None, "rose", "set/flowers/rose/1.jpg")),
        ("val/1.jpg", None, Place("validation", None, "val/1.jpg")),
        ("1.jpg", None, Place(None, None, "1.jpg")),
        ("cat/test/1.jpg", None, Place("test", None, "cat/test/1.jpg")),  # the class stands in the split's folder
    ],
)
def test_what_a_place_says(path: str, hint: str | None, place: Place) -> None:
    assert place_of(path.split("/"), hint) == place


def test_names() -> None:
    names = ("cifar10_jpeg_train.tar", "data_batch_1.bin", "t10k-images", "latest.tar", "VAL.tar", "train_test.tar")
    assert [split_word(name) for name in names] == ["train", None, "test", None, "validation", "train"]
    assert [is_left_out(name.split("/")) for name in ("a/.b", "__MACOSX/x.jpg", "a/x.CSV", "a/Thumbs.db")] == [True] * 4
    assert not any(
        is_left_out(name.split("/")) for name in ("a/x.JPG", "a/txt", "a/.x/../b.jpeg.bmp".replace("/.x/..", ""))
    )


def batch(count: int, label_bytes: int = 1, first: int = 0) -> bytes:
    """Records whose planes are number, number + 1 and number + 2, labels number % 10."""
    records = [
        bytes([7] * (label_bytes - 1) + [n % 10])
        + bytes([n % 250] * 1024 + [n % 250 + 1] * 1024 + [n % 250 + 2] * 1024)
        for n in range(first, first + count)
    ]
    return b"".join(records)


def cifar_plan(path: Path, kind: str = "cifar10", given: bool = False, classes: int = 10) -> ImagePlan:
    return cifar.plan([str(path)], kind, given=given, num_classes=classes, split_bytes=20_000)


@pytest.mark.parametrize("form", ["plain", "gzip", "tar", "tar.gz"])
def test_cifar_batches_of_each_form(tmp_path: Path, form: str) -> None:
    files = {"data_batch_1.bin": batch(30), "test_batch.bin": batch(11, first=30), "batches.meta.txt": b"airplane\n"}
    root = make_tree(tmp_path / "in", files)
    if form == "gzip":
        for path in root.iterdir():
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    if form.startswith("tar"):
        named = {f"cifar-10-batches-bin/{name}": data for name, data in files.items()}
        root = make_tar(tmp_path / "cifar-10-binary", named, "w" if form == "tar" else "w:gz")
    plan = cifar_plan(root)
    official = {
        row["name"]: row["_split"] for row in rows(cifar_plan(root, given=True), Intake(size=None, channels=None))
    }
    assert official == {"data_batch_1.bin": "train", "test_batch.bin": "test"}
    found = rows(plan, Intake(size=None, channels=None))
    assert [row["number"] for row in found] == [*range(30), *range(11)] and len(plan.pieces) > (form == "gzip")
    for row in found:
        n = row["number"] + (30 if row["name"] == "test_batch.bin" else 0)
        assert row["image"] == bytes([n, n + 1, n + 2]) * 1024 and row["label"] == n % 10
    assert plan.shape == (32, 32, 3) and plan.class_names[3] == "cat"
    grey = rows(plan, Intake(size=(8, 8), channels=1))
    assert [row["image"][0] for row in grey[:3]] == [1, 2, 3] and len(grey[0]["image"]) == 64


def test_cifar_planes_become_rows_of_pixels(tmp_path: Path) -> None:
    planes = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    path = make_tree(tmp_path, {"x.bin": b"\x04" + planes.tobytes()})
    (row,) = rows(cifar_plan(path), Intake(size=None, channels=None))
    assert row["image"] == np.dstack([planes[0], planes[1], planes[2]]).tobytes() and row["label"] == 4


@pytest.mark.parametrize("form", ["plain", "tar", "tar.gz"])
def test_cifar100_has_its_names_where_they_lie_beside_it(tmp_path: Path, form: str) -> None:
    names = "".join(f"name_{n}\n" for n in range(100)).encode()
    files = {"fine_label_names.txt": names, "coarse_label_names.txt": b"x", "train.bin": batch(12, 2)}

    def made(files: dict[str, bytes], place: str) -> Path:
        if form == "plain":
            return make_tree(tmp_path / place, files)
        named = {f"cifar-100-binary/{name}": data for name, data in files.items()}
        return make_tar(tmp_path / place, named, "w" if form == "tar" else "w:gz")

    plan = cifar_plan(made(files, "in"), "cifar100", classes=100)
    assert plan.class_names == tuple(f"name_{n}" for n in range(100))
    assert len(rows(plan, Intake(size=None, channels=None))) == 12
    assert cifar_plan(tmp_path / "in", "cifar100", classes=5).class_names == plan.class_names[:5]
    with pytest.raises(DataError, match="does not name the classes") as caught:
        cifar_plan(made({**files, "fine_label_names.txt": names[:-8]}, "cut"), "cifar100", classes=100)
    assert "99 names" in caught.value.got
    assert cifar_plan(made({"train.bin": batch(12, 2)}, "alone"), "cifar100", classes=100).class_names == ()


def test_cifar_labels_lengths_and_splits(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "in", {"train.bin": batch(12, 2), "test.bin": batch(3, 2)})
    found = rows(cifar_plan(root, "cifar100", given=True, classes=5), Intake(size=None, channels=None))
    assert Counter((row["_split"], row["_reason"]) for row in found if row["name"] == "train.bin") == {
        ("train", None): 7,
        (None, "label_out_of_range"): 5,
    }
    bad = next(row for row in found if row["kind"] == BAD)
    assert bad["_position"] % 3074 == 0 and bad["_raw"][:2] == bytes([7, bad["_position"] // 3074])
    with pytest.raises(DataError, match="is not a CIFAR batch") as caught:
        cifar_plan(root)  # records of another length
    assert "3073" in caught.value.allowed
    (root / "test.bin").write_bytes(gzip.compress(batch(3, 2)[:-1]))
    with pytest.raises(DataError, match="is not a CIFAR batch"):
        rows(cifar_plan(root, "cifar100"), Intake(size=None, channels=None))
    (root / "test.bin").rename(root / "some.bin")
    with pytest.raises(DataError, match="does not name its split"):
        cifar_plan(root, "cifar100", given=True)
    with pytest.raises(NotFoundError, match="holds no CIFAR batch"):
        cifar_plan(make_tree(tmp_path / "none", {"a.txt": b"x"}))


def parquet_plan(path: Path, **more: Any) -> ImagePlan:
    told = {"image": "image.bytes", "label": "label", "given": False, "num_classes": None}
    return parquet.plan([str(path)], **{**told, **more})


def test_parquet_without_a_row_group(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    with pq.ParquetWriter(path, pa.schema([("image", pa.binary()), ("label", pa.string())])):
        assert path.exists()
    assert pq.read_metadata(path).num_row_groups == 0
    with pytest.raises(DataError, match="hold no record") as caught:
        parquet_plan(path, image="image")
    assert caught.value.got and caught.value.allowed and caught.value.next_step


def test_a_text_of_any_length_is_no_label(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"image": [{"bytes": picture(1)}] * 2, "label": ["a" * 4096, "a" * 4097]}), path)
    assert [(row["kind"], row["_reason"]) for row in rows(parquet_plan(path))] == [
        (RECORD, None),
        (BAD, "label_too_long"),
    ]


def test_parquet_with_a_column_of_images(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    images = [{"bytes": picture(n), "path": "x"} for n in range(5)] + [None, {"bytes": b"noise", "path": "x"}]
    labels = ["a", "b", "a", "b", None, "a", "b"]
    pq.write_table(pa.table({"image": images, "label": labels}), path, row_group_size=3)
    found = rows(parquet_plan(path))
    assert [(row["number"], row["class"], row["image"]) for row in found if row["kind"] == RECORD] == [
        (n, labels[n], pixels(n)) for n in range(4)
    ]
    assert {row["_position"]: row["_reason"] for row in found if row["kind"] == BAD} == {
        4: "no_label",
        5: "no_image",
        6: "unknown_format",
    }
    numbers = pa.table({"image": [picture(1)] * 3, "label": pa.array([0, 7, -1], pa.int32())})
    pq.write_table(numbers, path)
    with pytest.raises(ConfigError, match="--num-classes"):
        parquet_plan(path, image="image")
    found = rows(parquet_plan(path, image="image", num_classes=7))
    assert Counter((row["label"], row["_reason"]) for row in found) == {(0, None): 1, (None, "label_out_of_range"): 2}
    with pytest.raises(ConfigError, match="columns") as caught:
        parquet_plan(path, image="picture")
    assert "picture: not there" in caught.value.got and "label (int32)" in caught.value.next_step
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        parquet_plan(path)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    source=st.sampled_from(["cifar", "tar"]),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=5),
    cut=st.floats(0, 2),
)
def test_damaged_sets_end_in_rows_or_an_error(
    tmp_path: Path, source: str, flips: list[tuple[float, int]], cut: float
) -> None:
    plain = batch(4) if source == "cifar" else make_tar(tmp_path / "x", FILES).read_bytes()
    data = bytearray(gzip.compress(plain, 1) if flips and flips[0][1] % 2 else plain)
    for place, value in flips:
        data[int(place * len(data))] = value
    path = tmp_path / "set.bin"
    path.write_bytes(bytes(data[: max(1, int(cut * len(data)))]))
    try:
        plan = cifar_plan(path) if source == "cifar" else tar_images.plan([str(path)], split_bytes=3000)
        found = rows(plan)
    except (DataError, NotFoundError) as error:
        assert error.got and error.next_step
        return
    assert all((row["kind"] == RECORD) == (row["_reason"] is None) for row in found)


@pytest.mark.shared_data
def test_real_cifar_batch_and_jpegs(shared_data: Path) -> None:
    folder = shared_data / "cifar10"
    keep = Intake(size=None, channels=None)
    found = rows(cifar_plan(folder / "data_batch_1_first4000.bin.gz"), keep)
    assert [row["label"] for row in found[:12]] == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3, 4, 7] and len(found) == 4000
    plan = tar_images.plan([str(folder / "cifar10_jpeg_test.tar.gz")], split_bytes=STEP)
    batches = plan.pieces[0].read(Intake(size=(32, 32), channels=3), None)
    first = next(iter(batches)).to_pylist()
    assert len(first) > 1000 and {row["kind"] for row in first} == {RECORD}
    assert {(row["_split"], row["class"]) for row in first} <= {("test", "airplane"), ("test", "automobile")}
    with tarfile.open(folder / "cifar10_jpeg_test.tar.gz") as tar:
        for row, info in zip(first[:200], (info for info in tar if info.isfile()), strict=False):
            file = tar.extractfile(info)
            assert file is not None and row["name"] == info.name
            assert row["image"] == np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB")).tobytes()
