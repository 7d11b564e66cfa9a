"""The file that each picture was: in the dataset, in predictions, and pictures that no dataset has; against Pillow."""

from __future__ import annotations

import base64
import io
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from PIL import Image

import lockstep
from lockstep.etl.images import job
from lockstep.etl.images.config import ImagesConfig
from lockstep.jobs import export
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.results.report import write_report
from tests.builders.evaluations import evaluate, predict
from tests.training._threads import run, run_threads

from .test_image_pieces import make_tar, make_tree

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow
SIDE = 4


def png(seed: int, height: int = SIDE, width: int = SIDE) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


# Names of one picture in several classes, splits and forms; a duplicate; what is left out; what is no picture.
FILES = {
    **{f"{split}/{name}/{n}.png": png(100 * len(name) + 10 * len(split) + n)
       for split in ("train", "test") for name in ("cat", "horse") for n in range(6)},
    "train/cat/deeper/e\u0301.png": png(1),
    "train/cat/copy of 1.png": png(2),
    "train/horse/copy of 1.png": png(2),
    "train/cat/notes.txt": b"text",
    "train/cat/cut.png": png(3)[:60],
}  # fmt: skip


def config(inputs: Sequence[Path], output: Path, **more: Any) -> ImagesConfig:
    given = {"inputs": tuple(map(str, inputs)), "output": str(output), "image_size": (SIDE, SIDE), "max_bad": "50%"}
    return ImagesConfig(**{**given, "split": "given", "source": "folder", "shard_bytes": 1500, **more})


def records(shard: Path) -> list[dict[str, Any]]:
    """The records of a shard, by pyarrow or TensorFlow."""
    if shard.suffix == ".parquet":
        return pq.ParquetFile(shard).read(columns=["sample_id", "image"]).to_pylist()
    import tensorflow as tf

    examples = [
        tf.train.Example.FromString(record.numpy()).features.feature for record in tf.data.TFRecordDataset(shard)
    ]
    return [
        {"sample_id": one["sample_id"].int64_list.value[0], "image": one["image"].bytes_list.value[0]}
        for one in examples
    ]


def named(dataset: Path, manifest: DatasetManifest) -> dict[str, bytes]:
    """The content of each record by its file, after a check of each id."""
    found: dict[str, bytes] = {}
    for name, split in manifest.splits.items():
        for number, shard in enumerate(split.shards):
            rows = records(dataset / shard.path)
            files = pq.read_table(dataset / f"_files/{name}/part-{number:05d}.parquet").to_pydict()
            assert files["sample_id"] == [row["sample_id"] for row in rows]
            assert not set(files["file"]) & set(found)
            found |= {file: row["image"] for file, row in zip(files["file"], rows, strict=True)}
    assert not list(verify(str(dataset)))
    return found


def opened(path: Path, member: str | None = None) -> bytes:
    """The pixels of a file, or of a member of an archive, by Pillow."""
    if member is None:
        return np.asarray(Image.open(path).convert("RGB")).tobytes()
    with tarfile.open(path) as archive, archive.extractfile(member) as file:  # type: ignore[union-attr] # it is there
        return np.asarray(Image.open(file).convert("RGB")).tobytes()


def test_a_dataset_names_the_file_of_each_picture(spark: SparkSession, tmp_path: Path) -> None:
    tree, good = make_tree(tmp_path / "set", FILES), [name for name in FILES if not name.endswith(("cut.png", ".txt"))]
    one, two = make_tar(tmp_path / "one.tar", FILES), make_tar(tmp_path / "two.tar", {"train/cat/1.png": png(77)})
    for number, (source, inputs, more) in enumerate((
        ("folder", [tree], {}),
        ("tar", [one], {}),
        ("tar", [one, two], {"input_root": str(tmp_path), "store": "encoded", "fmt": "parquet"}),
    )):  # fmt: skip
        output = tmp_path / f"data-{number}"
        found = named(output, job.run(spark, config(inputs, output, source=source, **more)))
        members = [(inputs[0], name) for name in good] + [(path, "train/cat/1.png") for path in inputs[1:]]
        assert set(found) == {f"{path}/{name}" for path, name in members}
        for path, name in members:
            content = found[f"{path}/{name}"]
            if more.get("store") == "encoded":
                assert content == (FILES[name] if path == one else png(77))
            else:
                assert content == (opened(path / name) if source == "folder" else opened(path, name))


@pytest.fixture(scope="module")
def trained(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on turned and cut pictures of many sizes, and the URLs of what it was made of."""
    root = tmp_path_factory.mktemp("pictures")
    files = {
        f"{name}/{n}.png": png(n + len(name), 9 + n % 5, 6 + n % 7) for name in ("cat", "horse") for n in range(16)
    }
    data = root / "data"
    made = config([make_tree(root / "set", files)], data, split="1/1", fit="crop", rotate=90, shard_bytes=1000)
    manifest = job.run(spark, made)
    options: dict[str, Any] = {"global_batch": 8, "epochs": 1, "num_ranks": 1, "launcher": "local"}
    run(TrainConfig(datasets=(str(data),), run=str(root / "run"), model="mlp", seed=3, **options))
    return {"root": root, "data": data, "manifest": manifest, "run": str(root / "run")}


def test_predictions_name_files_and_raw_pictures_are_those_of_the_dataset(trained: dict[str, Any]) -> None:
    import keras

    root, url, data = trained["root"], trained["run"], trained["data"]
    predict(url, str(data), "test", str(root / "test"), run_threads, batch=3)
    stored = pd.read_parquet(root / "test")
    assert list(stored)[:3] == ["sample_id", "file", "label"]
    content = named(data, trained["manifest"])
    (path,) = (root / "run/models").glob("*/model.keras")
    model = keras.models.load_model(path)
    for start in range(0, len(stored), 3):
        part = stored[start : start + 3]
        pixels = np.frombuffer(b"".join(content[file] for file in part["file"]), np.uint8).reshape(-1, SIDE, SIDE, 3)
        assert np.array_equal(model.predict_on_batch({"image": pixels}), np.stack(list(part["prediction"])))
        raw = lockstep.predict(url, images=list(part["file"]), batch=3)
        for name in ("file", "class", "class_name"):
            assert list(raw[name]) == list(part[name])
        assert np.array_equal(np.stack(list(raw["prediction"])), np.stack(list(part["prediction"])))
    assert all(Path(file).parent.name == name for file, name in zip(stored["file"], stored["label_name"], strict=True))


def test_a_folder_of_pictures_is_no_dataset_and_the_error_says_what_takes_it(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tree(tmp_path / "new", {"a.png": png(5)})
    with pytest.raises(NotFoundError, match="no dataset at") as caught:
        predict(trained["run"], str(folder), "test", str(tmp_path / "out"), run_threads)
    (call,) = re.findall(r"lockstep\.predict\([^)]*images=[^)]*\)", caught.value.next_step)
    assert list(eval(call)["file"]) == [f"{folder}/a.png"]  # noqa: S307 # the call that the error names runs as it stands


def test_a_folder_of_raw_pictures(trained: dict[str, Any], tmp_path: Path) -> None:
    url, root = trained["run"], make_tree(tmp_path / "new", {"b.png": png(5, 7, 4), "a/x.png": png(6), "note.txt": b""})
    found = lockstep.predict(url, images=root)
    assert list(found["file"]) == [f"{root}/a/x.png", f"{root}/b.png"]
    # Pillow turns against the clock: what the job was told, done by hand for a picture that only needs turning.
    turned = np.asarray(Image.open(root / "a/x.png").rotate(-90))[None]
    by_hand = lockstep.predict(url, {"image": turned}, batch=1)
    assert np.array_equal(lockstep.predict(url, images=root / "a/x.png", batch=1)["prediction"][0], by_hand[0])
    with pytest.raises(NotFoundError, match="no picture in the folder"):
        lockstep.predict(url, images=make_tree(tmp_path / "texts", {"a.txt": b""}))
    (root / "c.png").write_bytes(b"noise")
    with pytest.raises(DataError, match=r"c\.png is not a picture"):
        lockstep.predict(url, images=root)
    with pytest.raises(ConfigError, match="exclude each other"):
        lockstep.predict(url, {"image": turned}, images=root)


def test_an_export_says_that_it_takes_the_datasets_pixels_unless_it_takes_files(
    trained: dict[str, Any], spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main(["--run", trained["run"], "--output", str(tmp_path / "of-pixels")]) == 0
    assert "note: the model takes pixels as lockstep etl_images made them" in capsys.readouterr().out
    files = {f"{name}/{n}.png": png(n + len(name)) for name in ("cat", "horse") for n in range(8)}
    data, url = tmp_path / "data", str(tmp_path / "run")
    made = config([make_tree(tmp_path / "set", files)], data, split="1/1", store="encoded", fmt="parquet")
    job.run(spark, made)
    options: dict[str, Any] = {"global_batch": 8, "epochs": 1, "num_ranks": 1, "launcher": "local"}
    run(TrainConfig(datasets=(str(data),), run=url, model="mlp", **options))
    assert export.main(["--run", url, "--output", str(tmp_path / "of-files"), "--format", "savedmodel"]) == 0
    assert "note:" not in capsys.readouterr().out
    import tensorflow as tf

    raw = tf.saved_model.load(str(tmp_path / "of-files")).signatures["raw"]
    outputs = raw(image=tf.constant([files["cat/1.png"]]))["prediction"].numpy()
    by_name = lockstep.predict(url, images=tmp_path / "set" / "cat" / "1.png")
    assert np.allclose(outputs[0], by_name["prediction"][0], atol=1e-6)


def test_the_report_names_the_files_of_misjudged_pictures(trained: dict[str, Any]) -> None:
    data, url = trained["data"], trained["run"]
    found = evaluate(url, str(data), "test", run_threads, batch=3, pictures=True)
    content = named(data, trained["manifest"])
    assert len(found["misjudged"]) > 1
    for one in found["misjudged"]:
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(one["picture"].partition(",")[2]))))
        assert content[one["file"]] == pixels.tobytes() and Path(one["file"]).parent.name == one["true"]
    page = Path(write_report(url, found)).read_text()
    for one in found["misjudged"]:
        assert len(re.findall(f'<img [^>]*alt="[^"]*: {re.escape(one["file"])}"', page)) == 1
        assert len(re.findall(f"<figcaption>[^<]*: {re.escape(one['file'])}</figcaption>", page)) == 1
