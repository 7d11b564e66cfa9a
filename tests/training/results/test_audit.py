"""An audit shows each sample of each epoch once, and every way in which that can fail is found."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CorruptionError
from lockstep.training.batches.audit_log import HEADER, AuditLog, sample_hex
from lockstep.training.batches.feed import RankFeed
from lockstep.training.batches.training_set import left_over
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import SplitReader
from lockstep.training.results.audit import ROW, _records_at, all_ids, check_audit, parse_audit
from lockstep.training.world import World
from tests.training._tiny import write_table

EPOCHS, STEPS = 2, 8  # 2 * 100 samples in global batches of 24: 8 steps and 8 left over


class Run:
    """Three ranks that trained STEPS steps, with a checkpoint after every two."""

    def __init__(self, root: Path) -> None:
        opened = OpenSplit.at(str(root), "train")
        self.reader: SplitReader = opened.reader
        self.plan = EpochPlan.for_dataset(opened.manifest, "train", seed=1, global_batch=24, lanes=6, window_bytes=5000)
        self.audits: list[tuple[str, bytes]] = []
        for rank in range(3):
            feed = RankFeed(self.plan, opened.reader, opened.encoder, World.local(rank, 3))
            log = AuditLog()
            for batch in feed.batches(0, STEPS):
                log.add(batch)  # all of them before the first checkpoint, as a read-ahead may
            self.audits += [(f"rank-{rank} step-{step}", log.take(step)) for step in range(2, STEPS + 1, 2)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write_table(tmp_path / "d")
    return Run(tmp_path / "d")


def test_a_whole_run_is_right_and_its_left_over_is_listed(run: Run) -> None:
    report = check_audit(run.plan, run.reader, run.audits, steps=STEPS, epochs=EPOCHS)
    assert report.ok and report.samples == STEPS * 24
    assert len(report.left_over) == 8 and {epoch for epoch, _ in report.left_over} == {1}
    assert str(report).endswith("each once; 8 left over")
    assert report.left_over == tuple((e, sample_hex(s)) for e, s in left_over(run.plan, run.reader, EPOCHS))


def test_a_run_that_is_not_yet_at_its_end_is_right_so_far(run: Run) -> None:
    so_far = [audit for audit in run.audits if not audit[0].endswith("-8")]
    report = check_audit(run.plan, run.reader, so_far, steps=6, epochs=EPOCHS)
    assert report.ok and len(report.left_over) == 2 * 100 - 6 * 24
    assert str(report).endswith("; 56 not trained on yet, since epoch 2 is under way")


def test_audit_files_are_read_by_url(run: Run, tmp_path: Path) -> None:
    urls = []
    for number, (_, data) in enumerate(run.audits):
        (tmp_path / f"{number}.csv").write_bytes(data)
        urls.append(str(tmp_path / f"{number}.csv"))
    assert check_audit(run.plan, run.reader, urls, steps=STEPS, epochs=EPOCHS).ok


def test_a_part_holds_the_steps_since_the_part_before(run: Run) -> None:
    rows = parse_audit(run.audits[1][1], file="x")
    assert rows["step"].tolist() == [3] * 8 + [4] * 8
    first = run.audits[1][1].splitlines()[1].decode()
    assert first.startswith("3,0,") and len(first) == len("3,0,") + 16


def test_a_lost_part_is_named_sample_by_sample(run: Run) -> None:
    lost = parse_audit(run.audits[5][1], file="x")
    report = check_audit(run.plan, run.reader, run.audits[:5] + run.audits[6:], steps=STEPS, epochs=EPOCHS)
    assert not report.ok and not report.repeated
    assert set(report.missing) == {(int(row["epoch"]), sample_hex(int(row["id"]))) for row in lost}
    assert report.short_steps == (3, 4)


def test_a_part_counted_twice_is_named_sample_by_sample(run: Run) -> None:
    report = check_audit(run.plan, run.reader, [*run.audits, run.audits[0]], steps=STEPS, epochs=EPOCHS)
    assert len(report.repeated) == 16 and not report.missing and report.short_steps == (1, 2)


def test_a_sample_that_should_be_left_over_counts_as_repeated(run: Run) -> None:
    epoch, sample = left_over(run.plan, run.reader, EPOCHS)[0]
    extra = ("extra", HEADER + b"8,%d,%s\n" % (epoch, sample_hex(sample).encode()))
    report = check_audit(run.plan, run.reader, [*run.audits, extra], steps=STEPS, epochs=EPOCHS)
    assert report.repeated == ((epoch, sample_hex(sample)),)


@pytest.mark.parametrize(
    "row",
    [
        b"1,0,0123456789abcdef\n",  # no such sample
        b"1,7,%s\n",  # no such epoch
        b"9,0,%s\n",  # after the tip's step
        b"0,0,%s\n",  # steps count from 1
    ],
)
def test_rows_that_belong_to_nothing_are_unknown(run: Run, row: bytes) -> None:
    sample = run.audits[0][1].splitlines()[1].split(b",")[2]
    extra = ("extra", HEADER + row.replace(b"%s", sample))
    report = check_audit(run.plan, run.reader, [*run.audits, extra], steps=STEPS, epochs=EPOCHS)
    assert not report.ok and len(report.unknown) == 1 and not report.missing and not report.repeated


@pytest.mark.parametrize(
    "data",
    [
        b"",  # an unclosed file on HDFS
        HEADER + b"1,0,0123456789abcdef",  # cut in a line
        HEADER + b"1,0\n",
        HEADER + b"1,0,0123456789abcdeg\n",  # not hex
        HEADER + b"-1,0,0123456789abcdef\n",
        HEADER + b"1,0,0123456789ABCDEF0\n",  # 17 digits
        HEADER + b"1,0,0x00000000000001\n",  # what Python takes for hex too
        HEADER + b"9999999999999999999,0,0123456789abcdef\n",  # more than an int64 holds
    ],
)
def test_damaged_audits_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="step-2"):
        parse_audit(data, file="step-2.csv")


def test_ids_are_shown_unsigned() -> None:
    assert sample_hex(-1) == "f" * 16 and sample_hex(10) == "000000000000000a"
    rows = parse_audit(HEADER + b"1,0,ffffffffffffffff\n", file="x")
    assert rows["id"].tolist() == [-1]


def test_one_file_is_held_at_a_time(run: Run) -> None:
    """A run of 150 epochs: its rows together would take four times as much."""
    epochs, each = 150, 20
    steps = epochs * 100 // 24 // each * each
    ids = all_ids(run.reader)

    def files() -> Iterator[Any]:
        for first in range(1, steps + 1, each):
            rows = np.zeros(each * 24, ROW)
            rows["step"] = np.repeat(np.arange(first, first + each), 24)
            cells = [
                run.plan.lane_positions(lane, (first - 1) * 4, (first - 1 + each) * 4) for lane in range(run.plan.lanes)
            ]
            for lane, windows in enumerate(cells):
                at = np.flatnonzero(np.arange(len(rows)) % 24 // 4 == lane)
                pairs = [(epoch, _records_at(run.plan, epoch, positions)) for epoch, positions in windows]
                rows["epoch"][at] = np.concatenate([np.full(len(found), epoch) for epoch, found in pairs])
                rows["id"][at] = np.concatenate([ids[found] for _, found in pairs])
            yield rows

    tracemalloc.start()
    report = check_audit(run.plan, run.reader, files(), steps=steps, epochs=epochs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.ok and report.samples == steps * 24
    assert peak < steps * 24 * ROW.itemsize / 4, f"{peak} bytes"
