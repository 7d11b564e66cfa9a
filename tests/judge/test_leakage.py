"""What lies on two sides of a split, and what a time split must leave out, as pandas counts it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from lockstep.etl.write.dataset import write_dataset
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.sampled import corrected, sampled_of
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.training.reading.open import OpenSplit
from tests.builders.blocks import read_all
from tests.judge._sets import JudgedSet, written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def twins(rows: pd.DataFrame, fed: list[str]) -> tuple[int, int, float]:
    """Rows whose inputs another split has too, different inputs, and how many rows chance would give."""
    groups = rows.assign(**{name: rows[name].map(str) for name in fed}).groupby(fed, dropna=False)["split"]
    sizes, sides = groups.size().to_numpy(), groups.nunique().to_numpy()
    shares = rows["split"].value_counts(normalize=True).to_numpy()
    alone = (shares[None] ** sizes[:, None]).sum(axis=1)
    return int(sizes[sides > 1].sum()), len(sizes), float((sizes * (1 - alone)).sum())


def check_twins(judged: JudgedSet, fed: list[str]) -> None:
    found, distinct, chance = twins(written(judged), fed)
    leakage = judged.manifest.leakage
    assert leakage is not None
    assert (leakage["found"]["content"], leakage["distinct"]["content"]) == (found, distinct)
    assert leakage["by_chance"]["content"] == pytest.approx(chance, abs=0.051)


def test_clicks_on_two_sides(clicks: JudgedSet) -> None:
    users = [f"user_feature_{number}" for number in range(4)]
    check_twins(clicks, ["item_id", "position", *users, *(f"user-item_affinity_{number}" for number in range(3))])


def test_images_on_two_sides(garments: JudgedSet) -> None:
    check_twins(garments, ["image"])
    rows = garments.raw
    assert twins(rows, ["image"])[0] == 40, "20 training images are test images too"


@pytest.mark.shared_data
def test_incomes_on_two_sides(incomes: JudgedSet) -> None:
    """The number of a row is stored, and no model sees it."""
    check_twins(incomes, ["age", "job", "education", "hours"])


def schema(*features: Field) -> Schema:
    ignored = Field(name="n", dtype="int64", encoding={"kind": "ignore"})
    return Schema((sample_id_field(), ignored, *features, Field(name="yes", dtype="bool", kind="label")))


def numbers_of(url: Path, split: str) -> list[int]:
    opened = OpenSplit.at(str(url), split)
    rows = read_all(opened.reader)
    found: list[int] = rows.column("n").to_pylist()
    return found


def test_a_time_split_leaves_out_what_looks_into_the_next(small: SparkSession, folder: Path) -> None:
    rng = np.random.default_rng(7)
    raw = pd.DataFrame({"n": np.arange(500), "at": rng.integers(0, 900, 500), "yes": rng.random(500) < 0.3})
    url, window = folder / "times", 25
    write_dataset(
        small.createDataFrame(raw), str(url), id_columns=["n"], schema=schema(Field(name="at", dtype="int64")),
        split="time:at:60/20/20", label_window=window,
    )  # fmt: skip
    at = raw["at"].sort_values()
    # The border lies between two times, as near to 60 and 80 % as equal times allow.
    places = [int((at.searchsorted(at.unique()) - cut).__abs__().argmin()) for cut in (300, 400)]
    firsts = [int(at.unique()[place]) for place in places]
    wanted = {
        "train": raw[raw["at"] < firsts[0]],
        "validation": raw[(raw["at"] >= firsts[0]) & (raw["at"] < firsts[1])],
        "test": raw[raw["at"] >= firsts[1]],
    }
    lost = 0
    for split, first in zip(("train", "validation"), firsts, strict=True):
        seen = wanted[split]["at"] + window >= first
        lost += int(seen.sum())
        wanted[split] = wanted[split][~seen]
    for split, rows in wanted.items():
        assert sorted(numbers_of(url, split)) == rows["n"].tolist(), split
    assert load_dataset(str(url)).counts.dropped == {"censored_at_border": lost} and lost > 0


def test_sampling_leaves_the_test_split_and_its_rate_alone(small: SparkSession, folder: Path) -> None:
    rng = np.random.default_rng(8)
    raw = pd.DataFrame({"n": np.arange(4000), "x": rng.random(4000), "yes": rng.random(4000) < 0.05})
    url, x = folder / "sampled", Field(name="x", dtype="float64", encoding={"kind": "number"})
    write_dataset(
        small.createDataFrame(raw), str(url), id_columns=["n"], schema=schema(x), split="60/40", sample="yes=false:20%"
    )
    manifest = load_dataset(str(url))
    train, test = (raw.set_index("n").loc[numbers_of(url, split)] for split in ("train", "test"))
    assert manifest.counts.dropped == {"sampled_out": 4000 - len(train) - len(test)}
    assert train["yes"].sum() + test["yes"].sum() == raw["yes"].sum()
    whole = len(train) + manifest.counts.dropped["sampled_out"]  # of train, before
    no = whole - int(train["yes"].sum())
    assert abs((len(train) - train["yes"].sum()) / no - 0.2) < 4 * (0.2 * 0.8 / no) ** 0.5
    assert abs(whole / 4000 - 0.6) < 4 * (0.6 * 0.4 / 4000) ** 0.5
    # The rate of the thinned split, corrected, is that of the whole one.
    sampled = sampled_of(manifest)
    assert sampled is not None and sampled.splits == ("train",)
    label = Schema.from_json(manifest.schema).label
    assert label is not None
    shares = sampled.of_classes(label)
    assert shares == (0.2, 1.0)
    rate = float(corrected(np.array([train["yes"].mean()]), shares)[0])
    assert rate == pytest.approx(train["yes"].sum() / whole, rel=0.15)
