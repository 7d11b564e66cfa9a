"""Claims, the chain of parents, the lease: which checkpoint, model and result count."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.documents import seal
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from lockstep.training.driver.ownership import Lease
from lockstep.training.driver.retention import empty_trash, end_trash, retire, tidy_up
from lockstep.training.rules import Keep
from lockstep.training.run.lineage import (
    MAX_GENERATION,
    CheckpointRef,
    Claim,
    SupersededError,
    check_newest,
    claim_next,
    find_tip,
    lineage,
    read_claims,
    superseded,
)
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult, find_model, find_result

Ref = CheckpointRef


def claim(generation: int, parent: Ref | None) -> Claim:
    return Claim(generation, "00", parent, 1, 1)


@pytest.mark.parametrize(
    ("claims", "there", "expected"),
    [
        ({}, [], []),
        ({1: None}, [], []),  # claimed, nothing committed yet
        ({1: None}, [(10, 1), (5, 1)], [(10, 1), (5, 1)]),
        ({1: None, 2: (10, 1)}, [(10, 1), (5, 1)], [(10, 1), (5, 1)]),  # before its first commit: its parent
        ({1: None, 2: (10, 1)}, [(10, 1), (15, 2), (20, 1)], [(15, 2), (10, 1)]),  # step 20 of 1 came late
        ({1: None, 2: None}, [(5, 1)], []),  # 2 began before 1 committed anything
        ({1: None, 2: (5, 1), 3: (10, 2)}, [(5, 1), (10, 2), (12, 2), (15, 3)], [(15, 3), (10, 2), (5, 1)]),
        ({1: None, 2: (10, 1), 3: (10, 1)}, [(10, 1), (15, 2)], [(10, 1)]),  # 3 began where 2 did: 2's commit was late
        ({1: None, 2: (10, 1)}, [(5, 1)], [(5, 1)]),  # the parent itself is lost: what is before it
    ],
)
def test_lineage(claims: dict[int, Any], there: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    made = {g: claim(g, Ref(*parent) if parent else None) for g, parent in claims.items()}
    assert lineage(made, [Ref(*r) for r in there]) == [Ref(*r) for r in expected]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(str(tmp_path / "run"))


def put(
    paths: RunPaths, step: int, generation: int, *, where: str | None = None, state: dict[str, Any] | None = None
) -> str:
    url = where or paths.checkpoint(step, generation)
    Path(url).mkdir(parents=True)
    data = f"weights {step} {generation}".encode()
    Path(url, "rank-00000.bin").write_bytes(data)
    import hashlib

    files = {"rank-00000.bin": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    manifest = {"kind": "checkpoint", "format_version": 1, "step": step, "generation": generation, "files": files}
    manifest["state"] = state or {}
    Path(url, "_manifest.json").write_bytes(seal(manifest))
    return url


def start(paths: RunPaths, parent: Ref | None) -> Claim:
    return claim_next(filesystem(paths.root), paths, parent, epochs=1, num_ranks=1)


def tip(paths: RunPaths) -> Ref | None:
    found = find_tip(filesystem(paths.root), paths)
    return found.ref if found else None


def test_claims_count_up_and_name_their_parent(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    assert (start(paths, None).generation, start(paths, Ref(5, 1)).generation) == (1, 2)
    claims = read_claims(fs, paths)
    assert (claims[1].parent, claims[2].parent) == (None, Ref(5, 1))
    check_newest(fs, paths, 2)
    with pytest.raises(SupersededError, match="a claim of generation 2, where this driver has 1"):
        check_newest(fs, paths, 1)


def test_a_number_that_no_frame_can_say_is_not_claimed(paths: RunPaths) -> None:
    Path(paths.claims).mkdir(parents=True)
    Path(paths.claim(MAX_GENERATION)).touch()  # nobody counts so far: it was put there
    with pytest.raises(DataError, match="4294967295"):
        start(paths, None)
    assert len(list(Path(paths.claims).iterdir())) == 1


def test_only_one_of_many_drivers_gets_a_generation(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.run.lineage.claimed", lambda fs, paths: [])  # all look at the same moment
    won: list[int] = []
    lost: list[ConfigError] = []

    def go() -> None:
        try:
            won.append(start(paths, None).generation)
        except ConfigError as error:
            lost.append(error)

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (won, len(lost)) == ([1], 7)
    assert "at the same moment" in str(lost[0])


def test_changed_claim_is_refused(paths: RunPaths) -> None:
    start(paths, None)
    file = Path(paths.claim(1))
    file.write_bytes(file.read_bytes().replace(b'"epochs":1', b'"epochs":2'))
    with pytest.raises(CorruptionError, match=r"000001\.json"):
        read_claims(filesystem(paths.root), paths)


def test_tip_passes_over_what_is_not_whole(paths: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    start(paths, None)
    for step in (5, 10, 15, 20):
        put(paths, step, 1)
    Path(paths.checkpoint(20, 1), "_manifest.json").unlink()  # torn
    Path(paths.checkpoint(15, 1), "rank-00000.bin").write_bytes(b"weights 15 2")  # flipped, the same length
    assert tip(paths) == Ref(10, 1)
    assert "step-0000000020.g0001 is refused" in caplog.text
    assert "step-0000000015.g0001 is refused" in caplog.text
    said = "next: There is nothing to do: a run that resumes begins at step-0000000010.g0001 and computes steps 11 to "
    assert f"{said}20 again." in caplog.text and f"{said}15 again." in caplog.text and "verify URL" not in caplog.text
    Path(paths.checkpoint(10, 1), "rank-00000.bin").unlink()
    assert tip(paths) == Ref(5, 1)
    Path(paths.checkpoint(5, 1), "_manifest.json").write_bytes(b"{}")
    with pytest.raises(DataError, match=r"no checkpoint of .* is complete"):
        tip(paths)


def test_manifest_may_not_lead_out_of_its_directory(paths: RunPaths) -> None:
    start(paths, None)
    url = put(paths, 5, 1)
    files = {"../../secret": {"bytes": 1, "sha256": "00"}}
    manifest = {"kind": "checkpoint", "step": 5, "generation": 1, "files": files}
    Path(url, "_manifest.json").write_bytes(seal(manifest))
    with pytest.raises(DataError):
        tip(paths)


@pytest.mark.parametrize("files", [None, [1], {"rank-00000.bin": None}, {"rank-00000.bin": {"bytes": 9}}])
def test_sealed_nonsense_in_a_manifest_is_refused_like_rot(paths: RunPaths, files: Any) -> None:
    start(paths, None)
    put(paths, 5, 1)
    url = put(paths, 10, 1)
    manifest = {"kind": "checkpoint", "step": 10, "generation": 1, "files": files}
    Path(url, "_manifest.json").write_bytes(seal(manifest))
    assert tip(paths) == Ref(5, 1)


@pytest.mark.parametrize("changes", [{"kind": "run"}, {"format_version": 2}, {"parent": {"step": 5, "generation": 0}}])
def test_claim_of_another_kind_is_refused(paths: RunPaths, changes: dict[str, Any]) -> None:
    Path(paths.claims).mkdir(parents=True)
    Path(paths.claim(1)).write_bytes(seal(claim(1, None).to_json() | changes))
    with pytest.raises(DataError, match="000001"):
        read_claims(filesystem(paths.root), paths)


def test_digits_of_another_script_are_no_name_of_ours(paths: RunPaths) -> None:
    start(paths, None)
    Path(paths.claims, "00000\u0662.json").write_text("{}")
    assert list(read_claims(filesystem(paths.root), paths)) == [1]


def test_lost_claims_do_not_begin_a_second_training_among_the_first_ones_checkpoints(paths: RunPaths) -> None:
    start(paths, None)
    put(paths, 5, 1)
    Path(paths.claim(1)).unlink()
    with pytest.raises(DataError, match="lacks claims"):
        tip(paths)


def test_lost_checkpoints_do_not_begin_the_training_anew(paths: RunPaths) -> None:
    start(paths, None)
    assert tip(paths) is None  # it failed before its first one: nothing is lost
    result(paths, 1, "step-0000000005.g0001")
    with pytest.raises(DataError, match=r"no checkpoint of .* is complete"):
        tip(paths)
    start(paths, Ref(5, 1))
    with pytest.raises(DataError, match=r"no checkpoint of .* is complete"):
        tip(paths)


def names(url: str) -> list[str]:
    return sorted(p.name for p in Path(url).iterdir()) if Path(url).exists() else []


def test_retention_moves_and_only_a_later_claimant_deletes(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    start(paths, None)
    for step in (5, 10, 15, 20):
        put(paths, step, 1)
    retire(fs, paths, 1, keep=Keep(2))
    assert names(paths.checkpoints) == ["step-0000000015.g0001", "step-0000000020.g0001"]
    assert names(paths.trash(1)) == ["step-0000000005.g0001", "step-0000000010.g0001"]
    found = find_tip(fs, paths)
    start(paths, Ref(20, 1))
    tidy_up(fs, paths, 2, found, keep=Keep(2))
    assert names(paths.trash(1)) == []
    assert names(paths.checkpoints) == ["step-0000000015.g0001", "step-0000000020.g0001"]


def test_a_generation_empties_its_own_trash_while_lease_and_claims_are_its_own(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    start(paths, None)
    for step in (5, 10, 15):
        put(paths, step, 1)
    retire(fs, paths, 1, keep=Keep(1))
    swept = Path(paths.trash(1), "swept-step-0000000001.g0001-0f")  # of a driver that died while it deleted
    swept.mkdir()

    def overtaken() -> None:
        raise superseded(paths.root, "a later lease")

    with pytest.raises(SupersededError):
        empty_trash(fs, paths, 1, overtaken)
    assert names(paths.trash(1)) == ["step-0000000005.g0001", "step-0000000010.g0001", swept.name]
    empty_trash(fs, paths, 1, lambda: None)
    assert names(paths.trash(1)) == [] and tip(paths) == Ref(15, 1)
    swept.mkdir()
    start(paths, Ref(15, 1))
    tidy_up(fs, paths, 2, find_tip(fs, paths), keep=Keep(1))
    assert names(paths.trash(1)) == []


def test_the_end_of_a_run_empties_the_trash_of_all_its_generations_but_for_what_is_kept(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    start(paths, None)
    for step, auc in ((5, 0.6), (10, 0.9), (15, 0.8), (20, 0.7)):
        put(paths, step, 1, state={"in_epoch": False, "metrics": {"auc": auc}})
    retire(fs, paths, 1, Keep(2))
    Path(paths.checkpoint(20, 1), "_manifest.json").unlink()  # lost, so that the trash holds what replaces it
    start(paths, Ref(15, 1))
    tidy_up(fs, paths, 2, find_tip(fs, paths), keep=Keep(3))
    assert names(paths.trash(1)) == ["step-0000000005.g0001", "step-0000000010.g0001"]
    for step in (20, 25, 30):
        put(paths, step, 2, state={"in_epoch": False, "metrics": {"auc": 0.5}})
    end_trash(fs, paths, 2, Keep(3, best="auc:max"), lambda: None)
    assert names(paths.trash(1)) == ["step-0000000010.g0001"], "the best one, which the user has asked for since"
    end_trash(fs, paths, 2, Keep(3), lambda: None)
    assert names(paths.trash(1)) == names(paths.trash(2)) == []


def test_best_checkpoint_and_one_for_many_steps_survive_a_take_over(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    start(paths, None)
    for step, auc in ((5, 0.6), (10, 0.9), (15, 0.8), (20, 0.7), (25, 0.7)):
        put(paths, step, 1, state={"in_epoch": False, "metrics": {"auc": auc}})
    keep = Keep(1, every_steps=15, best="auc:max")
    retire(fs, paths, 1, keep)
    kept = [f"step-{step:010d}.g0001" for step in (10, 15, 25)]
    assert names(paths.checkpoints) == kept
    found = find_tip(fs, paths)
    start(paths, Ref(25, 1))
    tidy_up(fs, paths, 2, found, keep)
    assert names(paths.checkpoints) == kept


@pytest.mark.parametrize("thrown", ["before it is looked up", "since"])
def test_tip_that_an_old_driver_threw_away_comes_back(paths: RunPaths, thrown: str) -> None:
    """A driver in its retention moves what its successor's chain rests on: stopped before that, or at that moment."""
    fs = filesystem(paths.root)
    start(paths, None)
    put(paths, 5, 1)
    if thrown != "since":
        retire(fs, paths, 1, keep=Keep(0))
    found = find_tip(fs, paths)
    assert found is not None and found.ref == Ref(5, 1)
    if thrown == "since":
        retire(fs, paths, 1, keep=Keep(0))
    assert names(paths.checkpoints) == []
    start(paths, found.ref)
    left = tidy_up(fs, paths, 2, found, keep=Keep(3))
    assert names(paths.checkpoints) == ["step-0000000005.g0001"]
    assert left is not None and left.url == paths.checkpoint(5, 1)
    assert tip(paths) == Ref(5, 1)


def test_trash_inside_the_chain_is_kept(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    start(paths, None)
    put(paths, 15, 1)
    for step in (5, 10):
        put(paths, step, 1, where=join(paths.trash(1), f"step-{step:010d}.g0001"))
    found = find_tip(fs, paths)
    start(paths, Ref(15, 1))
    tidy_up(fs, paths, 2, found, keep=Keep(2))  # 15 and 10 are what a flipped byte may send us back to
    assert names(paths.trash(1)) == ["step-0000000010.g0001"]


def test_orphans_go_to_the_trash_of_the_next_claimant(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    start(paths, None)
    put(paths, 5, 1)
    start(paths, Ref(5, 1))
    put(paths, 10, 1)  # late
    retire(fs, paths, 2, keep=Keep(1))
    assert names(paths.checkpoints) == ["step-0000000005.g0001", "step-0000000010.g0001"]  # not generation 2's business
    start(paths, Ref(5, 1))
    tidy_up(fs, paths, 3, find_tip(fs, paths), keep=Keep(1))
    assert names(paths.checkpoints) == ["step-0000000005.g0001"]
    assert names(paths.trash(3)) == ["step-0000000010.g0001"]


def result(paths: RunPaths, generation: int, checkpoint: str, changes: dict[str, Any] | None = None) -> None:
    counts = dict.fromkeys(("steps", "epochs", "epochs_asked", "samples", "restarts", "seconds", "samples_per_s"), 1)
    more: dict[str, Any] = {"run": paths.root, "generation": generation, "checkpoint": checkpoint, **counts}
    document = RunResult(model=None, metrics={}, left_over=[], **more).to_json()
    Path(paths.result(generation)).parent.mkdir(parents=True, exist_ok=True)
    Path(paths.result(generation)).write_bytes(seal(document | (changes or {})))
    Path(paths.model(generation)).mkdir(parents=True, exist_ok=True)


def test_late_result_of_an_older_generation_does_not_count(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    start(paths, None)
    put(paths, 5, 1)
    start(paths, Ref(5, 1))
    result(paths, 1, "step-0000000010.g0001")  # it ended although generation 2 had begun from step 5
    assert find_result(fs, paths) is None
    with pytest.raises(NotFoundError, match="no finished model"):
        find_model(fs, paths)
    result(paths, 2, "step-0000000010.g0002")
    assert find_model(fs, paths) == paths.model(2)
    start(paths, Ref(10, 2))  # more epochs: until they are done, the finished generation's result counts
    assert find_model(fs, paths) == paths.model(2)
    put(paths, 12, 3)
    start(paths, Ref(12, 3))
    assert find_model(fs, paths) == paths.model(2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "claim"}, "no result"),
        ({"generation": 2}, "contradicts its name"),
        ({"epochs": "many"}, "epochs"),
        ({"samples_per_s": "fast"}, "samples_per_s"),
        ({"metrics": 5}, "metrics"),
        ({"left_over": None}, "left_over"),
        ({"restart_log": [{"generation": 2}]}, r"restart_log\[0\]"),
        ({"checkpoint": 5}, "checkpoint"),
        ({"max_steps": 0}, "max_steps"),
        ({"stopped_by": 5}, "stopped_by"),
        ({"validation_s": "long"}, "validation_s"),
        ({"of another version": 1}, "unknown keys"),
    ],
)
def test_sealed_nonsense_in_a_result_is_named(paths: RunPaths, changes: dict[str, Any], named: str) -> None:
    start(paths, None)
    result(paths, 1, "step-0000000005.g0001", changes)
    with pytest.raises(DataError, match=named):
        find_result(filesystem(paths.root), paths)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b"[" * 100_000, b'{"pid":1e400,"host":[]}'])
def test_lease_that_cannot_be_read_is_no_living_driver(paths: RunPaths, content: bytes) -> None:
    Path(paths.root).mkdir()
    Path(paths.lease).write_bytes(content)
    with Lease(filesystem(paths.root), paths.lease, watch_s=0.0):
        assert json.loads(Path(paths.lease).read_text())["closed"] is False


def test_lease_of_a_living_driver_is_respected(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    Path(paths.root).mkdir()
    with Lease(fs, paths.lease, every_s=0.1):
        began = time.monotonic()
        with pytest.raises(ConfigError, match="another driver is working") as caught, Lease(fs, paths.lease, 120.0):
            pass
        assert time.monotonic() - began < 60
        assert str(os.getpid()) in caught.value.got
    began = time.monotonic()
    with Lease(fs, paths.lease, 120.0):  # closed: nothing to watch
        pass
    assert time.monotonic() - began < 60


def test_lease_of_another_host_is_watched_and_taken(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    Path(paths.root).mkdir()
    foreign = {"nonce": "aa", "counter": 3, "closed": False, "host": "elsewhere", "boot": "b", "pid": 1, "started": "1"}
    Path(paths.lease).write_text(json.dumps(foreign))
    began = time.monotonic()
    with Lease(fs, paths.lease, 1.0):
        assert time.monotonic() - began >= 1.0
        assert json.loads(Path(paths.lease).read_text())["pid"] == os.getpid()


def test_woken_driver_does_not_fight_over_the_lease(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    Path(paths.root).mkdir()
    with Lease(fs, paths.lease, every_s=0.1):
        Path(paths.lease).write_text(json.dumps({"nonce": "successor", "turn": 2, "counter": 1, "closed": False}))
        time.sleep(0.4)
        assert json.loads(Path(paths.lease).read_text())["nonce"] == "successor"
    assert json.loads(Path(paths.lease).read_text())["nonce"] == "successor"
