"""Layouts of image sets that people have: each gives the right classes, or one error that names the folder."""

from __future__ import annotations

import io
import os
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.etl.images import folders
from lockstep.etl.images import tar as tar_images
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.images.depth import log_dark
from lockstep.etl.images.job import Tally, class_names
from lockstep.etl.images.layout import ClassFolder
from lockstep.etl.images.planned import known_of
from lockstep.etl.images.source import BAD, DROPPED, RECORD, ImagePlan
from lockstep.features.images.decode import Limits
from lockstep.storage.errors import DataError

from .test_image_pieces import STEP, make_tar, make_tree, picture, rows

ONE = picture(1)


def tally(plan: ImagePlan) -> tuple[Tally, list[str]]:
    """What the job counts, by plain Python; and the reasons of rejected files."""
    found = rows(plan)
    good = [row for row in found if row["kind"] == RECORD]
    classes = []
    for label in sorted({row["class"] for row in good}):
        mine = [row for row in good if row["class"] == label]
        apart = [row["name"] for row in mine if row["_split"] != "train"]
        classes.append(
            ClassFolder(
                label=label,
                in_train=len(mine) - len(apart),
                elsewhere=len(apart),
                first=min(row["name"] for row in mine),
                first_elsewhere=min(apart, default=None),
            )
        )
    bad = [row["_reason"] for row in found if row["kind"] == BAD]
    unsplit = sum(row["_split"] is None for row in good)
    labels = tuple(found.label for found in classes)
    counts = Tally(
        read=len(found),
        bad=len(bad),
        raw_bytes=0,
        dropped={},
        classes=labels,
        without_split=unsplit,
        folders=tuple(classes),
    )
    return counts, bad


LAYOUTS: list[tuple[str, Sequence[str], Sequence[str], str]] = [
    # (name, files, classes, "" or what the error says)
    ("CIFAR folders", ["train/cat/1.png", "train/dog/1.png", "test/cat/1.png", "test/dog/1.png"], ["cat", "dog"], ""),
    ("ImageNet", ["Data/CLS/train/n01/1.png", "Data/CLS/train/n02/1.png", "Note/n01/1.xml"], ["n01", "n02"], ""),
    ("ImageNet, flat val", ["train/n01/1.png", "train/n02/1.png", "val/1.png"], ["n01", "n02"], "no_class"),
    ("Tiny ImageNet", ["train/n01/images/1.png", "train/n02/images/1.png", "val/images/1.png"], [], "images (1 images"),
    ("Tiny ImageNet, train", ["train/n01/images/1.png", "train/n02/images/1.png"], ["n01", "n02"], ""),
    ("Kaggle cats and dogs", ["train/train/cat.1.png", "train/train/dog.1.png", "test1/test1/1.png"], [], "no_class"),
    ("Kaggle, twice in a folder", ["train/train/cat/1.png", "train/train/dog/1.png"], ["cat", "dog"], ""),
    ("Oxford pets", ["images/Bengal_1.png", "images/Pug_1.png", "annotations/trimaps/Bengal_1.png"], [], "images (as"),
    ("Caltech birds", ["CUB/images/001.Black/1.png", "CUB/images/002.Gull/1.png"], ["001.Black", "002.Gull"], ""),
    ("MVTec", ["bottle/train/good/1.png", "bottle/test/good/2.png", "bottle/test/cut/1.png"], [], "cut (1 images"),
    ("few shots", ["train/cat/1.png", "train/dog/1.png", "test/owl/1.png"], [], "owl (1 images, as test/owl/1.png)"),
    ("a class only in train", ["train/cat/1.png", "train/dog/1.png", "test/cat/1.png"], ["cat", "dog"], ""),
    ("masks beside images", ["images/1.png", "masks/1.png"], [], "images (as images/1.png)"),
    ("a class in a class", ["cat/1.png", "cat/black/2.png", "dog/1.png"], [], "black in cat (cat/black/2.png)"),
    ("kinds of a class", ["flowers/rose/1.png", "trees/oak/1.png"], ["oak", "rose"], ""),
    ("a folder without classes", ["1.png", "2.png"], [], "no_class"),
    ("side files", ["a/1.png", "b/1.png", "__MACOSX/a/1.png", "a/._1.png", "a/@eaDir/1.png/T.jpg"], ["a", "b"], ""),
    ("notebooks", ["a/1.png", "b/1.png", ".ipynb_checkpoints/1.png", "a/.DS_Store", "b/Thumbs.db"], ["a", "b"], ""),
    ("one split to a class", ["cat/train/1.png", "dog/test/1.png"], [], "no_class"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "classes", "error"), [row[1:] for row in LAYOUTS], ids=[row[0] for row in LAYOUTS])
@pytest.mark.parametrize("form", ["folder", "tar", "tar.gz"])
def test_layouts(tmp_path: Path, files: Sequence[str], classes: Sequence[str], error: str, form: str) -> None:
    content = dict.fromkeys(files, ONE)
    config = ImagesConfig(inputs=("x",), output="y", source="folder" if form == "folder" else "tar", image_size=(4, 4))
    if form == "folder":
        plan = folders.plan([str(make_tree(tmp_path / "set", content))], split_bytes=STEP)
    else:
        path = make_tar(tmp_path / f"set.{form}", content, "w:gz" if form == "tar.gz" else "w")
        plan = tar_images.plan([str(path)], split_bytes=STEP, listed=Limits())
    counted, bad = tally(plan)
    if error == "no_class":
        assert set(bad) == {"no_class"}
        return
    assert not bad
    if plan.files is not None:  # planned on the driver
        assert known_of(plan, []).folders == counted.folders
    if error:
        with pytest.raises(DataError) as caught:
            class_names(config, plan, counted, None)
        assert error in caught.value.got and "--classes" in caught.value.next_step
        return
    assert list(class_names(config, plan, counted, None)) == list(classes)


def test_a_class_may_be_called_train_where_classes_names_it(tmp_path: Path) -> None:
    files = ["bus/1.png", "train/1.png", "Train/2.png"]
    root = str(make_tree(tmp_path / "set", dict.fromkeys(files, ONE)))
    found = {row["_place"]: row["class"] for row in rows(folders.plan([root], split_bytes=STEP))}
    assert found == {"bus/1.png": "bus", "train/1.png": None, "Train/2.png": None}
    for made in ("folder", "tar", "tar.gz"):
        content = dict.fromkeys([*files, "val/train/3.png", "train/bus/4.png", "train/train/5.png"], ONE)
        if made == "folder":
            plan = folders.plan(
                [str(make_tree(tmp_path / "more", content))], split_bytes=STEP, classes=("bus", "train")
            )
        else:
            path = make_tar(tmp_path / f"x.{made}", content, "w:gz" if made == "tar.gz" else "w")
            plan = tar_images.plan([str(path)], split_bytes=STEP, classes=("bus", "train"))
        good = {row["name"]: (row["_split"], row["class"]) for row in rows(plan) if row["kind"] == RECORD}
        assert good == {
            "bus/1.png": (None, "bus"),
            "train/1.png": (None, "train"),
            "val/train/3.png": ("validation", "train"),
            "train/bus/4.png": ("train", "bus"),
            "train/train/5.png": ("train", "train"),
        }


def test_a_name_in_two_forms_is_one_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    two = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    content = {f"{name}/{file}.png": ONE for name in two for file in ("1", *two)}
    root, archive = str(make_tree(tmp_path / "set", content)), str(make_tar(tmp_path / "x.tar", content))
    for source, place in ((folders, root), (tar_images, archive)):
        plan = source.plan([place], split_bytes=STEP)
        assert "one class: café" in caplog.text
        caplog.clear()
        found = rows(plan)
        assert {row["class"] for row in found} == {two[0]} and len(found) == 6 and plan.names_may_repeat
        assert {row["name"] for row in found} == {f"{two[0]}/1.png", f"{two[0]}/{two[0]}.png"}
    config = ImagesConfig(inputs=("x",), output="y", source="tar", image_size=(4, 4), classes=("bar", two[1]))
    assert config.classes == ("bar", two[0])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["Cat", "cat", "dog"], "'Cat' and 'cat'"),
        (["cat", "cat ", "dog"], "'cat' and 'cat '"),
        (["1", "10", "2"], "class 1 has the label 0"),
        (["0", "1", "10", "2"], "class 10 has the label 2"),
        (["0", "1", "2"], ""),
        (["00", "01", "02"], ""),
        (["cat", "dog"], ""),
    ],
)
def test_names_that_mislead_are_said(names: list[str], said: str, caplog: pytest.LogCaptureFixture) -> None:
    config = ImagesConfig(inputs=("x",), output="y", source="folder", image_size=(4, 4))
    counts = Tally(read=3, bad=0, raw_bytes=0, dropped={}, classes=tuple(names), without_split=3)
    assert class_names(config, ImagePlan(sources=(), pieces=()), counts, None) == tuple(names)
    assert said in caplog.text if said else not caplog.text


def test_empty_class_folders_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_tree(tmp_path / "set", {"train/cat/1.png": ONE, "train/owl/notes.txt": b"", "val/cat/1.png": ONE})
    for name in ("train/dog", "val/emu", ".git", "other"):
        (root / name).mkdir()
    folders.plan([str(root)], split_bytes=STEP)
    assert "become no class: other, train/dog, train/owl, val/emu" in caplog.text


@pytest.mark.parametrize(("bits", "said"), [(16, ""), (13, ""), (12, "use 12 of"), (10, "use 10 of"), (8, "use 8 of")])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_few_bits_in_16_are_said(
    tmp_path: Path, bits: int, said: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, most = io.BytesIO(), (1 << bits) - 1
    Image.fromarray(np.array([[0, most]], dtype=np.uint16)).save(file, kind)
    content = {f"{name}/{number}.x": file.getvalue() for name in "ab" for number in range(5)}
    plan = folders.plan([str(make_tree(tmp_path / "set", {**content, "a/1.png": ONE}))], split_bytes=STEP)
    log_dark(plan.pieces, ImagesConfig(inputs=("x",), output="y", source="folder", image_size=(4, 4)).intake)
    assert said in caplog.text if said else not caplog.text


FOLDERS = ("cat", "Cat", "train", "val", "café", "cafe\u0301", ".git", "__MACOSX", "images")
FILES = ("1.png", "2.PNG", "no_suffix", "notes.txt", ".DS_Store", "é.png", "e\u0301.png", "empty.png")


def walked(root: Path) -> Counter[tuple[str, str | None, str | None]]:
    """(name, split, class) of each file by os.walk; in place of the split "dropped", by its name, or "bad"."""
    splits = {"train": "train", "val": "validation"}
    found: Counter[tuple[str, str | None, str | None]] = Counter()
    for folder, _, names in os.walk(root):
        for file in names:
            path = Path(folder, file)
            name = unicodedata.normalize("NFC", str(path.relative_to(root)))
            above = name.split("/")[:-1]
            if any(part.startswith((".", "__MACOSX")) for part in name.split("/")) or name.endswith(".txt"):
                found["", "dropped", None] += 1
                continue
            at = next((n for n, part in enumerate(above) if part in splits), None)
            split = None if at is None else splits[above[at]]
            inside = above if at is None else above[at + 1 :]
            while at is not None and inside and splits.get(inside[0]) == split:
                inside = inside[1:]
            label = None if not inside else inside[-1] if at is None else inside[0]
            if label is None or not path.exists() or not path.stat().st_size:
                found["", "bad", None] += 1
            else:
                found[name, split, label] += 1
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.lists(st.sampled_from(FOLDERS), max_size=3), st.sampled_from(FILES)).map(
            lambda place: "/".join((*place[0], place[1]))
        ),
        st.sampled_from(["file", "link", "broken link"]),
        min_size=1,
        max_size=8,
    )
)
def test_a_folder_has_the_images_that_os_walk_finds_and_its_archive_the_same(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]
) -> None:
    root = tmp_path_factory.mktemp("tree") / "set"
    (root.parent / "1.png").write_bytes(ONE)
    for name, kind in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "file" or name.endswith("empty.png"):
            place.write_bytes(b"" if name.endswith("empty.png") else ONE)
        else:
            place.symlink_to(root.parent / ("1.png" if kind == "link" else "gone.png"))
    archive = root.parent / "x.tar"
    with tarfile.open(archive, "w", dereference=True) as tar:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            tar.add(path, path.relative_to(root))

    def read(plan: ImagePlan) -> Counter[tuple[str, str | None, str | None]]:
        kinds = {BAD: "bad", DROPPED: "dropped"}
        return Counter(
            (row["name"], row["_split"], row["class"]) if row["kind"] == RECORD else ("", kinds[row["kind"]], None)
            for row in rows(plan)
        )

    assert read(folders.plan([str(root)], split_bytes=STEP)) == walked(root)
    for path in root.rglob("*"):
        if path.is_symlink() and not path.exists():
            path.unlink()  # which tar left out
    assert read(tar_images.plan([str(archive)], split_bytes=STEP)) == walked(root)
