"""Records of earlier datasets have the stated default of a new column: batches as of datasets rewritten by pyarrow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.jobs import evaluate, verify
from lockstep.jobs.train import main
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.plan.datasets import open_mixture, open_parts
from lockstep.training.plan.make_plan import make_plan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.selecting import count_kept
from lockstep.training.world import World
from tests.builders.blocks import read_all
from tests.storage.repacked import repacked
from tests.training._tiny import write_rows

ID, A, LABEL = (
    Field(name="sample_id", dtype="int64", kind="id"),
    Field(name="a", dtype="float32"),
    Field(name="label", dtype="bool", kind="label"),
)
NEW = (
    Field(name="device", dtype="string", nullable=True, default="desktop",
          encoding={"kind": "hash", "buckets": 9, "seed": 42}),
    Field(name="price", dtype="float64", nullable=True, default=0.1, encoding={"kind": "number", "null_value": -1}),
    Field(name="clicks", dtype="int64", nullable=True, default=-3, encoding={"kind": "log"}),
    Field(name="robot", dtype="bool", nullable=True, default=False, encoding={"kind": "number", "null_value": 1}),
    Field(name="size", dtype="uint64", nullable=True, default=2**64 - 1,
          encoding={"kind": "bucketise", "boundaries": [10]}),
    Field(name="score", dtype="float32", nullable=True, default=7, encoding={"kind": "clip", "least": 0, "most": 9}),
)  # fmt: skip
NARROW, WIDE = Schema((ID, A, LABEL)), Schema((ID, NEW[0], A, *NEW[1:], LABEL))


def rows_of(first: int, count: int, schema: Schema, filled: bool = False) -> pa.RecordBatch:
    """Records with nulls and values in the new columns; `filled`: with their defaults, by pyarrow."""
    chance = np.random.default_rng(first)
    numbers = range(first, first + count)
    made: dict[str, Any] = {
        "sample_id": pa.array([sample_id([str(number).encode()], 0) for number in numbers]),
        "a": pa.array(chance.standard_normal(count), pa.float32()),
        "label": pa.array(chance.random(count) < 0.5),
        "device": pa.array([[None, "desktop", "phone", ""][number % 4] for number in numbers]),
        "price": pa.array([None if number % 3 == 0 else number / 8 for number in numbers]),
        "clicks": pa.array([None if number % 5 == 0 else number for number in numbers]),
        "robot": pa.array([[None, True, False][number % 3] for number in numbers]),
        "size": pa.array([None if number % 7 == 0 else number for number in numbers], pa.decimal128(20, 0)),
        "score": pa.array([None if number % 2 == 0 else number % 11 for number in numbers], pa.float32()),
    }
    if filled:
        nothing = {field.name: pa.nulls(count, field.arrow_type) for field in NEW}
        made |= {field.name: nothing[field.name].fill_null(pa.scalar(field.default, field.arrow_type)) for field in NEW}
    return pa.RecordBatch.from_arrays([made[field.name] for field in schema], schema=schema.arrow_schema())


def write(url: Path, first: int, count: int, schema: Schema, form: str, filled: bool = False) -> DatasetManifest:
    records = {"train": count - 20, "test": 20}
    rows, fmt = rows_of(first, count, schema, filled), "parquet" if form == "parquet" else "tfrecord"
    plain = url.with_name(f"{url.name}-plain") if form == "gzip" else url
    manifest = write_rows(str(plain), schema, rows, records, fmt, 3, 8, 0)
    return repacked(plain, url) if form == "gzip" else manifest


def chains(folder: Path, form: str) -> tuple[list[str], list[str]]:
    """Two earlier datasets and one with the new columns; and the same with the earlier ones rewritten."""
    for number, (first, count) in enumerate([(0, 90), (1000, 61)]):
        write(folder / f"old-{number}", first, count, NARROW, form)
        write(folder / f"filled-{number}", first, count, WIDE, form, filled=True)
    write(folder / "new", 5000, 83, WIDE, form)
    return tuple([str(folder / name) for name in (f"{kind}-0", f"{kind}-1", "new")] for kind in ("old", "filled"))  # type: ignore[return-value]


def same(one: Any, other: Any) -> None:
    """Batches are equal, bit for bit."""
    assert one.x.keys() == other.x.keys() == {"a", *(field.name for field in NEW)}
    for name in one.x:
        np.testing.assert_array_equal(one.x[name], other.x[name], err_msg=name, strict=True)
    for name in ("y", "sample_ids", "epochs"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


@pytest.mark.parametrize("form", ["tfrecord", "gzip", "parquet"])
@pytest.mark.parametrize("mix", [None, (3, 1, 2)])
@pytest.mark.parametrize("newest_first", [False, True])
def test_batches_are_those_of_rewritten_datasets(
    tmp_path: Path, form: str, mix: tuple[int, ...] | None, newest_first: bool
) -> None:
    """In the order of one plan, since the order of samples follows from the datasets' digests."""
    each = [TrainingSet.at(urls[::-1] if newest_first else urls, "train", mix) for urls in chains(tmp_path, form)]
    plan = make_plan(each[0].manifest, "train", mix, seed=4, global_batch=12, lanes=2, window_bytes=2000)
    assert each[0].encoder.signature == each[1].encoder.signature
    for rank in range(2):
        feeds = [one.feed(plan, World.local(rank, 2)) for one in each]
        steps = plan.steps(3)
        for one, other in zip(*(feed.batches(0, steps) for feed in feeds), strict=True):
            same(one, other)
        assert one.step == steps - 1 > 9


@pytest.mark.parametrize("form", ["tfrecord", "gzip", "parquet"])
def test_rows_and_conditions_see_the_defaults(tmp_path: Path, form: str) -> None:
    from lockstep.features.condition import Condition

    old, filled = chains(tmp_path, form)
    one, other = (OpenSplit.at(urls, "test") for urls in (old, filled))
    found, wanted = read_all(one.reader), read_all(other.reader)
    assert found.schema == wanted.schema and found.equals(wanted) and len(found) == 60
    condition = Condition.parse("device = 'desktop' AND price < 0.2", WIDE)
    counts = [
        count_kept(url, OpenSplit.at(url, "train").manifest, "train", condition, lambda: None, WIDE)
        for url in (old[0], filled[0])
    ]
    assert counts[0] == counts[1] and sum(counts[0]) == 70


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda field: replace(field, default=None), "field `device`"),
        (lambda field: replace(field, name="a2"), "field `a2`"),
    ],
)
def test_a_column_without_a_default_does_not_fit(tmp_path: Path, change: Any, got: str) -> None:
    write(tmp_path / "old", 0, 40, NARROW, "tfrecord")
    field = change(replace(NEW[0], default=None))
    schema = Schema((ID, A, field, LABEL))
    rows = rows_of(100, 40, Schema((ID, A, NEW[0], LABEL)))
    rows = pa.RecordBatch.from_arrays(rows.columns, schema=schema.arrow_schema())
    write_rows(str(tmp_path / "new"), schema, rows, {"train": 20, "test": 20}, "tfrecord", 1, 8, 0)
    urls = [str(tmp_path / "old"), str(tmp_path / "new")]
    for opened in (open_parts, open_mixture):
        with pytest.raises(ConfigError, match="cannot be trained on as one") as caught:
            opened(urls, "train")
        assert got in caught.value.got


def test_a_changed_type_and_two_columns_of_siblings_do_not_fit(tmp_path: Path) -> None:
    write(tmp_path / "one", 0, 40, Schema((ID, A, NEW[0], LABEL)), "parquet")
    write(tmp_path / "two", 100, 40, Schema((ID, A, NEW[1], LABEL)), "parquet")
    other = replace(NEW[1], dtype="float32")
    write(tmp_path / "typed", 200, 40, Schema((ID, A, *NEW[:1], LABEL)), "parquet")
    with pytest.raises(ConfigError, match="cannot be trained on as one"):
        open_parts([str(tmp_path / "one"), str(tmp_path / "two")], "train")
    assert Schema((ID, A, NEW[0], other, LABEL)).added_to(Schema((ID, A, NEW[1], LABEL))) is None
    assert NARROW.added_to(WIDE) is None and WIDE.added_to(NARROW) == NEW and WIDE.added_to(WIDE) == ()


@pytest.mark.slow
def test_a_run_trains_validates_and_evaluates_over_old_and_new(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    urls, run = chains(tmp_path, "tfrecord")[0], str(tmp_path / "run")
    call = ["--dataset", *urls, "--run", run, "--model", "logistic", "--num-ranks", "2", "--epochs", "2", "--audit"]
    call += ["--global-batch", "8", "--validate", "test", "--where", "device IS NOT NULL", "--launcher", "local"]
    assert main(call) == 0 and verify.main([run]) == 0
    (stored,) = Path(run).glob("models/*/schema.json")
    assert Schema.from_json(json.loads(stored.read_bytes())) == WIDE
    assert evaluate.main(["--run", run, "--dataset", urls[-1], "--launcher", "local", "--split", "test"]) == 0
    assert "ok    audit" in capfd.readouterr().out
