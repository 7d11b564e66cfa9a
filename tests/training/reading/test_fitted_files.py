"""Which fitted files a dataset's encoder is made from, with folds and without."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fitted import Vocabulary
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, CorruptionError, DataError
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit, load_encoder
from lockstep.training.world import World
from tests.training._tiny import write_rows

SCHEMA = load_schema("""
fields = [{name = "w", dtype = "string", encoding = {kind = "vocabulary", max_size = 5}}]
""")


def write(url: Path, *files: str, folds: int = 3) -> DatasetManifest:
    """A dataset of folds with a vocabulary in each of `files`, one token longer each time."""
    rows = pa.RecordBatch.from_pydict({"sample_id": range(6), "w": list("ababab")}, schema=SCHEMA.arrow_schema())
    fitted = tuple(
        Vocabulary(name=name, tokens=("a", "b", "c")[: 1 + place], counts=(3, 2, 1)[: 1 + place], fitted_on=("x",))
        for place, name in enumerate(files)
    )
    records = {f"fold-{fold}": len(rows) // folds for fold in range(folds)}
    return write_rows(str(url), SCHEMA, rows, records, "tfrecord", 1, 8, 0, fitted)


def test_each_held_out_fold_has_its_own_statistics(tmp_path: Path) -> None:
    manifest = write(tmp_path / "folds", "w.fold-0", "w.fold-1")
    for held_out, columns in (("fold-0", 2), ("fold-1", 3)):  # tokens and one bucket for the unknown
        encoder = load_encoder(str(tmp_path / "folds"), manifest, held_out)
        assert encoder.signature.features["w"].shape == (columns,)
    for wrong in (None, "fold-7"):
        with pytest.raises(ConfigError, match="held out") as caught:
            load_encoder(str(tmp_path / "folds"), manifest, wrong)
        assert caught.value.allowed == "fold-0, fold-1"


def test_folds_are_fed_with_the_statistics_of_their_own(tmp_path: Path) -> None:
    """What a rank does: a plan over the folds that are not held out, a reader of them, and batches."""
    write(tmp_path / "d", "w.fold-0", "w.fold-1", "w.fold-2")
    opened = OpenSplit.at([str(tmp_path / "d")], "fold-0,fold-2", training=True)
    plan = EpochPlan.for_dataset(opened.manifest, "fold-0,fold-2", seed=0, global_batch=2)
    batch = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1)).batch(0)
    assert batch.x["w"].shape == (2, 3), "fitted without fold-1: two tokens and one bucket"


@pytest.mark.parametrize(
    ("evaluated", "columns"),
    [
        ("fold-0", 2),  # held out by the run
        ("fold-1", 2),  # trained on, with what was fitted without fold-0
    ],
)
def test_a_run_is_evaluated_with_the_statistics_it_was_trained_with(
    tmp_path: Path, evaluated: str, columns: int
) -> None:
    url = str(tmp_path / "d")
    write(tmp_path / "d", "w.fold-0", "w.fold-1", "w.fold-2")
    opened = OpenSplit.at(url, evaluated, as_trained_on="fold-1,fold-2")
    assert opened.encoder.signature.features["w"].shape == (columns,)
    assert opened.reader.split == evaluated and opened.reader.table.run(0).count == 2


def test_a_dataset_without_folds_has_one_file(tmp_path: Path) -> None:
    manifest = write(tmp_path / "whole", "w")
    for held_out in (None, "fold-0"):
        assert load_encoder(str(tmp_path / "whole"), manifest, held_out).signature.features["w"].shape == (2,)
    (tmp_path / "whole" / "_fitted" / "w.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CorruptionError):
        load_encoder(str(tmp_path / "whole"), manifest)
    with pytest.raises(DataError, match="not in the dataset"):
        load_encoder(str(tmp_path / "none"), write(tmp_path / "none"))
