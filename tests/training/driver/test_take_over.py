"""One driver: --take-over, and a driver that is stopped by SIGSTOP, overtaken and woken changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import ConfigError, StorageError
from lockstep.storage.files.interface import Writer
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import is_temporary
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.driver.ownership import Lease, Ownership
from lockstep.training.run.lineage import Claim, SupersededError, claim_next, read_claims
from lockstep.training.run.paths import RunPaths, generation_name
from lockstep.training.run.result import find_result
from tests.training import _ranks
from tests.training._driver_alone import drive
from tests.training._tiny import write_table
from tests.waiting import WAIT_S, until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("take-over") / "data"
    write_table(folder)
    return str(folder)


@pytest.fixture
def config(tmp_path: Path, data: str) -> TrainConfig:
    return TrainConfig(
        datasets=(data,), run=str(tmp_path / "run"), model="tiny", num_ranks=1, global_batch=8, epochs=2,
        checkpoint_every=5, keep_checkpoints=2, launcher="local",
    )  # fmt: skip


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(config: TrainConfig) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def driver(
        method: str = "stat", pattern: str = "^$", pace: str = "train", config: TrainConfig = config
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.training._driver_alone", json.dumps(config.to_json())]
        process = subprocess.Popen(
            [*command, method, pattern, pace], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield driver
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def stopped(process: subprocess.Popen[str]) -> None:
    """Wait until the process has stopped itself."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.communicate()[0]


def everything(run: str) -> dict[str, bytes]:
    """Each file of the run directory and its bytes, but for temporary files and what an old rank still uploads."""
    files = {str(f.relative_to(run)): f for f in sorted(Path(run).rglob("*")) if f.is_file()}
    theirs = {name for name, f in files.items() if is_temporary(f.name) or name.startswith(".staging/g0001-")}
    return {name: f.read_bytes() for name, f in files.items() if name not in theirs}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        ("rename_new", r"/run\.json$"),  # before it has claimed: its temporary file is swept
        ("rename_new", r"/generations/000001\.json$"),  # the number is taken when it wakes
        ("create", r"/generations/\.000001"),
        ("create", r"/\.staging/.*/step-0000000010/\._manifest"),  # it writes into what is gone
        ("rename_new", r"/checkpoints/step-0000000010"),  # between manifest and rename
        ("rename_new", r"/\.trash/g0001/"),  # in its retention
        ("rename_new", r"/\.trash/g0001/swept-"),  # before it deletes what it has moved there
        ("delete", r"/\.trash/g0001/swept-"),
        ("rename_new", r"/metrics/g0001/part-00001"),
        ("rename_new", r"/models/g0001$"),
        ("rename_new", r"/results/g0001"),
        ("create", r"/results/\.g0001"),
        ("replace", r"/run/lease\.json$"),  # before it holds the lease: it is none that was overtaken, and refuses
        ("create", r"/run/\.lease\.json"),
    ],
)
def test_driver_that_wakes_changes_nothing(config: TrainConfig, start: Start, method: str, pattern: str) -> None:
    old = start(method, pattern)
    stopped(old)
    result = drive(config, take_over=True)
    assert result.steps == 25
    fs, paths = filesystem(config.run), RunPaths(config.run)
    before, counts = everything(config.run), find_result(fs, paths)
    assert counts is not None
    os.kill(old.pid, signal.SIGCONT)
    told = old.communicate(timeout=WAIT_S)[0]
    refused = "lease" in pattern
    assert ("ConfigError: another driver is working" if refused else "SupersededError: this driver of") in told
    assert old.returncode == (2 if refused else 1)
    assert everything(config.run) == before
    assert find_result(fs, paths) == counts
    assert verify(config.run) == []
    assert drive(config) == result  # and whoever comes next finds it complete


@pytest.mark.slow
def test_ranks_of_a_stopped_driver_end_by_themselves(config: TrainConfig, start: Start) -> None:
    """With real ranks: two, whose driver is stopped from outside while they train."""
    config = config.but(num_ranks=2, epochs=8)
    old = start(pace="train_at_a_crawl", config=config)
    until(lambda: Path(config.run, "checkpoints").exists() and bool(list(Path(config.run, "checkpoints").iterdir())))
    pids = _ranks.living_ranks(old.pid)
    assert len(pids) == 2
    os.kill(old.pid, signal.SIGSTOP)
    until(lambda: not any(map(_ranks.lives, pids)))
    theirs = f"logs/{generation_name(max(read_claims(filesystem(config.run), RunPaths(config.run))))}/"
    drive(config.but(num_ranks=1), take_over=True)
    before = everything(config.run)
    os.kill(old.pid, signal.SIGCONT)
    assert "SupersededError" in old.communicate(timeout=WAIT_S)[0]
    assert old.returncode == 1
    # Only what its own ranks printed may come late, under its own generation.
    assert {n: b for n, b in everything(config.run).items() if n in before or not n.startswith(theirs)} == before


@pytest.mark.slow
def test_living_driver_is_replaced_only_by_take_over(config: TrainConfig, start: Start) -> None:
    """It ends its launch within seconds, although its rank does well and no commit is due."""
    config = config.but(epochs=400, checkpoint_every=100_000)
    old = start(pace="train_slowly", config=config)
    until(Path(config.run, "generations", "000001.json").exists)
    with pytest.raises(ConfigError, match="another driver is working") as caught:
        drive(config)
    assert "--take-over" in caught.value.next_step
    assert caught.value.exit_code == 2 and old.poll() is None
    with Ownership(filesystem(config.run), RunPaths(config.run), take_over=True):
        began = time.monotonic()
        assert "SupersededError" in old.communicate(timeout=WAIT_S)[0]
        assert old.returncode == 1
        assert time.monotonic() - began < 120  # of the 250 s that its steps alone take
    assert list(read_claims(filesystem(config.run), RunPaths(config.run))) == [1]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(str(tmp_path / "run"))


def test_overtaken_driver_does_not_claim_again(paths: RunPaths) -> None:
    """Its ranks may fail at any moment: what restarts them must not take the run back."""
    fs = filesystem(paths.root)
    with Ownership(fs, paths, every_s=60.0) as old, Ownership(fs, paths, every_s=60.0, take_over=True) as new:
        with pytest.raises(SupersededError, match=r"lease\.json"):
            old.claim(None, epochs=1, num_ranks=1)  # before the other one has claimed, too
        first = new.claim(None, epochs=1, num_ranks=1)
        assert first is not None and first.generation == 1
        with pytest.raises(SupersededError):
            old.confirm()
        Path(paths.lease).unlink()
        with pytest.raises(SupersededError, match="a claim of generation 1"):
            old.claim(None, epochs=1, num_ranks=1)
        second = new.claim(None, epochs=1, num_ranks=1)
        assert second is not None and second.generation == 2


def test_claim_of_an_overtaken_driver_is_followed_by_the_new_one_s(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    with Ownership(fs, paths, every_s=60.0), Ownership(fs, paths, every_s=60.0, take_over=True) as new:
        claim_next(fs, paths, None, epochs=1, num_ranks=1)  # by the old one, which looked a moment before
        assert new.claim(None, epochs=1, num_ranks=1) is None  # what to start from is to be looked up again
        claim = new.claim(None, epochs=1, num_ranks=1)
        assert claim is not None and claim.generation == 2


def test_driver_does_not_take_its_own_claim_for_another_s(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease's thread looks at the claims while one is made."""

    def slowly(*args: Any, **options: Any) -> Claim:
        claim = claim_next(*args, **options)
        time.sleep(0.1)
        return claim

    monkeypatch.setattr("lockstep.training.driver.ownership.claim_next", slowly)
    with Ownership(filesystem(paths.root), paths, every_s=0.005) as driver:
        for generation in (1, 2):
            claim = driver.claim(None, epochs=1, num_ranks=1)
            assert claim is not None and claim.generation == generation
        time.sleep(0.05)
        assert driver.overtaken() is None


def test_lease_written_by_a_woken_driver_is_written_over(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    with Lease(fs, paths.lease, every_s=60.0):
        stale = Path(paths.lease).read_bytes()
        with Lease(fs, paths.lease, every_s=0.1, take_over=True) as new:
            mine = json.loads(Path(paths.lease).read_bytes())["nonce"]
            Path(paths.lease).write_bytes(stale)
            until(lambda: json.loads(Path(paths.lease).read_bytes())["nonce"] == mine)
            assert new.lost is None


class UnreadableLease(LocalFileSystem):
    """A file system that has lost the blocks of leases, though it lists and replaces them."""

    lost: bool = False

    def read_bytes(self, url: str) -> bytes:
        if self.lost and url.endswith("lease.json"):
            raise StorageError("cannot read", got=url, allowed="its blocks", next_step="Wait.")
        return super().read_bytes(url)


def test_an_unreadable_lease_is_rewritten_and_claims_decide(paths: RunPaths) -> None:
    fs = UnreadableLease()
    with Ownership(fs, paths, every_s=0.05) as driver:
        claim = driver.claim(None, epochs=1, num_ranks=1)
        assert claim is not None
        fs.lost = True
        before = Path(paths.lease).read_bytes()
        until(lambda: Path(paths.lease).read_bytes() != before)
        driver.confirm()
        claim_next(fs, paths, None, epochs=1, num_ranks=1)  # by another driver
        with pytest.raises(SupersededError, match="a claim of generation 2"):
            driver.confirm()
        fs.lost = False


def test_driver_notices_a_claim_where_the_lease_is_lost(paths: RunPaths) -> None:
    fs = filesystem(paths.root)
    with Ownership(fs, paths, every_s=0.1) as old:
        claim_next(fs, paths, None, epochs=1, num_ranks=1)
        until(lambda: old.overtaken() is not None)
        assert "a claim of generation 1, where this driver has 0" in str(old.overtaken())


class AwayStorage(LocalFileSystem):
    """A file system that goes away in a `call` of a lease's thread, which ends when it is back."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self._call, self.gone, self.back = call, threading.Event(), threading.Event()

    @property
    def away(self) -> bool:
        return self.gone.is_set() and not self.back.is_set()

    def _wait(self, call: str) -> None:
        if call == self._call and threading.current_thread().name == "lease":
            self.gone.set()
            assert self.back.wait(WAIT_S)

    def create(self, url: str, *, exclusive: bool = True) -> Writer:
        self._wait("create")
        return super().create(url, exclusive=exclusive)

    def replace(self, src: str, dst: str) -> None:
        self._wait("replace")
        super().replace(src, dst)


@pytest.mark.parametrize(("call", "rewritten"), [("create", False), ("replace", True)])
def test_a_last_rewrite_of_an_ended_driver_stops_no_other(
    paths: RunPaths, call: str, rewritten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fs = AwayStorage(call)
    with Lease(fs, paths.lease, every_s=0.05):
        until(fs.gone.is_set)
    (thread,) = (one for one in threading.enumerate() if one.name == "lease")
    left = Path(paths.lease).read_bytes()
    assert json.loads(left)["closed"] is False
    fs.back.set()
    thread.join(WAIT_S)
    assert (Path(paths.lease).read_bytes() != left) is rewritten  # a rename that is under way cannot be called back
    with Lease(filesystem(paths.root), paths.lease, watch_s=1.0):
        assert "watching" not in caplog.text  # in this process the next driver knows who has ended


def test_a_next_driver_keeps_the_lease_that_an_ended_one_rewrites(paths: RunPaths) -> None:
    fs = AwayStorage("replace")
    with Lease(fs, paths.lease, every_s=0.05):
        until(fs.gone.is_set)
    (thread,) = (one for one in threading.enumerate() if one.name == "lease")
    with Lease(filesystem(paths.root), paths.lease, every_s=0.1) as new:
        mine = json.loads(Path(paths.lease).read_bytes())["nonce"]
        fs.back.set()
        thread.join(WAIT_S)
        until(lambda: json.loads(Path(paths.lease).read_bytes())["nonce"] == mine)
        assert new.lost is None
