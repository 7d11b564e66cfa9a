"""Arrays in .npz and .npy files: what numpy.load gives is what is read, and nothing is unpickled."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.images import job, npz
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.images.source import RECORD, ImagePlan
from lockstep.features.images.intake import Intake
from lockstep.features.images.resize import resize
from lockstep.storage.errors import ConfigError, DataError, LockstepError, NotFoundError
from lockstep.storage.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Arrays = dict[str, np.ndarray]
Write = Callable[[Path, Arrays], Path]


def stored(folder: Path, arrays: Arrays) -> Path:
    np.savez(folder / "set.npz", allow_pickle=True, **arrays)
    return folder / "set.npz"


def deflated(folder: Path, arrays: Arrays) -> Path:
    np.savez_compressed(folder / "set.npz", allow_pickle=True, **arrays)
    return folder / "set.npz"


def loose(folder: Path, arrays: Arrays) -> Path:
    (folder / "set").mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / "set" / f"{name}.npy", array)
    return folder / "set"


def plan(path: Path, *, given: bool = False, classes: int = 10, step: int = 1 << 20, **more: Any) -> ImagePlan:
    return npz.plan([str(path)], names=more.get("names", ()), given=given, num_classes=classes, split_bytes=step)


def read(found: ImagePlan, classes: int = 10) -> list[dict[str, Any]]:
    """All rows, from pieces that went through JSON."""
    pieces = [job.from_json(job.to_json(piece)) for piece in found.pieces]
    return [
        row
        for piece in pieces
        for batch in piece.read(Intake(size=None, channels=None), classes)
        for row in batch.to_pylist()
    ]


def mnist(count: int = 40, seed: int = 0) -> Arrays:
    """As keras.datasets.mnist keeps them in mnist.npz."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 6, 4), np.uint8)
    labels = rng.integers(0, 3, count, np.uint8)
    test = count // 4
    return {"x_test": images[:test], "x_train": images[test:], "y_train": labels[test:], "y_test": labels[:test]}


@settings(max_examples=40)
@given(
    sides=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    channels=st.sampled_from([(), (1,), (3,)]),
    counts=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kind=st.sampled_from(["u1", "i1", "<i4", ">i8", "<u8"]),
    column=st.booleans(),
    write=st.sampled_from([stored, deflated, loose]),
    step=st.sampled_from([1, 40, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_what_numpy_loads_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    sides: tuple[int, int],
    channels: tuple[int, ...],
    counts: tuple[int, int],
    kind: str,
    column: bool,
    write: Write,
    step: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for split, count in zip(("train", "val"), counts, strict=True):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, *sides, *channels), np.uint8)
        labels = rng.integers(-1 if kind[-2] == "i" else 0, 11, count).astype(kind)
        arrays[f"{split}_labels"] = labels[:, None] if column else labels
    path = write(tmp_path_factory.mktemp("set"), arrays)
    found = plan(path, given=True, step=step)
    assert found.shape == (*sides, *(channels or (1,))) and found.records == sum(counts)
    rows = read(found)
    files = path.glob("*.npy") if path.is_dir() else [path]
    loaded: Arrays = {}
    for file in files:  # the oracle
        content = np.load(file, allow_pickle=False)
        loaded |= dict(content) if file.suffix == ".npz" else {file.stem: content}
    for split in ("train", "val"):
        images, labels = loaded[f"{split}_images"], loaded[f"{split}_labels"].reshape(-1)
        good = [(number, int(label)) for number, label in enumerate(labels) if 0 <= label < 10]
        mine = [
            row for row in rows if f"{split}_" in (row["name"] or row["_place"] or found.sources[row["_source"]].url)
        ]
        assert [(r["number"], r["label"], r["image"]) for r in mine if r["kind"] == RECORD] == [
            (number, label, images[number].tobytes()) for number, label in good
        ]
        assert {r["_split"] for r in mine if r["kind"] == RECORD} <= {{"train": "train", "val": "validation"}[split]}
        assert [(r["_position"], r["_raw"]) for r in mine if r["kind"] != RECORD] == [
            (number, label.tobytes()) for number, label in enumerate(labels) if not 0 <= label < 10
        ]


def test_arrays_go_together_by_name(tmp_path: Path) -> None:
    one = mnist()
    images, labels = one["x_train"], one["y_train"]
    for names in ("x y", "images labels", "X_test Y_test", "train-images train-labels", "data target"):
        image, label = names.split()
        path = deflated(tmp_path, {label: labels, "names of classes": np.array(["a", "b"]), image: images})
        (piece,) = plan(path).pieces
        assert isinstance(piece, npz.ArrayPiece) and piece.name == f"set.npz/{image}.npy"
    path = stored(tmp_path, {"arr_0": images, "arr_1": labels, "x": images[:3], "y": labels})
    with pytest.raises(DataError, match="do not belong together"):
        plan(path)
    (piece,) = plan(path, names=(("arr_0", "arr_1"),)).pieces
    assert isinstance(piece, npz.ArrayPiece) and piece.count == len(images)
    with pytest.raises(NotFoundError, match="does not hold the arrays") as caught:
        plan(path, names=(("arr_0", "arr_2"),))
    assert caught.value.got == "arrays arr_0, arr_1, x, y"
    with pytest.raises(NotFoundError, match="no input holds the arrays"):
        plan(path, names=(("arr_0", "arr_1"), ("z", "w")))
    with pytest.raises(ConfigError, match="does not name its split"):
        plan(path, names=(("arr_0", "arr_1"),), given=True)
    for half in ({"x_train": images}, {"y_train": labels}, {"arr_0": images}, {}):
        with pytest.raises(NotFoundError):
            plan(stored(tmp_path, half))
    with pytest.raises(ConfigError, match="two arrays that may be the images"):
        plan(stored(tmp_path, {"x": images, "images": images, "y": labels}))
    (tmp_path / "set.npz").unlink()
    (tmp_path / "test").mkdir()  # a split by the file's folder
    found = plan(stored(tmp_path / "test", {"x": images, "y": labels}).parents[1], given=True, names=(("x", "y"),))
    assert {piece.split for piece in found.pieces if isinstance(piece, npz.ArrayPiece)} == {"test"}


PICTURES, LABELS = np.zeros((4, 3, 2), np.uint8), np.zeros(4, np.int64)


@pytest.mark.parametrize(
    ("x", "y", "what"),
    [
        (PICTURES.astype(np.float32), LABELS, "no array of pictures"),
        (PICTURES.astype(np.uint16), LABELS, "no array of pictures"),
        (np.zeros((4, 3, 8, 8), np.uint8), LABELS, "no array of pictures"),  # channels in front
        (np.zeros((4, 6), np.uint8), LABELS, "no array of pictures"),
        (np.zeros((4, 1, 5000), np.uint8), LABELS, "no array of pictures"),
        (np.zeros((0, 3, 2), np.uint8), LABELS[:0], "no array of pictures"),
        (np.asfortranarray(PICTURES), LABELS, "Fortran"),
        (PICTURES, LABELS[:3], "do not belong together"),
        (PICTURES, np.eye(4), "no array of labels"),
        (PICTURES, np.eye(4, dtype=np.int64), "no array of labels"),
        (PICTURES, np.array(["a", "b", "c", "d"]), "no array of labels"),
        (PICTURES, np.zeros(4, [("a", "<i4")]), "type or shape"),
        (PICTURES, np.array([0, "a", None, 1], object), "holds Python objects"),
        (np.array([None], object), LABELS, "holds Python objects"),
    ],
)
@pytest.mark.parametrize("write", [deflated, loose])
def test_arrays_that_are_no_pictures_or_labels(
    tmp_path: Path, x: np.ndarray, y: np.ndarray, what: str, write: Write
) -> None:
    with pytest.raises(DataError, match=what) as caught:
        plan(write(tmp_path, {"x": x, "y": y}))
    assert all((caught.value.got, caught.value.allowed, caught.value.next_step))


class _Run:
    """Its pickle would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_bytes, (self.path, b"code ran")


def test_no_pickle_is_ever_loaded(tmp_path: Path) -> None:
    path = loose(tmp_path, {"x": PICTURES, "y": LABELS}) / "y.npy"
    mark = tmp_path / "mark"
    objects = np.empty(4, object)
    objects[:] = [_Run(mark)] * 4
    np.save(path, objects, allow_pickle=True)
    with pytest.raises(DataError, match="holds Python objects"):
        plan(path.parent)
    path.write_bytes(pickle.dumps(_Run(mark)))  # numpy.load would take a bare pickle, too
    with pytest.raises(DataError, match="not a NumPy array"):
        plan(path.parent)
    assert not mark.exists()
    np.load(path, allow_pickle=True)
    assert mark.exists()  # so the trap was one


def header(shape: str, descr: str = "'|u1'", version: tuple[int, int] = (1, 0)) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (header("(1000000000, 28, 28)"), "wrong length"),  # terabytes that are not there
        (header("(4, 3, 2)") + bytes(25), "wrong length"),
        (header("(4, 3, 2)") + bytes(23), "wrong length"),
        (header("(4, -3, -2)") + bytes(24), "type or shape"),
        (header("(99999999999999999999, 3, 2)"), "type or shape"),
        (header("(" + "(" * 5000), "not a NumPy array"),
        (header("(4, 3, 2)", "'|u1' * 10**9"), "not a NumPy array"),
        (header("(4, 3, 2)", "__import__('os').getpid()"), "not a NumPy array"),
        (header("(4, 3, 2)", version=(3, 0)) + bytes(24), "not a NumPy array"),
        (b"\x93NUMPY\x01\x00\xff\xff" + bytes(65535), "not a NumPy array"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "not a NumPy array"),
        (b"\x93NUMPY", "not a NumPy array"),
        (b"x", "not a NumPy array"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_forged_headers_take_no_memory(tmp_path: Path, content: bytes, what: str, packed: bool) -> None:
    path = loose(tmp_path, {"x": PICTURES, "y": LABELS})
    (path / "x.npy").write_bytes(content)
    if packed:
        with zipfile.ZipFile(tmp_path / "set.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for name in "xy":
                archive.write(path / f"{name}.npy", f"{name}.npy")
        path = tmp_path / "set.npz"
    with warnings.catch_warnings(action="ignore"), pytest.raises(DataError, match=what) as caught:
        plan(path)
    assert all((caught.value.got, caught.value.allowed, caught.value.next_step))


def test_archives_that_are_cut_or_forged(tmp_path: Path) -> None:
    arrays: Arrays = {"x": np.arange(24, dtype=np.uint8).reshape(4, 3, 2), "y": LABELS}
    whole = stored(tmp_path, arrays).read_bytes()
    path = tmp_path / "set.npz"

    def refusal(content: bytes) -> LockstepError:
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            read(plan(path))
        assert all((caught.value.got, caught.value.allowed, caught.value.next_step))
        return caught.value

    for end in range(4, len(whole), 31):
        assert "is damaged" in refusal(whole[:end]).what
    flipped = bytearray(whole)
    flipped[whole.index(arrays["x"].tobytes()) + 5] ^= 1
    assert "Bad CRC-32" in refusal(bytes(flipped)).got  # also numpy.load's word
    big = io.BytesIO()
    with zipfile.ZipFile(big, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            data = io.BytesIO()
            np.save(data, array)
            archive.writestr(f"{name}.npy", data.getvalue())
    sizes = bytearray(big.getvalue())
    at = sizes.index(b"PK\x01\x02") + 24  # the unpacked size in the directory
    sizes[at : at + 4] = (1 << 30).to_bytes(4, "little")
    assert "cannot be as large" in refusal(bytes(sizes)).what
    for compression, flags, word in ((zipfile.ZIP_BZIP2, 0, "compression 12"), (zipfile.ZIP_STORED, 1, "encrypted")):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("x.npy", header("(4, 3, 2)") + bytes(24))
            archive.writestr("y.npy", header("(4,)") + bytes(4))
        other = bytearray(path.read_bytes())
        for directory in (other.index(b"PK\x01\x02"), other.rindex(b"PK\x01\x02")):
            other[directory + 8] |= flags
        assert refusal(bytes(other)).got == word
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path, "w") as archive:
        for _ in range(2):
            archive.writestr("x.npy", b"")
    assert "or one twice" in refusal(path.read_bytes()).what


@pytest.mark.slow
def test_mnist_as_keras_keeps_it(spark: SparkSession, tmp_path: Path) -> None:
    arrays = mnist(80)
    arrays["y_test"][3] = 77
    path = deflated(tmp_path, arrays)
    found = {}
    for name, place in (("a", path), ("b", loose(tmp_path, arrays))):
        told = ImagesConfig(
            source="npz", inputs=(str(place),), output=str(tmp_path / name), split="given", fmt="parquet",
            image_size=(3, 5), num_classes=3, max_bad="5%", split_bytes=200,
        )  # fmt: skip
        manifest = job.run(spark, told)
        assert (manifest.counts.read, manifest.counts.written, manifest.counts.quarantined) == (80, 79, 1)
        assert not list(verify(str(tmp_path / name)))
        (bad,) = pq.read_table(tmp_path / name / "_quarantine").to_pylist()
        assert (bad["position"], bad["reason"], bad["raw"]) == (3, "label_out_of_range", b"\x4d")
        assert bad["source"] == str(path / "y_test.npy" if place == path else place / "y_test.npy")
        found[name] = {
            split: sorted(
                (row["label"], row["image"])
                for shard in manifest.splits[split].shards
                for row in pq.ParquetFile(tmp_path / name / shard.path).read().to_pylist()
            )
            for split in manifest.splits
        }
    assert found["a"] == found["b"] and set(found["a"]) == {"train", "test"}
    with np.load(path) as oracle:
        for split in ("train", "test"):
            labels = oracle[f"y_{split}"]
            pixels = resize(oracle[f"x_{split}"][..., None], 3, 5)
            expected = sorted((int(y), x.tobytes()) for x, y in zip(pixels, labels, strict=True) if y < 3)
            assert found["a"][split] == expected


@pytest.mark.parametrize(("images", "labels"), [("pixels", "kinds"), (["pixels"], ["kinds"]), (["p", "q"], ["k", "l"])])
def test_names_of_arrays_may_be_a_text_or_a_list(images: Any, labels: Any) -> None:
    config = ImagesConfig(inputs=("a.npz",), output="d", source="npz", image_arrays=images, label_arrays=labels)
    found = (config.image_arrays, config.label_arrays)
    assert found == tuple((each,) if isinstance(each, str) else tuple(each) for each in (images, labels))
