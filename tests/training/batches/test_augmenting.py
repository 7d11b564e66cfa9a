"""--augment on batches: the same bytes of a sample at any number of ranks, cut of batches and start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError
from lockstep.training.batches.augmenting import Augmentation, soft_labels, soft_signature
from lockstep.training.batches.feed import Batch, RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.world import World
from tests.training._tiny import write_images

EVERY = ["crop:2:reflect", "flip:both", "rotate90", "rotate:20", "scale:0.8:1.2", "colour:0.4:0.4", "cutout:3:9"]
MIXED = [*EVERY, "mixup:0.4"]
STEPS = 12  # of 20 samples, so more than two epochs of 100


def batches(root: Path, words: list[str], rank: int, num_ranks: int, first: int = 0, chunk: int = 2000) -> Any:
    opened = OpenSplit.at(str(root), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=3, global_batch=20, lanes=5)
    feed = RankFeed(plan, opened.reader, opened.encoder, World.local(rank, num_ranks), encoded_ahead_bytes=chunk)
    augmentation = Augmentation(words, 3, opened.encoder.signature, 4)
    with_images: Iterator[Batch] = map(augmentation, feed.batches(first, STEPS))
    return list(with_images)


def joined(parts: list[Batch]) -> tuple[bytes, bytes, list[int]]:
    assert all(part.y is not None for part in parts)
    return (
        b"".join(part.x["image"].tobytes() for part in parts),
        b"".join(part.y.tobytes() for part in parts if part.y is not None),
        [sample for part in parts for sample in part.sample_ids.tolist()],
    )


def test_global_batches_depend_on_neither_ranks_nor_chunks_nor_the_start(tmp_path: Path) -> None:
    write_images(tmp_path / "d")
    alone = [joined([batch]) for batch in batches(tmp_path / "d", MIXED, 0, 1)]
    assert alone == [joined([batch]) for batch in batches(tmp_path / "d", MIXED, 0, 1, chunk=60)]
    assert alone[7:] == [joined([batch]) for batch in batches(tmp_path / "d", MIXED, 0, 1, first=7)]
    for num_ranks in (2, 3, 5):
        ranks = [batches(tmp_path / "d", MIXED, rank, num_ranks) for rank in range(num_ranks)]
        assert alone == [joined(list(parts)) for parts in zip(*ranks, strict=True)], num_ranks


def test_a_sample_looks_the_same_wherever_it_comes_up_in_an_epoch_and_else_in_the_next(tmp_path: Path) -> None:
    write_images(tmp_path / "d")
    opened = OpenSplit.at(str(tmp_path / "d"), "train")
    augmentation = Augmentation(EVERY, 3, opened.encoder.signature, 1)
    seen: dict[tuple[int, int], bytes] = {}
    for lanes in (1, 10):  # another order of the same samples
        plan = EpochPlan.for_dataset(opened.manifest, "train", seed=lanes, global_batch=20, lanes=lanes)
        feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1))
        for batch in map(augmentation, feed.batches(0, 10)):
            keys = zip(batch.epochs.tolist(), batch.sample_ids.tolist(), strict=True)
            for key, image in zip(keys, batch.x["image"], strict=True):
                assert seen.setdefault(key, image.tobytes()) == image.tobytes()
    assert len(seen) == 200
    again = [seen[0, sample] != seen[1, sample] for epoch, sample in seen if epoch == 0]
    assert sum(again) == 100


def test_what_is_not_augmented_stays_and_the_batch_given_is_not_changed(tmp_path: Path) -> None:
    write_images(tmp_path / "d")
    opened = OpenSplit.at(str(tmp_path / "d"), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=3, global_batch=20, lanes=5)
    plain = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1)).batch(0)
    before = plain.x["image"].copy()
    for words in (EVERY, MIXED):
        found = Augmentation(words, 3, opened.encoder.signature, 4)(plain)
        assert np.array_equal(plain.x["image"], before) and not np.array_equal(found.x["image"], before)
        assert found.x["image"].dtype == np.uint8 and found.sample_ids is plain.sample_ids
    assert np.array_equal(Augmentation(["crop:0"], 3, opened.encoder.signature, 4)(plain).x["image"], before)


def signature(**changes: Any) -> Signature:
    parts: dict[str, Any] = {
        "features": {"image": TensorSpec(shape=(2, 2, 1), dtype="uint8")},
        "label": TensorSpec(shape=(), dtype="int64"),
        "num_classes": 3,
    }
    return Signature(**{**parts, **changes})


def batch_of(images: Any, y: Any, weight: Any = None) -> Batch:
    ids, epochs = np.arange(len(images)), np.zeros(len(images), dtype=np.int64)
    return Batch(step=0, x={"image": images}, y=y, sample_ids=ids, epochs=epochs, weight=weight)


def test_mixup_makes_labels_of_shares_that_add_up_to_one() -> None:
    augmentation = Augmentation(["mixup:1"], 0, signature(), 20)
    assert augmentation.signature.label == TensorSpec(shape=(3,), dtype="float32")
    # Each image is full of 80 times its class, so what is mixed can be read off it.
    y = np.arange(40) // 7 % 3
    found = augmentation(batch_of(np.repeat((80 * y).astype(np.uint8), 4).reshape(40, 2, 2, 1), y))
    assert found.y is not None and found.y.dtype == np.float32 and found.y.shape == (40, 3)
    assert np.array_equal(found.y.sum(axis=1), np.ones(40))
    assert np.array_equal(np.floor(found.y @ [0, 80, 160] + 0.5), found.x["image"][:, 0, 0, 0])
    assert ((found.y > 0).sum(axis=1) == 2).sum() > 10


def test_mixup_of_yes_or_no_labels_stays_one_number() -> None:
    plain = signature(label=TensorSpec(shape=(), dtype="float32"), num_classes=None)
    augmentation = Augmentation(["mixup:1"], 0, plain, 2)
    assert augmentation.signature == plain
    found = augmentation(batch_of(np.zeros((2, 2, 2, 1), np.uint8), np.array([0, 1], np.float32)))
    assert found.y is not None and ((found.y > 0) & (found.y < 1)).all()


def test_samples_without_weight_are_not_mixed_in() -> None:
    images = np.repeat(np.array([10, 200, 60, 90], np.uint8), 4).reshape(4, 2, 2, 1)
    weight = np.array([1, 0, 1, 3], np.float32)
    plain = signature(weight=TensorSpec(shape=(), dtype="float32"))
    found = Augmentation(["mixup:8"], 0, plain, 2)(batch_of(images, np.array([0, 1, 0, 1]), weight))
    assert np.array_equal(found.x["image"][:2], images[:2]) and not np.array_equal(found.x["image"][2:], images[2:])
    assert found.weight is not None and found.weight[:2].tolist() == [1, 0]
    assert found.y is not None and found.y[:2].tolist() == [[1, 0, 0], [0, 1, 0]]


def test_mixup_keeps_the_weight_of_each_class() -> None:
    rows = 4000
    rare = np.arange(rows) % 10 == 0
    weight = np.where(rare, 4.5, 0.5).astype(np.float32)  # balanced: both classes weigh 1,800
    images = np.zeros((rows, 2, 2, 1), np.uint8)
    weighted = signature(weight=TensorSpec(shape=(), dtype="float32"))
    found = Augmentation(["mixup:1"], 0, weighted, 40)(batch_of(images, rare.astype(np.int64), weight))
    assert found.y is not None and found.weight is not None
    np.testing.assert_array_equal(found.y.sum(axis=1), 1)
    totals = found.weight @ found.y
    np.testing.assert_allclose(totals[:2] / 1800, 1, atol=0.06)  # by chance: partners and shares are drawn
    # Row by row: what is own counts own share times own weight, the rest the partner's.
    each = signature(num_classes=40)
    own, weights = np.arange(40), weight[:40]
    shares = Augmentation(["mixup:1"], 0, each, 40)(batch_of(images[:40], own)).y
    found = Augmentation(["mixup:1"], 0, each, 40)(batch_of(images[:40], own, weights))
    assert shares is not None and found.y is not None and found.weight is not None
    np.testing.assert_allclose(found.weight[:, None] * found.y, shares * weights, rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "lane_rows", "changes", "told"),
    [
        (["mixup:0.2"], 1, {}, "2 rows or more of each lane"),
        (["mixup:0.2"], 4, {"label": None, "num_classes": None}, "one image and a label"),
        (["mixup:0.2"], 4, {"num_classes": None}, "without a number of classes"),
        (["flip"], 4, {"features": {"a": TensorSpec(shape=(1,), dtype="float32")}}, "one feature"),
        (["flip"], 4, {"features": {"a": TensorSpec(shape=(2, 2, 3), dtype="float32")}}, "not normalised"),
        (["rotate90"], 4, {"features": {"a": TensorSpec(shape=(2, 3, 3), dtype="uint8")}}, "square"),
    ],
)
def test_what_cannot_be_done_with_a_dataset_is_refused(
    words: list[str], lane_rows: int, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match="--augment") as refused:
        Augmentation(words, 0, signature(**changes), lane_rows)
    assert told in str(refused.value)


def test_labels_of_an_evaluation_take_the_form_that_the_loss_was_made_for() -> None:
    labels = np.array([2, 0])
    assert soft_labels(labels, signature()) is labels
    found = soft_labels(labels, soft_signature(signature()))
    assert found is not None and found.tolist() == [[0, 0, 1], [1, 0, 0]]
