"""A logistic baseline of pyspark.ml is that of scikit-learn: the same rows, features and penalty, the same AUC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import hstack
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import MultiLabelBinarizer, OneHotEncoder

from lockstep.etl.baseline.config import BaselineConfig
from lockstep.etl.baseline.train import train_and_predict
from lockstep.features.schema.schema import Schema
from lockstep.training.results.stored_baselines import scores_of
from tests.judge._sets import JudgedSet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow
PENALTY = 0.003


def columns_of(rows: pd.DataFrame, schema: Schema) -> pd.DataFrame:
    """Categories as texts: values, or the bucket of a number; a column for each token of a list."""
    found: dict[str, Any] = {}
    for field in schema.features:
        encoding = field.encoding or {}
        values = rows[field.name]
        if field.is_list:
            continue
        if encoding["kind"] == "bucketise":
            buckets = np.digitize(values.astype(np.float64), encoding["boundaries"])
            values = pd.Series(np.where(values.isna(), -1, buckets), index=rows.index)
        found[field.name] = values.astype(str)
    return pd.DataFrame(found)


@pytest.mark.soak
def test_logistic_on_the_web_log(small: SparkSession, visits: JudgedSet) -> None:
    settings = (f"regParam={PENALTY}", "standardization=false", "maxIter=200")
    found = train_and_predict(small, BaselineConfig(dataset=visits.url, kind="logistic", settings=settings))
    assert found.rows is not None
    ours = scores_of(found.rows, 2)
    schema = Schema.from_json(visits.manifest.schema)
    train, test = visits.rows("train"), visits.rows("test")
    plain, asked = columns_of(train, schema), columns_of(test, schema)
    parts = [make_column_transformer((OneHotEncoder(handle_unknown="ignore"), [*plain])).fit(plain)]
    inputs = [[parts[0].transform(one)] for one in (plain, asked)]
    for field in schema.features:
        if field.is_list:
            binarizer = MultiLabelBinarizer(sparse_output=True).fit(train[field.name])
            known = {*binarizer.classes_}
            for matrices, rows in zip(inputs, (train, test), strict=True):
                matrices.append(binarizer.transform([[one for one in row if one in known] for row in rows[field.name]]))
    model = LogisticRegression(C=1 / (PENALTY * len(train)), max_iter=2000, tol=1e-8)
    model.fit(hstack(inputs[0]).tocsr(), train[visits.label])
    theirs = roc_auc_score(test[visits.label], model.predict_proba(hstack(inputs[1]).tocsr())[:, 1])
    print(f"pyspark.ml {ours['metrics']['roc_auc']:.5f}, scikit-learn {theirs:.5f}")
    assert ours["metrics"]["roc_auc"] == pytest.approx(theirs, abs=0.003)
    assert len(found.rows) == len(test)
