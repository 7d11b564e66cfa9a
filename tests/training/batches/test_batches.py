"""Batches do not depend on the number of ranks; the read-ahead ends, fails and times out where the consumer sees it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError, CorruptionError, StorageTimeoutError
from lockstep.training.batches.feed import Batch, RankFeed, eval_batches
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.order import Run
from lockstep.training.reading.background import ReadAhead
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import SplitReader
from lockstep.training.world import World
from tests.builders.blocks import read_all
from tests.training._tiny import write_images, write_table


def feed(
    root: Path,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    start_step: int = 0,
    groups: int | None = None,
    encoded_ahead_bytes: int = 1 << 20,
) -> RankFeed:
    opened = OpenSplit.at(str(root), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=3, global_batch=24, lanes=12, window_bytes=9000)
    world = World.local(rank, num_ranks)
    return RankFeed(
        plan, opened.reader, opened.encoder, world, start_step, groups=groups, encoded_ahead_bytes=encoded_ahead_bytes
    )


def threads() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_of_another_test() -> None:
    end = time.monotonic() + 60
    while threads() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_global_batches_are_the_same_at_any_number_of_ranks(tmp_path: Path, fmt: str) -> None:
    write_images(tmp_path / "d", fmt=fmt, shards=3)
    alone = list(feed(tmp_path / "d").batches(0, 12))  # 2.9 epochs of 100
    assert [batch.step for batch in alone] == list(range(12))
    for num_ranks in (2, 5, 12):
        parts = [list(feed(tmp_path / "d", rank, num_ranks).batches(0, 12)) for rank in range(num_ranks)]
        for step, whole in enumerate(alone):
            there = [part[step] for part in parts]
            for name in whole.x:
                assert np.array_equal(np.concatenate([part.x[name] for part in there]), whole.x[name])
            labels = np.concatenate([part.y for part in there if part.y is not None])
            assert whole.y is not None and np.array_equal(labels, whole.y)
            assert np.array_equal(np.concatenate([part.sample_ids for part in there]), whole.sample_ids)
            assert np.array_equal(np.concatenate([part.epochs for part in there]), whole.epochs)
    counts = Counter(
        sample for batch in alone for sample in zip(batch.epochs.tolist(), batch.sample_ids.tolist(), strict=True)
    )
    assert max(counts.values()) == 1 and len(counts) == 12 * 24
    assert sum(epoch < 2 for epoch, _ in counts) == 200  # whole epochs are complete


def same(a: Batch, b: Batch) -> bool:
    return a.step == b.step and np.array_equal(a.sample_ids, b.sample_ids) and np.array_equal(a.x["a"], b.x["a"])


def test_any_start_and_any_read_ahead_give_the_same_batches(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    alone = list(feed(tmp_path / "d").batches(0, 12))
    small = feed(tmp_path / "d", encoded_ahead_bytes=1)  # a batch at a time
    assert all(same(a, b) for a, b in zip(small.batches(5, 12), alone[5:], strict=True))
    assert same(small.batch(3), alone[3])
    begun = feed(tmp_path / "d", start_step=7)
    assert all(same(a, b) for a, b in zip(begun, alone[7:], strict=False))


def test_rows_and_groups(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    assert [feed(tmp_path / "d", rank, 3, groups=4).rows for rank in range(3)] == [6, 6, 12]
    with pytest.raises(ConfigError, match="more than the 4 lane groups"):
        feed(tmp_path / "d", 0, 5, groups=4)


def test_the_thread_ends_with_its_iterator(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    batches = feed(tmp_path / "d", encoded_ahead_bytes=1).batches(0, 1000)
    next(batches)
    assert threads() == 1
    batches.close()
    assert threads() == 0
    assert len(list(feed(tmp_path / "d").batches(0, 3))) == 3
    assert threads() == 0


def test_damage_found_by_the_thread_is_raised_in_the_consumer(tmp_path: Path) -> None:
    write_table(tmp_path / "d", fmt="tfrecord")
    reading = feed(tmp_path / "d")
    shard = tmp_path / "d" / "split=train" / "part-00001.tfrecord"
    data = bytearray(shard.read_bytes())
    data[2000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"part-00001\.tfrecord, record \d+, offset \d+"):
        list(reading.batches(0, 12))
    assert threads() == 0


class Stuck(SplitReader):
    """A reader whose file system does not answer."""

    answers = threading.Event()

    def raw(self, run: Run) -> bytes | memoryview | None:
        assert self.answers.wait(120)
        return super().raw(run)


def test_a_deadline_names_what_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.reading.background._JOIN_S", 0.1)  # the stuck thread's end is not waited for
    write_table(tmp_path / "d")
    opened = OpenSplit.at(str(tmp_path / "d"), "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=3, global_batch=24, lanes=12)
    reader = Stuck(str(tmp_path / "d"), opened.manifest, "train", opened.encoder)
    stuck = RankFeed(plan, reader, opened.encoder, World.local(11, 12), deadline_s=0.2)
    with pytest.raises(StorageTimeoutError) as caught:
        try:
            next(stuck.batches(4, 5))
        finally:
            reader.answers.set()
    assert "lane 11 of split `train` at step 4" in caught.value.got


def test_read_ahead_may_be_closed_in_its_own_thread() -> None:
    """Where the collector comes to a forgotten iterator just there."""
    closed, there = threading.Event(), threading.Event()
    own: list[ReadAhead[int]] = []

    def items() -> Iterator[int]:
        assert there.wait(120)
        own[0].close()
        closed.set()
        yield 0

    own.append(ReadAhead(items(), lambda: "nothing", 120.0))
    there.set()
    assert closed.wait(120) and list(own[0]) == []
    own[0].close()


def test_read_ahead_is_bounded() -> None:
    made = 0

    def items() -> Iterator[int]:
        nonlocal made
        for number in range(100):
            made += 1
            yield number

    with ReadAhead(items(), lambda: "nothing", 120.0) as ahead:
        assert next(ahead) == 0
        time.sleep(0.3)
        assert made <= 3  # one used, one finished, one being handed over
    assert list(ahead) == []  # closed


def test_a_reader_of_another_split_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    opened, other = (OpenSplit.at(str(tmp_path / "d"), split) for split in ("train", "test"))
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=3, global_batch=4)
    with pytest.raises(ConfigError, match="different splits"):
        RankFeed(plan, other.reader, opened.encoder, World.local(0, 1))


@pytest.mark.parametrize(
    ("records", "num_ranks", "batch_size"),
    [
        (30, 1, 7),  # uneven last batch
        (30, 3, 7),  # a share of 5 blocks for 3 ranks
        (30, 9, 100),  # more ranks than blocks: some have nothing
        (32, 2, 4),  # batches within blocks
    ],
)
@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_evaluation_gives_each_sample_once(
    tmp_path: Path, fmt: str, records: int, num_ranks: int, batch_size: int
) -> None:
    write_table(tmp_path / "d", fmt=fmt, records={"test": records}, shards=2)
    opened = OpenSplit.at(str(tmp_path / "d"), "test")
    seen: list[int] = []
    sizes: list[int] = []
    for rank in range(num_ranks):
        for part in eval_batches(opened.reader, opened.encoder, rank, num_ranks, batch_size):
            sizes.append(len(part))
            seen.extend(part.sample_id.tolist())
    # The same batches as of one rank: what a model computes of a row may depend, in its last bit, on the batch.
    assert sizes == [min(batch_size, records - start) for start in range(0, records, batch_size)]
    runs = [opened.reader.table.run(block) for block in range(opened.reader.table.num_blocks)]
    assert seen == read_all(opened.reader, runs).column("sample_id").to_pylist()
