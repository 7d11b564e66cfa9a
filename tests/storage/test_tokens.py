"""Delegation tokens in memory with a path, and what may be shown of a token file."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.jobs._checks import CheckFailed
from lockstep.jobs._site_checks import check_tokens
from lockstep.storage import tokens
from lockstep.storage.settings import hadoop_settings, set_hadoop_settings, settings_for_tasks, webhdfs_token

# One token of a cluster that is gone, as `hdfs fetchdt` wrote it, and as `hadoop dtutil edit -format protobuf` did.
WRITABLE = (
    "SERUUwABC2hhLWhkZnM6bnMxKAAPYWxpY2VAU0lURS5URVNUBWFsaWNlAIoBohoci8mKAaIaH5kJCgsUI+8JF8bm24wR+QaaJ/W3SazcngsVSERG"
    "U19ERUxFR0FUSU9OX1RPS0VOC2hhLWhkZnM6bnMxAA=="
)
PROTOBUF = (
    "SERUUwF1CnMKC2hhLWhkZnM6bnMxEmQKKAAPYWxpY2VAU0lURS5URVNUBWFsaWNlAIoBohoci8mKAaIaH5kJCgsSFCPvCRfG5tuMEfkGmif1t0ms"
    "3J4LGhVIREZTX0RFTEVHQVRJT05fVE9LRU4iC2hhLWhkZnM6bnMx"
)
READ = "import os, sys; sys.stdout.write(open(os.environ['HADOOP_TOKEN_FILE_LOCATION']).read())"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_held", "")
    monkeypatch.setattr(tokens, "_file", -1)
    monkeypatch.delenv(tokens.VARIABLE, raising=False)


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.usefixtures("fresh")
def test_tokens_have_one_path_whose_content_is_replaced() -> None:
    tokens.hold("")
    assert tokens.VARIABLE not in os.environ and tokens.held() == ""
    tokens.hold(text(b"first"))
    path = Path(os.environ[tokens.VARIABLE])
    child = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True)
    assert child.stdout == "first"
    with path.open("rb") as reader:  # one who has begun gets all of the old ones
        tokens.hold(text(b"the second"))
        assert reader.read() == b"first"
    assert os.environ[tokens.VARIABLE] == str(path) and path.read_bytes() == b"the second"
    assert tokens.held() == text(b"the second")


@pytest.mark.usefixtures("fresh")
def test_tokens_are_in_what_tasks_get_and_in_no_setting() -> None:
    tokens.hold(text(b"a secret"))
    sent = settings_for_tasks()
    assert text(b"a secret") in sent.values() and text(b"a secret") not in json.dumps(hadoop_settings())
    tokens.hold(text(b"another"))
    try:
        set_hadoop_settings(sent)  # as a task does
        assert tokens.held() == text(b"a secret")
        assert text(b"a secret") not in json.dumps(hadoop_settings())
    finally:
        set_hadoop_settings({})


@pytest.mark.parametrize("form", [WRITABLE, PROTOBUF])
def test_what_may_be_shown_of_a_token_file(form: str) -> None:
    data = base64.b64decode(form)
    assert tokens.shown(data) == [tokens.TokenInfo("HDFS_DELEGATION_TOKEN", "alice@SITE.TEST", 1795734608.137)]
    for cut in range(len(data) - 1):
        with contextlib.suppress(ValueError):  # no other error, and no endless loop
            tokens.shown(data[:cut])
    with pytest.raises(ValueError, match="does not begin"):
        tokens.shown(b"root:x:0:0")


def test_a_token_for_webhdfs_is_that_of_the_name_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real NameNode: tests/cluster/test_sites.py."""
    path = tmp_path / "tokens"
    path.write_bytes(base64.b64decode(WRITABLE))
    monkeypatch.setenv(tokens.VARIABLE, str(path))
    found = webhdfs_token("ns1")
    assert found is not None and not set(found) & set("+/=")
    assert base64.urlsafe_b64decode(found + "==") in path.read_bytes()
    assert webhdfs_token("another") is None and webhdfs_token() is None
    path.write_bytes(b"HDTS\0\5")
    assert webhdfs_token("ns1") is None


def test_doctor_shows_owner_and_time_of_tokens_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(base64.b64decode(WRITABLE))
    monkeypatch.setenv(tokens.VARIABLE, str(path))
    monkeypatch.setattr("lockstep.jobs._site_checks.time.time", lambda: 1795734600.0)
    assert check_tokens() == "HDFS_DELEGATION_TOKEN of alice@SITE.TEST until 2026-11-26 23:10 UTC"
    monkeypatch.setattr("lockstep.jobs._site_checks.time.time", lambda: 1795734700.0)
    with pytest.raises(CheckFailed, match="until 2026") as ended:
        check_tokens()
    assert "fetchdt" in ended.value.next_step
    path.write_bytes(b"no tokens")
    with pytest.raises(CheckFailed, match="cannot be read"):
        check_tokens()
    monkeypatch.delenv(tokens.VARIABLE)
    assert check_tokens().startswith("none")
