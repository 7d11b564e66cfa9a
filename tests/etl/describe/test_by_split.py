"""Statistics of splits next to each other, and histograms that a skewed column does not flatten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.etl.describe.by_split import (
    ALL,
    MOST_SHARE,
    MOST_SPLITS,
    ComparedColumn,
    compared,
    in_order,
    shared_histogram,
)
from lockstep.etl.describe.dataset import class_name, dataset_tables, describe, words
from lockstep.etl.describe.page import as_page
from lockstep.etl.describe.statistics import BINS, ColumnStats
from tests.training._tiny import write_table

RNG = np.random.default_rng(5)
LOG_NORMAL = np.exp(RNG.normal(3, 2, 5000))
FAR = np.concatenate([RNG.normal(0, 1, 5000), [1e9]])  # one value far away, and negative ones
MOSTLY_ZERO = np.where(RNG.random(5000) < 0.8, 0, RNG.integers(1, 500, 5000))


def column(parts: dict[str, pa.Array], dtype: str, shape: tuple[int | None, ...] = ()) -> ComparedColumn:
    total, by_split = ColumnStats("x", dtype, shape), {}
    for name, values in parts.items():
        by_split[name] = ColumnStats("x", dtype, shape)
        for stats in (total, by_split[name]):
            stats.add(values)
    return compared(total, by_split)


def test_each_fact_has_a_value_of_each_split_and_train_is_first() -> None:
    parts = {"test": pa.array([1, None, 5]), "train": pa.array([2, 4, 6, 8]), "other": pa.array([], pa.int64())}
    found = column(parts, "int64")
    assert found.splits == ("train", "other", "test") == tuple(in_order(parts))
    facts = dict(found.facts)
    assert facts["rows"] == ("4", "0", "3") and facts["null"] == ("0", "0", "1 (33.3 %)")
    assert facts["least"] == ("2", "", "1") and facts["greatest"] == ("8", "", "5") and facts["mean"] == ("5", "", "3")
    (histogram,) = found.histograms
    assert histogram.labels == ("1", "2", "4", "5", "6", "8")
    assert histogram.shares["train"] == (0, 0.25, 0.25, 0, 0.25, 0.25) and histogram.shares["test"][0] == 0.5


@pytest.mark.parametrize(
    ("values", "bins", "note"),
    [
        (RNG.normal(0, 1, 5000), "values", ""),
        (LOG_NORMAL, "values, in bins by size", ""),
        (FAR, "values, in bins of equal count", ""),
        (MOSTLY_ZERO, "values", "without 0, the value of train "),
        (np.round(LOG_NORMAL).astype(np.int64), "values, in bins by size", ""),
    ],
)
def test_no_bar_of_a_skewed_column_has_most_values(values: np.ndarray, bins: str, note: str) -> None:
    found = shared_histogram("values", {"train": values, "test": values[:500]})
    assert found.title == bins and found.note.startswith(note) and bool(found.note) == bool(note)
    assert max(found.shares["train"]) <= MOST_SHARE and sum(share > 0.005 for share in found.shares["train"]) >= 8
    assert max(np.histogram(values, BINS)[0]) > MOST_SHARE * len(values) or bins == "values"


@given(
    hnp.arrays(st.sampled_from([np.int64, np.int8, np.float32, np.float64]), st.integers(1, 80)),
    st.integers(0, 80),
)
def test_each_finite_value_is_in_one_bar(values: np.ndarray, cut: int) -> None:
    finite = values[np.isfinite(values)]
    if len(finite):
        found = shared_histogram("values", {"train": finite[:cut], "test": finite[cut:]})
        assert 1 <= len(found.labels) <= BINS + 1
        for shares in found.shares.values():
            assert (len(shares) == len(found.labels) and sum(shares) == pytest.approx(1)) or not any(shares)


def test_ids_have_no_histogram_and_many_folds_are_one() -> None:
    total, stats = ColumnStats("x", "int64", kind="id"), ColumnStats("x", "int64", kind="id")
    for one in (total, stats):
        one.add(pa.array([5, 6]))
    found = compared(total, {"train": stats})
    assert found.histograms == () and dict(found.facts) == {"rows": ("2",), "distinct": ("2",)}
    assert [name for name, _ in total.summary().facts] == ["distinct"], "no mean of ids on a terminal either"
    folds = {f"fold-{number}": pa.array([number]) for number in range(MOST_SPLITS + 1)}
    assert column(folds, "int64").splits == (ALL,) and dict(column(folds, "int64").facts)["rows"] == ("5",)


def test_texts_are_compared_by_the_most_frequent_of_all_splits() -> None:
    found = column({"train": pa.array(["a", "b", "b"]), "test": pa.array(["c", "b", "c", "c"])}, "string")
    histogram = found.histograms[-1]
    assert histogram.title == "the most frequent of 3" and histogram.labels == ("b", "c", "a")
    assert histogram.shares == {"train": (2 / 3, 0, 1 / 3), "test": (0.25, 0.75, 0)}


def test_black_is_left_out_of_pictures_bytes() -> None:
    pictures = np.zeros((4, 2, 8), np.uint8)
    pictures[:, 0, :3] = 200
    stats = ColumnStats("x", "uint8", (2, 8))
    stats.byte_counts += np.bincount(pictures.reshape(-1), minlength=256)
    (histogram,) = compared(stats, {"train": stats}).histograms
    assert histogram.note == "without 0, the value of train 81.2 %"
    assert histogram.shares["train"][200 // 16] == 1


def test_settings_without_a_value_are_left_out(tmp_path: Path) -> None:
    manifest = write_table(str(tmp_path))
    config: dict[str, object] = {"shards": 2, "row_group_bytes": None, "clean": False, "bake": []}
    manifest = replace(manifest, created_by={**manifest.created_by, "config": config})
    (rows,) = [table.rows for table in dataset_tables(manifest) if table.title == "Configuration"]
    assert rows == (("bake", "none"), ("clean", "false"), ("shards", "2"))


def test_json_is_words_and_classes_have_names() -> None:
    assert words({"kind": "vocabulary", "max_size": 9, "file": "a.json"}) == "vocabulary: file a.json, max size 9"
    assert words([1, 2]) == "1, 2" and words(list(range(9))).endswith("7, ... (9 in all)") and words([]) == "none"
    assert (words(None), words("a"), words(True), words({"kind": "hash"})) == ("none", "a", "true", "hash")
    names = ["shirt", "dress"]
    found = [class_name(value, names) for value in (0, 1, 2, True, "x")]
    assert found == ["0 shirt", "1 dress", "2", "True dress", "x"]
    assert class_name(1, None) == "1"


def test_the_page_begins_with_classes_and_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    page = as_page(describe(str(tmp_path / "d")))
    order = ["Classes by `label`", ">Columns (", "<h3>label", "<h3>a", "<h3>sample_id", ">Splits<", ">Schema<"]
    places = [page.index(text) for text in order]
    assert places == sorted(places) and "<title>d: a dataset</title>" in page and "{&#34;" not in page
    assert "prefers-color-scheme: dark" in page and "</span> train</span>" in page and "</span> test</span>" in page
