"""Sequence models find the next page more often than a table of which pages follow a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.next_page import rows_of, scores
from lockstep.etl import tables
from lockstep.jobs import etl_table
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks
from lockstep.training.search.folds import cross_validate
from tests.builders.evaluations import evaluate
from tests.training._threads import run_threads

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


def test_hits_of_models_and_of_a_table_of_pairs(pages: str, folder: Path) -> None:
    """Each model finds more than the table; the mean of both finds most."""
    found = {}
    for model, epochs in (("gru", 10), ("transformer", 10)):
        config = TrainConfig(
            datasets=(pages,), run=str(folder / f"pages-{model}"), model=model, num_ranks=1, global_batch=64,
            epochs=epochs, launcher="local",
        )  # fmt: skip
        found[model] = cross_validate(config, run_threads, hooks=Hooks(lease_watch_s=0.1))["metrics"]["hit@10"]["mean"]
    both, of_table = [], []
    for held_out in FOLDS:
        runs = [str(folder / f"pages-{model}" / held_out) for model in found]
        both.append(evaluate(runs, pages, held_out, run_threads)["metrics"]["hit@10"])
        train = rows_of(pages, [one for one in FOLDS if one != held_out])
        of_table.append(scores(train, rows_of(pages, [held_out]))[1])
    print(f"{found}, both {np.mean(both):.4f}, table of pairs {np.mean(of_table):.4f}")
    assert np.mean(both) > max(found.values())
    assert min(found.values()) > np.mean(of_table)
