"""A whole profile with ranks as threads: what is made slow is what the verdict names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.batches import feed as batches
from lockstep.training.batches.training_set import Feed
from lockstep.training.config import TrainConfig
from lockstep.training.driver.preflight import open_dataset, plan_for
from lockstep.training.profiling.profile import NO_RUN, Profile, profile, table
from lockstep.training.profiling.profile_rank import ProfileData, drop_pages
from lockstep.training.reading.fetch import BlockFetcher
from lockstep.training.reading.files import ShardFiles
from lockstep.training.world import World
from tests.training._threads import run_threads
from tests.training._tiny import write_images

SLOW_S = 0.02


def slow_s() -> float:
    """So long that a step waits for it, on a loaded machine too: what competes slows the steps, but no sleep."""
    began, computed = time.monotonic(), time.thread_time()
    while time.thread_time() - computed < 0.02:
        sum(range(1000))
    return SLOW_S * max(1.0, (time.monotonic() - began) / 0.02)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """So few that the last cold places are in blocks that were read before."""
    folder = tmp_path_factory.mktemp("profile")
    write_images(folder / "data", records={"train": 800, "test": 8}, fmt="tfrecord")
    return str(folder / "data")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are encoded one by one, so that a few steps are many calls."""
    monkeypatch.setattr(batches, "_CHUNK_ROWS", 8)


def config_of(images: str, num_ranks: int, **more: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "global_batch": 16,
        "lanes": 8,
        "window_bytes": 1,  # so little is loaded ahead of a lane: a block
        "epochs": 1,
        "model": "tests.training._models:small_conv",
        "launcher": "local",
    }
    return TrainConfig(datasets=(images,), run=NO_RUN, num_ranks=num_ranks, **(plain | more))


def profiled(images: str, num_ranks: int, **more: Any) -> Profile:
    return profile(config_of(images, num_ranks, **more), run_threads, steps=8, rounds=2)


@pytest.mark.slow
def test_a_slow_storage_is_named_and_no_file_is_left(
    images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, slow_by_s = ShardFiles.read, slow_s()

    def slow(self: ShardFiles, shard: int, start: int, stop: int, *, fresh: bool = False) -> bytes | memoryview:
        time.sleep(slow_by_s)
        return read(self, shard, start, stop, fresh=fresh)

    monkeypatch.setattr(ShardFiles, "read", slow)
    # Cached data come from a cache of blocks, which is not slow.
    found = profiled(images, 2, cache=str(tmp_path / "cache"), augment="flip")
    assert found.verdict.bound_by == "storage", table(found)
    assert found.verdict.gain_at_most > 1.3
    assert found.measured.waiting["cold"] > 0.3 > found.measured.waiting["synthetic"]
    assert found.measured.cold_alone.median > 3 * found.measured.cached_alone.median
    assert (found.rounds, found.steps, found.repeats) == (2, 8, True)
    stored = sum(path.stat().st_size for path in Path(images, "split=train").iterdir())
    assert found.pass_bytes == found.split_bytes == stored
    steps_bytes = 8 * 16 / 800 * stored  # of one of the three rounds, on both ranks together
    assert len(found.fetched_bytes) == 2 and sum(found.fetched_bytes) > 3 * steps_bytes
    assert f"{found.fetched_bytes[1] / 1e6:.1f} MB by rank 1; an epoch reads 100.0% of" in table(found)
    with pytest.raises(ConfigError, match="absent"):
        profiled(images, 1, cache=str(tmp_path / "cache"), model="tests.training._models:absent")
    assert list(tmp_path.iterdir()) == []
    assert "bound by: reading from storage; without that at most" in table(found)


@pytest.mark.slow
@pytest.mark.soak
def test_a_slow_encoding_is_named(images: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, slow_by_s = batches.RankFeed._next, 2 * slow_s()

    def slow(self: batches.RankFeed, step: int, last_step: int) -> list[batches.Batch]:
        time.sleep(slow_by_s)
        return make(self, step, last_step)

    monkeypatch.setattr(batches.RankFeed, "_next", slow)
    found = profiled(images, 1, micro_batches=2)
    assert found.verdict.bound_by == "input", table(found)
    assert found.verdict.shares["exchange"] < 0.1  # one rank waits for nobody


def test_near_data_are_read_once_and_far_data_each_time(
    images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = ShardFiles.read, []

    def counted(self: ShardFiles, shard: int, start: int, stop: int, *, fresh: bool = False) -> bytes | memoryview:
        reads.append((shard, start, stop))
        return read(self, shard, start, stop, fresh=fresh)

    def reads_of(feed: Feed) -> set[tuple[int, int, int]]:
        reads.clear()
        feed.batch(3)
        return set(reads)

    monkeypatch.setattr(ShardFiles, "read", counted)
    config = config_of(images, 1, cache=str(tmp_path / "cache"))
    identity = plan_for(open_dataset(config)[0], config).identity()
    with ProfileData(config, World.local(0, 1, 1), identity) as data:
        first = reads_of(data.near)
        data.near.batch(30)
        assert (len(first) > 0, reads_of(data.near)) == (True, set())
        assert reads_of(data.far()) == reads_of(data.far()) == first
    assert list(tmp_path.iterdir()) == []


def test_the_budget_of_reading_ahead_is_the_flag_s(images: str, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    class Noted(BlockFetcher):
        def __init__(self, *args: Any, budget_bytes: int, **more: Any) -> None:
            budgets.append(budget_bytes)
            super().__init__(*args, budget_bytes=budget_bytes, **more)

    monkeypatch.setattr("lockstep.training.reading.reader.BlockFetcher", Noted)
    config = config_of(images, 1, read_ahead_bytes=300_000)
    with ProfileData(config, World.local(0, 1, 1), plan_for(open_dataset(config)[0], config).identity()) as data:
        data.far()
    assert budgets == [300_000] * 2


def test_dropped_pages_come_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"abc" * 10_000)
    drop_pages(str(tmp_path / "shard"))
    assert (tmp_path / "shard").read_bytes() == b"abc" * 10_000
