"""Batches that the feed puts together are the plan's, sample by sample, for every encoding and form of a column."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.fitted import Moments, Vocabulary
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.order import Run
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.parquet_shard import ParquetShard
from lockstep.training.world import World
from tests.training._plain_feed import assert_same, plain_batches
from tests.training._tiny import write_images, write_rows

TOKENS = ("a", "é", "", "ab", "7")
HASH = {"kind": "hash", "buckets": 5, "seed": 7}
WORDS = {"kind": "vocabulary", "file": "words.json", "max_size": 9, "min_count": 1, "oov_buckets": 2}
MANY = {**WORDS, "file": "many.json"}
FITTED: tuple[Any, ...] = (
    Vocabulary(name="words", tokens=TOKENS, counts=(5, 4, 3, 2, 1), fitted_on=("train",)),
    Vocabulary(name="many", tokens=TOKENS, counts=(5, 4, 3, 2, 1), fitted_on=("train",)),
    Moments(name="scaled", count=9, mean=2.5, variance=4.0, fitted_on=("train",)),
)
SCHEMA = Schema(
    (
        sample_id_field(),
        Field(name="words", dtype="string", nullable=True, encoding=WORDS),
        Field(name="hashed", dtype="int64", nullable=True, encoding={**HASH, "output": "index"}),
        Field(name="many", dtype="string", shape=(None,), encoding=MANY),
        Field(name="bytes", dtype="bytes", shape=(None,), encoding=HASH),
        Field(name="turns", dtype="int64", shape=(None,), encoding={"kind": "sequence", "length": 3, "of": HASH}),
        Field(
            name="last",
            dtype="float32",
            shape=(None,),
            encoding={"kind": "sequence", "length": 2, "keep": "last", "with": "length", "pad_value": -1},
        ),
        Field(name="scaled", dtype="float64", nullable=True, encoding={"kind": "standardise", "file": "scaled.json"}),
        Field(name="bucket", dtype="uint64", nullable=True, encoding={"kind": "bucketise", "boundaries": [1, 2**63]}),
        Field(name="flag", dtype="bool"),
        Field(name="number", dtype="int64", nullable=True, encoding={"kind": "number", "null_value": -7}),
        Field(name="unused", dtype="string", nullable=True, encoding={"kind": "ignore"}),
        Field(name="tensor", dtype="float64", shape=(2, 3)),
        Field(
            name="pixels",
            dtype="uint8",
            shape=(2, 2, 3),
            encoding={"kind": "normalise", "divide_by": 255, "mean": [0.1, 0.2, 0.3], "deviation": [1.0, 2.0, 0.5]},
        ),
        Field(name="image", dtype="bytes", encoding={"kind": "image", "height": 3, "width": 2, "channels": 3}),
        Field(name="label", dtype="int64", kind="label", num_classes=4),
        Field(name="weight", dtype="float32", kind="weight"),
    )
)


def rows_of(count: int) -> pa.RecordBatch:
    """Rows of every kind of column, the same each time."""
    rng = np.random.default_rng(count)

    def maybe(values: list[Any]) -> list[Any]:
        return [None if rng.random() < 0.2 else value for value in values]

    def lists(draw: Any) -> list[Any]:
        return [[draw() for _ in range(rng.integers(0, 5))] for _ in range(count)]

    def png() -> bytes:
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)).save(file, "PNG")
        return file.getvalue()

    words = [*TOKENS, "other", "more"]
    columns: dict[str, list[Any]] = {
        "sample_id": rng.permutation(1000 * count)[:count].tolist(),
        "words": maybe([words[n] for n in rng.integers(0, 7, count)]),
        "hashed": maybe(rng.integers(-(2**62), 2**62, count).tolist()),
        "many": lists(lambda: words[rng.integers(0, 7)]),
        "bytes": lists(lambda: rng.bytes(int(rng.integers(0, 9)))),
        "turns": lists(lambda: int(rng.integers(-5, 5))),
        "last": lists(lambda: float(np.float32(rng.random()))),
        "scaled": maybe(rng.normal(size=count).tolist()),
        "bucket": maybe([(0, 1, 2**63, 2**64 - 1)[n] for n in rng.integers(0, 4, count)]),
        "flag": (rng.random(count) < 0.5).tolist(),
        "number": maybe(rng.integers(-(2**20), 2**20, count).tolist()),
        "unused": maybe(["x"] * count),
        "tensor": [rng.normal(size=6).tobytes() for _ in range(count)],
        "pixels": [rng.bytes(12) for _ in range(count)],
        "image": [png() for _ in range(count)],
        "label": rng.integers(0, 4, count).tolist(),
        "weight": rng.random(count, dtype=np.float32).tolist(),
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA.arrow_schema())


@settings(max_examples=16, deadline=None)
@given(st.data())
def test_batches_are_the_plans(data: st.DataObject) -> None:
    count = data.draw(st.integers(12, 70))
    lanes = data.draw(st.sampled_from([1, 2, 3, 6, 12]))
    each = data.draw(st.integers(1, 4))
    fmt, shards, block = data.draw(st.tuples(st.sampled_from(["tfrecord", "parquet"]), *[st.integers(1, 9)] * 2))
    with tempfile.TemporaryDirectory() as root:
        write_rows(root, SCHEMA, rows_of(count), {"train": count}, fmt, shards, block, 0, FITTED)
        opened = OpenSplit.at(root, "train")
        window_bytes = data.draw(st.integers(1, 40)) * lanes * opened.reader.record_bytes
        plan = EpochPlan.for_dataset(
            opened.manifest,
            "train",
            seed=5,
            global_batch=lanes * each,
            lanes=lanes,
            window_bytes=window_bytes,
            interleave=data.draw(st.sampled_from([None, 2, 3])),
        )
        first = data.draw(st.integers(0, 2 * count // plan.global_batch))
        last = first + data.draw(st.integers(1, 1 + 3 * count // plan.global_batch))
        ranks = data.draw(st.integers(1, min(3, lanes)))
        read_ahead = data.draw(st.sampled_from([1, 20_000, 48 << 20]))
        cut = data.draw(st.integers(first, last))
        for rank in range(ranks):
            reader = OpenSplit.at(root, "train").reader
            feed = RankFeed(plan, reader, opened.encoder, World.local(rank, ranks), encoded_ahead_bytes=read_ahead)
            found = [*feed.batches(first, cut), *feed.batches(cut, last)]
            wanted = plain_batches(plan, opened.reader, opened.encoder, feed.lanes, first, last)
            for batch, other in zip(found, wanted, strict=True):
                assert_same(batch, other)
            again = data.draw(st.integers(0, len(found) - 1))
            assert_same(feed.batch(first + again), found[again])
            every = data.draw(st.integers(1, 5))  # a worker's batches, other workers' passed over
            for number in range(again % every, len(found), every):
                assert_same(feed.batch(first + number), found[number])


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_passing_over_batches_reads_each_window_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    write_images(str(tmp_path), fmt=fmt, records={"train": 1200}, shards=2, block_records=40)
    opened = OpenSplit.at(str(tmp_path), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=5, global_batch=8, lanes=4, window_bytes=160_000)
    feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1))
    read: list[int] = []

    raw, decode = opened.reader.raw, ParquetShard.decode

    def counted_raw(run: Run) -> Any:
        found = raw(run)
        read.append(run.count if found is not None else 0)
        return found

    def counted_block(*block: Any) -> pa.RecordBatch:
        read.append(len(found := decode(*block)))
        return found

    monkeypatch.setattr(opened.reader, "raw", counted_raw)
    monkeypatch.setattr(ParquetShard, "decode", counted_block)
    for step in range(1, plan.steps(1), 3):
        feed.batch(step)
    assert plan.window_records > 3 * 2 and sum(read) <= 1200 + 4 * plan.window_records


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_a_whole_number_that_float32_would_change_is_refused(tmp_path: Path, fmt: str) -> None:
    schema = Schema((sample_id_field(), Field(name="many", dtype="int64")))
    rows = pa.RecordBatch.from_pydict(
        {"sample_id": range(20), "many": [*range(18), 1 << 24, (1 << 24) + 1]}, schema=schema.arrow_schema()
    )
    write_rows(str(tmp_path), schema, rows, {"train": 20}, fmt, 1, 5, 0)
    opened = OpenSplit.at(str(tmp_path), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=5, global_batch=4)
    feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1))
    with pytest.raises(DataError, match="`many` would become another number as float32"):
        list(feed.batches(0, 5))


def test_what_is_passed_over_leaves_no_trace(tmp_path: Path) -> None:
    # A chunk is one batch, and what of the next strips lies before it has no place.
    write_images(str(tmp_path), fmt="tfrecord", records={"train": 60}, block_records=10)
    opened, other = OpenSplit.at(str(tmp_path), "train"), OpenSplit.at(str(tmp_path), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=5, global_batch=4, lanes=2, window_bytes=1200)
    feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1), encoded_ahead_bytes=1)
    found = list(plain_batches(plan, other.reader, other.encoder, feed.lanes, 0, 40))
    assert feed.chunk_steps == 1 and plan.window_records < 6
    for first in range(30):
        for step in (first, first + 4, first + 9):
            assert_same(feed.batch(step), found[step])
