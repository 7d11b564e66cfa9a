"""Balanced folds and a cross-validation of real data are what scikit-learn makes of the same rows."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from lockstep.etl.write.dataset import write_dataset
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks
from lockstep.training.reading.open import OpenSplit
from lockstep.training.search.folds import cross_validate
from tests.builders.blocks import read_all
from tests.training._threads import run_threads

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.shared_data]

ROWS, FOLDS = 6_000, 5
NUMBERS = {"age": 0, "years": 4, "hours": 12}  # by their place in the file
WORDS = {"work": 1, "family": 5, "job": 6, "relation": 7, "sex": 9}


def incomes(shared: Path) -> pd.DataFrame:
    """UCI Adult from the second row on; the first one's age is cut off. `fnlwgt` groups the rows."""
    with gzip.open(shared / "adult" / "adult.data.gz", "rt") as file:
        whole = pd.read_csv(file, header=None, skiprows=1, nrows=ROWS, skipinitialspace=True)
    columns = {name: whole[place] for name, place in (NUMBERS | WORDS).items()}
    return pd.DataFrame({"row": np.arange(len(whole)), "fnlwgt": whole[2], **columns, "rich": whole[14] == ">50K"})


def schema_of() -> Schema:
    def fitted(kind: str, name: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "file": f"{name}.json", **more}

    words = {"max_size": 50, "min_count": 1, "oov_buckets": 1}
    return Schema((
        sample_id_field(),
        Field(name="row", dtype="int64", encoding={"kind": "ignore"}),
        *(Field(name=name, dtype="int64", encoding=fitted("standardise", name)) for name in NUMBERS),
        *(Field(name=name, dtype="string", encoding=fitted("vocabulary", name, **words)) for name in WORDS),
        Field(name="rich", dtype="bool", kind="label"),
    ))  # fmt: skip


@pytest.mark.soak
def test_logistic_regression_over_balanced_folds(small: SparkSession, folder: Path, shared_data: Path) -> None:
    raw, url = incomes(shared_data), str(folder / "incomes-folds")
    options: dict[str, Any] = {"split": f"kfold:{FOLDS}:fnlwgt:balanced", "fmt": "parquet"}
    manifest = write_dataset(small.createDataFrame(raw), url, id_columns=["row"], schema=schema_of(), **options)
    theirs = [len(test) for _, test in GroupKFold(FOLDS).split(raw, groups=raw["fnlwgt"])]
    names = [f"fold-{number}" for number in range(FOLDS)]
    assert [manifest.splits[name].records for name in names] == theirs
    config = TrainConfig(
        datasets=(url,), run=str(folder / "incomes-cv"), model="logistic", num_ranks=1, global_batch=128, epochs=4,
        learning_rate=0.01, launcher="local",
    )  # fmt: skip
    result = cross_validate(config, run_threads, hooks=Hooks(lease_watch_s=0.1))
    numbers = {name: rows_of(url, name) for name in names}
    expected = []
    for held_out in names:
        test = raw["row"].isin(numbers[held_out])
        encoder = make_column_transformer(
            (StandardScaler(), list(NUMBERS)), (OneHotEncoder(handle_unknown="ignore"), list(WORDS))
        )
        model = make_pipeline(encoder, LogisticRegression(max_iter=1000)).fit(raw[~test], raw["rich"][~test])
        expected.append(roc_auc_score(raw["rich"][test], model.predict_proba(raw[test])[:, 1]))
    found = result["metrics"]["auc"]
    assert found["n"] == FOLDS and found["mean"] == pytest.approx(np.mean(expected), abs=0.003)
    assert found["std"] == pytest.approx(np.std(expected, ddof=1), abs=0.003)


def rows_of(url: str, split: str) -> list[int]:
    """The numbers of a split's rows."""
    reader = OpenSplit.at(url, split, also=("row",)).reader
    found: list[int] = read_all(reader)["row"].to_pylist()
    return found
