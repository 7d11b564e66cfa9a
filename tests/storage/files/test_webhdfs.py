"""WebHDFS against servers that refuse, break off, freeze or lose their answers; no Hadoop is needed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.storage.errors import (
    ConfigError,
    ExistsError,
    LockstepError,
    NotFoundError,
    RetryableStorageError,
    StorageError,
    StorageTimeoutError,
)
from lockstep.storage.files.remote import not_there
from lockstep.storage.files.webhdfs import WebHdfsFileSystem
from lockstep.storage.files.webhdfs_http import as_hdfs, as_webhdfs, http_addresses
from lockstep.storage.files.webhdfs_streams import WebHdfsRaw, WebHdfsWriter, _Append, open_at
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.settings import DEFAULTS
from tests.storage.files.fake_webhdfs import FakeWebHdfs, gone, refusing, serving, silent

DATA = bytes(range(100))
QUICK = DEFAULTS | {
    "lockstep.storage.call-deadline-s": "0.5",
    "lockstep.storage.data-deadline-s": "1",
    "lockstep.storage.give-up-s": "3",
}
HASTY = QUICK | {"lockstep.storage.give-up-s": "60"}  # soon tired of a frozen server, and of no other
PATIENT = DEFAULTS | {"lockstep.storage.call-deadline-s": "60", "lockstep.storage.give-up-s": "120"}
SERVICE = {
    "dfs.ha.namenodes.ns1": "nn1,nn2",
    "dfs.namenode.http-address.ns1.nn1": "a:9870",
    "dfs.namenode.http-address.ns1.nn2": "b:9870",
    "dfs.namenode.rpc-address.ns1.nn1": "a:8020",
    "dfs.namenode.rpc-address.ns1.nn2": "b:8020",
}
SINGLE = {"dfs.namenode.http-address": "c:9870", "dfs.namenode.rpc-address": "c:8020", "fs.defaultFS": "hdfs://c:8020"}


@pytest.fixture
def fake() -> Iterator[FakeWebHdfs]:
    with serving() as server:
        yield server


@pytest.fixture
def fs(fake: FakeWebHdfs) -> WebHdfsFileSystem:
    """What a loaded machine answers late is waited for: no request is made twice for that."""
    return WebHdfsFileSystem(fake.address, PATIENT, user="me", token=None)


def url(name: str) -> str:
    return f"webhdfs://nn:1/{name}"


def test_a_rename_whose_answer_is_lost_has_happened_once(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    fake.files["/a"] = b"mine"
    fake.after["RENAME"] = [gone]
    fs.rename_new(url("a"), url("b"))
    assert fake.files == {"/b": b"mine"} and fake.count("RENAME") == 2


def test_a_rename_onto_a_file_of_others_is_refused_also_at_the_second_attempt(
    fs: WebHdfsFileSystem, fake: FakeWebHdfs
) -> None:
    fake.files |= {"/a": b"mine", "/b": b"theirs"}
    fake.before["RENAME"] = [gone]
    with pytest.raises(ExistsError):
        fs.rename_new(url("a"), url("b"))
    assert fake.files == {"/a": b"mine", "/b": b"theirs"}


def test_a_server_with_the_old_rename_is_told(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    """HttpFS knows no renameoptions: its rename moves into a directory that has the target's name."""
    fake.files["/a"] = b"x"
    fake.before["RENAME"] = [lambda handler: bool(handler.tell({"boolean": True})) or True]
    with pytest.raises(StorageError, match="does not know renames that refuse"):
        fs.rename_new(url("a"), url("b"))
    fake.before["CREATE"] = [lambda handler: bool(handler.tell(b"")) or True]  # no DataNode is named
    with pytest.raises(ConfigError, match="does not answer as WebHDFS"):
        fs.create(url("c"))


@pytest.mark.parametrize(("fault", "settings"), [(gone, PATIENT), (silent(1.2), HASTY)], ids=["broken", "frozen"])
def test_a_create_without_an_answer_is_not_repeated_under_its_name(
    fs: WebHdfsFileSystem, fake: FakeWebHdfs, fault: Any, settings: dict[str, str]
) -> None:
    """It may happen late, and would then empty what a second one has written; write_file takes another name."""
    fake.before["CREATE data"] = [fault]
    with pytest.raises(RetryableStorageError, match="may still happen"):
        WebHdfsFileSystem(fake.address, settings, user="me", token=None).create(url("a"))
    assert fake.count("CREATE data") == 1
    fake.after["CREATE data"] = [gone]
    write_file(fs, url("b"), b"data")
    assert fake.files["/b"] == b"data" and fake.count("CREATE data") == 3


def test_a_create_that_was_refused_or_never_sent_is_repeated(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    fake.before["CREATE"] = [refusing("RetriableException", "in safe mode")]
    fake.before["CREATE data"] = [refusing("SafeModeException")]
    with fs.create(url("a")) as writer:
        writer.write(b"x")
    assert fake.files == {"/a": b"x"}


def test_a_deletion_whose_answer_is_lost_has_happened(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    fake.files["/a"] = b"x"
    fake.after["DELETE"] = [gone]
    assert fs.delete(url("a")) is True
    assert fs.delete(url("a")) is False


@pytest.mark.parametrize(("fault", "settings"), [(gone, PATIENT), (silent(0.4), HASTY)], ids=["broken", "frozen"])
def test_an_answer_that_one_of_two_namenodes_loses(fake: FakeWebHdfs, fault: Any, settings: dict[str, str]) -> None:
    """The `hdfs` package goes on to the second one by itself, within one attempt."""
    with serving() as other:
        other.files = fake.files
        pair = f"{fake.address},{other.address}"
        fake.files["/a"] = b"mine"
        fake.after["RENAME"] = [fault]
        WebHdfsFileSystem(pair, settings, user="me", token=None).rename_new(url("a"), url("b"))
        assert fake.files == {"/b": b"mine"}
        if settings is PATIENT:  # a hasty one may ask both once more, on a loaded machine
            assert fake.count("RENAME") == other.count("RENAME") == 1
        fake.after["DELETE"] = [fault]
        assert WebHdfsFileSystem(pair, settings, user="me", token=None).delete(url("b")) is True
        assert fake.files == {}


def test_a_namenode_that_refuses_or_is_dead_has_deleted_nothing(fake: FakeWebHdfs) -> None:
    with serving() as standby:
        for first in ("127.0.0.1:9", standby.address):
            standby.before["DELETE"] = [refusing("StandbyException")]
            both = WebHdfsFileSystem(f"{first},{fake.address}", PATIENT, user="me", token=None)
            assert both.delete(url("a")) is False


def test_a_read_that_breaks_goes_on_where_it_was(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    data = bytes(range(256)) * 40_000

    def half(handler: Any) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: 5 << 20])  # the second of the reader's pieces breaks off
        return gone(handler)

    fake.files["/a"] = data
    fake.before["OPEN data"] = [half]
    with fs.open_read(url("a")) as file:
        assert file.read(1 << 20) + file.read() == data
    assert [asked["offset"] for name, asked in fake.asked if name == "OPEN data"] == ["0", str(4 << 20)]


@pytest.mark.parametrize(("fault", "settings"), [(gone, PATIENT), (silent(1.2), HASTY)], ids=["broken", "frozen"])
def test_a_read_goes_on_at_another_replica_than_that_which_failed(
    fake: FakeWebHdfs, fault: Any, settings: dict[str, str]
) -> None:
    fs = WebHdfsFileSystem(fake.address, settings, user="me", token=None)
    fake.files["/a"] = DATA
    fake.replicas = {"10.0.0.1:9866": "127.0.0.1", "10.0.0.2:9866": "localhost"}
    asked_nodes: list[str] = []

    def first(handler: Any) -> bool:
        asked_nodes.append(handler.headers["Host"])
        fs.calls.data_deadline_s, fs.calls._data._timeout = 60.0, (60.0, 60.0)  # of the requests after this one
        return bool(fault(handler))

    def next_one(handler: Any) -> bool:
        asked_nodes.append(handler.headers["Host"])
        return False

    fake.before["OPEN data"] = [first, next_one, next_one]
    with WebHdfsRaw(fs, url("a"), len(DATA)) as raw:
        assert raw.read_at(0, 10) == DATA[:10]
        assert raw.read_at(50, 10) == DATA[50:60]  # a read elsewhere, which does not try the first one again
    assert asked_nodes == [f"127.0.0.1:{fake.port}", *[f"localhost:{fake.port}"] * 2]


def test_the_only_replica_is_asked_again(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    fake.files["/a"] = DATA
    fake.before["OPEN data"] = [gone, gone]
    assert fs.read_range(url("a"), 1, 5) == DATA[1:6]
    left_out = [asked.get("excludedatanodes") for name, asked in fake.asked if name == "OPEN"]
    assert left_out == [None, *["10.0.0.1:9866", None] * 2]
    fake.before |= {"OPEN data": [gone], "GET_BLOCK_LOCATIONS": [refusing("UnsupportedOperationException")]}
    assert fs.read_range(url("a"), 1, 5) == DATA[1:6]  # of a server that does not tell its DataNodes' ports


def test_an_attempt_that_was_given_up_leaves_no_stream_behind(
    fs: WebHdfsFileSystem, fake: FakeWebHdfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends later than the one after it, whose stream and place are kept."""
    fake.files["/a"] = bytes(range(100))
    go_on, reached = threading.Event(), threading.Event()
    opened: list[Any] = []

    class Slow:
        def __init__(self, stream: Any, slow: bool) -> None:
            self.stream, self.slow, self.closed, self.raw = stream, slow, False, self

        def read(self, length: int, decode_content: bool) -> Any:
            if self.slow:
                reached.set()
                go_on.wait(120)
            return self.stream.raw.read(length, decode_content=decode_content)

        def close(self) -> None:
            self.closed = True
            self.stream.close()

    def open_slowly(*arguments: Any) -> Slow:
        opened.append(Slow(open_at(*arguments), not opened))
        return opened[-1]

    monkeypatch.setattr("lockstep.storage.files.webhdfs_streams.open_at", open_slowly)
    with WebHdfsRaw(fs, url("a"), 100) as raw:
        client = fs.calls._data
        old = threading.Thread(target=raw._read, args=(client, 0, 10))
        old.start()
        assert reached.wait(120)
        assert raw.read_at(0, 20) == bytes(range(20))
        go_on.set()
        old.join(120)
        assert opened[0].closed and not opened[1].closed
        assert raw.read_at(20, 20) == bytes(range(20, 40)) and len(opened) == 2
    assert opened[1].closed
    assert raw._read(client, 0, 10) == bytes(range(10)) and opened[2].closed  # nor one that begins after the end


def test_a_write_that_breaks_is_written_anew_under_another_name(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    """A DataNode that loses its client closes the file as it is: a whole file to every reader, and too short."""

    def cut(handler: Any) -> bool:
        fake.files["/half"] = b"12"
        return gone(handler)

    fake.before["APPEND data"] = [cut]
    write_file(fs, url("a"), b"1234")
    assert fake.files["/a"] == b"1234" and fake.count("CREATE data") == 2
    fake.after["APPEND data"] = [lambda handler: bool(fake.files.update({"/c": b"12"}))]
    with pytest.raises(StorageError, match="not have the length"), fs.create(url("c")) as writer:
        writer.write(b"1234")


def test_a_file_that_is_taken_away_from_its_writer(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    writer = fs.create(url("a"))
    del fake.files["/a"]
    with pytest.raises(RetryableStorageError, match="taken over") as caught:
        writer.write(b"1" * WebHdfsWriter.piece_bytes)
    assert caught.value.got and caught.value.allowed and caught.value.next_step
    assert not_there("cannot write x", "write", "gone").next_step == caught.value.next_step  # by hdfs:// just so


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "webhdfs-append"]


def wait_for_senders() -> None:
    end = time.monotonic() + 60
    while senders() and time.monotonic() < end:
        time.sleep(0.02)
    assert senders() == []


def test_a_writer_that_nobody_ends_gives_its_connection_back(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    """And one that is only slow goes on with another request."""

    plain = fs.calls.send

    def soon_tired(method: str, where: str, body: Any, *rest: Any) -> None:
        first = next(body)  # this one is waited for, the second one not
        fs.calls.send, fs.data_deadline_s = plain, 0.3  # type: ignore[method-assign] # undone
        plain(method, where, itertools.chain([first], body), *rest)

    writer = fs.create(url("a"))
    fs.calls.send = soon_tired  # type: ignore[method-assign,assignment] # of this object alone
    writer.write(b"1" * WebHdfsWriter.piece_bytes)
    wait_for_senders()
    fs.data_deadline_s = 60.0
    writer.write(b"2" * WebHdfsWriter.piece_bytes)
    writer.close()
    assert fake.files["/a"] == b"1" * WebHdfsWriter.piece_bytes + b"2" * WebHdfsWriter.piece_bytes
    assert fake.count("APPEND data") == 2
    wait_for_senders()


def test_an_end_that_comes_too_late_gives_the_request_up(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    taken = threading.Event()

    def slowly(method: str, where: str, body: Any, *rest: Any) -> None:
        next(body)
        taken.wait(120)  # a DataNode that takes nothing more for now
        for _ in body:
            raise AssertionError("a piece was sent after the end")

    fake.files["/a"] = b""
    fs.calls.send = slowly  # type: ignore[method-assign,assignment] # of this object alone
    request = _Append(fs, url("a"))
    for piece in (b"1", b"2"):
        request.put(piece, 1.0)
    with pytest.raises(StorageTimeoutError):
        request.finish(0.1)
    assert request._cancelled
    taken.set()
    wait_for_senders()


def test_a_frozen_server_ends_at_the_deadline(fake: FakeWebHdfs) -> None:
    fake.before["GETFILESTATUS"] = [silent(1.0)] * 200
    start = time.monotonic()
    with pytest.raises(StorageError, match=fake.address) as caught:
        WebHdfsFileSystem(fake.address, QUICK, user="me", token=None).stat(url("a"))
    assert time.monotonic() - start < 60  # not that of 200 attempts; the rest is for a loaded machine
    assert caught.value.got and caught.value.allowed and caught.value.next_step


def test_the_second_namenode_serves_where_the_first_does_not(fake: FakeWebHdfs) -> None:
    """Dead at first, then standby: both in one attempt."""
    with serving() as standby:
        for first in ("127.0.0.1:9", standby.address):
            standby.before["GETFILESTATUS"] = [refusing("StandbyException", "Operation category READ")]
            both = WebHdfsFileSystem(f"{first},{fake.address}", PATIENT, user="me", token=None)
            assert both.stat("webhdfs://x:1,y:2/").is_dir
            assert first in both.calls.whom and fake.address in both.calls.whom
    standby_only = WebHdfsFileSystem(f"{fake.address}", PATIENT, user="me", token=None)
    fake.before["GETFILESTATUS"] = [refusing("StandbyException")] * 2  # a failover takes some seconds
    assert standby_only.stat(url("")).is_dir


def test_a_standby_namenode_that_refuses_a_token_is_not_the_last_word(fake: FakeWebHdfs) -> None:
    text = "Failed to obtain user group information: org.apache.hadoop.security.token.SecretManager$InvalidToken: "
    with serving() as standby:
        standby.before["GETFILESTATUS"] = [refusing("SecurityException", text + "StandbyException")]
        both = WebHdfsFileSystem(f"{standby.address},{fake.address}", PATIENT, user="me", token="a token")
        assert both.stat("webhdfs://x:1,y:2/").is_dir
    fake.before["GETFILESTATUS"] = [refusing("SecurityException", text + "token is expired")]
    with pytest.raises(StorageError, match="permission denied"):
        WebHdfsFileSystem(fake.address, PATIENT, user="me", token="a token").stat(url("a"))


def test_a_token_is_sent_and_never_told(fake: FakeWebHdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_WEBHDFS_TOKEN", "s3cr3t")
    here = f"webhdfs://{fake.address}/a"
    with pytest.raises(NotFoundError):
        filesystem(here).stat(here)
    asked = fake.asked[0][1]
    assert asked["delegation"] == "s3cr3t" and "user.name" not in asked
    with monkeypatch.context() as soon:
        soon.setenv("LOCKSTEP_STORAGE_GIVE_UP_S", "0.3")
        fake.before["GETFILESTATUS"] = [gone] * 50
        with pytest.raises(LockstepError) as caught:
            filesystem(here).stat(here)
        closed = "webhdfs://127.0.0.1:9/a"
        with pytest.raises(LockstepError) as refused:
            filesystem(closed).stat(closed)
    fake.before["GETFILESTATUS"] = [lambda handler: bool(handler.tell(handler.path.encode(), 404)) or True]
    with pytest.raises(ConfigError) as echoed:  # a page that shows what was asked for
        filesystem(here).stat(here)
    for error in (caught.value, echoed.value, refused.value):
        while error is not None:  # nor in what it was raised from, which --debug prints
            assert "s3cr3t" not in str(error)
            error = error.__cause__  # type: ignore[assignment] # to the last


def test_proxies_and_passwords_of_the_environment_are_left_alone(
    fake: FakeWebHdfs, fs: WebHdfsFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert fs.stat(url("")).is_dir


def test_another_server_is_no_webhdfs(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    fake.before["GETFILESTATUS"] = [
        lambda handler: bool(handler.tell(b"<html>hello</html>")) or True,
        lambda handler: bool(handler.tell(b"not found", 404)) or True,
    ]
    for _ in range(2):
        with pytest.raises(ConfigError, match="does not answer as WebHDFS"):
            fs.stat(url("a"))


@pytest.mark.parametrize(
    "body",
    [
        "", "null", "[]", "1", '"text"', "{}", '{"FileStatus": null}', '{"FileStatus": {}}', '{"FileStatus": [1]}',
        '{"FileStatus": {"type": "FILE", "length": "many", "modificationTime": 1}}',
        '{"FileStatus": {"type": "FILE", "length": 1e999, "modificationTime": 1}}',
        '{"FileStatuses": {"FileStatus": 5}}', '{"FileStatuses": {"FileStatus": [5]}}',
        '{"FileStatuses": {"FileStatus": [{"pathSuffix": 5}, {"pathSuffix": 6}]}}',
        '{"FileStatuses": {"FileStatus": [{"pathSuffix": "..", "type": "FILE"}]}}',  # out of the directory
        '{"RemoteException": 3}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("status", [200, 500])
def test_answers_of_no_known_form_end_as_errors_of_ours(
    fs: WebHdfsFileSystem, fake: FakeWebHdfs, body: str, status: int
) -> None:
    for operation, call in (("GETFILESTATUS", fs.stat), ("LISTSTATUS", fs.list)):
        fake.before[operation] = [lambda handler: bool(handler.tell(body.encode(), status)) or True]
        with pytest.raises(LockstepError):
            call(url("a"))


@pytest.mark.parametrize(
    ("authority", "settings", "wanted"),
    [
        ("a:1", {}, ("http://a:1",)),
        ("a:1,b:2", {}, ("http://a:1", "http://b:2")),
        ("[::1]:9870", {}, ("http://[::1]:9870",)),
        ("ns1", SERVICE, ("http://a:9870", "http://b:9870")),
        ("ns1", {}, None),  # a name service that nobody has described
        ("host", SINGLE, None),  # no port: 9870 is Hadoop's, but not every cluster's
        ("a:1,b", {}, None),
        ("a:99999", {}, None),
        ("me@a:1", {}, None),  # the user comes from HADOOP_USER_NAME
        ("", {}, None),
    ],
)
def test_addresses(authority: str, settings: dict[str, str], wanted: tuple[str, ...] | None) -> None:
    if wanted is None:
        with pytest.raises(ConfigError):
            http_addresses(authority, settings)
    else:
        assert http_addresses(authority, settings) == wanted


@pytest.mark.parametrize(
    ("web", "native", "settings"),
    [
        ("webhdfs://c:9870/x", "hdfs://c:8020/x", SINGLE),
        ("webhdfs://ns1/x", "hdfs://ns1/x", SERVICE),
    ],
)
def test_one_path_by_both_ways(web: str, native: str, settings: dict[str, str]) -> None:
    assert as_webhdfs(native, settings) == web and as_hdfs(web, settings) == native
    assert as_webhdfs(web, {}) == web and as_hdfs(native, {}) == native
    for convert, given in ((as_webhdfs, native), (as_hdfs, web)):
        with pytest.raises(ConfigError):
            convert(given, {})


def test_the_way_of_a_name_service_by_one_of_its_nodes_and_of_the_default() -> None:
    assert as_webhdfs("hdfs://b:8020/x", SERVICE) == "webhdfs://ns1/x"
    assert as_hdfs("webhdfs://a:9870,b:9870/x", SERVICE) == "hdfs://ns1/x"
    assert as_webhdfs("hdfs:///x", SINGLE) == "webhdfs://c:9870/x"


def test_dots_are_no_names(fs: WebHdfsFileSystem) -> None:
    """An HTTP client resolves them by itself: `/../../jmx` would leave WebHDFS."""
    for path in ("webhdfs://nn:1/a/../b", "webhdfs://nn:1/./a"):
        with pytest.raises(ConfigError):
            fs.stat(path)
