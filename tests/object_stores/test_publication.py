"""Publication without a rename: what a reader sees while a writer works, dies, or races another one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lockstep.storage import publish
from lockstep.storage.errors import ExistsError, NotFoundError, StorageError
from lockstep.storage.files import object_store
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.files.object_store import ObjectStore
from lockstep.storage.fs import walk
from lockstep.storage.publish import CLAIM_NAME, MANIFEST_NAME, publish_directory, refuse_occupied, write_file
from lockstep.storage.urls import join
from tests.fs_contract import put
from tests.object_stores.server import ObjectServer
from tests.object_stores.writing import PARTS, build, content

REQUESTS = 22  # of a publication are fewer


def found(fs: FileSystem, url: str) -> dict[str, bytes]:
    """All files below a directory, by their paths in it."""
    try:
        return {entry.url.removeprefix(f"{url}/"): fs.read_bytes(entry.url) for entry in walk(fs, url)}
    except NotFoundError:
        return {}


def whole(fs: FileSystem, url: str) -> bool:
    """Whether a manifest is there; then all that it lists is, too."""
    there = found(fs, url)
    if MANIFEST_NAME not in there:
        return False
    listed = json.loads(there[MANIFEST_NAME])
    assert {part: there[part].decode() for part in listed} == listed
    return True


def run(root: str, name: str, kill_at: int) -> int:
    command = [sys.executable, "-m", "tests.object_stores.writing", root, name, str(kill_at)]
    return subprocess.run(command, timeout=300, check=False).returncode


def test_a_published_directory_has_the_names_of_a_disk(fs: FileSystem, root: str) -> None:
    publish_directory(fs, build(root, "one"), join(root, "out"))
    assert found(fs, root) == {f"out/{path}": data for path, data in content("one").items()}
    with pytest.raises(ExistsError):
        publish_directory(fs, build(root, "two"), join(root, "out"))
    assert found(fs, join(root, "out")) == content("one")
    assert found(fs, join(root, "_staging-two")) == content("two")


@pytest.mark.slow
def test_a_writer_killed_at_any_request_has_published_all_or_nothing(
    fs: FileSystem, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(at: int) -> bool:
        here = join(root, str(at))
        code = run(here, "killed", at)
        assert code in (0, -9)
        out = join(here, "out")
        done = whole(fs, out)
        assert done or code != 0
        second = build(here, "second")
        if done:
            with pytest.raises(ExistsError):
                publish_directory(fs, second, out)
            assert found(fs, out).items() >= content("killed").items()
            return code == 0
        if fs.exists(out):  # its writer may still live
            with pytest.raises(ExistsError):
                publish_directory(fs, second, out)
            with monkeypatch.context() as patch:
                patch.setattr(publish, "ABANDONED_AFTER_S", 0.0)
                refuse_occupied(fs, out)
                publish_directory(fs, second, out)
        else:
            publish_directory(fs, second, out)
        assert found(fs, out) == content("second")
        return False

    ends = [killed(at) for at in range(1, REQUESTS)]
    assert ends == sorted(ends) and ends[-1] and not ends[12]  # killed in each request until there are no more


def races(fs: FileSystem, root: str, count: int) -> Counter[str]:
    """Two writers publish one directory, `count` times, four races at once: who won how often."""

    def race(number: int) -> str:
        here = join(root, str(number))
        stagings = {name: build(here, name) for name in ("a", "b")}
        start, winners = threading.Barrier(2), list[str]()

        def publish_as(name: str) -> None:
            start.wait(60)
            try:
                publish_directory(fs, stagings[name], join(here, "out"))
                winners.append(name)
            except ExistsError:
                pass

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(publish_as, stagings))
        assert len(winners) == 1
        assert found(fs, join(here, "out")) == content(winners[0])
        return winners[0]

    with ThreadPoolExecutor(4) as pool:
        return Counter(pool.map(race, range(count)))


def test_of_a_hundred_races_one_writer_wins_each(fs: FileSystem, root: str) -> None:
    assert races(fs, root, 100).total() == 100


def test_of_writers_of_one_file_one_wins(fs: FileSystem, root: str) -> None:
    url, winners = join(root, "claim"), list[bytes]()

    def claim(number: int) -> None:
        data = str(number).encode()
        try:
            write_file(fs, url, data)
            winners.append(data)
        except ExistsError:
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(claim, range(40)))
    assert len(winners) == 1 and fs.read_bytes(url) == winners[0]


def test_a_writer_that_was_paused_after_its_check_replaces_nothing(fs: FileSystem, root: str) -> None:
    """The version is read before the check: what a successor wrote since then stands."""
    url, checks = join(root, "lease.json"), list[int]()
    write_file(fs, url, b"mine")

    class LostError(Exception):
        pass

    def confirm() -> None:
        checks.append(len(checks))
        if len(checks) == 1:
            fs.create(url, exclusive=False).close()  # the successor, while this writer is paused
        elif len(checks) == 2:
            raise LostError

    with pytest.raises(LostError):
        write_file(fs, url, b"late", exclusive=False, confirm=confirm)
    assert fs.read_bytes(url) == b""


def test_a_writer_whose_claim_was_taken_publishes_nothing(
    fs: FileSystem, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paused before the manifest, and another one finds its claim old."""
    out, copy, second = join(root, "out"), ObjectStore._copy, build(root, "second")

    def paused(self: ObjectStore, src: str, dst: str, size: int, *, new: bool) -> None:
        if src.endswith(PARTS[-1]) and "_staging-first" in src:
            with monkeypatch.context() as patch:
                patch.setattr(publish, "ABANDONED_AFTER_S", 0.0)
                publish_directory(fs, second, out)
        copy(self, src, dst, size, new=new)

    first = build(root, "first")
    monkeypatch.setattr(ObjectStore, "_copy", paused)
    with pytest.raises(ExistsError):
        publish_directory(fs, first, out)
    assert found(fs, out) == content("second")


def test_a_writer_that_claims_just_after_another_one_has_published_deletes_nothing(
    fs: FileSystem, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found the name free, and then was paused."""
    out, put_new, first = join(root, "out"), ObjectStore.put_new, build(root, "first")
    second = build(root, "second")

    def paused(self: ObjectStore, url: str, data: bytes) -> None:
        if url == join(out, CLAIM_NAME):
            with monkeypatch.context() as patch:
                patch.setattr(ObjectStore, "put_new", put_new)
                publish_directory(fs, first, out)
        put_new(self, url, data)

    monkeypatch.setattr(ObjectStore, "put_new", paused)
    with pytest.raises(ExistsError):
        publish_directory(fs, second, out)
    assert found(fs, out) == content("first") and found(fs, second) == content("second")


def test_a_directory_of_others_is_never_swept(fs: FileSystem, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "ABANDONED_AFTER_S", 0.0)
    put(fs, join(root, "out", "theirs"))
    with pytest.raises(ExistsError):
        refuse_occupied(fs, join(root, "out"))
    with pytest.raises(ExistsError):
        publish_directory(fs, build(root, "one"), join(root, "out"))
    assert found(fs, join(root, "out")) == {"theirs": b"data"}
    put(fs, join(root, "whole", MANIFEST_NAME))  # its writer was killed before it removed its claim
    put(fs, join(root, "whole", CLAIM_NAME))
    with pytest.raises(ExistsError):
        publish_directory(fs, join(root, "_staging-one"), join(root, "whole"))


@pytest.mark.parametrize("condition", ["create", "update", "copy"])
def test_a_store_that_ignores_a_condition_is_refused_before_anything_is_written(
    s3: ObjectServer, root: str, monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    import obstore

    real_put, real_copy = obstore.put, obstore.copy

    def deaf_put(*call: Any, mode: Any = None, **options: Any) -> Any:
        deaf = condition == ("create" if mode == "create" else "update")
        return real_put(*call, mode=None if deaf else mode, **options)

    def deaf_copy(*call: Any, overwrite: bool = True) -> Any:
        return real_copy(*call, overwrite=overwrite or condition == "copy")

    monkeypatch.setattr(obstore, "put", deaf_put)
    monkeypatch.setattr(obstore, "copy", deaf_copy)
    fs = ObjectStore("s3", root.split("/")[2], object_store_settings())
    for write in (lambda: fs.create(join(root, "f")), lambda: write_file(fs, join(root, "f"), b"x")):
        with pytest.raises(StorageError, match=f"{s3.endpoint} does not heed conditions"):
            write()
    assert not fs.exists(root)


def object_store_settings() -> dict[str, str]:
    from lockstep.storage.files.object_clients import object_settings
    from lockstep.storage.settings import hadoop_settings

    return object_settings(hadoop_settings())


def test_a_write_whose_answer_was_lost_is_not_taken_for_another_writers(
    root: str, fs: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore
    from obstore.exceptions import GenericError

    put(fs, join(root, "before"))  # the probe is done
    real_put, lost = obstore.put, list[str]()

    def lossy(store: Any, path: str, *call: Any, **options: Any) -> Any:
        answer = real_put(store, path, *call, **options)
        if path not in lost:
            lost.append(path)
            raise GenericError("Error performing PUT - HTTP error: error sending request")
        return answer

    monkeypatch.setattr(obstore, "put", lossy)
    write_file(fs, join(root, "f"), b"mine")
    write_file(fs, join(root, "f"), b"again", exclusive=False)
    assert fs.read_bytes(join(root, "f")) == b"again" and len(lost) == 1
    with pytest.raises(ExistsError):
        write_file(fs, join(root, "before"), b"other")


def test_a_file_too_long_for_one_copy_goes_through_this_process(
    root: str, fs: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "COPY_LIMIT_BYTES", 1000)
    data = bytes(range(256)) * 100
    fs.rename_new(put(fs, join(root, "a"), data), join(root, "b"))
    fs.replace(put(fs, join(root, "c"), data + b"1"), join(root, "b"))
    put(fs, join(root, "d"), data)
    with pytest.raises(ExistsError):
        fs.rename_new(join(root, "d"), join(root, "b"))
    assert fs.read_bytes(join(root, "b")) == data + b"1"
    assert [entry.name for entry in fs.list(root)] == ["b", "d"]
