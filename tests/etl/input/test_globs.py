"""Inputs: patterns, folders, lists, and one file named twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.etl.input.files import find_sources
from lockstep.storage.errors import ConfigError, DataError, NotFoundError


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    names = ("logs/2015-01/b.log", "logs/2015-01/a.log", "logs/2015-02/a.log", "logs/2016-01/a.log.gz", "logs/top.log")
    hidden = ("logs/2015-01/_SUCCESS", "logs/_tmp/x.log", "logs/2015-02/.x.log", "logs/2015-02/c.log._COPYING_")
    for name in (*names, *hidden, "logs/odd[1].log"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("logs/*.log", ["logs/odd[1].log", "logs/top.log"]),
        ("logs/2015-*/a.log", ["logs/2015-01/a.log", "logs/2015-02/a.log"]),
        ("logs/201[56]-01/?.log*", ["logs/2015-01/a.log", "logs/2015-01/b.log", "logs/2016-01/a.log.gz"]),
        ("logs/2015-*", ["logs/2015-01/a.log", "logs/2015-01/b.log", "logs/2015-02/a.log"]),  # folders are walked
        ("*/top.log", ["logs/top.log"]),
        ("logs/odd[1].log", ["logs/odd[1].log"]),  # there as it stands
        ("logs/_t*/x.log", ["logs/_tmp/x.log"]),  # asked for by name
        ("logs/2015-02", ["logs/2015-02/a.log"]),
        ("logs/2015-01/*", ["logs/2015-01/a.log", "logs/2015-01/b.log"]),  # not _SUCCESS
        ("logs/*/x.log", None),
        ("logs/*/*/*", None),
        ("logs/top.log/*", None),
        ("none/*.log", None),
        ("logs/2017-*", None),
    ],
)
def test_patterns(logs: Path, url: str, found: list[str] | None) -> None:
    if found is None:
        with pytest.raises(NotFoundError, match="names no file") as caught:
            find_sources([url])
        assert caught.value.exit_code == 2
        return
    assert [source.url for source in find_sources([url])] == found
    whole = [source.url for source in find_sources([f"{logs}/{url}"])]
    assert whole == [f"{logs}/{name}" for name in found]


def test_one_file_twice_is_refused(logs: Path) -> None:
    os.symlink(logs / "logs/top.log", logs / "link.log")
    for urls in (
        ["logs/top.log", "logs/top.log"],
        ["logs", "logs/2015-01/../top.log"],
        ["logs/top.log", f"file://{logs}/logs/top.log"],
        ["logs/top.log", "link.log"],
        ["logs/2015-*", "logs/*/a.log"],
    ):
        with pytest.raises(ConfigError, match="is given twice") as caught:
            find_sources(urls)
        assert caught.value.got and caught.value.next_step


def test_a_linked_folder_is_not_entered(logs: Path) -> None:
    os.symlink(logs / "logs", logs / "logs/2015-02/loop")
    with pytest.raises(DataError, match="2015-02/loop is a link to a folder") as caught:
        find_sources(["logs"])
    assert caught.value.got and caught.value.next_step
    assert len(find_sources(["logs/2015-02/loop/2015-01"])) == 2  # named outright


def test_a_pipe_is_no_file_and_nobody_waits_for_it(logs: Path) -> None:
    os.mkfifo(logs / "pipe")
    with pytest.raises(Exception, match="pipe"):
        find_sources(["pipe"])
