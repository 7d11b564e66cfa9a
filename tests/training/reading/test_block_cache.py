"""A node's cache: bounded, shared, never believed, and usable whatever its processes die of."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.jobs.fill_cache import main as fill_cache
from lockstep.storage.errors import ConfigError, CorruptionError
from lockstep.storage.fs import filesystem
from lockstep.training.plan.order import Run
from lockstep.training.reading import cache as block_cache
from lockstep.training.reading import cache as cache_folder
from lockstep.training.reading.cache import FOLDER, LIVE, LOCK, TEMPORARY, BlockCache, BlockId
from lockstep.training.reading.files import ShardFiles
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import ReadOptions, SplitReader
from tests.storage.repacked import repacked
from tests.training._tiny import write_images, write_table
from tests.waiting import WAIT_S

DATA = np.random.default_rng(0).integers(0, 256, 600_000, dtype=np.uint8).tobytes()


def place(start: int, stop: int, dataset: str = "a" * 64) -> BlockId:
    return BlockId(dataset, "split=train/part-00000.tfrecord", start, stop)


def opened(folder: Path, limit: int = 1 << 20, *datasets: str) -> BlockCache:
    cache = BlockCache(str(folder), limit)
    for dataset in datasets or ("a" * 64,):
        cache.reads(dataset)
    return cache


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name not in (LOCK, LIVE)]


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in entries(folder))


def test_what_is_kept_is_there_for_another_process_in_any_part(tmp_path: Path) -> None:
    with_one = opened(tmp_path)
    assert with_one.put(place(100, 600_000), DATA[100:])  # ten chunks
    with_one.close()
    with_one.close()  # as at the end of an owner that has closed it
    cache = opened(tmp_path)
    for start, stop in ((100, 600_000), (100, 101), (262_243, 262_245), (300_000, 599_999), (599_999, 600_000)):
        assert cache.get(place(100, 600_000), start, stop) == DATA[start:stop]
    others = (place(100, 599_999), place(101, 600_000), place(100, 600_000, "b" * 64))
    assert [cache.get(other, 200, 300) for other in others] == [None] * 3
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700


def test_every_flipped_bit_and_every_cut_of_an_entry_is_found_and_the_entry_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = opened(tmp_path)
    assert cache.put(place(0, 50), DATA[:50])
    assert cache.put(place(50, 100), DATA[50:100])
    path = Path(cache.folder.path(os.path.basename(os.path.dirname(entries(tmp_path)[0])), place(0, 50).key.hex()[:40]))
    other = next(entry for entry in entries(tmp_path) if entry != path)
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(len(whole))] + [whole + b"\0", other.read_bytes()]
    for offset in range(len(whole)):
        for bit in range(8):
            damaged.append(whole[:offset] + bytes([whole[offset] ^ 1 << bit]) + whole[offset + 1 :])
    with caplog.at_level(logging.CRITICAL):
        for content in damaged:
            path.write_bytes(content)
            assert cache.get(place(0, 50), 10, 20) is None
            assert not path.exists()
    assert cache.counts.damaged == len(damaged) > 1000
    path.write_bytes(whole[:-1])
    assert cache.get(place(0, 50), 10, 20) is None and "do not match their digest" in caplog.text
    assert cache.put(place(0, 50), DATA[:50]) and cache.get(place(0, 50), 10, 20) == DATA[10:20]


def test_what_is_no_file_in_place_of_an_entry_is_none_and_holds_up_nobody(tmp_path: Path) -> None:
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        folder = tmp_path / getattr(make, "__name__", "device")
        cache = opened(folder)
        assert cache.put(place(0, 50), DATA[:50])
        path = entries(folder)[0]
        path.unlink()
        make(path)
        got: list[bytes | None] = []
        ask = partial(cache.get, place(0, 50), 0, 50)
        reader = threading.Thread(target=lambda ask=ask, got=got: got.append(ask()), daemon=True)
        reader.start()
        reader.join(30)
        assert got == [None]
        cache.close()


def test_the_limit_holds_for_all_processes_and_datasets_together(tmp_path: Path) -> None:
    """Entries of a dataset that nobody reads any more go, the longest unused first; those of a living reader stay."""
    first = opened(tmp_path, 200_000)
    for number in range(30):
        first.put(place(number * 10_000, (number + 1) * 10_000), DATA[:10_000])
        assert total_bytes(tmp_path) <= 200_000
    kept = len(entries(tmp_path))
    assert kept == 19 and not first.keeps  # the first ones stay: what came last is used last in the next epoch too
    second = opened(tmp_path, 200_000, "b" * 64)
    assert not second.put(place(0, 10_000, "b" * 64), DATA[:10_000])  # the first process lives
    for number, path in enumerate(sorted(entries(tmp_path))):
        os.utime(path, (number, number))
    first.close()
    second.folder.epoch_began(0.0)  # it looks again
    assert second.put(place(0, 10_000, "b" * 64), DATA[:10_000])
    assert total_bytes(tmp_path) <= 200_000
    left = sorted(path.stat().st_mtime for path in entries(tmp_path))
    assert left[0] == kept + 1 - len(left)  # the oldest went
    assert not second.put(place(0, 300_000, "b" * 64), DATA[:300_000])  # more than the limit


def test_own_entries_that_two_epochs_did_not_use_make_room(tmp_path: Path) -> None:
    cache = opened(tmp_path, 100_000)
    for number in range(12):
        cache.put(place(number * 10_000, (number + 1) * 10_000), DATA[:10_000])
    assert len(entries(tmp_path)) == 9 and not cache.keeps
    for path in entries(tmp_path)[:4]:
        os.utime(path, (5, 5))
    cache.epoch_began()
    assert not cache.put(place(200_000, 210_000), DATA[:10_000])  # the first epoch is not over for all of them
    cache.epoch_began()
    assert cache.put(place(200_000, 210_000), DATA[:10_000])
    assert len(entries(tmp_path)) == 9 and all(path.stat().st_mtime > 5 for path in entries(tmp_path)[-5:])


def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_counted(tmp_path: Path) -> None:
    cache = opened(tmp_path, 100_000)
    assert cache.put(place(0, 10_000), DATA[:10_000])
    folder = entries(tmp_path)[0].parent
    left = folder / f"{TEMPORARY}dead"
    left.write_bytes(DATA[:60_000])
    writing = cache.folder.reserve(folder.name, 30_000)
    assert writing is not None
    (tmp_path / FOLDER / LOCK).write_bytes(b"torn")  # as after a loss of power
    other = opened(tmp_path, 100_000, "b" * 64)
    assert not left.exists() and Path(writing.path).exists()
    assert other.put(place(0, 50_000, "b" * 64), DATA[:50_000])
    assert not other.put(place(0, 20_000, "b" * 64), DATA[:20_000])
    cache.folder.give_up(writing)
    assert total_bytes(tmp_path) < 61_000


WRITER = """
import sys
from lockstep.training.reading.cache import BlockCache, BlockId
cache = BlockCache(sys.argv[1], 400_000)
cache.reads("a" * 64)
print("ready", flush=True)
number = 0
while True:
    data = bytes([number % 251]) * 20_000
    at = BlockId("a" * 64, "shard", number * 20_000, (number + 1) * 20_000)
    found = cache.get(at, at.start, at.stop)
    assert found in (None, data), number
    if found is None:
        cache.put(at, data)
    number = (number + 1) % 40
    cache.folder.epoch_began(1e12)  # all may go
"""


def test_a_kill_at_any_moment_leaves_a_cache_that_others_use(tmp_path: Path) -> None:
    for life_s in (0.05, 0.12):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        end = time.monotonic() + 120
        while not entries(tmp_path) and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(life_s)
        assert all(writer.poll() is None for writer in writers)  # they found nothing wrong in each other's entries
        writers[0].send_signal(signal.SIGKILL)
        writers[0].wait(120)
        time.sleep(0.05)
        assert writers[1].poll() is None
        writers[1].kill()
        for writer in writers:
            writer.communicate()
        assert total_bytes(tmp_path) <= 400_000
    cache = opened(tmp_path, 400_000)
    assert not list(tmp_path.rglob(f"{TEMPORARY}*"))
    found = [
        cache.get(BlockId("a" * 64, "shard", n * 20_000, n * 20_000 + 20_000), n * 20_000, n * 20_000 + 1)
        for n in range(40)
    ]
    assert any(found) and all(byte in (None, bytes([n % 251])) for n, byte in enumerate(found))
    assert cache.counts.damaged == 0


def test_a_holder_of_the_lock_that_stands_still_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path)
    assert cache.put(place(0, 10), DATA[:10])
    monkeypatch.setattr(cache_folder, "LOCK_LIMIT_S", 0.05)
    with (tmp_path / FOLDER / LOCK).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not cache.put(place(10, 20), DATA[10:20])
        assert cache.get(place(0, 10), 0, 10) == DATA[:10]
        opened(tmp_path, 1 << 20, "b" * 64).close()
    assert cache.put(place(10, 20), DATA[10:20])


def test_an_entry_is_named_only_when_nobody_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan could find neither the old name nor the new one: more would lie there than the limit."""
    cache = opened(tmp_path)
    assert cache.put(place(0, 10), DATA[:10])
    monkeypatch.setattr(cache_folder, "LOCK_LIMIT_S", 0.05)
    write = block_cache._write
    with (tmp_path / FOLDER / LOCK).open("rb") as held:

        def counted_meanwhile(*entry: Any) -> None:
            write(*entry)
            fcntl.flock(held, fcntl.LOCK_EX)

        monkeypatch.setattr(block_cache, "_write", counted_meanwhile)
        assert not cache.put(place(10, 20), DATA[10:20])
        assert len(entries(tmp_path)) == 1  # what was written is not left behind either
    monkeypatch.setattr(block_cache, "_write", write)
    assert cache.keeps and cache.put(place(10, 20), DATA[10:20])


def test_a_block_that_is_kept_while_the_cache_is_closed_is_left_out(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.folder.close()  # another thread's reads go on
    assert not cache.put(place(0, 10), DATA[:10]) and not entries(tmp_path)


def test_a_writer_that_dies_before_its_file_is_there_has_counted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(tmp_path)

    def dies(descriptor: int, *_: int) -> None:
        assert int((tmp_path / FOLDER / LOCK).read_text()) >= 10_000
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", dies)
    with pytest.raises(KeyboardInterrupt):
        cache.put(place(0, 10_000), DATA[:10_000])
    assert entries(tmp_path) == []


@pytest.mark.parametrize("broken", ["posix_fallocate", "pwrite", "rename"])
def test_a_full_disk_turns_the_cache_off_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    cache = opened(tmp_path)
    assert cache.put(place(0, 10), DATA[:10])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    assert not cache.put(place(10, 20), DATA[10:20]) and not cache.put(place(20, 30), DATA[20:30])
    assert caplog.text.count("adds no more blocks: No space left on device") == 1
    assert cache.get(place(0, 10), 0, 10) == DATA[:10] and len(entries(tmp_path)) == 1


def test_a_folder_that_cannot_be_a_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used as a cache"):
        ReadOptions(cache=str(tmp_path / "file"), cache_bytes=10).open_cache()
    with pytest.raises(ConfigError, match="cannot be used as a cache"):
        ReadOptions(cache="/tmp/a\0b", cache_bytes=10).open_cache()
    (tmp_path / FOLDER).mkdir(mode=0o700)
    (tmp_path / FOLDER).chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by others"):
        ReadOptions(cache=str(tmp_path), cache_bytes=10).open_cache()
    with pytest.raises(ConfigError, match="cache_bytes is invalid"):
        ReadOptions(cache=str(tmp_path))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What is read of shards, by shard and place."""
    found: list[tuple[int, int, int]] = []
    read = ShardFiles.read

    def counted(self: ShardFiles, shard: int, start: int, stop: int, *, fresh: bool = False) -> bytes | memoryview:
        found.append((shard, start, stop))
        return read(self, shard, start, stop, fresh=fresh)

    monkeypatch.setattr(ShardFiles, "read", counted)
    return found


def rows_of(reader: SplitReader, skip: int = 3) -> pa.RecordBatch:
    """All records, each block in two runs, hinted at some blocks ahead."""
    runs = []
    for block in range(reader.table.num_blocks):
        run = reader.table.run(block)
        first = min(skip, run.count)
        cut = [(run.first_record, first), (run.first_record + first, run.count - first)]
        runs += [type(run)(run.shard, start, count) for start, count in cut if count]
    batches = list(reader.sequence(runs))
    return pa.concat_batches(batches)


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet", "gzip"])
def test_a_second_epoch_reads_nothing_of_the_dataset(
    tmp_path: Path, reads: list[tuple[int, int, int]], fmt: str
) -> None:
    write_images(tmp_path / "d", fmt="parquet" if fmt == "parquet" else "tfrecord", records={"train": 43}, shards=3)
    if fmt == "gzip":
        repacked(tmp_path / "d", tmp_path / "packed")
    root = str(tmp_path / ("packed" if fmt == "gzip" else "d"))
    wanted = rows_of(OpenSplit.at(root, "train").reader)
    options = ReadOptions(cache=str(tmp_path / "cache"), cache_bytes=1 << 20)
    reader = OpenSplit.at(root, "train", options=options).reader
    reads.clear()
    assert rows_of(reader).equals(wanted)
    blocks = reader.table.num_blocks
    read = sum(stop - start for _, start, stop in reads)
    assert reader.counts.cached is not None and reader.counts.cached.misses == blocks
    assert read == sum(shard.edges[-1] - shard.edges[0] for shard in reader._shards)  # each byte once
    reads.clear()
    assert rows_of(reader, 5).equals(wanted)
    assert rows_of(OpenSplit.at(root, "train", options=options).reader, 8).equals(wanted)
    assert reads == [] and reader.counts.cached is not None and reader.counts.cached.misses == blocks


def test_a_cache_too_small_reads_the_rest_from_the_dataset(tmp_path: Path, reads: list[tuple[int, int, int]]) -> None:
    write_images(tmp_path / "d", fmt="tfrecord", records={"train": 200}, shards=1)
    wanted = rows_of(OpenSplit.at(str(tmp_path / "d"), "train").reader)
    options = ReadOptions(cache=str(tmp_path / "cache"), cache_bytes=10_000)
    reader = OpenSplit.at(str(tmp_path / "d"), "train", options=options).reader
    for _ in range(3):
        assert rows_of(reader).equals(wanted)
        assert total_bytes(tmp_path / "cache") <= 10_000
    assert reader.counts.cached is not None and reader.counts.cached.hits > 0


def test_room_that_comes_while_part_of_a_block_is_read_keeps_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "d", fmt="tfrecord", records={"train": 40}, shards=1, block_records=10)
    wanted = rows_of(OpenSplit.at(str(tmp_path / "d"), "train").reader)
    options = ReadOptions(cache=str(tmp_path / "cache"), cache_bytes=1 << 20)
    reader = OpenSplit.at(str(tmp_path / "d"), "train", options=options).reader
    answers = itertools.chain([False], itertools.repeat(True))
    monkeypatch.setattr(BlockCache, "keeps", property(lambda _: next(answers)))
    for _ in range(2):
        assert pa.concat_batches([reader.read(Run(0, first, 5)) for first in range(0, 40, 5)]).equals(wanted)
    assert "removed from" not in caplog.text and reader.counts.cached is not None and reader.counts.cached.damaged == 0


def test_damage_in_the_cache_is_read_again_and_damage_in_the_dataset_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "d", records={"train": 40}, shards=1)
    files_opened: list[bool] = []
    read = ShardFiles.read

    def noted(self: ShardFiles, shard: int, start: int, stop: int, *, fresh: bool = False) -> bytes | memoryview:
        files_opened.append(fresh)
        return read(self, shard, start, stop, fresh=fresh)

    monkeypatch.setattr(ShardFiles, "read", noted)
    root, shard = str(tmp_path / "d"), tmp_path / "d" / "split=train" / "part-00000.tfrecord"
    options = ReadOptions(cache=str(tmp_path / "cache"), cache_bytes=1 << 20)
    reader = OpenSplit.at(root, "train", options=options).reader
    wanted = rows_of(reader)
    for path in entries(tmp_path / "cache"):
        content = bytearray(path.read_bytes())
        content[-9] ^= 4
        path.write_bytes(content)
    assert rows_of(reader).equals(wanted)
    assert caplog.text.count("do not match their digest") == reader.table.num_blocks
    for path in entries(tmp_path / "cache"):
        path.unlink()
    whole = shard.read_bytes()
    shard.write_bytes(whole[:30] + bytes([whole[30] ^ 1]) + whole[31:])
    with pytest.raises(CorruptionError) as caught:
        reader.read(reader.table.run(0))
    assert (caught.value.file, caught.value.record) == (str(shard), 0)
    assert files_opened.count(True) == 1  # for the second look, by a stream that knows of no replica
    shard.write_bytes(whole)
    assert reader.read(reader.table.run(0)).equals(wanted.slice(0, reader.table.run(0).count))
    assert "the second read has the right bytes" not in caplog.text  # the damaged block is not there any more
    assert filesystem(root).stat(root).is_dir


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_a_filled_cache_serves_all_that_ranks_read(
    tmp_path: Path, fmt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_table(tmp_path / "d", fmt=fmt, records={"train": 100}, shards=2, block_records=8)
    size = sum(shard.bytes for shard in manifest.splits["train"].shards)
    call = ["--dataset", str(tmp_path / "d"), "--cache", str(tmp_path / "cache"), "--cache-bytes"]
    where = ["--where", "a > 99 OR a <= 99"]
    command = [sys.executable, "-m", "lockstep", "fill_cache", *call, str(1 << 20)]
    fillers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    shown = [filler.communicate(timeout=WAIT_S)[0] for filler in fillers]
    assert all(filler.returncode == 0 for filler in fillers) and all("; whole" in one for one in shown), shown
    added = [int(one.split(" blocks added")[0].split()[-1]) for one in shown]
    assert 14 <= sum(added) <= 28  # a block that both read at once is written twice, the second over the first
    options = ReadOptions(cache=str(tmp_path / "cache"), cache_bytes=1 << 20)
    reader = OpenSplit.at(str(tmp_path / "d"), "train", options=options).reader
    assert len(rows_of(reader)) == 100
    found = reader.counts.cached
    assert found is not None and (found.misses, found.damaged) == (0, 0) and found.hits >= 14
    reader.close()
    assert fill_cache([*call, str(1 << 20), *where]) == 0
    assert "0 blocks added (0.0 MB), 14 were there; whole" in capsys.readouterr().out
    small = [*call[:3], str(tmp_path / "small"), call[4], str(size // 2)]
    assert fill_cache(small) == 0
    assert "not whole (no room" in capsys.readouterr().out
    assert sum(path.stat().st_size for path in (tmp_path / "small").rglob("*") if len(path.name) == 40) <= size // 2
