"""Commits: all ranks or none, the manifest last, and a late rename that changes nothing."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.documents import unseal
from lockstep.storage.errors import CommunicationError, LockstepError, LostWriteError, StorageTimeoutError
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.control.messages import CheckpointReport
from lockstep.training.driver.commit import CommitHandler
from lockstep.training.driver.generation import RunHandler, Watch
from lockstep.training.driver.live import OnTerminal
from lockstep.training.driver.retention import drop_stagings
from lockstep.training.driver.status_board import Board
from lockstep.training.driver.stop import StopRequest
from lockstep.training.rules import Keep
from lockstep.training.run.lineage import CheckpointRef, Claim, SupersededError, claim_next, find_tip, read_checkpoint
from lockstep.training.run.metrics import PartWriter, read_history
from lockstep.training.run.paths import RunPaths, staged_checkpoint, staged_model


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(str(tmp_path / "run"))


def generation(paths: RunPaths, parent: CheckpointRef | None = None, *, ranks: int = 2) -> tuple[Claim, CommitHandler]:
    fs = filesystem(paths.root)
    claim = claim_next(fs, paths, parent, epochs=1, num_ranks=ranks)
    return claim, CommitHandler(fs, paths, claim, {"seed": 0}, keep=Keep(3), deadline_s=120.0)


def upload(paths: RunPaths, claim: Claim, step: int, rank: int, *, folder: str | None = None) -> dict[str, Any]:
    staging = folder or staged_checkpoint(paths.staging(claim.generation, claim.nonce), step)
    Path(staging).mkdir(parents=True, exist_ok=True)
    data = f"{step} {rank} {claim.generation}".encode()
    name = f"rank-{rank:05d}.bin"
    Path(staging, name).write_bytes(data)
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def commit(paths: RunPaths, claim: Claim, commits: CommitHandler, step: int) -> list[Any]:
    """All ranks upload and report at once; returns each one's answer or error."""
    answers: list[Any] = [None] * claim.num_ranks

    def go(rank: int) -> None:
        try:
            fields = {"step": step, "files": [upload(paths, claim, step, rank)], "audit": [], "state": {"rank": rank}}
            answers[rank] = commits.checkpoint(rank, CheckpointReport.from_json(fields))
        except LockstepError as error:
            answers[rank] = error

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(claim.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return answers


def test_commit_is_one_directory_with_a_sealed_manifest(paths: RunPaths) -> None:
    claim, commits = generation(paths)
    assert commit(paths, claim, commits, 10) == [{"committed": True}] * 2
    assert commit(paths, claim, commits, 20) == [{"committed": True}] * 2
    url = paths.checkpoint(20, 1)
    manifest = unseal(Path(url, "_manifest.json").read_bytes(), url)
    assert (manifest["step"], manifest["next_step"], manifest["num_ranks"]) == (20, 20, 2)
    assert manifest["parent"] == {"step": 10, "generation": 1}
    assert (manifest["plan"], manifest["state"]) == ({"seed": 0}, {"rank": 0})
    assert sorted(manifest["files"]) == ["rank-00000.bin", "rank-00001.bin"]
    found = find_tip(filesystem(paths.root), paths)
    assert found is not None and found.ref == CheckpointRef(20, 1)
    assert not list(Path(paths.staging(1, claim.nonce)).iterdir())
    assert not commits._reports  # nothing of a checkpoint stays in the driver's memory


def test_absent_rank_is_named_and_nothing_published(paths: RunPaths) -> None:
    claim, _ = generation(paths)
    commits = CommitHandler(filesystem(paths.root), paths, claim, {}, keep=Keep(3), deadline_s=0.2)
    with pytest.raises(CommunicationError, match="step 10 was not committed") as caught:
        commits.checkpoint(0, CheckpointReport.from_json({"step": 10, "files": [upload(paths, claim, 10, 0)]}))
    assert caught.value.got == "no report of rank 1"
    assert not Path(paths.checkpoints).exists()


def test_report_that_is_not_what_was_uploaded_is_refused(paths: RunPaths) -> None:
    claim, commits = generation(paths, ranks=1)
    file = upload(paths, claim, 10, 0)
    with pytest.raises(LostWriteError, match="does not read back"):
        commits.checkpoint(0, CheckpointReport.from_json({"step": 10, "files": [{**file, "bytes": 3}]}))
    _, commits = generation(paths, ranks=1)
    with pytest.raises(LockstepError, match="leads out"):
        commits.checkpoint(0, CheckpointReport.from_json({"step": 10, "files": [{**file, "name": "../../evil"}]}))
    assert not Path(paths.checkpoints).exists()


def test_failed_launch_wakes_the_waiting_ranks(paths: RunPaths) -> None:
    claim, commits = generation(paths)
    threading.Timer(0.2, lambda: commits.abort(LockstepError("rank 1 died"))).start()
    with pytest.raises(LockstepError, match="rank 1 died"):
        commits.checkpoint(0, CheckpointReport.from_json({"step": 10, "files": [upload(paths, claim, 10, 0)]}))


def test_step_may_not_go_back(paths: RunPaths) -> None:
    claim, commits = generation(paths, ranks=1)
    commit(paths, claim, commits, 20)
    assert commit(paths, claim, commits, 20) == [{"committed": True}]  # resumed at its very end: it is there
    (answer,) = commit(paths, claim, commits, 10)
    assert "does not follow step-0000000020.g0001" in str(answer)


@pytest.mark.parametrize("swept", [False, True])
def test_late_rename_is_an_orphan(paths: RunPaths, swept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation 1 is held at the rename of step 20, after its last look, while 2 begins from step 10 and goes on.

    Where 2 has taken away what 1 would rename, as every driver does after its claim, there is not even an orphan.
    """
    reached, release = threading.Event(), threading.Event()
    rename = LocalFileSystem.rename_new

    def hold(self: LocalFileSystem, src: str, dst: str) -> None:
        if dst == paths.checkpoint(20, 1):
            reached.set()
            assert release.wait(20)
        rename(self, src, dst)

    monkeypatch.setattr(LocalFileSystem, "rename_new", hold)
    fs = filesystem(paths.root)
    old, old_commits = generation(paths)
    commit(paths, old, old_commits, 10)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(commit(paths, old, old_commits, 20)))
    thread.start()
    assert reached.wait(10)

    new, commits = generation(paths, CheckpointRef(10, 1))
    if swept:
        drop_stagings(fs, paths, 2)
    for step in (20, 30):
        assert commit(paths, new, commits, step) == [{"committed": True}] * 2
    before = find_tip(fs, paths)
    release.set()
    thread.join(120)

    assert all(isinstance(answer, SupersededError) for answer in answers) and len(answers) == 2
    if swept:
        assert not fs.exists(paths.checkpoint(20, 1))
    else:
        read_checkpoint(fs, paths.checkpoint(20, 1), CheckpointRef(20, 1))  # it was renamed, whole
    assert find_tip(fs, paths) == before
    assert before is not None and before.ref == CheckpointRef(30, 2)
    assert old_commits.tip == CheckpointRef(10, 1)
    assert not Path(paths.trashes).exists()  # its retention did not run
    assert commit(paths, new, commits, 40) == [{"committed": True}] * 2


def test_superseded_driver_publishes_nothing(paths: RunPaths) -> None:
    old, old_commits = generation(paths, ranks=1)
    generation(paths)
    (answer,) = commit(paths, old, old_commits, 10)
    assert isinstance(answer, SupersededError)
    folder = staged_model(paths.staging(old.generation, old.nonce))
    with pytest.raises(SupersededError):
        old_commits.model(0, {"files": [upload(paths, old, 10, 0, folder=folder)]})
    assert not Path(paths.checkpoints).exists()
    assert not Path(paths.model(1)).exists()


def test_model_is_published_with_its_manifest(paths: RunPaths) -> None:
    claim, commits = generation(paths, ranks=1)
    folder = staged_model(paths.staging(claim.generation, claim.nonce))
    file = upload(paths, claim, 10, 0, folder=folder)
    assert commits.model(0, {"files": [file]}) == {"committed": True, "model": paths.model(1)}
    manifest = unseal(Path(paths.model(1), "_manifest.json").read_bytes(), "model")
    assert manifest["files"] == {file["name"]: {"bytes": file["bytes"], "sha256": file["sha256"]}}


def test_parts_are_closed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = PartWriter(str(tmp_path / "parts"), "log")
    parts.flush()
    assert not (tmp_path / "parts").exists()  # no empty part
    parts.add("one")
    parts.flush()
    parts.add("two")
    assert not parts.due
    monkeypatch.setattr("lockstep.training.run.metrics.PART_BYTES", 3)
    assert parts.due
    parts.flush_if_due()
    assert [p.read_text() for p in sorted((tmp_path / "parts").iterdir())] == ["one\n", "two\n"]


def test_parts_wait_for_a_storage_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    parts = PartWriter(str(tmp_path / "file" / "parts"), "log")
    parts.add("one")
    parts.try_flush()  # below a file nothing can be made
    (tmp_path / "file").unlink()
    monkeypatch.setattr("lockstep.training.run.metrics.MAX_WAITING_BYTES", 10)
    for word in ("two", "three", "four"):
        parts.add(word)
    parts.flush()
    (part,) = (tmp_path / "file" / "parts").iterdir()
    assert part.read_text() == "[3 lines dropped while the storage was unavailable]\nfour\n"


@pytest.mark.parametrize("limit", [1 << 20, 8])  # 8 bytes: the line that lies there was dropped from memory since
def test_a_part_that_got_its_name_and_could_not_be_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    def frozen(fs: LocalFileSystem, url: str) -> bytes:
        raise StorageTimeoutError("no answer")

    parts = PartWriter(str(tmp_path / "parts"), "log")
    parts.add("one")
    with monkeypatch.context() as away:
        away.setattr(LocalFileSystem, "read_bytes", frozen)
        parts.try_flush()
    monkeypatch.setattr("lockstep.training.run.metrics.MAX_WAITING_BYTES", limit)
    for word in ("two", "three"):
        parts.add(word)
    parts.flush()
    parts.add("four")
    parts.flush()
    told = [path.read_text() for path in sorted((tmp_path / "parts").iterdir())]
    dropped = "[2 lines dropped while the storage was unavailable]\n" if limit == 8 else "two\n"
    assert told == ["one\n", f"{dropped}three\n", "four\n"]


def test_metrics_with_dropped_lines_are_read(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that was away for long cost some rows, not the history."""
    generation(paths)
    parts = PartWriter(paths.metrics(1), "jsonl")
    monkeypatch.setattr("lockstep.training.run.metrics.MAX_WAITING_BYTES", 100)
    for step in range(1, 9):
        parts.add(json.dumps({"kind": "step", "step": step, "epoch": 0, "loss": 0.5}))
    parts.flush()
    assert b"lines dropped" in Path(paths.metrics(1), "part-00000.jsonl").read_bytes()
    Path(paths.run_json).write_text("{}")
    assert [row["step"] for row in read_history(paths.root).steps] == [8]


def board_of(paths: RunPaths, config: TrainConfig, progress: OnTerminal) -> Board:
    return Board(progress, filesystem(paths.root), paths, config, 4, StopRequest(), confirm=lambda: None)


def test_progress_says_of_which_epoch_a_val_loss_is(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    claim, commits = generation(paths)
    config = TrainConfig(datasets=("data",), run=paths.root, model="logistic", num_ranks=2, global_batch=1, epochs=2)

    def lines(epochs: int) -> str:
        with OnTerminal(config, 4) as progress:
            board = board_of(paths, config, progress)
            handler = RunHandler(paths, claim, None, commits, board, Watch([1, 1]))
            for epoch in range(2):
                last = 2 * epoch + 2
                step = {"kind": "step", "step": last, "epoch": epoch, "loss": 1.0 - epoch / 2}
                end = {"kind": "epoch", "step": last, "epoch": epoch, "metrics": {"val_loss": 3.0 - epoch}}
                handler.answer(0, "metrics", {"rows": [step]})
                handler.on_step(last)
                handler.answer(0, "metrics", {"rows": [end] if epoch < epochs else []})
        return capsys.readouterr().err.strip().split(" s, ")[-1]

    assert lines(1) == "loss 0.5000, val_loss 3.0000 of epoch 1"
    assert lines(2) == "loss 0.5000, val_loss 2.0000 of epoch 2"


def test_a_slow_rank_and_memory_that_runs_out_are_noted_and_kept(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    claim, commits = generation(paths)
    config = TrainConfig(datasets=("data",), run=paths.root, model="logistic", num_ranks=2, global_batch=2, epochs=1)
    used = {"kind": "usage", "step": 1, "rss_bytes": 95 << 20, "held_bytes": 95 << 20, "limit_bytes": 100 << 20}
    used |= {"limit_of": "container", "cores": 0.5}
    times = {"kind": "pace", "steps": 1, "links": {}}
    with (
        OnTerminal(config, 40) as progress,
        RunHandler(paths, claim, None, commits, board_of(paths, config, progress), Watch([1, 1])) as handler,
    ):
        for rank in (1, 0):
            handler.answer(rank, "metrics", {"rows": [{**used, "rank": rank, "host": f"host-{rank}"}]})
        for step in range(1, 41):
            for rank, seconds in enumerate((1.0, 2.0)):
                row = {**times, "rank": rank, "step": step, "times": [[0, round(1e6 * seconds), 0, 0]]}
                handler.answer(rank, "metrics", {"rows": [row]})
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [line.split(";")[0] for line in said] == [
        *(
            f"note: rank {rank} on host-{rank} may be killed for its memory: its container holds 95 of 100 MiB (95%), "
            "this rank 95"
            for rank in (1, 0)
        ),
        "note: rank 1 on host-1 is slow: 2,000.0 ms of its own a step, the others 1,000.0 ms, most of it for compute",
    ]
    rows = [json.loads(line) for part in Path(paths.metrics(1)).iterdir() for line in part.open()]
    found = [row for row in rows if row["kind"] == "straggler"]
    assert not [row for row in rows if row["kind"] == "pace"], "they are for the driver at once"
    assert found == [
        {"kind": "straggler", "step": 29, "rank": 1, "host": "host-1", "what": "compute", "own_s": 2.0, "others_s": 1.0}
    ]
