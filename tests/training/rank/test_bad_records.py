"""Records whose bytes are wrong: the run stops, or keeps their places with weight 0 (--on-bad-record skip)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import CorruptionError
from lockstep.training.batches.feed import RankFeed
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.config import TrainConfig
from lockstep.training.driver.preflight import plan_for
from lockstep.training.plan.order import Run
from lockstep.training.reading.bad_records import BadRecords
from lockstep.training.results.audit import check_run_audit
from lockstep.training.results.report import write_report
from lockstep.training.run.metrics import read_history
from lockstep.training.world import World
from tests.builders.evaluations import evaluate
from tests.storage.repacked import repacked
from tests.training._threads import final_tensors, run, run_threads
from tests.training._tiny import write_table

LENGTH_FIELD, DATA = 3, 20  # bytes of a record


def damaged(folder: Path, bad: dict[int, int], **more: Any) -> Path:
    """A dataset whose first shard has a flipped bit in byte `bad[record]` of some records."""
    write_table(folder, **({"records": {"train": 200, "test": 30}} | more))
    shard = sorted((folder / "split=train").iterdir())[0]
    lines = sorted((folder / "_index" / "train").iterdir())[0].read_text().splitlines()
    content = bytearray(shard.read_bytes())
    for record, byte in bad.items():
        content[int(lines[record].split()[0]) + byte] ^= 1
    shard.write_bytes(content)
    return shard


def config_of(data: Path, url: Path, ranks: int, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"global_batch": 24, "epochs": 3, "precision": "float64", "checkpoint_every": 3}
    return TrainConfig(
        datasets=(str(data),), run=str(url), num_ranks=ranks, model="logistic", launcher="local", **(options | more)
    )


def test_only_the_bad_records_are_replaced_and_have_weight_0(tmp_path: Path) -> None:
    shard = damaged(tmp_path / "bad", {9: DATA, 12: LENGTH_FIELD})
    write_table(tmp_path / "good", records={"train": 200, "test": 30})
    told: list[BadRecords] = []
    opened = TrainingSet.at([str(tmp_path / "bad")], "train", None).skipping_bad_records(told.append)
    whole = TrainingSet.at([str(tmp_path / "good")], "train", None)
    readers = [one.readers[0] for one in (opened, whole)]
    for _ in range(2):
        found, wanted = (reader.read(Run(0, 8, 8)).to_pylist() for reader in readers)
        assert [row for row, other in enumerate(wanted) if found[row] != other] == [1, 4]
        assert found[1] == {**wanted[0], "sample_id": found[1]["sample_id"]}
    for record, bad in zip((9, 12), told, strict=True):
        assert f"{shard.name}, record {record}," in bad.words and (bad.first, bad.count) == (record, 1)
        assert BadRecords.of_row(bad.to_row()) == bad and bad.ids[0] in readers[0].skipped

    plan = plan_for(whole.manifest, config_of(tmp_path / "good", tmp_path / "run", 1))
    feeds = [one.feed(plan, World.local(0, 1)) for one in (opened, whole)]
    weights = []
    for step in range(plan.steps(1)):
        mine, other = (feed.batch(step) for feed in feeds)
        assert mine.weight is not None
        assert np.array_equal(mine.weight != 0, mine.sample_ids == other.sample_ids)
        weights.append(mine.weight)
    assert (np.concatenate(weights) == 0).sum() == 2 and isinstance(feeds[0], RankFeed)


def test_another_block_stands_in_for_one_without_a_good_record_and_a_shard_without_any_is_refused(
    tmp_path: Path,
) -> None:
    shard = damaged(tmp_path / "bad", {8: DATA, 9: DATA}, block_records=2)
    opened = TrainingSet.at([str(tmp_path / "bad")], "train", None).skipping_bad_records(print)
    good, bad = (opened.readers[0].read(run).to_pylist() for run in (Run(0, 6, 2), Run(0, 8, 2)))
    assert [{**row, "sample_id": 0} for row in bad] == [{**good[0], "sample_id": 0}] * 2
    assert len({row["sample_id"] for row in (*good, *bad)}) == 4
    damaged(tmp_path / "worse", dict.fromkeys(range(20), DATA), shards=1, records={"train": 20})
    opened = TrainingSet.at([str(tmp_path / "worse")], "train", None).skipping_bad_records(print)
    with pytest.raises(CorruptionError, match=f"{shard.name.replace('2', '1')}, record 8"):
        opened.readers[0].read(Run(0, 8, 1))


@pytest.mark.parametrize("part", [(8, 8), (10, 3), (15, 1)])
def test_a_record_is_replaced_by_the_same_one_however_its_block_is_cut(tmp_path: Path, part: tuple[int, int]) -> None:
    """Ranks cut a block where their lanes end: statistics of batches must not depend on their number."""
    damaged(tmp_path / "bad", {10: DATA, 15: DATA})
    opened = TrainingSet.at([str(tmp_path / "bad")], "train", None).skipping_bad_records(lambda bad: None)
    whole = opened.readers[0].read(Run(0, 8, 8)).to_pylist()
    assert opened.readers[0].read(Run(0, *part)).to_pylist() == whole[part[0] - 8 : part[0] - 8 + part[1]]


def write(form: str, folder: Path) -> None:
    """A dataset of one form: tfrecord, gzip or parquet."""
    if form == "gzip":
        write_table(folder.with_name("plain"), records={"train": 200, "test": 30})
        repacked(folder.with_name("plain"), folder)
    else:
        write_table(folder, records={"train": 200, "test": 30}, fmt=form)


def damage_block(folder: Path, form: str, split: str, block: int) -> tuple[Path, bytes]:
    """Flip bits in one block of the first shard of a split (tfrecord: of one record); returns the shard and its bytes
    before."""
    shard = sorted((folder / f"split={split}").iterdir())[0]
    before = shard.read_bytes()
    if form == "parquet":
        chunk = pq.read_metadata(shard).row_group(block).column(1)
        at = chunk.data_page_offset + chunk.total_compressed_size - 2
    else:
        at = load_dataset(str(folder)).splits[split].shards[0].block_edges[block] + DATA
    shard.write_bytes(before[:at] + bytes([before[at] ^ 0xFF]) + before[at + 1 :])
    return shard, before


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tfrecord", "gzip", "parquet"])
def test_a_run_skips_what_it_cannot_decode_and_its_audit_validation_evaluation_and_report_say_so(
    tmp_path: Path, form: str
) -> None:
    data, url = tmp_path / "data", tmp_path / "run"
    write(form, data)
    shard, before = damage_block(data, form, "train", 2)
    damage_block(data, form, "test", 0)
    lost = 1 if form == "tfrecord" else 8  # records: in gzip and Parquet those of the block
    done = run(config_of(data, url, 2, validate="test", on_bad_record="skip", audit=True))
    assert done.bad_records["samples"] == lost and shard.name in done.bad_records["first"][0]
    assert re.search(rf"\n{lost} records? skipped with weight 0; the first: .*{shard.name}", done.summary())

    for content in (None, before):  # the shard as it is now, and restored
        if content is not None:
            shard.write_bytes(content)
        report = check_run_audit(done.run)
        assert report.ok and report.replaced in range(2 * lost, 3 * lost + 1), report
        assert f"{report.replaced} had weight 0" in str(report)

    left_out = read_history(done.run).epochs[-1]["validation"]["left_out"]
    assert left_out["samples"] == lost and "test" in left_out["first"][0]
    assert read_history(done.run).epochs[-1]["validation"]["samples"] == 30 - lost
    damage_block(data, form, "train", 2)
    found = evaluate(done.run, str(data), "test", run_threads, baseline="majority")
    assert sum(found["baseline"]["class_counts"]) == 200 - lost
    assert found["left_out"]["samples"] == lost and found["samples"] == 30 - lost
    page = Path(write_report(done.run)).read_text()
    assert f"<tr><th>number</th><td>{lost}</td>" in page and shard.name in page.partition("Skipped records")[2]


@pytest.mark.slow
def test_a_run_that_a_bad_record_stopped_goes_on_without_it_at_any_number_of_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shard = damaged(tmp_path / "bad", {57: DATA})
    with pytest.raises(CorruptionError, match=f"{shard.name}, record 57"):
        run(config_of(tmp_path / "bad", tmp_path / "a", 2))
    first = run(config_of(tmp_path / "bad", tmp_path / "a", 2, on_bad_record="skip"))
    second = run(config_of(tmp_path / "bad", tmp_path / "b", 1, on_bad_record="skip"))
    for result in (first, second):
        assert result.bad_records["samples"] == 1
        assert f"{shard.name}, record 57," in result.bad_records["first"][0]
        assert {row["what"] for row in read_history(result.run).bad_records} == set(result.bad_records["first"])
    assert capfd.readouterr().err.count("note: weight 0: a record's data does not match its checksum") == 2
    mine, other = (final_tensors(result.run) for result in (first, second))
    for name, value in mine.items():
        if name.split("/")[0] == "weights":
            np.testing.assert_allclose(value, other[name], rtol=1e-9, atol=1e-12)
