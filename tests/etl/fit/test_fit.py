"""What is fitted: on which splits, exactly, the same from any partitions; and the hash that Spark SQL works out."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from lockstep.etl.fit.statistics import fit_all, fitted_on
from lockstep.features.encode.encoder import Encoder
from lockstep.features.encode.hashing import buckets_of
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fitted import read_fitted
from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = load_schema("""
fields = [
    {name = "page", dtype = "string", nullable = true, encoding = {kind = "vocabulary", max_size = 3}},
    {name = "tags", dtype = "string", list = true, encoding = {kind = "vocabulary", max_size = 9, min_count = 2}},
    {name = "item", dtype = "int64", list = true, encoding = {kind = "sequence", length = 2, of.kind = "vocabulary"}},
    {name = "price", dtype = "float64", nullable = true, encoding = {kind = "standardise"}},
    {name = "odd.name", dtype = "int64", encoding = {kind = "standardise", file = "odd.json"}},
    {name = "hashed", dtype = "string", encoding = {kind = "hash", buckets = 7}},
]
""")
DDL = (
    "_split string, page string, tags array<string>, item array<bigint>, price double, `odd.name` bigint, hashed string"
)


def rows_of(count: int, splits: list[str | None]) -> list[dict[str, Any]]:
    """Rows whose figures would be off in floats: large means, values of very different size."""
    rng = np.random.default_rng(5)
    return [
        {
            "_split": splits[number % len(splits)],
            "page": [None, "é", "/a", "/b", "/b/c"][rng.integers(0, 5)],
            "tags": [f"t{n}" for n in rng.integers(0, 12, rng.integers(0, 4))],
            "item": rng.integers(-3, 2**40, 2).tolist(),
            "price": [None, float("nan"), 1e9 + float(rng.random()), 10.0 ** -int(rng.integers(0, 20)), -0.0][
                rng.integers(0, 5)
            ],
            "odd.name": int(rng.integers(2**62, 2**63 - 1)),
            "hashed": "x" * int(rng.integers(0, 50)),
        }
        for number in range(count)
    ]


def frame(spark: SparkSession, rows: list[dict[str, Any]]) -> DataFrame:
    names = [part.split()[0].strip("`") for part in DDL.split(", ")]
    return spark.createDataFrame([tuple(row[name] for name in names) for row in rows], DDL)


def tokens_of(rows: list[dict[str, Any]], field: str, splits: tuple[str, ...], least: int, most: int) -> list[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        if row["_split"] in splits:
            values = row[field] if isinstance(row[field], list) else [row[field]]
            counts.update(str(value) for value in values if value is not None)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0].encode()))
    return [token for token, count in ordered if count >= least][:most]


def moments_of(rows: list[dict[str, Any]], field: str, splits: tuple[str, ...]) -> tuple[int, float, float]:
    values = [Fraction(v) for row in rows if row["_split"] in splits and (v := row[field]) is not None and v == v]
    mean = sum(values, Fraction(0)) / len(values)
    return len(values), float(mean), float(sum(((v - mean) ** 2 for v in values), Fraction(0)) / len(values))


@pytest.mark.slow
def test_statistics_are_exact_and_of_the_training_split_alone(spark: SparkSession) -> None:
    rows = rows_of(300, ["train", "test", "train", None])
    found = fit_all(frame(spark, rows).repartition(5), SCHEMA, ["train", "test"])
    assert list(found) == [f"{name}.json" for name in ("item", "odd", "page", "price", "tags")]
    again = fit_all(frame(spark, rows[::-1]).coalesce(1), SCHEMA, ["test", "train"])
    assert canonical_bytes(found) == canonical_bytes(again), "partitions and their order change nothing"
    train = ("train",)
    assert found["page.json"]["tokens"] == tokens_of(rows, "page", train, 1, 3)
    assert found["tags.json"]["tokens"] == tokens_of(rows, "tags", train, 2, 9)
    assert found["item.json"]["tokens"] == tokens_of(rows, "item", train, 1, 10_000)
    for file, field in (("price", "price"), ("odd", "odd.name")):
        document = found[f"{file}.json"]
        assert (document["count"], document["mean"], document["variance"]) == moments_of(rows, field, train)
    fitted = {field.name: read_fitted(found[str(field.fitted_file)]) for field in SCHEMA.fitted_fields}
    assert Encoder(SCHEMA, fitted).signature.features["page"].shape == (4,)
    # what anybody can work out in SQL
    hashed = frame(spark, rows).selectExpr(
        "hashed", "pmod(xxhash64(hashed), 7) AS s", "`odd.name` AS n", "pmod(xxhash64(`odd.name`), 7) AS b"
    )
    table = hashed.toArrow().combine_chunks()
    for column, expected, kind in (("hashed", "s", pa.string()), ("n", "b", pa.int64())):
        values = table.column(column).combine_chunks().cast(kind)
        assert buckets_of(values, 7, 42).tolist() == table.column(expected).to_pylist()


@pytest.mark.slow
def test_each_held_out_fold_has_statistics_of_the_others(spark: SparkSession) -> None:
    folds = ["fold-0", "fold-1", "fold-2"]
    rows = rows_of(120, list(folds))
    found = fit_all(frame(spark, rows), SCHEMA, folds)
    assert len(found) == 15 and "odd.fold-2.json" in found
    for held_out in folds:
        others = tuple(name for name in folds if name != held_out)
        page, price = found[f"page.{held_out}.json"], found[f"price.{held_out}.json"]
        assert page["fitted_on"] == list(others) and page["tokens"] == tokens_of(rows, "page", others, 1, 3)
        assert (price["count"], price["mean"], price["variance"]) == moments_of(rows, "price", others)


@pytest.mark.slow
def test_an_infinite_value_is_told(spark: SparkSession) -> None:
    from lockstep.etl.spark.errors import translating_errors

    rows = rows_of(4, ["train"])
    rows[2]["price"] = float("inf")
    with (
        pytest.raises(DataError, match=r"field `price` holds a value that is infinite"),
        translating_errors(spark, "fitting"),
    ):
        fit_all(frame(spark, rows), SCHEMA, ["train"])


def test_what_is_fitted_on_which_splits() -> None:
    assert [fit.splits for fit in fitted_on(["train", "validation", "test"])] == [("train",)]
    assert [(fit.held_out, fit.splits) for fit in fitted_on(["fold-0", "fold-1"])] == [
        ("fold-0", ("fold-1",)),
        ("fold-1", ("fold-0",)),
    ]
    for wrong in (["fold-0"], ["a", "b"], [], ["fold-0", "test"]):
        with pytest.raises(ConfigError, match="no split to fit"):
            fitted_on(wrong)


def test_a_declared_vocabulary_is_fitted_without_a_look_at_any_row() -> None:
    """Neither rows nor a training split: the columns are those of pandas' categories."""
    schema = load_schema("""
fields = [
    {name = "page", dtype = "string", nullable = true, encoding = {kind = "vocabulary", tokens = ["b", "é", "a"]}},
    {name = "item", dtype = "int64", encoding = {kind = "vocabulary", tokens = ["7", "10"], oov_buckets = 0}},
]
""")
    nothing: Any = None
    documents = fit_all(nothing, schema, ["everything"])
    assert sorted(documents) == ["item.json", "page.json"]
    assert documents["page.json"] == {
        "kind": "vocabulary", "name": "page", "tokens": ["a", "b", "é"], "counts": [0, 0, 0], "fitted_on": [],
    }  # fmt: skip
    fitted = {schema[doc["name"]].name: read_fitted(json.loads(canonical_bytes(doc))) for doc in documents.values()}
    encoder = Encoder(schema, fitted)
    pages, items = ["é", "a", None, "b", "other"], [10, 7, 10, 8, 7]
    rows = pa.RecordBatch.from_arrays(
        [pa.array(range(5), pa.int64()), pa.array(pages), pa.array(items)], schema=schema.arrow_schema()
    )
    x = encoder.encode(rows).x
    expected = pd.get_dummies(pd.Categorical(pages, ["a", "b", "é"])).to_numpy(np.float32)
    np.testing.assert_array_equal(x["page"][:, :3], expected)
    np.testing.assert_array_equal(x["page"][:, 3], [0, 0, 0, 0, 1])  # the bucket of unknown ones
    expected = pd.get_dummies(pd.Categorical([str(item) for item in items], ["10", "7"])).to_numpy(np.float32)
    np.testing.assert_array_equal(x["item"], expected)


@pytest.mark.parametrize("tokens", ["[]", '["a", "a"]', "[1]", '"a"'])
def test_a_list_that_is_no_vocabulary_is_refused(tokens: str) -> None:
    encoding = f'{{kind = "vocabulary", tokens = {tokens}}}'
    with pytest.raises(ConfigError, match="cannot be declared like this") as caught:
        load_schema(f"""
[[fields]]
name = "p"
dtype = "string"
encoding = {encoding}
""")
    assert "tokens" in caught.value.got


@given(
    mean=st.floats(-1e9, 1e9),
    deviation=st.floats(1e-3, 1e9),
    values=st.lists(st.none() | st.floats(-1e12, 1e12, width=64), min_size=1, max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_a_declared_mean_is_fed_without_a_look_at_any_row(
    mean: float, deviation: float, values: list[float | None]
) -> None:
    """Neither rows nor a training split: what scikit-learn's scaler makes with this mean and deviation."""
    schema = load_schema(f"""
[[fields]]
name = "price"
dtype = "float64"
nullable = true
encoding = {{kind = "standardise", mean = {mean!r}, deviation = {deviation!r}}}
""")
    nothing: Any = None
    documents = fit_all(nothing, schema, ["everything"])
    assert documents["price.json"]["fitted_on"] == [] and documents["price.json"]["count"] == 0
    fitted = read_fitted(json.loads(canonical_bytes(documents["price.json"])))
    rows = pa.RecordBatch.from_arrays(
        [pa.array(range(len(values)), pa.int64()), pa.array(values, pa.float64())], schema=schema.arrow_schema()
    )
    scaler = StandardScaler()
    scaler.mean_, scaler.scale_, scaler.n_features_in_ = np.array([mean]), np.array([deviation]), 1
    wanted = scaler.transform(np.array([[mean if value is None else value] for value in values]))
    np.testing.assert_array_equal(Encoder(schema, {"price": fitted}).encode(rows).x["price"], wanted.astype(np.float32))


@pytest.mark.parametrize("keys", ["mean = 1", "deviation = 1", "mean = 1, deviation = 0", "mean = nan, deviation = 1"])
def test_a_declared_mean_that_is_none_is_refused(keys: str) -> None:
    with pytest.raises(ConfigError, match="cannot be declared like this") as caught:
        load_schema(f"""
[[fields]]
name = "p"
dtype = "int64"
encoding = {{kind = "standardise", {keys}}}
""")
    assert "deviation" in caught.value.allowed or "deviation" in caught.value.got
