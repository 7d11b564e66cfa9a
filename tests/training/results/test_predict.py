"""Predictions of a split, of raw rows, in Spark and by TensorFlow only: all what plain Keras predicts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lockstep
from lockstep.features.encode.encoder import Encoded
from lockstep.features.images.decode_many import BadImageError
from lockstep.storage.errors import ConfigError, DataError, ExistsError
from lockstep.storage.progress import Progress
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.launch.local import run_local
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.export_run import export_run
from lockstep.training.results.trained_run import TrainedRun
from lockstep.training.run import notes
from tests.builders.blocks import read_all
from tests.builders.evaluations import evaluate, predict
from tests.training._ranks import living_ranks
from tests.training._threads import run, run_threads
from tests.training._tiny import write_files
from tests.training._visits import write_visits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow
BATCH = 5
# Run where neither Lockstep nor the repository can be imported.
WITHOUT_LOCKSTEP = """
import sys
import numpy as np, tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1])
given = np.load(sys.argv[2], allow_pickle=True)
for name in ("serving_default", "raw"):
    call = loaded.signatures[name]
    inputs = {key.partition("/")[2]: given[key] for key in given.files if key.startswith(f"{name}/")}
    plain = {key: value.tolist() if value.dtype == object else value for key, value in inputs.items()}
    found = call(**{key: tf.constant(value) for key, value in plain.items()})
    np.testing.assert_array_equal(found["prediction"].numpy(), given["expected"])
assert not {"lockstep", "training"} & set(sys.modules)
print("equal")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedRun, str, pa.RecordBatch]:
    """(run, dataset, its 203 test rows as they were declared)."""
    folder = tmp_path_factory.mktemp("predict")
    rows = write_visits(folder / "data", {"train": 80, "test": 203})
    config = TrainConfig(
        datasets=(str(folder / "data"),), run=str(folder / "run"), model="logistic", global_batch=16, epochs=1,
        num_ranks=1, launcher="local", learning_rate=0.3,
    )  # fmt: skip
    return TrainedRun.of(run(config), run_threads), str(folder / "data"), rows.slice(80)


def of_keras(trained: TrainedRun, dataset: str) -> tuple[dict[str, Any], Any]:
    """(the encoded test rows, what plain Keras predicts for them)."""
    import keras

    split = OpenSplit.at(dataset, "test")
    rows = split.encoder.encode(read_all(split.reader))
    assert trained.model is not None
    model = keras.models.load_model(Path(trained.model, "model.keras"))
    return rows.x, model.predict(rows.x, batch_size=BATCH, verbose=0)


def test_a_dataset_without_a_label_is_predicted_and_not_evaluated(
    trained: tuple[TrainedRun, str, pa.RecordBatch], tmp_path: Path
) -> None:
    result, dataset, _ = trained
    write_visits(tmp_path / "new", {"train": 80, "test": 203}, labelled=False)
    predict(result.run, str(tmp_path / "new"), "test", str(tmp_path / "out"), run_threads, batch=BATCH)
    found, (_, expected) = pd.read_parquet(tmp_path / "out"), of_keras(result, dataset)
    assert list(found.columns) == ["sample_id", "prediction"]
    np.testing.assert_array_equal(found["prediction"].to_numpy(), expected[:, 0].astype(np.float64))
    with pytest.raises(ConfigError, match="another schema"):
        evaluate(result.run, str(tmp_path / "new"), "test", run_threads)


def test_each_row_once_at_any_number_of_ranks_and_through_a_killed_one(
    trained: tuple[TrainedRun, str, pa.RecordBatch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result, dataset, rows = trained
    for num_ranks in (1, 3):
        url = str(tmp_path / f"of-{num_ranks}")
        predict(result.run, dataset, "test", url, run_threads, num_ranks=num_ranks, batch=BATCH)
    frame, (_, expected) = pd.read_parquet(tmp_path / "of-1"), of_keras(result, dataset)
    assert list(frame.columns) == ["sample_id", "label", "prediction"] and frame["prediction"].dtype == float
    assert frame["sample_id"].tolist() == rows.column("sample_id").to_pylist()
    assert frame["label"].tolist() == rows.column("label").to_pylist()
    np.testing.assert_array_equal(frame["prediction"].to_numpy(), expected[:, 0].astype(np.float64))
    seen: list[int] = []

    def update(self: Progress, *_: object) -> None:
        seen.append(1)
        if len(seen) == 3:  # files; each of the two ranks has more to write
            assert not (tmp_path / "killed").exists()
            os.kill(living_ranks(os.getpid())[0], signal.SIGKILL)

    monkeypatch.setattr(Progress, "update", update)
    done = predict(result.run, dataset, "test", str(tmp_path / "killed"), run_local, num_ranks=2, batch=BATCH)
    assert done.rows == 203 and "starting the ranks again" in capsys.readouterr().err
    names = sorted(path.name for path in (tmp_path / "of-1").iterdir())
    assert len(names) == 33 and verify(str(tmp_path / "killed")) == []
    for name in names:  # the manifest too
        assert len({(tmp_path / folder / name).read_bytes() for folder in ("of-1", "of-3", "killed")}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "of-1", "of-3"], "no staging is left"
    predict(result.run, dataset, "test", str(tmp_path / "step"), run_threads, batch=BATCH, checkpoint=result.steps)
    assert pd.read_parquet(tmp_path / "step").equals(frame), "the last checkpoint has the model's weights"
    with pytest.raises(ConfigError, match="no such checkpoint"):
        predict(result.run, dataset, "test", str(tmp_path / "new"), run_threads, checkpoint=3)
    for inside in (f"{dataset}/predictions", f"{dataset}/split=test/predictions"):
        with pytest.raises(ConfigError, match="cannot be written into a dataset") as caught:
            predict(result.run, dataset, "test", inside, run_threads)
        assert inside in caught.value.got and not Path(inside).exists()
    with pytest.raises(ExistsError):
        predict(result.run, dataset, "test", str(tmp_path / "of-1"), run_threads)
    for split, output in (("validation", str(tmp_path / "new")), ("test", f"{result.run}/new")):
        with pytest.raises(ConfigError):
            predict(result.run, dataset, split, output, run_threads)


def test_raw_rows_are_predicted_alike_in_python_in_spark_and_by_tensorflow(
    trained: tuple[TrainedRun, str, pa.RecordBatch], spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark.sql.functions import struct

    result, dataset, rows = trained
    x, expected = of_keras(result, dataset)
    features = rows.drop_columns(["label", "sample_id"])
    np.testing.assert_array_equal(result.predict(features, batch=BATCH), expected)
    frame = features.to_pandas(integer_object_nulls=True)
    np.testing.assert_array_equal(lockstep.predict(result.run, frame, batch=BATCH), expected)
    assert lockstep.predict(result.run, features.slice(0, 0)).shape == (0, 1)
    broken = frame.assign(picture=[b"" if row == 7 else data for row, data in enumerate(frame["picture"])])
    with pytest.raises(DataError, match="the image of row 7"):
        lockstep.predict(result.run, broken, batch=BATCH)
    assert result.evaluate("test")["samples"] == 203

    exported = export_run(result.run, str(tmp_path / "model"), run_threads, form="savedmodel")
    assert exported.not_raw == {} and verify(exported.output) == []
    np.testing.assert_array_equal(lockstep.predict(exported.output, frame, batch=BATCH), expected)
    given = {f"serving_default/{name}": values for name, values in x.items()} | raw_inputs(rows)
    whole = lockstep.predict(result.run, frame)  # as one batch
    np.savez(tmp_path / "given.npz", allow_pickle=True, expected=whole, **given)
    command = [sys.executable, "-I", "-c", WITHOUT_LOCKSTEP, exported.output, str(tmp_path / "given.npz")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stderr

    predict(result.run, dataset, "test", str(tmp_path / "of-split"), run_threads, batch=BATCH)
    of_split = spark.read.parquet(str(tmp_path / "of-split")).toPandas().set_index("sample_id")["prediction"]
    udf = lockstep.predict_udf(result.run, batch=BATCH)
    columns = spark.createDataFrame(pa.Table.from_batches([rows])).coalesce(1)
    found = columns.select("sample_id", udf(struct("*")).alias("prediction")).toPandas()
    assert found["sample_id"].tolist() == rows.column("sample_id").to_pylist()
    assert of_split.loc[found["sample_id"]].tolist() == found["prediction"].tolist()
    np.testing.assert_array_equal(found["prediction"].to_numpy(), expected[:, 0].astype(np.float64))
    with pytest.raises(Exception, match="lack columns") as caught:
        columns.select(udf(struct("agent", "user"))).collect()
    assert "no page" in str(caught.value) and "next: " in str(caught.value)


def raw_inputs(rows: pa.RecordBatch) -> dict[str, Any]:
    """Rows of tests.training._visits as inputs of the signature `raw`."""
    found: dict[str, Any] = {}
    for name in ("agent", "page", "user", "bytes", "age", "speed", "robot", "count"):
        column = rows.column(name)
        if name in ("page", "user", "bytes", "speed"):
            found[f"raw/{name}_is_null"] = np.asarray(column.is_null())
            column = column.fill_null("" if name == "page" else 0)
        texts = pa.types.is_string(column.type)
        found[f"raw/{name}"] = np.array(column.to_pylist(), object) if texts else np.asarray(column)
    for name, kind, pad in (("tags", object, "a"), ("path", np.int64, 7), ("seconds", np.float64, 9.0)):
        lists = rows.column(name).to_pylist()
        longest = max(map(len, lists)) + 1
        found[f"raw/{name}"] = np.array([each + [pad] * (longest - len(each)) for each in lists], kind)
        found[f"raw/{name}_length"] = np.array([len(each) for each in lists])
    found["raw/picture"] = np.array(rows.column("picture").to_pylist(), object)
    pixels = b"".join(rows.column("pixels").to_pylist())
    return found | {"raw/pixels": np.frombuffer(pixels, np.uint8).reshape(-1, 2, 2)}


def test_classes_are_lists_and_the_largest() -> None:
    from lockstep.training.results.predict_rank import Form, columns_of

    rows = Encoded({}, np.array([2, 0]), np.array([7, 8]))
    outputs = np.array([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]], np.float32)
    table = columns_of(rows, outputs, Form(False, 3))
    assert table.schema.types == [pa.int64(), pa.int64(), pa.list_(pa.float32()), pa.int64()]
    assert table.column("class").to_pylist() == [2, 1] and table.column("label").to_pylist() == [2, 0]
    assert columns_of(rows, outputs, Form(False, None)).schema.names == ["sample_id", "label", "prediction"]


def test_predictions_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    from lockstep.training.results.predict_rank import doubts_in

    lists = [[0.5, 0.5], [np.nan, 1.0], None, [np.inf, np.nan], [0.0, 1.0]]
    for column in (pa.array([0.5, np.nan, -np.inf, 1.0, None]), pa.array(lists, pa.list_(pa.float32()))):
        pq.write_table(pa.table({"prediction": column}), tmp_path / "part.parquet")
        found = {"not_finite": 2, "left_out": 1, "first_left_out": []}
        assert doubts_in(tmp_path / "part.parquet") == found
    (note,) = notes.of_predictions(2, 4)
    assert note.startswith("2 of 4 predictions") and "; next: " in note and notes.of_predictions(0, 4) == []


def test_bad_images_have_no_prediction_and_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where no image of a batch can be decoded, and the same bytes at any number of ranks."""
    bad = {3: b"", 55: b"no image", **dict.fromkeys(range(74, 80), b"")}
    data = str(tmp_path / "data")
    write_files(data, bad, records={"train": 50, "test": 30})
    config = TrainConfig(
        datasets=(data,), run=str(tmp_path / "run"), model="mlp", global_batch=16, epochs=1, num_ranks=1,
        launcher="local", bad_images="skip", extra={"width": 4},
    )  # fmt: skip
    result = run(config)
    done = predict(result.run, data, "test", str(tmp_path / "one"), run_threads, batch=4)
    predict(result.run, data, "test", str(tmp_path / "two"), run_threads, num_ranks=2, batch=4)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    frame = pd.read_parquet(tmp_path / "one")
    nulls = frame.set_index("sample_id")["prediction"].isna()
    assert nulls.index[nulls].tolist() == [55, *range(74, 80)] and frame["label"].notna().all()
    write_files(tmp_path / "clean", {}, records={"train": 50, "test": 23}, without=[n for n in bad if n >= 50])
    predict(result.run, str(tmp_path / "clean"), "test", str(tmp_path / "of-clean"), run_threads)
    expected = pd.read_parquet(tmp_path / "of-clean").set_index("sample_id")["prediction"]
    found = frame.set_index("sample_id")["prediction"].dropna()
    assert found.index.tolist() == expected.index.tolist()
    np.testing.assert_allclose(np.stack(found.to_list()), np.stack(expected.to_list()), rtol=1e-5)
    evaluated = evaluate(result.run, data, "test", run_threads, batch=4)
    assert done.left_out == evaluated["left_out"] and done.left_out["samples"] == 7
    assert json.loads((tmp_path / "one/_manifest.json").read_text())["left_out"] == done.left_out
    assert "7 rows of split `test` have no prediction, the first: an image of the dataset" in capsys.readouterr().err


def test_classes_of_bad_images_are_null() -> None:
    from lockstep.training.results.predict_rank import Form, columns_of

    image = BadImageError(1, "no image")
    rows = Encoded({}, np.array([1, 0, 1]), np.arange(3), bad=(image,))
    table = columns_of(rows, np.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]], np.float32), Form(False, 2))
    assert table.column("class").to_pylist() == [1, None, 0] and table.column("prediction").null_count == 1
    assert table.column("label").to_pylist() == [1, 0, 1]
