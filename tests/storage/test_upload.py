"""What an upload plans, leaves alone, replaces and refuses; the file system is a local one that fails on demand."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import (
    ConfigError,
    CorruptionError,
    DataError,
    ExistsError,
    LockstepError,
    NotFoundError,
    RetryableStorageError,
    StorageAwayError,
    StorageError,
)
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.upload import find_files, temporary_name, upload


def files(folder: Path, **contents: bytes) -> Path:
    for name, data in contents.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def run(source: Path | list[str], target: Path, **options: Any) -> list[str]:
    inputs = source if isinstance(source, list) else [str(source)]
    items = find_files(inputs, str(target))
    return [outcome.done for outcome in upload(items, str(target), **options)]


def test_files_by_their_names_folders_by_their_content(tmp_path: Path) -> None:
    source = files(tmp_path / "in", a=b"1", b__c=b"2", b___hidden=b"3", empty=b"")
    counted: list[int] = []
    done = run([str(source), str(files(tmp_path / "more", d=b"4") / "d")], tmp_path / "out", on_bytes=counted.append)
    assert done == ["sent"] * 5
    assert tree(tmp_path / "out") == {"a": b"1", "b/_hidden": b"3", "b/c": b"2", "d": b"4", "empty": b""}
    assert sum(counted) == 4
    assert run([str(source)], tmp_path / "out", parallel=3) == ["there"] * 4


def test_another_content_is_refused_before_anything_is_sent_or_replaced_when_asked(tmp_path: Path) -> None:
    source = files(tmp_path / "in", a=b"new", b=b"old", c=b"longer")
    target = files(tmp_path / "out", b=b"abc", c=b"short")
    before = tree(target)
    with pytest.raises(ExistsError, match="c exists with another content"):  # by the lengths alone
        run(source, target)
    (target / "c").unlink()
    with pytest.raises(ExistsError, match="b exists with another content"):  # the same length
        run(source, target)
    assert tree(target) == {"b": before["b"]}
    counted: list[int] = []
    assert run(source, target, replace=True, on_bytes=counted.append) == ["sent", "replaced", "sent"]
    assert tree(target) == tree(source) and sum(counted) == 12


def test_what_an_interrupted_upload_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    source = files(tmp_path / "in", a=b"1")
    kept = {".b.0123456789abcdef.upload": b"of another file", ".a.tmp": b"", ".a.0123456789abcde.upload": b"no nonce"}
    target = files(tmp_path / "out", **kept)
    (target / ".a.0123456789abcdef.upload").write_bytes(b"half")
    run(source, target)
    assert tree(target) == kept | {"a": b"1"}


@pytest.mark.parametrize("kind", ["link", "circle", "pipe", "colon", "temporary", "not utf-8"])
def test_what_has_no_place_on_hdfs_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    source = files(tmp_path / "in", a=b"1")
    match kind:
        case "link":
            (source / "odd").symlink_to("/etc/passwd")
        case "circle":
            (source / "odd").symlink_to(source)
        case "pipe":
            os.mkfifo(source / "odd")
        case "colon":
            (source / "odd:name").touch()
        case "temporary":
            (source / ".odd.0123456789abcdef.upload").touch()
        case _:
            Path(os.fsdecode(bytes(source) + b"/odd\xff")).touch()
    with pytest.raises(ConfigError, match="odd"):
        run(source, tmp_path / "out")


def test_calls_that_cannot_be_right(tmp_path: Path) -> None:
    one, two = files(tmp_path / "one", a=b"1"), files(tmp_path / "two", a=b"2")
    with pytest.raises(ConfigError, match="two files would become"):
        run([str(one), str(two)], tmp_path / "out")
    with pytest.raises(ConfigError, match="is not local"):
        run(["hdfs://nn:1/a"], tmp_path / "out")
    with pytest.raises(NotFoundError):
        run([str(tmp_path / "none")], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="nothing to upload"):
        run([str(tmp_path / "empty")], tmp_path / "out")
    with pytest.raises(ExistsError, match="is a file"):
        run([str(one)], one / "a")
    (tmp_path / "taken" / "a").mkdir(parents=True)
    with pytest.raises(ExistsError, match="is a directory"):
        run([str(one)], tmp_path / "taken")
    link = tmp_path / "link"
    link.symlink_to(one / "a")
    assert run([str(link)], tmp_path / "out") == ["sent"]  # given by name, a link is what it leads to


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Lets a function see each path of the target that was written, as soon as it is closed."""

    def install(seen: Callable[[str], None]) -> None:
        plain = LocalFileSystem.create

        def create(self: LocalFileSystem, url: str, *, exclusive: bool = True) -> Any:
            writer = plain(self, url, exclusive=exclusive)
            close = writer.close

            def close_and_tell() -> None:
                close()
                seen(url)

            monkeypatch.setattr(writer, "close", close_and_tell)
            return writer

        monkeypatch.setattr(LocalFileSystem, "create", create)

    return install


def test_a_file_that_arrives_changed_never_has_its_name(tmp_path: Path, wrong: Any) -> None:
    wrong(lambda url: Path(url).write_bytes(b"Ruined"))
    with pytest.raises(CorruptionError, match="differs from the local one"):
        run(files(tmp_path / "in", a=b"intact"), tmp_path / "out")
    assert tree(tmp_path / "out") == {}


def test_a_dead_datanode_costs_a_second_attempt_under_another_name(tmp_path: Path, wrong: Any) -> None:
    seen: list[str] = []

    def fail_once(url: str) -> None:
        seen.append(url)
        if len(seen) == 1:
            raise RetryableStorageError("a DataNode died")

    wrong(fail_once)
    counted: list[int] = []
    assert run(files(tmp_path / "in", a=b"data"), tmp_path / "out", on_bytes=counted.append) == ["sent"]
    assert tree(tmp_path / "out") == {"a": b"data"} and len(set(seen)) == 2 and sum(counted) == 4


@pytest.mark.parametrize("how", ["upload", "write"])
def test_who_does_not_take_a_file_is_named(
    tmp_path: Path, wrong: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def fail(url: str) -> None:
        raise RetryableStorageError("a DataNode died")

    wrong(fail)
    monkeypatch.setenv("LOCKSTEP_STORAGE_WRITE_GIVE_UP_S", "0.01")
    monkeypatch.setattr(LocalFileSystem, "whom", "the NameNode at nn:8020", raising=False)
    with pytest.raises(StorageAwayError, match=rf"^the NameNode at nn:8020 did not serve `{how} .*/out/a`") as caught:
        if how == "upload":
            run(files(tmp_path / "in", a=b"data"), tmp_path / "out")
        else:
            write_file(filesystem(str(tmp_path)), str(tmp_path / "out" / "a"), b"data")
    assert caught.value.whom == "the NameNode at nn:8020"


def test_a_failure_stops_the_others_and_leaves_no_half_file(
    tmp_path: Path, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are on their way too, not just those that have not begun."""
    monkeypatch.setattr("lockstep.storage.upload.COPY_BYTES", 1)

    def fail(url: str) -> None:
        if ".a." in url:
            raise StorageError("no space")

    wrong(fail)
    source = files(tmp_path / "in", a=b"1", b=b"2" * 3000, **{f"c{i}": b"3" * 50 for i in range(50)})
    counted: list[int] = []

    def count(size: int) -> None:
        time.sleep(0.02)  # a slow network: all of it would take a minute, and a failure is heard of sooner
        counted.append(size)

    with pytest.raises(StorageError, match="no space"):
        run(source, tmp_path / "out", parallel=2, on_bytes=count)
    left = tree(tmp_path / "out")
    assert all(name.startswith("c") for name in left) and len(left) < 50 and counted.count(1) < 2000


@pytest.mark.parametrize("step", ["compare", "back-off"])
def test_a_failure_stops_steps_that_send_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    source = files(tmp_path / "in", a=b"1", b=b"2" * 3000)
    if step == "compare":
        files(tmp_path / "out", a=b"1", b=b"2" * 3000)
    monkeypatch.setattr("lockstep.storage.upload.COPY_BYTES", 1)
    monkeypatch.setenv("LOCKSTEP_STORAGE_WRITE_GIVE_UP_S", "60")
    begun = threading.Event()

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            begun.set()
            time.sleep(0.01)
            return super().read(1)

    plain_create, plain_open = LocalFileSystem.create, LocalFileSystem.open_read

    def create(self: LocalFileSystem, url: str, *, exclusive: bool = True) -> Any:
        if ".a." in url:
            assert begun.wait(120)
            raise StorageError("no space")
        begun.set()
        raise RetryableStorageError("a DataNode died")

    def open_read(self: LocalFileSystem, url: str) -> Any:
        if url.endswith("out/a"):
            assert begun.wait(120)
            raise StorageError("no space")
        return Slow(b"2" * 3000) if url.endswith("out/b") else plain_open(self, url)

    monkeypatch.setattr(LocalFileSystem, "create", create if step == "back-off" else plain_create)
    monkeypatch.setattr(LocalFileSystem, "open_read", open_read)
    start = time.monotonic()
    with pytest.raises(StorageError, match="no space"):
        run(source, tmp_path / "out", parallel=2)
    assert time.monotonic() - start < 15  # else all of the back-off, or 3000 reads of 10 ms


def test_a_local_file_that_changes_is_told(tmp_path: Path) -> None:
    source = files(tmp_path / "in", a=b"1234")
    items = find_files([str(source)], str(tmp_path / "out"))
    (source / "a").write_bytes(b"12345")
    with pytest.raises(DataError, match="changed while it was sent"):
        upload(items, str(tmp_path / "out"))
    assert tree(tmp_path / "out") == {}


def test_the_temporary_name_is_hidden_and_beside_the_target() -> None:
    assert temporary_name("hdfs://nn:1/a/b.txt", "0" * 16) == "hdfs://nn:1/a/.b.txt.0000000000000000.upload"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--output", "/local"], "neither on HDFS"),
        (["--output", "webhdfs://host/x"], "names no NameNode"),
        (["--output", "swebhdfs://host/x"], "swebhdfs:// URL names no NameNode"),
        (["--output", "swebhdfs://host:1/x", "--via", "hdfs"], "neither on HDFS"),
        (["--output", "hdfs://host:1/x", "--via", "webhdfs"], "cannot be reached by webhdfs"),
        (["--output", "webhdfs://host:1/x", "--parallel", "0"], "--parallel"),
        (["--output", "webhdfs://host:1/x", "--overwrite", "always"], "invalid arguments"),
        (["--output", "webhdfs://host:1/x", "--input", "/none"], "/none"),
    ],
)
def test_calls_of_the_job_that_are_refused_at_once(flags: list[str], told: str, tmp_path: Path) -> None:
    from lockstep.jobs.upload import main

    source = str(files(tmp_path / "in", a=b"1"))
    with pytest.raises(LockstepError, match=told) as caught:
        main(["--input", source, *flags])
    assert caught.value.exit_code == 2 and caught.value.next_step
