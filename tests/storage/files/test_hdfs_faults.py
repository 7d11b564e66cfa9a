"""HDFS calls against servers that refuse or never answer, and answers that are lost; no Hadoop is needed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.storage.errors import (
    ConfigError,
    DeniedError,
    DiskFullError,
    ExistsError,
    NotFoundError,
    RetryableStorageError,
    StorageAwayError,
    StorageError,
)
from lockstep.storage.files.deadlines import left_behind
from lockstep.storage.files.hdfs import HdfsFileSystem, translate
from lockstep.storage.publish import write_file
from lockstep.storage.settings import DEFAULTS, hadoop_settings, set_hadoop_settings, write_give_up_s
from tests.storage.files.fake_hdfs import FakeClient


@pytest.fixture(autouse=True, scope="module")
def _no_call_left_behind() -> Iterator[None]:
    before = left_behind()  # other files' tests of frozen servers, on the same worker
    yield
    end = time.monotonic() + 120  # pytest itself ends by sys.exit, which a thread coming back late would abort
    while left_behind() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert left_behind() <= before


def _rpc(java: str, text: str) -> RuntimeError:
    return RuntimeError(f'RPCError("org.apache.hadoop.{java}", "{text}\\n\\tat org.apache.hadoop.X")')


ROOT = Path(__file__).resolve().parents[3]
QUICK = {
    "lockstep.storage.call-deadline-s": "0.3",
    "lockstep.storage.give-up-s": "1.2",
    "dfs.client.failover.max.attempts": "1",
}
PATIENT = {"lockstep.storage.call-deadline-s": "60", "lockstep.storage.give-up-s": "120"}  # where calls are to succeed
LATE_S = 30  # after a deadline of a second at most: the loaded machine's, not a server's that never answers


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A server that accepts connections and never answers, as a frozen NameNode does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HdfsFileSystem, FakeClient]]:
    client = FakeClient()
    monkeypatch.setattr("hdfs_native.Client", lambda url, config: SimpleNamespace(inner=client))
    set_hadoop_settings(PATIENT)
    yield HdfsFileSystem("nn:1", DEFAULTS | PATIENT), client
    set_hadoop_settings({})


def test_a_frozen_namenode_ends_in_one_clear_error(black_hole: str) -> None:
    fs = HdfsFileSystem(black_hole, DEFAULTS | QUICK)
    start = time.monotonic()
    with pytest.raises(StorageError) as caught:
        fs.stat(f"hdfs://{black_hole}/x")
    assert time.monotonic() - start < LATE_S
    assert type(caught.value) is StorageAwayError  # final: nobody tries again
    assert black_hole in caught.value.what
    assert caught.value.got and caught.value.allowed and caught.value.next_step


@pytest.mark.parametrize("call", ["create", "rename_new", "delete", "mkdirs", "list", "read_bytes", "open_read"])
def test_every_call_ends(black_hole: str, call: str) -> None:
    fs = HdfsFileSystem(black_hole, DEFAULTS | {**QUICK, "lockstep.storage.give-up-s": "0.5"})
    url = f"hdfs://{black_hole}/x"
    start = time.monotonic()
    with pytest.raises(StorageError, match=black_hole):
        getattr(fs, call)(*([url, url + "2"] if call == "rename_new" else [url]))
    assert time.monotonic() - start < LATE_S


def test_a_refused_connection_names_address_and_cause() -> None:
    quick = QUICK | {"lockstep.storage.call-deadline-s": "60"}  # a refusal that comes late is one, too
    with socket.socket() as nobody_listens:  # and nobody else can have its port
        nobody_listens.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody_listens.getsockname()[1]}"
        with pytest.raises(StorageError, match=address) as caught:
            HdfsFileSystem(address, DEFAULTS | quick).stat(f"hdfs://{address}/x")
    assert "Connection refused" in caught.value.got


def test_a_job_ends_with_its_own_exit_code() -> None:
    """The server goes while the interpreter ends, so that the call left behind comes back at the worst moment."""
    code = """
import os, socket, time
from lockstep.jobs import verify
from lockstep.jobs._cli import run_job
from lockstep.storage.settings import set_hadoop_settings

class Late:
    def __init__(self):
        self.server, self.sleep = socket.create_server(("127.0.0.1", 0)), time.sleep

    def __del__(self):
        self.server.close()
        self.sleep(2)

late = Late()
set_hadoop_settings({"dfs.client.failover.max.attempts": "1"})
os.environ.update(LOCKSTEP_STORAGE_CALL_DEADLINE_S="0.2", LOCKSTEP_STORAGE_GIVE_UP_S="0.5")
run_job(verify.main, [f"hdfs://127.0.0.1:{late.server.getsockname()[1]}/x"])
"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (found.returncode, found.stderr.count("error:")) == (1, 1), found.stderr
    assert all(part in found.stderr for part in ("the NameNode at 127.0.0.1:", "got:", "allowed:", "next:"))
    assert "Traceback" not in found.stderr and "FATAL" not in found.stderr


def test_a_timed_out_call_leaves_its_client_behind(fake: tuple[HdfsFileSystem, FakeClient]) -> None:
    client = fake[1]
    fs = HdfsFileSystem("nn:1", DEFAULTS | PATIENT | {"lockstep.storage.call-deadline-s": "0.3"})
    client.files["/a"] = b"1"
    release = threading.Event()
    client.before["get_file_info"] = [lambda: release.wait(120) and None]
    assert fs.stat("hdfs://nn:1/a").size_bytes == 1  # a later attempt, while the first still hangs
    release.set()


@pytest.mark.parametrize("error", [OSError("RPC listener disconnected"), OSError("Connection reset by peer")])
def test_a_rename_whose_answer_is_lost_is_settled(fake: tuple[HdfsFileSystem, FakeClient], error: OSError) -> None:
    fs, client = fake
    client.files["/a"] = b"mine"
    client.after["rename"] = [_raise(error)]
    fs.rename_new("hdfs://nn:1/a", "hdfs://nn:1/b")
    assert client.files == {"/b": b"mine"}


def test_a_rename_that_did_not_happen_is_done_again(fake: tuple[HdfsFileSystem, FakeClient]) -> None:
    fs, client = fake
    client.files["/a"] = b"mine"
    client.before["rename"] = [_raise(OSError("RPC listener disconnected"))]
    fs.rename_new("hdfs://nn:1/a", "hdfs://nn:1/b")
    assert client.files == {"/b": b"mine"}


def test_a_lost_race_is_not_taken_for_a_success(fake: tuple[HdfsFileSystem, FakeClient]) -> None:
    fs, client = fake
    client.files["/a"] = b"mine"

    def another_wins() -> None:
        client.files["/b"] = b"theirs"
        raise OSError("RPC listener disconnected")

    client.before["rename"] = [another_wins]
    with pytest.raises(ExistsError):
        fs.rename_new("hdfs://nn:1/a", "hdfs://nn:1/b")
    client.files.pop("/a")
    client.files["/a"] = b"long"
    client.before["rename"] = [lambda: client.files.pop("/a") and _raise(OSError("RPC listener disconnected"))()]
    with pytest.raises(NotFoundError):
        fs.rename_new("hdfs://nn:1/a", "hdfs://nn:1/c")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError('RPCError("org.apache.hadoop.ipc.RetriableException", "o.a.SafeModeException: Cannot create")'),
        RuntimeError('RPCError("org.apache.hadoop.ipc.StandbyException", "Operation category READ is not supported")'),
        RuntimeError('RPCError("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "Cannot")'),
    ],
)
def test_states_that_pass_are_waited_for(fake: tuple[HdfsFileSystem, FakeClient], error: RuntimeError) -> None:
    fs, client = fake
    client.before["mkdirs"] = [_raise(error), _raise(error)]
    fs.mkdirs("hdfs://nn:1/d")
    assert "/d" in client.folders


@pytest.mark.parametrize("step", ["create", "write", "hsync", "close"])
def test_a_failed_write_is_begun_anew_under_another_name(fake: tuple[HdfsFileSystem, FakeClient], step: str) -> None:
    fs, client = fake
    client.before[step] = [_raise(OSError("Connection refused (os error 111)"))]
    write_file(fs, "hdfs://nn:1/f", b"data")
    assert client.files == {"/f": b"data"}
    assert len(set(client.created)) == (1 if step == "create" else 2)


def test_a_create_whose_answer_is_lost_takes_another_name(fake: tuple[HdfsFileSystem, FakeClient]) -> None:
    fs, client = fake
    client.after["create"] = [_raise(OSError("RPC listener disconnected"))]
    write_file(fs, "hdfs://nn:1/f", b"data")
    assert client.files == {"/f": b"data"}
    assert len(set(client.created)) == 2


def test_a_file_that_lost_bytes_is_not_published(fake: tuple[HdfsFileSystem, FakeClient]) -> None:
    fs, client = fake
    client.lose_bytes = 1
    with pytest.raises(StorageError, match="not have the length"):
        write_file(fs, "hdfs://nn:1/f", b"data")
    assert client.files == {}


def test_a_whole_file_is_read_in_large_pieces(
    fake: tuple[HdfsFileSystem, FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`io` by itself would ask for 8 KiB at a time: 2,560 calls for this file."""
    fs, client = fake
    client.files["/f"] = bytes(20 << 20)
    asked: list[int] = []
    at_once = HdfsFileSystem.call

    def counted(self: HdfsFileSystem, fn: Any, verb: str, url: str, **limits: Any) -> Any:
        asked.extend([1] if verb == "read" else [])
        return at_once(self, fn, verb, url, **limits)

    monkeypatch.setattr(HdfsFileSystem, "call", counted)
    with fs.open_read("hdfs://nn:1/f") as file:
        assert file.read() == client.files["/f"]
    assert len(asked) == 3


def test_a_panic_of_the_library_is_an_error_of_ours(fake: tuple[HdfsFileSystem, FakeClient]) -> None:
    class PanicException(BaseException):
        pass

    fs, client = fake
    client.before["get_file_info"] = [_raise(PanicException("Cannot read past end of the file"))]
    with pytest.raises(StorageError, match="find"):
        fs.stat("hdfs://nn:1/f")


@pytest.mark.parametrize(
    ("error", "kind", "word"),
    [
        (FileNotFoundError("File does not exist: /p\n\tat org.apache.X"), NotFoundError, "File does not exist: /p"),
        (FileExistsError("/p already exists as a directory\n\tat x"), ExistsError, "already exists"),
        (_rpc("security.AccessControlException", "Permission denied: user=bob"), DeniedError, "denied: user=bob"),
        (_rpc("hdfs.protocol.DSQuotaExceededException", "quota of /q"), DiskFullError, "quota of /q"),
        (RuntimeError('DataTransferError("All DataNodes failed: [x]")'), RetryableStorageError, "All DataNodes"),
        (RuntimeError('DataTransferError("Datanode closed, no ack")'), RetryableStorageError, "ack"),
        (RuntimeError('DataTransferError("Failed to replay packets")'), RetryableStorageError, "replay"),
        (RuntimeError('ErasureCodingError("Not enough valid shards")'), RetryableStorageError, "shards"),
        (RuntimeError('InvalidArgument("No NameNode hosts found")'), ConfigError, "No NameNode"),
        (RuntimeError("GSSAPIError(GssMajorCodes { GSS_S_NO_CRED })"), StorageError, "GSS_S_NO_CRED"),
        (OSError("failed to lookup address information: Name or service not known"), StorageError, "Name or service"),
        (OSError("No data received for 3000ms"), RetryableStorageError, "No data"),
    ],
)  # fmt: skip
def test_one_class_each_and_no_java_stack(error: Exception, kind: type[Exception], word: str) -> None:
    ours = translate(error, verb="stat", place="hdfs://nn/p", whom="the NameNode at nn")
    assert type(ours) is kind
    assert word in ours.got and "\tat" not in str(ours) and "\\n" not in str(ours)
    assert ours.allowed and ours.next_step


def test_settings_of_a_driver_win_unless_they_are_only_hadoops_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", *(name for name in os.environ if name.startswith("AWS_"))):
        monkeypatch.delenv(name, raising=False)
    given = {"dfs.client.socket-timeout": "60000", "dfs.replication": "1", "spark.x": "y", "fs.defaultFS": "hdfs://n"}
    set_hadoop_settings(given)
    try:
        assert hadoop_settings() == DEFAULTS | {"dfs.replication": "1", "fs.defaultFS": "hdfs://n"}
        set_hadoop_settings({"dfs.client.socket-timeout": "7000"})
        assert hadoop_settings()["dfs.client.socket-timeout"] == "7000"
        assert write_give_up_s() == 645
    finally:
        set_hadoop_settings({})


def test_a_broken_configuration_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "core-site.xml").write_text("<configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"core-site\.xml"):
        hadoop_settings()
    monkeypatch.delenv("HADOOP_CONF_DIR")
    monkeypatch.setenv("LOCKSTEP_STORAGE_GIVE_UP_S", "soon")
    with pytest.raises(ConfigError, match="give-up-s"):
        HdfsFileSystem("nn:1", hadoop_settings())


def _raise(error: BaseException) -> Any:
    def fail() -> None:
        raise error

    return fail
