"""Sequence models find the next page more often than a table of which pages follow a page, on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.next_page import rows_of, scores
from etl import tables
from jobs import etl_table
from tests.training._threads import run_threads
from training.config import TrainConfig
from training.driver.train import Hooks
from training.search.folds import cross_validate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.soak]
FOLDS = [f"fold-{number}" for number in range(5)]


@pytest.fixture(scope="module")
def pages(small: SparkSession, folder: Path) -> str:
    """The dataset of conf/next_page.toml in five folds of visitors."""
    url = str(folder / "pages")
    args = ["--config", "conf/next_page.toml", "--split", "kfold:5:visitor", "--output", url]
    config = etl_table.config_of(etl_table.parser().parse(args))
    tables.run(small, config, tables.check(config))
    return url


@pytest.mark.parametrize("model", ["gru", "transformer"])
def test_hits_of_a_model_and_of_a_table_of_pairs(pages: str, folder: Path, model: str) -> None:
    config = TrainConfig(
        datasets=(pages,), run=str(folder / f"pages-{model}"), model=model, num_ranks=1, global_batch=64, epochs=8,
        launcher="local",
    )  # fmt: skip
    found = cross_validate(config, run_threads, hooks=Hooks(lease_watch_s=0.1))["metrics"]["hit@10"]
    of_table = np.mean([
        scores(rows_of(pages, [one for one in FOLDS if one != held_out]), rows_of(pages, [held_out]))[1]
        for held_out in FOLDS
    ])  # fmt: skip
    print(f"{model} {found['mean']:.4f}, table of pairs {of_table:.4f}")
    assert found["mean"] > of_table
