"""The feed as a tf.data pipeline: same batches, static shapes, repeatable, and errors keep their class."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lockstep.features.images.decode_many import aligned_empty
from lockstep.storage.errors import CorruptionError
from lockstep.training.batches.feed import Batch, RankFeed
from lockstep.training.batches.tf_dataset import FeedPipeline, to_device
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.world import World
from tests.training._tiny import write_images, write_table


def feed(root: Path, rank: int = 1) -> RankFeed:
    opened = OpenSplit.at(str(root), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=3, global_batch=20, lanes=10)
    return RankFeed(plan, opened.reader, opened.encoder, World.local(rank, 3), encoded_ahead_bytes=2000)


def batch_labels(batch: Batch) -> list[int]:
    assert batch.y is not None
    return list(batch.y.tolist())


def test_batches_are_the_feeds_with_static_shapes_each_time(tmp_path: Path) -> None:
    write_images(tmp_path / "d")
    dataset = FeedPipeline(feed(tmp_path / "d"), 2, 9).dataset
    x, y = dataset.element_spec
    assert x["image"].shape == (6, 8, 8, 1) and x["image"].dtype == tf.uint8
    assert y.shape == (6,) and y.dtype == tf.int64
    assert int(dataset.cardinality()) == 7
    assert dataset.options().autotune.enabled is False
    expected = list(feed(tmp_path / "d").batches(2, 9))
    for _ in range(2):  # Keras may look at a first batch and begin again
        found = list(dataset.as_numpy_iterator())
        assert len(found) == len(expected)
        for (images, labels), batch in zip(found, expected, strict=True):
            assert np.array_equal(images["image"], batch.x["image"]) and labels.tolist() == batch_labels(batch)


def test_a_devices_batches_are_the_same(tmp_path: Path) -> None:
    """On the CPU, which stands for a device here: the way there is the same code, no GPU is tried."""
    write_images(tmp_path / "d")
    plain = FeedPipeline(feed(tmp_path / "d"), 2, 9).dataset
    assert to_device(plain) is plain or tf.config.list_logical_devices("GPU")
    moved = to_device(plain, "/CPU:0")
    assert moved.element_spec == plain.element_spec
    for (images, labels), (other, same) in zip(plain.as_numpy_iterator(), moved.as_numpy_iterator(), strict=True):
        assert np.array_equal(images["image"], other["image"]) and np.array_equal(labels, same)


def test_an_aligned_array_becomes_a_tensor_without_a_copy() -> None:
    array = aligned_empty((3, 5, 7 * 4)).view(np.float32)
    array[:] = 1
    tensor = tf.function(lambda: tf.numpy_function(lambda: array, [], tf.float32))()
    array[1] = 2
    assert tensor.shape == (3, 5, 7) and tensor.numpy()[1, 0, 0] == 2


def test_every_batch_is_shown_once_in_order(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    seen: list[Batch] = []
    with FeedPipeline(feed(tmp_path / "d"), 0, 6, seen.append) as pipeline:
        assert len(list(pipeline.dataset)) == 6
    assert [batch.step for batch in seen] == list(range(6))


AHEAD = """
import sys, time
import tensorflow as tf
from tests.training.batches.test_batches_tf import feed
from lockstep.training.batches.tf_dataset import PREFETCH_BATCHES, FeedPipeline

tf.keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()  # as in every rank
made = []
with FeedPipeline(feed(sys.argv[1]), 0, 9, lambda batch: made.append(batch.step)) as pipeline:
    step = tf.function(lambda iterator: iterator.get_next())
    for first, last in ((0, 6), (6, 9)):
        iterator = iter(pipeline.part(first, last))
        for number in range(first, last):
            step(iterator)
            wanted = list(range(min(last, number + 1 + PREFETCH_BATCHES)))
            end = time.monotonic() + 30
            while made != wanted:
                assert time.monotonic() < end, (number, made)
                time.sleep(0.002)
"""


@pytest.mark.slow
def test_batches_are_made_while_a_step_runs_although_operations_are_deterministic(tmp_path: Path) -> None:
    """tf.data drops what could make a run depend on time, unless it knows better."""
    write_table(tmp_path / "d")
    subprocess.run([sys.executable, "-c", AHEAD, f"{tmp_path / 'd'}"], check=True)


def test_a_part_begins_with_batches_that_were_read_before_the_last_one_ended(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    expected = [batch.x["a"].tolist() for batch in feed(tmp_path / "d").batches(0, 12)]
    reading, found = feed(tmp_path / "d"), []
    plain, asked = reading.batches, []

    def batches(first: int, last: int) -> Any:
        asked.append((first, last))
        return plain(first, last)

    with pytest.MonkeyPatch.context() as patch, FeedPipeline(reading, 0, 12) as pipeline:
        patch.setattr(reading, "batches", batches)
        for first, last in ((0, 4), (4, 5), (5, 12), (2, 4)):
            found += [x["a"].tolist() for x, _ in pipeline.part(first, last).as_numpy_iterator()]
    assert found == [*expected, *expected[2:4]]
    assert asked == [(0, 12), (2, 12)], "parts that follow continue"


def test_the_original_error_is_kept(tmp_path: Path) -> None:
    write_table(tmp_path / "d", fmt="tfrecord")
    reading = feed(tmp_path / "d", 0)
    for shard in (tmp_path / "d" / "split=train").iterdir():
        data = bytearray(shard.read_bytes())
        data[1000::400] = bytes(len(data[1000::400]))
        shard.write_bytes(data)
    with FeedPipeline(reading, 0, 9) as pipeline:
        with pytest.raises(tf.errors.OpError, match="CorruptionError"):
            list(pipeline.dataset)
        assert isinstance(pipeline.failure, CorruptionError)


def test_a_closed_pipeline_starts_no_thread_again(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    others = set(threading.enumerate())
    pipeline = FeedPipeline(feed(tmp_path / "d"), 0, 1000)
    iterator = iter(pipeline.dataset)
    next(iterator)
    pipeline.close()
    with pytest.raises(tf.errors.OpError, match="closed"):
        list(iterator)
    assert not any(thread.name == "read-ahead" for thread in set(threading.enumerate()) - others)
