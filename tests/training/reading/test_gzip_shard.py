"""Training on gzip shards: the batches of the same shards unpacked, from any step on; damage told with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.shared.arrays import split_arrays
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import CorruptionError
from lockstep.storage.formats.gzip_blocks import pack
from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.shards import GzipShard
from lockstep.training.world import World
from tests.builders.blocks import read_block
from tests.storage.repacked import repacked
from tests.training._tiny import write_images, write_table


def feed(plan: EpochPlan, root: Path, rank: int = 0, num_ranks: int = 1, start_step: int = 0) -> RankFeed:
    opened = OpenSplit.at(str(root), "train")
    return RankFeed(plan, opened.reader, opened.encoder, World.local(rank, num_ranks), start_step)


def test_batches_are_those_of_the_unpacked_shards_from_any_step_on(tmp_path: Path) -> None:
    plain = write_images(tmp_path / "plain", fmt="tfrecord", shards=3)
    packed = repacked(tmp_path / "plain", tmp_path / "packed")
    sizes: dict[str, Any] = {"seed": 3, "global_batch": 24, "lanes": 12, "window_bytes": 9000}
    plan = EpochPlan.for_dataset(plain, "train", **sizes)
    own = EpochPlan.for_dataset(packed, "train", **sizes)
    # A window is of so many records in memory, which packing does not change; the order follows the digest.
    assert own.window_records == plan.window_records and own.dataset_digest != plan.dataset_digest
    assert packed.splits["train"].shards[0].bytes < plain.splits["train"].shards[0].bytes
    wanted = list(feed(plan, tmp_path / "plain").batches(0, 12))  # 2.9 epochs; windows and lanes cut blocks
    for rank, ranks, start in ((0, 1, 0), (0, 1, 7), (1, 2, 5)):
        found = list(feed(plan, tmp_path / "packed", rank, ranks, start).batches(start, 12))
        rows = slice(rank * 24 // ranks, (rank + 1) * 24 // ranks)
        for one, other in zip(found, wanted[start:], strict=True):
            assert np.array_equal(one.sample_ids, other.sample_ids[rows])
            assert np.array_equal(one.x["image"], other.x["image"][rows])


def test_arrays_are_those_of_the_unpacked_shards(tmp_path: Path) -> None:
    write_table(tmp_path / "plain")
    repacked(tmp_path / "plain", tmp_path / "packed")
    plain, packed = (list(split_arrays(str(tmp_path / name), "test", 7)) for name in ("plain", "packed"))
    assert len(plain) == len(packed) == 5
    for one, other in zip(plain, packed, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


BOMB = pack(bytes(8 << 20))  # 8 kB


@pytest.mark.parametrize(
    ("change", "what", "record", "block"),
    [
        (lambda data, at: data[: at[1] - 4] + b"\x00\x00\xfe\xff" + data[at[1] :], "damaged|does not end", 0, 0),
        (lambda data, at: data[: at[1]] + b"\xff" * 9 + data[at[1] + 9 :], "damaged", 8, 1),
        # Two blocks in each other's place: whole, but of other lengths.
        (lambda data, at: data[: at[1]] + data[at[2] : at[3]] + data[at[1] : at[2]] + data[at[3] :], "gzip", 8, 1),
        (lambda data, at: data[: at[1]] + BOMB[: at[2] - at[1]] + data[at[2] :], "more than its manifest", 8, 1),
    ],
)  # fmt: skip
def test_damage_of_the_same_length_is_told_with_its_place(
    tmp_path: Path, change: Any, what: str, record: int, block: int
) -> None:
    write_images(tmp_path / "plain", fmt="tfrecord", shards=1)
    shard = repacked(tmp_path / "plain", tmp_path / "d").splits["train"].shards[0]
    path, at = tmp_path / "d" / shard.path, shard.block_offsets
    data = path.read_bytes()
    changed = change(data, at)
    assert len(changed) == len(data) and changed != data
    path.write_bytes(changed)
    with pytest.raises(CorruptionError, match=what) as caught:
        list(split_arrays(str(tmp_path / "d"), "train", 10))
    assert (caught.value.file, caught.value.record, caught.value.offset) == (str(path), record, at[block])


def test_blocks_of_another_number_of_records_are_refused(tmp_path: Path) -> None:
    manifest = write_table(tmp_path / "plain", shards=1)
    shard = repacked(tmp_path / "plain", tmp_path / "d").splits["train"].shards[0]
    url, schema = str(tmp_path / "d" / shard.path), Schema.from_json(manifest.schema)
    assert len(read_block(GzipShard(url, shard, 8, schema), url, 1, 8)) == 8
    with pytest.raises(CorruptionError, match="another number of records than its manifest") as caught:
        read_block(GzipShard(url, shard, 7, schema), url, 1, 7)
    assert (caught.value.got.split()[0], caught.value.allowed, caught.value.record) == ("8", "7", 7)


def test_a_cut_shard_is_refused_at_the_start(tmp_path: Path) -> None:
    write_table(tmp_path / "plain", shards=1)
    shard = repacked(tmp_path / "plain", tmp_path / "d").splits["train"].shards[0]
    path = tmp_path / "d" / shard.path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="another length"):
        OpenSplit.at(str(tmp_path / "d"), "train")
    assert load_dataset(str(tmp_path / "d")).compression == "gzip"
