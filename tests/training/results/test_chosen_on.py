"""What evaluate, publish and the report say of a split by which the model was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.training.config import TrainConfig
from lockstep.training.results.chosen_on import chosen_on, chosen_words
from lockstep.training.results.evaluate import summary
from lockstep.training.results.report import write_report
from tests.builders.evaluations import evaluate, publish
from tests.training._threads import run, run_threads
from tests.training._tiny import write_table

RULES: dict[str, Any] = {"keep_best": "val_auc:max", "early_stop": "val_auc:max:3"}
SAID = ["--keep-best val_auc:max", "--early-stop val_auc:max:3"]


@pytest.mark.parametrize(
    ("config", "search", "watching", "split", "found"),
    [
        ({"validate": "val", **RULES}, None, [], "val", SAID),
        ({"validate": "val", **RULES}, None, [], "test", []),
        ({"validate": "val", **RULES}, None, [], "train", []),  # judged nothing; that it was trained on is no choice
        ({"validate": "val"}, None, [], "val", []),  # watched by nobody
        ({"validate": "val"}, "val_loss:min", [], "val", ["the --metric of a search, val_loss:min"]),
        ({"validate": "val"}, None, ["EarlyStopping of val_loss"], "val", ["the model's EarlyStopping of val_loss"]),
        ({"split": "fold-1,fold-2", "keep_best": "loss:min"}, None, [], "fold-2", ["--keep-best loss:min"]),
        ({"validate": "val", "keep_best": "loss:min"}, None, [], "val", []),
    ],
)
def test_what_chose_by_a_split(
    config: dict[str, Any], search: str | None, watching: list[str], split: str, found: list[str]
) -> None:
    given = TrainConfig(datasets=("d",), run="r", model="m", num_ranks=1, global_batch=1, epochs=1, **config)
    document = {"config": given.to_json(), "search_metric": search}
    assert chosen_on(document, split, watching) == found
    assert bool(chosen_words(found)) == bool(found)


@pytest.mark.slow
def test_a_split_that_judged_is_called_so_wherever_its_figures_are_shown(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    write_table(data, records={"train": 96, "val": 40, "test": 40})
    config = TrainConfig(
        datasets=(data,), run=str(tmp_path / "run"), model="tests.training._models:watches_validation", num_ranks=1,
        global_batch=24, epochs=2, launcher="local", validate="val", **RULES,
    )  # fmt: skip
    done = run(config)
    reasons = [*SAID, "the model's ReduceLROnPlateau of val_loss"]
    judged = evaluate(done.run, data, "val", run_threads)
    assert judged["chosen_on"] == reasons
    line = f"chosen on this split ({'; '.join(judged['chosen_on'])}): optimistic"
    assert summary(judged).splitlines()[1] == line
    apart = evaluate(done.run, data, "test", run_threads)
    assert apart["chosen_on"] == [] and "optimistic" not in summary(apart)
    assert f"val, every epoch; {line}" in (page := Path(write_report(done.run)).read_text().replace("&#39;", "'"))
    assert "validation (chosen on: optimistic)" in page
    assert f"<p>{line}</p>" in Path(write_report(done.run, judged)).read_text().replace("&#39;", "'")
    # The same rows in another place are the same rows; other rows of that name are not.
    (tmp_path / "data").rename(tmp_path / "moved")
    assert evaluate(done.run, str(tmp_path / "moved"), "val", run_threads)["chosen_on"] == judged["chosen_on"]
    write_table(tmp_path / "other", records={"train": 96, "val": 40, "test": 40}, seed=5)
    assert evaluate(done.run, str(tmp_path / "other"), "val", run_threads)["chosen_on"] == []
    first = publish(done.run, str(tmp_path / "models"), str(tmp_path / "moved"), "val", "auc:max", run_threads)
    assert first["chosen_on"] == judged["chosen_on"]
