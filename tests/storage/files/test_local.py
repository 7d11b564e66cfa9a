"""The contract on local disk, and what only a local disk has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.storage.errors import ConfigError, ExistsError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.files.local import LocalFileSystem, rename_noreplace_portable
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.urls import absolute, basename, join, parent, split_url
from tests.fs_contract import FileSystemContract, put


class TestPlainPaths(FileSystemContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)

    @pytest.fixture
    def fs(self, root: str) -> FileSystem:
        return filesystem(root)


class TestFileUrls(TestPlainPaths):
    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return tmp_path.as_uri()


class TestWithoutRenameat2(TestPlainPaths):
    @pytest.fixture(autouse=True)
    def _portable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lockstep.storage.files.local.rename_noreplace", rename_noreplace_portable)


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fs = filesystem("f")
    put(fs, "f")
    fs.rename_new("f", "g")
    assert [entry.url for entry in fs.list(".")] == ["./g"]
    assert parent("g") == "." and basename("g") == "g"


def test_sync_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    fs = LocalFileSystem()
    with fs.create(str(tmp_path / "a" / "f")) as writer:
        writer.write(b"x")
        writer.sync()
    assert synced == [str(tmp_path / "a" / "f"), str(tmp_path / "a")]
    fs.rename_new(str(tmp_path / "a" / "f"), str(tmp_path / "g"))
    assert synced[2:] == [str(tmp_path), str(tmp_path / "a")]


def test_mode_of_a_directory(tmp_path: Path) -> None:
    LocalFileSystem().mkdirs(str(tmp_path / "q"), mode=0o700)
    assert (tmp_path / "q").stat().st_mode & 0o777 == 0o700


def test_failures_of_the_disk_are_ours(tmp_path: Path) -> None:
    fs = LocalFileSystem()
    with pytest.raises(StorageError) as caught:
        fs.create(str(tmp_path / ("x" * 300)))
    assert "too long" in caught.value.got
    writer = fs.create("/dev/full", exclusive=False)
    writer.write(b"x")
    with pytest.raises(StorageError, match="/dev/full"):
        writer.sync()


def test_a_dangling_link_is_no_free_name(tmp_path: Path) -> None:
    fs = LocalFileSystem()
    put(fs, str(tmp_path / "f"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ExistsError):
        fs.rename_new(str(tmp_path / "f"), str(tmp_path / "link"))
    assert fs.list(str(tmp_path))[0].name == "f"
    assert fs.delete(str(tmp_path / "link"))


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("/a/b", ("file", "", "/a/b")),
        ("a", ("file", "", "a")),
        ("C:x y", ("file", "", "C:x y")),
        ("file:///a%20b", ("file", "", "/a%20b")),  # not decoded, as Hadoop
        ("file:/a", ("file", "", "/a")),
        ("file://localhost/a", ("file", "", "/a")),
        ("hdfs://nn:8020/a/b", ("hdfs", "nn:8020", "/a/b")),
        ("HDFS://ns1", ("hdfs", "ns1", "/")),
        ("hdfs:///a", ("hdfs", "", "/a")),
    ],
)
def test_split_url(url: str, parts: tuple[str, str, str]) -> None:
    assert split_url(url) == parts


@pytest.mark.parametrize("url", ["", "a\0b", "hdfs:/a", "webhdfs:a", "file://host/a", "file:a", "file://"])
def test_urls_that_cannot_be_right(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_url(url)
    assert caught.value.next_step


@pytest.mark.parametrize("url", ["viewfs://nn:1/a", "ftp://host/a", "http://host/a"])
def test_other_schemes_are_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=url.partition(":")[0]):
        filesystem(url)


@pytest.mark.parametrize(
    ("url", "above"),
    [("/a/b", "/a"), ("/a", "/"), ("/", "/"), ("a/b/", "a"), ("a", "."), ("hdfs://n/a", "hdfs://n/"),
     ("hdfs://n/a/b/", "hdfs://n/a"), ("hdfs://n/", "hdfs://n/"), ("file:///a/b", "file:///a")],
)  # fmt: skip
def test_parent(url: str, above: str) -> None:
    assert parent(url) == above


def test_join() -> None:
    assert join("/", "a", "b") == "/a/b"
    assert join("hdfs://n/", "a") == "hdfs://n/a"
    assert join("a/", "/b/") == "a/b"
    assert join(".", "a") == "./a"


def test_backends_are_shared(tmp_path: Path) -> None:
    assert filesystem(str(tmp_path)) is filesystem("file:///x")
    with pytest.raises(NotFoundError):
        filesystem("x").stat(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a/b", "{cwd}/a/b"),
        ("./a//b/", "{cwd}/a/b"),
        ("/a/b", "/a/b"),  # what is absolute stays as it is written
        ("file:///a/b", "file:///a/b"),
        ("hdfs://nn:1/a", "hdfs://nn:1/a"),
        ("2024:log", "{cwd}/2024:log"),  # a colon alone makes no URL
    ],
)
def test_absolute(given: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute(given) == wanted.format(cwd=tmp_path)


def test_pipe_or_device_in_place_of_a_file_is_neither_waited_for_nor_read_without_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        for read in (LocalFileSystem().read_bytes, LocalFileSystem().open_read):
            with pytest.raises(StorageError, match=path) as caught:
                read(path)
            assert "pipe, socket or device" in caught.value.got


def test_a_linked_folder_is_named_and_not_entered(tmp_path: Path) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x").write_bytes(b"1")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "y").write_bytes(b"2")
    os.symlink(tmp_path / "out", tmp_path / "in" / "b")
    os.symlink(tmp_path / "in", tmp_path / "in" / "loop")
    top = str(tmp_path / "in")
    found = [(entry.url.removeprefix(top), entry.is_special) for entry in walk(filesystem(top), top)]
    assert found == [("/a/x", False), ("/b", True), ("/loop", True)]
    os.symlink(top, tmp_path / "top")  # what is asked for may itself be a link
    assert len(list(walk(filesystem(top), str(tmp_path / "top")))) == 3


def test_a_slash_at_the_end_of_a_name_is_none_of_it(tmp_path: Path) -> None:
    fs, new = filesystem(str(tmp_path)), f"{tmp_path}/new/"
    put(fs, f"{tmp_path}/staging/f")
    fs.rename_new(f"{tmp_path}/staging/", new)
    assert fs.exists(new) and fs.read_bytes(join(new, "f")) == b"data" and os.listdir(tmp_path) == ["new"]
    assert [entry.url for entry in fs.list(new)] == [f"{tmp_path}/new/f"]
    with pytest.raises(ExistsError):
        fs.rename_new(str(tmp_path / "new"), new)
