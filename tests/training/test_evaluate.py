"""Evaluation: the same at any number of ranks and rows at a time, and what plain Keras says."""

from __future__ import annotations

import os
import signal
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import ConfigError, CorruptionError, DataError, ExistsError
from storage.verify import verify
from tests.training._threads import run, run_threads
from tests.training._tiny import write_images, write_table
from training.config import TrainConfig
from training.evaluate import evaluate, summary
from training.export_run import export_run
from training.launch.task import RankTask
from training.open_split import OpenSplit
from training.weights_source import weights_at

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(run, dataset): 30 test rows in 4 blocks."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_table(folder / "data")
    options: dict[str, Any] = {"global_batch": 16, "epochs": 2, "launcher": "local", "num_ranks": 1}
    run(
        TrainConfig(
            datasets=(str(folder / "data"),), run=str(folder / "run"), model="logistic", keep_best="loss:max", **options
        )
    )
    return str(folder / "run"), str(folder / "data")


@pytest.mark.parametrize(
    ("num_ranks", "batch"),
    [
        (1, 512),  # all at once
        (2, 7),  # uneven last batches
        (5, 512),  # a rank without a row
    ],
)
def test_ranks_and_batches_change_no_result(trained: tuple[str, str], num_ranks: int, batch: int) -> None:
    import keras

    url, dataset = trained
    result = evaluate(url, dataset, "test", run_threads, num_ranks=num_ranks, batch=batch, baseline="majority")
    split = OpenSplit.at(dataset, "test")
    table = split.reader.table
    rows = split.encoder.encode(split.reader.read_all([table.run(i) for i in range(table.num_blocks)]))
    assert rows.y is not None
    model = keras.models.load_model(Path(result["model"], "model.keras"))
    plain = model.evaluate(rows.x, rows.y, batch_size=30, verbose=0, return_dict=True)
    assert result["samples"] == 30
    assert result["metrics"] == pytest.approx(plain, rel=1e-5)
    train = OpenSplit.at(dataset, "train")
    labels = train.encoder.encode(train.reader.read_all([train.reader.table.run(i) for i in range(14)])).y
    assert labels is not None
    of_majority = np.mean(rows.y == (labels.mean() > 0.5))
    assert result["baseline"]["metrics"]["accuracy"] == pytest.approx(of_majority)
    assert result["baseline"]["metrics"]["auc"] == pytest.approx(0.5)
    assert "majority" in summary(result)


def test_an_unfinished_run_is_evaluated_by_its_checkpoint(trained: tuple[str, str], tmp_path: Path) -> None:
    import shutil

    url, dataset = trained
    whole = evaluate(url, dataset, "test", run_threads)
    shutil.copytree(url, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "results")
    part = evaluate(str(tmp_path / "run"), dataset, "test", run_threads)
    assert "step-0000000012" in part["model"]
    assert part["metrics"] == whole["metrics"]
    write_table(tmp_path / "other", seed=9)
    with pytest.raises(ConfigError, match="another digest") as caught:
        evaluate(str(tmp_path / "run"), str(tmp_path / "other"), "test", run_threads)
    assert "split test: as many records, of other content" in caught.value.got
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(DataError, match="neither a model nor a checkpoint"):
        evaluate(str(tmp_path / "run"), dataset, "test", run_threads)


def test_what_cannot_be_evaluated(trained: tuple[str, str], tmp_path: Path) -> None:
    import shutil

    url, dataset = trained
    with pytest.raises(ConfigError, match="no split"):
        evaluate(url, dataset, "validation", run_threads)
    with pytest.raises(ConfigError, match="baseline"):
        evaluate(url, dataset, "test", run_threads, baseline="rate:a")
    write_images(tmp_path / "images")
    with pytest.raises(ConfigError, match="another schema") as caught:
        evaluate(url, str(tmp_path / "images"), "test", run_threads)
    assert "no field `a`; no field `b`; field `image` (not there)" in caught.value.got
    shutil.copytree(url, tmp_path / "run")
    file = tmp_path / "run" / "models" / "g0001" / "model.keras"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"model\.keras"):
        evaluate(str(tmp_path / "run"), dataset, "test", run_threads)


def weights_of(url: str) -> list[Any]:
    import keras

    weights: list[Any] = keras.models.load_model(Path(url, "model.keras")).get_weights()
    return weights


def test_any_checkpoint_becomes_a_model_and_a_model_the_first_weights(trained: tuple[str, str], tmp_path: Path) -> None:
    url, dataset = trained
    done = export_run(url, str(tmp_path / "model"), run_threads)
    of_run = weights_of(f"{url}/models/g0001")
    for mine, theirs in zip(weights_of(done.output), of_run, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert verify(done.output) == []
    options: dict[str, Any] = {"global_batch": 16, "epochs": 1, "launcher": "local", "num_ranks": 1}
    file = f"{done.output}/model.keras"
    assert weights_at(done.output).file == weights_at(file).file == Path(file).read_bytes()
    sources = (file, f"{url}/checkpoints/{done.checkpoint}")
    for number, source in enumerate(sources):
        config = TrainConfig(
            datasets=(dataset,), run=str(tmp_path / f"run{number}"), model="logistic", init_from=source,
            learning_rate=1e-30, **options,
        )  # fmt: skip
        second = run(config)
        assert second.model is not None
        for mine, theirs in zip(weights_of(second.model), of_run, strict=True):
            np.testing.assert_array_equal(mine, theirs)  # no step of such a rate changes a float32
    # Each epoch's end has a checkpoint where the best is kept, whatever --checkpoint-every; the loss fell.
    assert export_run(url, str(tmp_path / "best"), run_threads, checkpoint="best").checkpoint.step == 6
    assert done.checkpoint.step == 12
    with pytest.raises(ConfigError, match="--keep-best"):
        export_run(str(tmp_path / "run0"), str(tmp_path / "none"), run_threads, checkpoint="best")


def test_what_cannot_be_exported_or_begun_from(trained: tuple[str, str], tmp_path: Path) -> None:
    url, dataset = trained
    with pytest.raises(ConfigError, match="no such checkpoint"):
        export_run(url, str(tmp_path / "model"), run_threads, checkpoint=3)
    with pytest.raises(ExistsError):
        export_run(url, str(tmp_path), run_threads)
    with pytest.raises(ConfigError, match="into a run"):
        export_run(url, f"{url}/models/g0002", run_threads)  # a later generation's name

    def ended(task: RankTask, num_ranks: int, **options: Any) -> list[dict[str, Any]]:
        Path(task.payload["directory"]).mkdir()
        os.kill(os.getpid(), signal.SIGTERM)
        return [{}]

    with pytest.raises(SystemExit):
        export_run(url, str(tmp_path / "model"), ended)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "other.keras").write_bytes(b"PK\3\4 no archive")
    options: dict[str, Any] = {"global_batch": 16, "epochs": 1, "launcher": "local", "num_ranks": 1}
    content = bytearray(Path(url, "models", "g0001", "model.keras").read_bytes())
    content[content.rindex(b"PK\1\2") + 6] = 0xFF  # written by another version of zip, the archive's list says
    (tmp_path / "later.keras").write_bytes(content)
    with zipfile.ZipFile(f"{url}/models/g0001/model.keras") as archive:
        weights = archive.read("model.weights.h5")
    (tmp_path / "changed.weights.h5").write_bytes(weights.replace(b"HEAP", b"heap"))  # where HDF5 has names
    refused = dict.fromkeys(("other.keras", "later.keras", "changed.weights.h5"), CorruptionError)
    for source, error in {"no.keras": ConfigError, dataset: ConfigError, **refused}.items():
        config = TrainConfig(
            datasets=(dataset,),
            run=str(tmp_path / "run"),
            model="logistic",
            init_from=str(tmp_path / source),
            **options,
        )
        with pytest.raises(error):
            run(config)
