"""Ranks go where their lanes' bytes lie; what is in a batch does not depend on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.files.interface import HdfsBlock
from tests.training._tiny import write_table
from training.config import TrainConfig
from training.control.task import Limits
from training.driver.preflight import near_ranks
from training.launch import barrier, placement
from training.launch.placement import Near, blocks_by_spark, bytes_near, near_or_none, ranks_of_tasks
from training.launch.process import Place
from training.plan.epoch_plan import EpochPlan


@pytest.mark.parametrize(
    ("hosts", "near", "ranks"),
    [
        (["a", "b"], [{"a": 1}, {"b": 1}], [0, 1]),
        (["a", "b"], [{"b": 1}, {"a": 1}], [1, 0]),
        (["a", "b"], [{"b": 5, "a": 4}, {"b": 9}], [0, 1]),  # both want b: the one that gains more has it
        (["a", "a", "b"], [{"b": 1}, {"a": 1}, {"a": 1}], [2, 1, 0]),
        (["a", "b"], [{}, {}], [0, 1]),  # other names than HDFS's: as without
        (["a", "b"], None, [0, 1]),
        (["a", "b"], [{"b": 1}], [0, 1]),  # of another number of ranks
    ],
)
def test_tasks_become_the_ranks_that_read_beside_them(
    hosts: list[str], near: list[dict[str, int]] | None, ranks: list[int]
) -> None:
    assert ranks_of_tasks(hosts, near) == ranks


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=5, max_size=5))
def test_no_swap_of_two_tasks_gains_anything(table: list[list[int]]) -> None:
    hosts = list("vwxyz")
    near = [dict(zip(hosts, row, strict=True)) for row in table]
    ranks = ranks_of_tasks(hosts, near)
    assert sorted(ranks) == list(range(5))

    def gain(order: tuple[int, ...]) -> int:
        return sum(table[rank][task] for task, rank in enumerate(order))

    found = gain(tuple(ranks))
    assert found >= gain(tuple(range(5)))
    for one, other in permutations(range(5), 2):
        swapped = list(ranks)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        assert gain(tuple(swapped)) <= found


def test_bytes_are_counted_by_the_lanes_of_a_rank_and_the_blocks_of_the_shards(tmp_path: Path) -> None:
    manifest = write_table(tmp_path / "d", records={"train": 64}, shards=2)
    shards = manifest.splits["train"].shards
    plan = EpochPlan.for_dataset(manifest, "train", seed=0, global_batch=8, lanes=4)
    sizes = [shard.bytes for shard in shards]
    half = sizes[0] // 2
    blocks = {
        "0": [HdfsBlock(0, half, ("a", "10.0.0.1")), HdfsBlock(half, sizes[0] - half, ("b",))],
        "1": [HdfsBlock(0, sizes[1], ("a", "b"))],
    }
    near = bytes_near(plan, ["0", "1"], sizes, 2, None, blocks.__getitem__)
    assert sum(found.get("a", 0) for found in near) == pytest.approx(half + sizes[1], abs=20)
    assert sum(found.get("b", 0) for found in near) == pytest.approx(sizes[0] - half + sizes[1], abs=20)
    assert sum(found.get("10.0.0.1", 0) for found in near) == pytest.approx(half, abs=20)
    for rank, found in enumerate(near):
        own = [run for lane in plan.rank_lanes(rank, 2) for run in plan.runs(0, *plan.lane_span(0, lane))]
        second = sum(run.count for run in own if run.shard == 1) * sizes[1] / 32
        assert min(found["a"], found["b"]) >= second - 20


def test_data_on_a_disk_are_near_nobody(tmp_path: Path) -> None:
    write_table(tmp_path / "d")
    config = TrainConfig(
        datasets=(str(tmp_path / "d"),), run="r", model="logistic", num_ranks=2, global_batch=8, epochs=1
    )
    assert near_ranks(config, 2, lambda url: []) is None


def test_ranks_of_data_on_hdfs_are_placed_unless_the_questions_were_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "d", shards=2)
    config = TrainConfig(
        datasets=(str(tmp_path / "d"),), run="r", model="logistic", num_ranks=2, global_batch=8, epochs=1
    )
    monkeypatch.setattr("training.driver.preflight.split_url", lambda url: ("hdfs", "nn", url))
    asked: list[str] = []

    def blocks_of(url: str) -> list[HdfsBlock]:
        asked.append(url)
        return [HdfsBlock(0, 1 << 20, ("a",))]

    near = near_ranks(config, 2, blocks_of)
    assert near is not None and all(found["a"] > 0 for found in near)
    assert asked == [str(tmp_path / "d" / "split=train" / f"part-0000{shard}.tfrecord") for shard in range(2)]
    monkeypatch.setattr("training.driver.preflight.MOST_SHARDS", 1)
    assert near_ranks(config, 2, blocks_of) is None and len(asked) == 2


class JavaBlock:
    """A block location, as Hadoop's Java class tells it."""

    getOffset, getLength = staticmethod(lambda: 5), staticmethod(lambda: 7)
    getHosts = staticmethod(lambda: ["node-1", "node-2"])
    getNames = staticmethod(lambda: ["10.0.0.1:9866", "10.0.0.2:9866"])


def spark_over(blocks: list[JavaBlock]) -> Any:
    """What blocks_by_spark asks of a SparkContext."""
    status = SimpleNamespace(getLen=lambda: 12)
    fs = SimpleNamespace(getFileStatus=lambda _: status, getFileBlockLocations=lambda path, start, length: blocks)
    hadoop = SimpleNamespace(fs=SimpleNamespace(Path=lambda url: SimpleNamespace(getFileSystem=lambda conf: fs)))
    java = SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(hadoop=hadoop)))
    return SimpleNamespace(_jvm=java, _jsc=SimpleNamespace(hadoopConfiguration=lambda: None))


def test_blocks_are_told_by_names_and_addresses_of_their_hosts() -> None:
    (block,) = blocks_by_spark(spark_over([JavaBlock()]), "hdfs://nn/f")
    assert block == HdfsBlock(5, 7, ("node-1", "node-2", "10.0.0.1", "10.0.0.2"))


@pytest.mark.parametrize("fault", ["refuses", "says nothing", "hangs"])
def test_where_nobody_tells_of_blocks_ranks_start_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    monkeypatch.setattr(placement, "_LIMIT_S", 0.1 if fault == "hangs" else 20.0)
    go_on = threading.Event()

    def near(num_ranks: int, blocks_of: Callable[[str], Any]) -> Near:
        if fault == "hangs":
            go_on.wait(20)
        raise OSError(*["refused"] * (fault == "refuses"))

    assert near_or_none(near, spark_over([]), 2) is None
    go_on.set()
    assert "ranks are not placed near their blocks" in caplog.text
    monkeypatch.setattr(placement, "_LIMIT_S", 20.0)
    assert near_or_none(lambda num_ranks, _: [{"a": num_ranks}], spark_over([]), 2) == [{"a": 2}]


def test_each_task_keeps_post_for_the_rank_that_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts are told by rank: that is what World.from_hosts and the ranks' links rest on."""
    places: list[Place] = []

    def keep(place: Place, _: object) -> int:
        places.append(place)
        return 0

    monkeypatch.setattr(barrier, "keep_post", keep)
    for task in range(3):
        infos = [SimpleNamespace(address=address) for address in ("a:1", "b:2", "b:3")]
        context = SimpleNamespace(
            getTaskInfos=lambda infos=infos: infos, partitionId=lambda task=task: task, resources=dict
        )
        monkeypatch.setattr(pyspark.BarrierTaskContext, "get", lambda context=context: context)
        monkeypatch.setattr(pyspark.SparkFiles, "getRootDirectory", lambda: "/files")
        monkeypatch.setenv("LOCKSTEP_FILES", "")
        near = [{"b": 1}, {"b": 1}, {"a": 9}]
        post = barrier.KeepPostOnTask(("host", 1), b"secret", Limits(), [("0",), ("1",), ("2",)], near)
        assert list(post([task])) == [(places[-1].rank, 0)]
    assert [place.rank for place in places] == [2, 1, 0]
    assert {place.hosts for place in places} == {("b", "b", "a")}
    assert [place.devices for place in places] == [("2",), ("1",), ("0",)]
