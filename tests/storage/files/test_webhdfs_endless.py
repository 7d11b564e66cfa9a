"""WebHDFS against answers that are endless or large: no more of one is read than it may be long, nor for longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.storage.errors import ConfigError, LockstepError, StorageError
from lockstep.storage.files.deadlines import left_behind
from lockstep.storage.files.webhdfs import WebHdfsFileSystem
from lockstep.storage.publish import write_file
from tests.storage.files.fake_webhdfs import FakeWebHdfs, serving
from tests.storage.files.test_webhdfs_hostile import DATA, PATIENT, url


@pytest.fixture
def fake() -> Iterator[FakeWebHdfs]:
    with serving() as server:
        yield server


@pytest.fixture
def fs(fake: FakeWebHdfs) -> WebHdfsFileSystem:
    return WebHdfsFileSystem(fake.address, PATIENT, user="me", token=None)


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    "operation", ["OPEN data", "OPEN", "GETFILESTATUS", "MKDIRS", "DELETE", "CREATE", "CREATE data", "APPEND data"]
)
def test_an_answer_without_an_end_is_not_read_to_its_end(
    fs: WebHdfsFileSystem, fake: FakeWebHdfs, operation: str, status: int
) -> None:
    sent = 0

    def pour(handler: Any) -> bool:
        nonlocal sent
        handler.send_response(status)
        handler.end_headers()
        handler.close_connection = True
        try:
            while True:
                sent += handler.wfile.write(b"x" * (1 << 16))
        except OSError:
            return True

    calls: dict[str, Callable[[], object]] = {
        "GETFILESTATUS": lambda: fs.stat(url("a")),
        "MKDIRS": lambda: fs.mkdirs(url("c")),
        "DELETE": lambda: fs.delete(url("a")),
        "CREATE": lambda: fs.create(url("b")),
        "CREATE data": lambda: fs.create(url("b")),
        "APPEND data": lambda: write_file(fs, url("b"), DATA),
    }
    fake.files["/a"] = DATA
    fake.before[operation] = [pour] * 20
    with pytest.raises(LockstepError):
        calls.get(operation, lambda: fs.read_bytes(url("a")))()
    assert sent < 1 << 24  # some MiB lie in the buffers of a connection; read to its end, this would not come back


def test_an_answer_that_trickles_is_left_at_the_deadline(fake: FakeWebHdfs) -> None:
    """Its thread, too, ends: each byte comes in time, but all of them do not."""
    settings = PATIENT | {"lockstep.storage.call-deadline-s": "1"}
    fs = WebHdfsFileSystem(fake.address, settings, user="me", token=None)
    others = left_behind()  # of tests before this one, that ask servers which never answer
    ended = threading.Event()

    def trickle(handler: Any) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        try:
            while True:
                handler.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            ended.set()
            return True

    fake.before["LISTSTATUS"] = [trickle]
    with pytest.raises(StorageError):
        fs.calls.once(lambda client: client._list_status("/"), "list", url(""), 1.0)
    assert ended.wait(120)
    end = time.monotonic() + 120  # the server has seen the end; the thread that asked may be on its way yet
    while left_behind() > others and time.monotonic() < end:
        time.sleep(0.01)
    assert left_behind() <= others


def test_a_listing_is_long_where_a_directory_is_large(
    fs: WebHdfsFileSystem, fake: FakeWebHdfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"type": "FILE", "length": 1, "modificationTime": 1}
    told = {"FileStatuses": {"FileStatus": [entry | {"pathSuffix": f"{number:0100}"} for number in range(3000)]}}
    fake.before["LISTSTATUS"] = [lambda handler: bool(handler.tell(told)) or True] * 2
    assert len(fs.list(url("d"))) == 3000
    monkeypatch.setattr("lockstep.storage.files.webhdfs_http._MAX_LIST_BYTES", 3000 * 100)
    with pytest.raises(ConfigError, match="over 300000 bytes"):
        fs.list(url("d"))


def test_the_connection_is_used_again_after_an_answer(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    callers: set[int] = set()

    def note(handler: Any) -> bool:
        callers.add(handler.client_address[1])
        return False

    fake.before["GETFILESTATUS"] = [note] * 3
    for _ in range(3):
        fs.stat(url(""))
    assert len(callers) == 1
