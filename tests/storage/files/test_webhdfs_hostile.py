"""WebHDFS against servers that lie, lead astray or cut: each ends in an error of ours, and nothing passes for done."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import ConfigError, CorruptionError, LockstepError, StorageError
from lockstep.storage.files.webhdfs import WebHdfsFileSystem
from lockstep.storage.settings import DEFAULTS
from lockstep.storage.upload import find_files, upload
from tests.storage.files.fake_webhdfs import FakeWebHdfs, serving

# Attempts that a loaded machine does not end before their answers, which are to be seen; few of them.
PATIENT = DEFAULTS | {
    "lockstep.storage.call-deadline-s": "60",
    "lockstep.storage.data-deadline-s": "60",
    "lockstep.storage.give-up-s": "60",
}
DATA = bytes(range(256)) * 40
PAGE = b"<html>Log in</html>" * 1000  # longer than the file


@pytest.fixture
def fake() -> Iterator[FakeWebHdfs]:
    with serving() as server:
        yield server


@pytest.fixture
def fs(fake: FakeWebHdfs) -> WebHdfsFileSystem:
    return WebHdfsFileSystem(fake.address, PATIENT, user="me", token="s3cr3t")


def url(name: str) -> str:
    return f"webhdfs://nn:1/{name}"


def answering(status: int, body: bytes = b"", **headers: str) -> Callable[[Any], bool]:
    """An answer of just this."""

    def answer(handler: Any) -> bool:
        handler.tell(body, status, {name.replace("_", "-"): value for name, value in headers.items()})
        return True

    return answer


def of_untold_length(body: bytes, **headers: str) -> Callable[[Any], bool]:
    """An answer that ends with its last chunk, or with the connection."""

    def answer(handler: Any) -> bool:
        handler.send_response(200)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True
        return True

    return answer


@pytest.mark.parametrize("operation", ["GETFILESTATUS", "LISTSTATUS", "RENAME", "DELETE", "MKDIRS"])
@pytest.mark.parametrize("status", [302, 307])
def test_no_redirect_to_a_stranger_is_followed(
    fs: WebHdfsFileSystem, fake: FakeWebHdfs, operation: str, status: int
) -> None:
    """A login page would answer a PUT or DELETE that became a GET by 200, as if it were done."""
    fake.files["/a"] = DATA
    calls: dict[str, Callable[[], object]] = {
        "GETFILESTATUS": lambda: fs.stat(url("a")),
        "LISTSTATUS": lambda: fs.list(url("")),
        "RENAME": lambda: fs.rename_new(url("a"), url("b")),
        "DELETE": lambda: fs.delete(url("a")),
        "MKDIRS": lambda: fs.mkdirs(url("c")),
    }
    with serving() as stranger:
        stranger.files["/a"] = DATA
        where = f"http://{stranger.address}/webhdfs/v1/a?op=GETFILESTATUS"
        fake.before[operation] = [answering(status, Location=where)]
        with pytest.raises(ConfigError, match="does not answer as WebHDFS") as caught:
            calls[operation]()
        assert stranger.address in caught.value.got and stranger.asked == []
    assert fake.files == {"/a": DATA}


@pytest.mark.parametrize("status", [302, 307, 304])
def test_the_place_of_data_is_the_last_one(fs: WebHdfsFileSystem, fake: FakeWebHdfs, status: int) -> None:
    fake.files["/a"] = DATA
    with serving() as stranger:
        where = f"http://{stranger.address}/webhdfs/v1/a?op=OPEN&data=1&offset=0&length=9"
        for name in ("OPEN data", "CREATE data", "APPEND data"):
            fake.before[name] = [answering(status, Location=where)]
        with pytest.raises(LockstepError):
            fs.read_bytes(url("a"))
        with pytest.raises(LockstepError):
            fs.create(url("b"))
        with pytest.raises(LockstepError), fs.create(url("c")) as writer:
            writer.write(DATA)
        assert stranger.asked == []
    assert "/c" not in fake.files


@pytest.mark.parametrize(
    "where",
    ["file:///etc/passwd", "ftp://h/x", "nonsense", "http://", "http://[::1", "http://127.0.0.1:9/x", "//h/x", "\x01"],
)
def test_places_that_are_none(fake: FakeWebHdfs, where: str) -> None:
    settings = PATIENT | {"lockstep.storage.give-up-s": "3"}  # one that refuses connections may begin to serve
    fs = WebHdfsFileSystem(fake.address, settings, user="me", token="s3cr3t")
    fake.files["/a"] = DATA
    fake.before["OPEN"] = [answering(307, Location=where)] * 20
    with pytest.raises(LockstepError) as caught:
        fs.read_bytes(url("a"))
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (answering(200, DATA[:-1]), CorruptionError),  # a proxy that cuts and mends the length
        (answering(200, b""), CorruptionError),
        (answering(200, DATA + b"x"), StorageError),  # not what was asked for: its beginning is no better
        (answering(200, PAGE), StorageError),
        (of_untold_length(PAGE), StorageError),
        (of_untold_length(b"%x\r\n%s\r\n0\r\n\r\n" % (len(PAGE), PAGE), Transfer_Encoding="chunked"), StorageError),
        (answering(200, gzip.compress(DATA, mtime=0), Content_Encoding="gzip"), StorageError),
        (answering(204), CorruptionError),
        (answering(302, Location="http://127.0.0.1:9/login"), StorageError),
        (answering(403, b"<html>Log in</html>"), StorageError),
        (answering(404, b"<html>no such page</html>"), StorageError),
    ],
)
def test_answers_that_are_not_the_bytes_asked_for(
    fs: WebHdfsFileSystem, fake: FakeWebHdfs, answer: Callable[[Any], bool], kind: type[LockstepError]
) -> None:
    fake.files["/a"] = DATA
    fake.before["OPEN data"] = [answer] * 20
    with pytest.raises(kind) as caught:
        fs.read_bytes(url("a"))
    if kind is StorageError:  # the NameNode has answered, so its port is not to blame
        assert fake.address in caught.value.what and "DataNode or a proxy" in caught.value.next_step
    fake.before["OPEN data"] = [answer] * 20
    with pytest.raises(kind), fs.open_read(url("a")) as file:
        file.read()


def test_a_checksum_that_is_none_is_the_datanodes_fault(fs: WebHdfsFileSystem, fake: FakeWebHdfs) -> None:
    fake.before["GETFILECHECKSUM"] = [
        lambda handler: answering(307, Location=f"http://{fake.address}{handler.path}&data=1")(handler)
    ]
    fake.before["GETFILECHECKSUM data"] = [answering(200, PAGE)]
    with pytest.raises(StorageError, match="does not answer as a DataNode"):
        fs.stored_checksum(url("a"))


@pytest.mark.parametrize("length", [-1, len(DATA) + 1, 1 << 29, 1 << 62, "x", None, [1]])
def test_a_namenode_that_lies_about_a_length(fs: WebHdfsFileSystem, fake: FakeWebHdfs, length: Any) -> None:
    fake.files["/a"] = DATA
    told = {"FileStatus": {"type": "FILE", "length": length, "modificationTime": 1, "pathSuffix": ""}}
    for read in (fs.read_bytes, lambda place: fs.open_read(place).read()):
        fake.before["GETFILESTATUS"] = [lambda handler: bool(handler.tell(told)) or True]
        with pytest.raises((CorruptionError, ConfigError)):
            read(url("a"))


@pytest.mark.parametrize("name", ["../b", "a/../../b", "/etc/passwd", "a/b", "..", ".", "", 5, None, ["a"]])
def test_a_listing_names_nothing_outside_its_directory(fs: WebHdfsFileSystem, fake: FakeWebHdfs, name: Any) -> None:
    """Nor the directory itself, which would then never be walked through."""
    entry = {"type": "FILE", "length": 1, "modificationTime": 1, "pathSuffix": name}
    told = {"FileStatuses": {"FileStatus": [entry, entry]}}
    fake.before["LISTSTATUS"] = [lambda handler: bool(handler.tell(told)) or True]
    with pytest.raises(ConfigError):
        fs.list(url("d"))


@pytest.mark.parametrize("arrived", [DATA[:-1], DATA + b"x", DATA[:-1] + b"?", b""])
def test_an_upload_whose_bytes_change_on_the_way_has_no_name(
    fake: FakeWebHdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrived: bytes
) -> None:
    """A proxy answers 200 to a body of which it passed on something else."""
    (tmp_path / "file").write_bytes(DATA)
    output = f"webhdfs://{fake.address}/d"
    for name in ("GIVE_UP_S", "WRITE_GIVE_UP_S"):
        monkeypatch.setenv(f"LOCKSTEP_STORAGE_{name}", "60")

    def change(handler: Any) -> bool:
        for name in fake.files:
            fake.files[name] = arrived
        return False

    stored = {"FileChecksum": {"algorithm": "of no known kind", "bytes": "00", "length": 1}}
    fake.after["APPEND data"] = [change] * 20
    fake.before["LISTSTATUS"] = [lambda handler: bool(handler.tell({"FileStatuses": {"FileStatus": []}})) or True]
    fake.before["GETFILECHECKSUM"] = [
        lambda handler: answering(307, Location=f"http://{fake.address}{handler.path}&data=1")(handler)
    ] * 20
    fake.before["GETFILECHECKSUM data"] = [lambda handler: bool(handler.tell(stored)) or True] * 20
    with pytest.raises((CorruptionError, StorageError)):
        upload(find_files([str(tmp_path / "file")], output), output)
    assert fake.files == {} and fake.count("RENAME") == 0
