"""Staging folders: signed, published whole or removed; --clean takes what nobody signs any more and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.etl.write.checks import check_output
from lockstep.etl.write.config import WriteConfig
from lockstep.etl.write.quarantine import quarantine_apart
from lockstep.etl.write.staging import SIGN_NAME, Staging, clean, is_unfinished, leftovers, publish_beside
from lockstep.storage.documents import SEAL, seal
from lockstep.storage.errors import ExistsError, NotFoundError, StorageError, StorageTimeoutError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from tests.storage.make_dataset import make_dataset


def now_ms() -> int:
    """Read where it is needed: many minutes pass between the import of a file and its last test."""
    return int(time.time() * 1000)


def left_by_a_killed_job(folder: Path, age_s: float) -> Path:
    """A staging folder as a job leaves it that is killed, its sign so many seconds old."""
    with Staging(str(folder / "out")) as staging:
        root = Path(staging.root)
        kept = folder / "kept"
        shutil.copytree(root, kept)
    kept.rename(root)
    os.utime(root / SIGN_NAME, (time.time() - age_s,) * 2)
    return root


def test_what_is_old_and_signed_goes_and_nothing_else(tmp_path: Path) -> None:
    dead, living = left_by_a_killed_job(tmp_path, 3600), left_by_a_killed_job(tmp_path, 10)
    last_step = tmp_path / "_staging-etl-00000000000000aa"  # manifest written, sign removed, killed before the rename
    make_dataset(str(last_step))
    os.utime(last_step / "_manifest.json", (0, 0))
    others = {
        "_staging-etl-00000000000000ab": None,  # no sign
        "_staging-etl-00000000000000ac": (dead / SIGN_NAME).read_bytes(),  # the sign of another folder
        "_staging-etl-00000000000000ad": b'{"job":"etl-00000000000000ad"}',  # a sign that nobody sealed
        "_staging-made": (dead / SIGN_NAME).read_bytes(),
        "data": (dead / SIGN_NAME).read_bytes(),
    }
    for name, sign in others.items():
        (tmp_path / name).mkdir()
        if sign is not None:
            (tmp_path / name / SIGN_NAME).write_bytes(sign)
            os.utime(tmp_path / name / SIGN_NAME, (0, 0))
    (tmp_path / "_staging-etl-00000000000000ae").symlink_to(dead)
    (tmp_path / "_staging-etl-00000000000000af").write_text("a file")
    fs, output = filesystem(str(tmp_path)), str(tmp_path / "out")
    found = {item.url: item for item in leftovers(fs, output, now_ms())}
    assert set(found) == {str(dead), str(last_step)}
    assert found[str(dead)].output == output and 3600 <= found[str(dead)].silent_s < 3900
    assert len(clean(fs, output, now_ms())) == 2 and not clean(fs, output, now_ms())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {living.name, *others, "_staging-etl-00000000000000ae", "_staging-etl-00000000000000af"}
    assert not leftovers(fs, str(tmp_path / "none" / "out"), now_ms())  # no folder, nothing left


def test_a_cleaner_that_was_killed_is_cleaned_behind(tmp_path: Path) -> None:
    dead = left_by_a_killed_job(tmp_path, 3600)
    dead.rename(f"{dead}.dead")
    assert len(clean(filesystem(str(tmp_path)), str(tmp_path / "out"), now_ms())) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_user_is_named_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed, held, kept, gone = (left_by_a_killed_job(tmp_path, 3600) for _ in range(4))
    fs = filesystem(str(tmp_path))
    exists, rename, delete = fs.exists, fs.rename_new, fs.delete

    def refuses(url: str, folder: Path) -> None:
        if url.startswith(str(folder)):
            raise StorageError(f"{url}: permission denied")

    def exists_or_not(url: str) -> bool:
        refuses(url, closed)
        return exists(url)

    def rename_new(source: str, target: str) -> None:
        refuses(source, held)
        rename(source, target)

    def delete_all(url: str, *, recursive: bool = False) -> bool:
        refuses(url, kept)
        return delete(url, recursive=recursive)

    for name, function in (("exists", exists_or_not), ("rename_new", rename_new), ("delete", delete_all)):
        monkeypatch.setattr(fs, name, function)
    removed = clean(fs, str(tmp_path / "out"), now_ms())
    assert [item.url for item in removed] == [str(gone)]
    for folder in (closed, held, kept):
        assert sum(str(folder) in line for line in caplog.messages) == 1
    assert {path.name for path in tmp_path.iterdir()} == {closed.name, held.name, f"{kept.name}.dead"}


def test_a_job_signs_again_and_again(tmp_path: Path) -> None:
    with Staging(str(tmp_path / "out"), beat_s=0.01) as staging:
        sign = Path(staging.root) / SIGN_NAME
        end = time.monotonic() + 120
        while json.loads(sign.read_bytes())["beats"] < 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert json.loads(sign.read_bytes())["beats"] >= 3
        staging.publish(b"{}")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "_manifest.json"]


def test_a_job_whose_folder_was_cleaned_publishes_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match="while this job used it"),
        Staging(str(tmp_path / "out")) as staging,
    ):
        assert clean(staging.fs, staging.url, now_ms() + 3_600_000)
        staging.publish(b"{}")
    assert not list(tmp_path.iterdir())


def test_nor_one_whose_folder_is_cleaned_while_it_writes_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest would be the only file of a folder that its writing brings back."""

    def write(fs: FileSystem, url: str, data: bytes, **options: Any) -> None:
        if url.endswith("_manifest.json"):
            assert clean(fs, str(tmp_path / "out"), now_ms() + 3_600_000)
        write_file(fs, url, data, **options)

    monkeypatch.setattr("lockstep.etl.write.staging.write_file", write)
    with (
        pytest.raises(StorageError, match="while this job used it"),
        Staging(str(tmp_path / "out")) as staging,
    ):
        staging.publish(b"{}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        ("before the rename", []),
        ("after the rename", ["apart", "out"]),
        ("after the rename, nothing can be read", ["apart", "out"]),  # not known: a quarantine is not thrown away
        ("name taken", ["out"]),  # by the dataset of another job, with another manifest
    ],
)
def test_a_published_dataset_keeps_its_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, left: list[str]
) -> None:
    out = tmp_path / "out"

    def publish(fs: FileSystem, root: str, url: str) -> None:
        if url == str(out) and fails == "name taken":
            out.mkdir()
            (out / "_manifest.json").write_bytes(b"[]")
            raise ExistsError("taken")
        if url == str(out) and fails == "before the rename":
            raise StorageTimeoutError("no answer")
        fs.rename_new(root, url)
        if url == str(out):
            if fails != "after the rename":
                monkeypatch.setattr(type(fs), "read_bytes", unread)
            raise StorageTimeoutError("no answer")

    def unread(fs: FileSystem, url: str) -> bytes:
        raise StorageTimeoutError("no answer")

    monkeypatch.setattr("lockstep.etl.write.staging.publish_directory", publish)
    with (
        pytest.raises(ExistsError if fails == "name taken" else StorageTimeoutError),
        Staging(str(out)) as staging,
        Staging(str(tmp_path / "apart"), mode=0o700) as apart,
    ):
        publish_beside(staging, b"{}", apart)
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def killed_in_between(folder: Path, age_s: float, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is left of a job that was killed behind the rename of its quarantine, before that of its dataset."""

    def publish(fs: FileSystem, root: str, url: str) -> None:
        fs.rename_new(root, url)
        raise KeyboardInterrupt

    with (
        monkeypatch.context() as patched,
        pytest.raises(KeyboardInterrupt),
        Staging(str(folder / "out")) as staging,
        Staging(str(folder / "far" / "apart"), mode=0o700, part_of=staging.url) as apart,
    ):
        (Path(apart.root) / "part-00000.parquet").touch()
        patched.setattr("lockstep.etl.write.staging.publish_directory", publish)
        publish_beside(staging, b"{}", apart)
    left = folder / "far" / "apart"
    os.utime(left / SIGN_NAME, (time.time() - age_s,) * 2)
    return left


def test_a_quarantine_without_its_dataset_is_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed_in_between(tmp_path, 3600, monkeypatch)
    config = WriteConfig(output=str(tmp_path / "out"), quarantine=str(left), clean=True)
    with pytest.raises(ExistsError):
        check_output(replace(config, clean=False))
    check_output(config)
    with quarantine_apart(config) as apart:
        assert not left.exists()
        apart.publish(None)
        apart.keep()
    assert [path.name for path in tmp_path.rglob("*")] == ["far", "apart"], "whole, and without a sign"
    with pytest.raises(ExistsError):  # what is finished stays
        check_output(config)


@pytest.mark.parametrize("error", [NotFoundError("gone"), StorageError("permission denied")], ids=repr)
def test_a_quarantine_that_is_not_removed_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Another job took it in the meantime, or the storage keeps it: its place is free, so this job goes on."""
    left = killed_in_between(tmp_path, 3600, monkeypatch)
    config = WriteConfig(output=str(tmp_path / "out"), quarantine=str(left), clean=True)
    fs = filesystem(str(left))
    delete = fs.delete

    def delete_or_not(url: str, *, recursive: bool = False) -> bool:
        if url.endswith(".dead"):
            raise error
        return delete(url, recursive=recursive)

    monkeypatch.setattr(fs, "delete", delete_or_not)
    quarantine_apart(config)
    assert not left.exists()


@pytest.mark.parametrize(
    "why",
    ["young", "its dataset is there", "moved", "not signed", "another's", "of another output", "of no file system"],
)
def test_any_other_quarantine_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    left = killed_in_between(tmp_path, 10 if why == "young" else 3600, monkeypatch)
    sign, output = left / SIGN_NAME, tmp_path / "out"
    if why == "its dataset is there":
        (tmp_path / "out").mkdir()
    elif why == "moved":
        left = left.rename(tmp_path / "elsewhere")
    elif why == "not signed":
        sign.unlink()
    elif why == "another's":
        sign.write_bytes(b'{"job":"etl-00000000000000ad"}')
        os.utime(sign, (0, 0))
    elif why == "of another output":
        output = tmp_path / "new"
    elif why == "of no file system":  # nobody asks it whether that dataset is there
        told = {key: value for key, value in json.loads(sign.read_bytes()).items() if key != SEAL}
        sign.write_bytes(seal({**told, "part_of": "foo://x/y"}))
        os.utime(sign, (0, 0))
    config = WriteConfig(output=str(output), quarantine=str(left), clean=True)
    assert is_unfinished(filesystem(str(left)), str(left), str(output)) == (why == "young")
    with pytest.raises(ExistsError):
        check_output(config)
        quarantine_apart(config)
    assert (left / "part-00000.parquet").exists()
