"""Pictures without class folders, and requests whose visits may continue, are predicted: against PIL and Keras."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pandas as pd
import pytest
from PIL import Image

import lockstep
from lockstep.etl.images import job as image_sets
from lockstep.etl.logs import job as logs
from lockstep.jobs import etl_images, etl_logs
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from tests.builders.evaluations import predict
from tests.training._threads import run, run_threads

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow
LOG = Path(__file__).resolve().parents[3] / "data/weblogs/nasa_access_log_1995-07-09.log.gz"
CLASSES = ("cat", "dog", "owl")


def images(spark: SparkSession, flags: list[str]) -> None:
    """Run `lockstep etl_images` in this session."""
    image_sets.run(spark, etl_images.config_of(etl_images.parser().parse(flags)))


def web_log(spark: SparkSession, output: Path, *more: str) -> None:
    flags = ["--input", str(LOG), "--output", str(output), *more]
    logs.run(spark, etl_logs.config_of(etl_logs.parser().parse(flags)))


def draw(path: Path, seed: int, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(shade, shade + 60, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def trained(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run on pictures of three classes in folders."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(90):
        draw(folder / "animals" / CLASSES[number % 3] / f"{number}.png", number, number % 3 * 90)
    flags = ["--source", "folder", "--image-size", "8x8", "--input", str(folder / "animals")]
    images(spark, [*flags, "--output", str(folder / "data")])
    options: dict[str, Any] = {"global_batch": 16, "epochs": 4, "num_ranks": 1, "launcher": "local"}
    return run(TrainConfig(datasets=(str(folder / "data"),), run=str(folder / "run"), model="mlp", **options)).run


@pytest.mark.parametrize("source", ["folder", "tar", "tar.gz"])
def test_a_folder_without_classes_is_predicted(trained: str, spark: SparkSession, tmp_path: Path, source: str) -> None:
    places = ["1.png", "2026-11-30/2.png", "test/3.png", "a/b/4.png", "dog/5.png"]
    for number, place in enumerate(places):
        draw(tmp_path / "new" / place, 100 + number, number % 3 * 90)
    given = tmp_path / "new"
    if source != "folder":
        given = tmp_path / f"new.{source}"
        with tarfile.open(given, "w:gz" if source == "tar.gz" else "w") as archive:
            archive.add(tmp_path / "new", arcname=".")
    flags = ["--source", source.partition(".")[0], "--image-size", "8x8", "--input", str(given), "--unlabelled"]
    images(spark, [*flags, "--output", str(tmp_path / "data")])
    assert verify(str(tmp_path / "data")) == []
    predict(trained, str(tmp_path / "data"), "test", str(tmp_path / "out"), run_threads)
    found = pd.read_parquet(tmp_path / "out")
    assert "label" not in found and found["sample_id"].nunique() == 5
    found = found.assign(place=found["file"].str.partition("/./")[2]) if source != "folder" else found
    places_found = [next(place for place in places if file.endswith(place)) for file in found["file"]]
    assert sorted(places_found) == sorted(places)
    pixels = np.stack([np.asarray(Image.open(tmp_path / "new" / place)) for place in places_found])
    (model,) = Path(trained, "models").glob("*/model.keras")
    expected = keras.models.load_model(model).predict({"image": pixels}, verbose=0)
    np.testing.assert_allclose(np.stack(found["prediction"].to_list()), expected, rtol=0, atol=1e-6)
    assert found["class_name"].tolist() == [CLASSES[number] for number in expected.argmax(axis=1)]


def test_what_pictures_without_labels_cannot_have_is_refused(
    trained: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        draw(tmp_path / "new" / f"{number}.png", number, 90)
        draw(tmp_path / "others" / ("ant", "bee", "fly")[number % 3] / f"{number}.png", number, 90)
    flags = ["--image-size", "8x8", "--input", str(tmp_path / "new"), "--output", str(tmp_path / "data")]
    for more in (["--source", "folder", "--classes", "cat,dog"], ["--source", "parquet"], ["--source", "idx"]):
        with pytest.raises(ConfigError, match=r"--unlabelled|--classes"):
            images(spark, [*flags, *more, "--unlabelled"])
    with pytest.raises(DataError) as caught:
        images(spark, [*flags, "--source", "folder"])
    assert "--unlabelled" in caught.value.next_step
    other = ["--source", "folder", "--image-size", "8x8", "--input", str(tmp_path / "others")]
    images(spark, [*other, "--output", str(tmp_path / "others-data"), "--split", "1/1"])
    with pytest.raises(ConfigError, match="does not store") as refused:
        predict(trained, str(tmp_path / "others-data"), "test", str(tmp_path / "no"), run_threads)
    assert refused.value.got == "classes ant, bee, fly (not cat, dog, owl)"
    images(spark, [*flags, "--source", "folder", "--fit", "crop", "--unlabelled"])
    predict(trained, str(tmp_path / "data"), "test", str(tmp_path / "out"), run_threads)
    assert "made with --fit crop, the model's with --fit resize" in capsys.readouterr().err


def test_each_request_of_a_web_log_is_predicted_by_the_words_of_training(spark: SparkSession, tmp_path: Path) -> None:
    """The features of requests of one log are those of a labelled dataset of it, which leaves out the last half hour:
    so are the predictions, though a shorter log has another vocabulary.
    """
    web_log(spark, tmp_path / "data")
    options: dict[str, Any] = {"global_batch": 128, "epochs": 1, "num_ranks": 1, "launcher": "local"}
    result = run(
        TrainConfig(datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="logistic", **options)
    )
    web_log(spark, tmp_path / "new", "--unlabelled")
    counts = [lockstep.read_manifest(tmp_path / name).counts for name in ("data", "new")]
    assert (
        counts[1].written == counts[0].written + counts[0].dropped["censored"] and "censored" not in counts[1].dropped
    )
    predict(result.run, str(tmp_path / "data"), "test", str(tmp_path / "known"), run_threads)
    predict(result.run, str(tmp_path / "new"), "test", str(tmp_path / "all"), run_threads)
    known, found = (pd.read_parquet(tmp_path / name).set_index("sample_id")["prediction"] for name in ("known", "all"))
    np.testing.assert_allclose(found.loc[known.index], known, rtol=0, atol=1e-6)
    assert len(found) == counts[1].written
    created = json.loads((tmp_path / "new" / "_manifest.json").read_text())["created_by"]["config"]
    assert created["label"] is None and created["unlabelled"] is True
