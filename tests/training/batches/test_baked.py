"""A baked dataset is trained on as the one that it was baked from, and its model's export tells what inputs are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from lockstep.features.encode.bake import Baker
from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fitted import Vocabulary, read_fitted
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.world import World
from tests.training._tiny import write_rows

ROWS = 40
SCHEMA = load_schema("""
fields = [
    {name = "y", dtype = "bool", kind = "label"},
    {name = "w", dtype = "string", encoding = {kind = "vocabulary", max_size = 5}},
    {name = "h", dtype = "int64", list = true, encoding = {kind = "hash", buckets = 7}},
]
""")
WORDS = Vocabulary(name="w", tokens=("a", "b"), counts=(9, 5), fitted_on=("train",))


def written(folder: Path) -> tuple[DatasetManifest, DatasetManifest]:
    """The same rows as declared in `raw` and baked in `baked`."""
    rng = np.random.default_rng(3)
    words, lists = rng.choice(list("abc"), ROWS).tolist(), [rng.integers(0, 30, n % 4).tolist() for n in range(ROWS)]
    columns = {"sample_id": range(ROWS), "y": [word == "a" for word in words], "w": words, "h": lists}
    rows = pa.RecordBatch.from_pydict(columns, schema=SCHEMA.arrow_schema())
    baker = Baker(SCHEMA, {"w": WORDS})
    (baked,) = baker.batches(rows)
    raw = write_rows(str(folder / "raw"), SCHEMA, rows, {"train": ROWS}, "tfrecord", 2, 8, 0, (WORDS,))
    return raw, write_rows(str(folder / "baked"), baker.schema, baked, {"train": ROWS}, "parquet", 2, 8, 0, (WORDS,))


def test_it_gives_the_same_losses_and_says_what_inputs_are(tmp_path: Path) -> None:
    import keras

    from lockstep.training.models import ModelOptions, build
    from lockstep.training.models.on_disk import export

    losses, manifests = [], written(tmp_path)
    for name, manifest in zip(("raw", "baked"), manifests, strict=True):
        opened = OpenSplit.at(str(tmp_path / name), "train")
        plan = EpochPlan.for_dataset(opened.manifest, "train", seed=0, global_batch=ROWS)
        feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1))
        keras.utils.set_random_seed(0)
        model = build("logistic", opened.encoder.signature, ModelOptions(seed=1)).model
        batches = [feed.batch(step) for step in range(3)]  # all rows each time, in another order in each dataset
        losses.append([float(model.train_on_batch(batch.x, batch.y)[0]) for batch in batches])
        files = export(model, str(tmp_path / f"model-{name}"), str(tmp_path / name), manifest, opened.encoder.signature)
        told = sorted(file["name"] for file in files if file["name"] not in ("model.keras", "signature.json"))
        assert told == ["fitted-w.json", *(["raw_schema.json"] if name == "baked" else []), "schema.json"]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    assert losses[0][2] < losses[0][0]

    # Who has the exported folder alone can make the model's inputs of raw rows.
    folder = tmp_path / "model-baked"
    schema = Schema.from_json(json.loads((folder / "raw_schema.json").read_text("utf-8")))
    encoder = Encoder(schema, {"w": read_fitted(json.loads((folder / "fitted-w.json").read_text("utf-8")))})
    assert schema == SCHEMA and encoder.signature.to_json() == json.loads(
        (folder / "signature.json").read_text("utf-8")
    )
