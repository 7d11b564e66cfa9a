"""Which audit files of a run count: those along the chain of claims, up to where each next generation began."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.documents import seal, sha256_hex
from lockstep.storage.errors import DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import temporary_name, write_file
from lockstep.training.batches.audit_log import AuditLog
from lockstep.training.batches.feed import RankFeed
from lockstep.training.config import TrainConfig
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.audit import audit_files, check_run_audit
from lockstep.training.run.lineage import CheckpointRef, claim_next
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.run_json import open_run
from lockstep.training.world import World
from tests.training._tiny import write_table
from tests.training.reading.test_fitted_files import write as write_folds

EPOCHS = 2


class TinyRun:
    """A run directory as the driver and its ranks leave it, without training."""

    def __init__(self, folder: Path, *, audit: bool = True, split: str = "train", batch: int = 20) -> None:
        self.dataset = str(folder / "dataset")
        if not Path(self.dataset).exists():
            write_table(self.dataset)
        manifest = load_dataset(self.dataset)
        self.plan = EpochPlan.for_dataset(manifest, split, seed=0, global_batch=batch, window_bytes=3000)
        self.paths = RunPaths(str(folder / "run"))
        self.fs = filesystem(self.paths.root)
        config = TrainConfig(
            datasets=(self.dataset,),
            run=self.paths.root,
            model="logistic",
            num_ranks=2,
            global_batch=batch,
            split=split,
            epochs=EPOCHS,
            audit=audit,
            batchnorm="local",
        )
        open_run(self.fs, self.paths, config, manifest, self.plan)

    def generation(self, parent: CheckpointRef | None, num_ranks: int, committed: list[int], uploaded: int = 0) -> int:
        """Claim, and train on to each checkpoint in turn; `uploaded` is one whose audit alone came to lie there."""
        claim = claim_next(self.fs, self.paths, parent, epochs=EPOCHS, num_ranks=num_ranks)
        for rank in range(num_ranks):
            opened = OpenSplit.at(self.dataset, self.plan.split, training=True)
            feed = RankFeed(self.plan, opened.reader, opened.encoder, World.local(rank, num_ranks))
            log, step = AuditLog(), parent.step if parent else 0
            for stop in [*committed, *([uploaded] if uploaded else [])]:
                for batch in feed.batches(step, stop):
                    log.add(batch)
                write_file(self.fs, self.paths.audit(claim.generation, rank, stop), log.take(stop))
                step = stop
        for stop in committed:
            self._commit(CheckpointRef(stop, claim.generation))
        return claim.generation

    def _commit(self, ref: CheckpointRef) -> None:
        directory = self.paths.checkpoint(ref.step, ref.generation)
        write_file(self.fs, f"{directory}/weights", b"w")
        files = {"weights": {"bytes": 1, "sha256": sha256_hex(b"w")}}
        document = {"kind": "checkpoint", "step": ref.step, "generation": ref.generation, "files": files}
        write_file(self.fs, f"{directory}/_manifest.json", seal(document))


def test_a_run_in_one_go(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.generation(None, 2, [4, 10])
    report = check_run_audit(run.paths.root)
    assert report.ok and report.steps == 10 and report.samples == 200 and not report.left_over


def test_generations_that_failed_in_between_count_up_to_where_the_next_began(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    first = run.generation(None, 2, [2, 4], uploaded=6)  # step 6 was uploaded, never committed
    second = run.generation(CheckpointRef(4, first), 4, [])  # died before its first checkpoint
    third = run.generation(CheckpointRef(4, first), 3, [7, 10])
    with run.fs.create(temporary_name(run.paths.audit(first, 0, 6))) as half:  # its rank was killed while it wrote
        half.write(b"1,")
    files = audit_files(run.fs, run.paths, CheckpointRef(10, third))
    assert len(files) == 2 * 2 + 3 * 2 and second == 2
    assert not any("g0002" in url or "step-0000000006" in url for url in files)
    report = check_run_audit(run.paths.root)
    assert report.ok and report.steps == 10


def test_a_run_of_which_endless_epochs_are_asked_is_checked_up_to_where_it_is(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    first = run.generation(None, 2, [4])
    claim_next(run.fs, run.paths, CheckpointRef(4, first), epochs=10**12, num_ranks=2)
    report = check_run_audit(run.paths.root)
    assert report.ok and report.samples == 80 and len(report.left_over) == 20  # of the epoch that is under way


def test_a_lost_file_is_noticed(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.generation(None, 2, [5, 10])
    run.fs.delete(run.paths.audit(1, 1, 5))
    report = check_run_audit(run.paths.root)
    assert len(report.missing) == 50 and report.short_steps == (1, 2, 3, 4, 5)
    assert report.places == ("generation 1, rank 1: steps 1 to 5 in none of its parts",)


def _swapped(lines: list[bytes]) -> list[bytes]:
    """Two samples of different steps change places: each still counts once."""
    one, other = lines[2].split(b","), lines[-1].split(b",")
    one[2], other[2] = other[2], one[2]
    return [*lines[:2], b",".join(one), *lines[3:-1], b",".join(other)]


@pytest.mark.parametrize(
    ("forge", "told"),
    [
        (lambda lines: lines[:-1], "g0002/rank-00001/step-0000000010.csv, row 22: step 10 has 6 rows of 7"),
        (lambda lines: [*lines, lines[-1]], "g0002/rank-00001/step-0000000010.csv, row 22: step 10 has 8 rows of 7"),
        (_swapped, "g0002/rank-00001/step-0000000010.csv, row 3: step 7, sample"),
        # Every row of one step once more, as if it were an earlier one.
        (
            lambda lines: [b"4" + line[1:] if line[:2] == b"7," else line for line in lines],
            "row 1: step 4, but generation",
        ),
    ],
)
def test_a_forged_part_is_told_by_file_and_row(tmp_path: Path, forge: Callable[..., Any], told: str) -> None:
    """Generation 2 has three ranks, of 6 or 7 rows, and does steps 7 to 10."""
    run = TinyRun(tmp_path)
    first = run.generation(None, 2, [3, 6])
    run.generation(CheckpointRef(6, first), 3, [10])
    assert check_run_audit(run.paths.root).ok
    file = Path(run.paths.audit(2, 1, 10))
    header, *lines = file.read_bytes().splitlines()
    file.write_bytes(b"".join(line + b"\n" for line in (header, *forge(lines))))
    report = check_run_audit(run.paths.root)
    assert not report.ok and len(report.places) <= 2
    assert told in report.places[0], report.places


def test_a_part_that_is_copied_is_told(tmp_path: Path) -> None:
    """Under another step, or as that of a rank that there was not."""
    run = TinyRun(tmp_path)
    run.generation(None, 2, [5, 10])
    part = Path(run.paths.audit(1, 0, 5))
    Path(run.paths.audit(1, 0, 4)).write_bytes(part.read_bytes())
    Path(run.paths.audit(1, 2, 5)).parent.mkdir()
    Path(run.paths.audit(1, 2, 5)).write_bytes(part.read_bytes())
    places = check_run_audit(run.paths.root).places
    assert len(places) == 2
    assert "rank-00002/step-0000000005.csv: generation 1 had 2 ranks" in places[0]
    assert "rank-00000/step-0000000005.csv, row 1: step 1 is in" in places[1]


def test_a_moved_dataset_is_given_and_another_one_refused(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.generation(None, 1, [10])
    (tmp_path / "dataset").rename(tmp_path / "moved")
    assert check_run_audit(run.paths.root, str(tmp_path / "moved")).ok
    write_table(tmp_path / "other", seed=1)
    with pytest.raises(DataError, match="another dataset"):
        check_run_audit(run.paths.root, str(tmp_path / "other"))


@pytest.mark.parametrize("audit", [False, True])
def test_a_run_without_audit_or_checkpoint_is_told_so(tmp_path: Path, audit: bool) -> None:
    run = TinyRun(tmp_path, audit=audit)
    with pytest.raises(DataError, match="no audit to check"):
        check_run_audit(run.paths.root)


def test_a_run_on_folds_needs_the_statistics_it_was_trained_with_and_no_others(tmp_path: Path) -> None:
    write_folds(tmp_path / "dataset", "w.fold-0", "w.fold-1", folds=2)
    run = TinyRun(tmp_path, split="fold-1", batch=2)  # fold-0 is held out
    run.generation(None, 1, [run.plan.steps(EPOCHS)])
    (tmp_path / "dataset" / "_fitted" / "w.fold-1.json").unlink()  # fitted without what the run was trained on
    assert check_run_audit(run.paths.root).ok
