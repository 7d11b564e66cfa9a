"""The pictures of a report that a model was surest to be wrong about."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.training.config import TrainConfig
from lockstep.training.results.evaluate import summary, without_pictures
from lockstep.training.results.report import write_report
from lockstep.training.scoring.misjudged import MOST_BYTES, MOST_PICTURES, _within_bytes
from tests.builders.evaluations import evaluate
from tests.training._threads import run, run_threads
from tests.training._tiny import write_images
from tests.training.results.test_ensemble import BATCH, outputs_of, rows_of


def test_the_surest_mistakes_are_those_of_plain_numpy_at_any_number_of_ranks(tmp_path: Path) -> None:
    images, url, names = tmp_path / "images", str(tmp_path / "run"), ["north-west", "<b>", "south-west", "south-east"]
    manifest = write_images(images, records={"train": 64, "test": 150})
    own = {**manifest.created_by, "config": {"class_names": names}}
    (images / "_manifest.json").write_bytes(replace(manifest, created_by=own).to_bytes())
    config = TrainConfig(
        datasets=(str(images),), run=url, model="tests.training._models:softmax", num_ranks=1, global_batch=32,
        epochs=1, launcher="local",
    )  # fmt: skip
    run(config)
    alone, again = (
        evaluate(url, str(images), "test", run_threads, num_ranks=ranks, batch=BATCH, pictures=True) for ranks in (1, 2)
    )
    assert alone["misjudged"] == again["misjudged"] and "misjudged" not in without_pictures(alone)
    _, rows = rows_of(str(images))
    predicted = outputs_of(alone["model"], rows.x, 150)
    classes, surest = predicted.argmax(axis=1), predicted.max(axis=1).round(6)
    wrong = np.flatnonzero(classes != rows.y)
    wrong = wrong[np.lexsort((rows.sample_id[wrong], -surest[wrong]))][:MOST_PICTURES]
    counts = np.bincount(rows.y, minlength=len(names))  # the summary says names, not numbers
    said = ", ".join(f"{count} of {name}" for count, name in zip(counts, names, strict=True))
    assert f"150 samples, {said}\n" in summary(alone) and alone["class_names"] == names
    assert len(wrong) > 2 and [one["sample_id"] for one in alone["misjudged"]] == rows.sample_id[wrong].tolist()
    for row, one in zip(wrong, alone["misjudged"], strict=True):
        assert (one["true"], one["predicted"]) == (names[rows.y[row]], names[classes[row]])
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(one["picture"].partition(",")[2]))))
        assert np.array_equal(pixels, np.asarray(rows.x["image"][row])[:, :, 0].astype(np.uint8))
    page = Path(write_report(url, alone)).read_text()
    assert page.count("<img ") == len(wrong) and "<b>" not in page and "taken for" in page
    assert page == Path(write_report(url)).read_text(), "a later report keeps them"


def test_the_pictures_of_a_report_are_bounded() -> None:
    many = [{"sample_id": number, "picture": "x" * size} for number, size in enumerate((MOST_BYTES - 9, 100, 9, 1))]
    assert [one["sample_id"] for one in _within_bytes(many)] == [0, 2]
    assert len(_within_bytes([{"picture": "x"}] * 99)) == MOST_PICTURES
