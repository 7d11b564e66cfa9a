"""lockstep launch: where its flags end, what it refuses before anything starts, and lines of output within bounds."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.jobs._split_script import split_script
from lockstep.jobs.launch import main, parser
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.training.launch.output import BATCH_BYTES, LINE_BYTES, LineBuffer, OutputPrinter, read_lines
from lockstep.training.launch.script_driver import MAX_SCRIPT_BYTES, ScriptConfig
from lockstep.training.launch.script_rank import ScriptOrder, environment
from lockstep.training.world import World


@pytest.mark.parametrize(
    ("argv", "flags", "script", "arguments"),
    [
        (["--num-ranks", "2", "a.py"], ["--num-ranks", "2"], "a.py", ()),
        (["--num-ranks=2", "a.py", "--num-ranks", "3"], ["--num-ranks=2"], "a.py", ("--num-ranks", "3")),  # its own
        (["--debug", "a.py", "--", "-x"], ["--debug"], "a.py", ("--", "-x")),  # -- is handed on as well
        (["--num-ranks", "2", "--", "a.py", "b"], ["--num-ranks", "2"], "a.py", ("b",)),
        (["--config", "x.toml", "y.toml", "a.py", "c.toml"], ["--config", "x.toml", "y.toml"], "a.py", ("c.toml",)),
        (["--files", "a.py,b", "c.py"], ["--files", "a.py,b"], "c.py", ()),
        (["--no-such", "a.py"], ["--no-such"], "a.py", ()),  # the parser tells of the flag
    ],
)
def test_the_script_is_the_first_word_that_is_no_flag(
    argv: list[str], flags: list[str], script: str, arguments: tuple[str, ...]
) -> None:
    assert split_script(parser(), argv) == (flags, script, arguments)


@given(st.lists(st.text()))
def test_arguments_reach_the_script_as_they_are(arguments: list[str]) -> None:
    flags, script, found = split_script(parser(), ["--num-ranks", "2", "a.py", *arguments])
    assert (flags, script, list(found)) == (["--num-ranks", "2"], "a.py", arguments)
    order = ScriptOrder(name="a.py", arguments=tuple(arguments), path=None, text="", start_s=1.0)
    assert ScriptOrder.from_json(json.loads(json.dumps(order.to_json()))) == order


@pytest.mark.parametrize("argv", [["--num-ranks", "2"], ["--num-ranks", "2", "--"], []])
def test_a_call_without_a_script_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="invalid arguments"):
        main(argv)


def test_what_cannot_be_is_told_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print(")
    good = tmp_path / "good.py"
    good.write_text("# -*- coding: latin-1 -*-\nprint('\xe4')\n", encoding="latin-1")
    large = tmp_path / "large.py"
    large.write_text("#" * (MAX_SCRIPT_BYTES + 1))
    config = ScriptConfig(script=str(good), num_ranks=2, files=str(good), arguments="--all")  # type: ignore[arg-type]  # as people call it
    assert (config.files, config.arguments) == ((str(good),), ("--all",))
    assert config.limits.stall_s == 600
    for changed, words in (
        ({"script": str(script)}, "not a Python script"),
        ({"script": str(large)}, "script of up to"),
        ({"num_ranks": 0}, "--num-ranks"),
        ({"max_restarts": -1}, "--max-restarts"),
        ({"start_limit_s": float("nan")}, "--start-limit"),
        ({"files": (str(good), str(tmp_path / "x" / ".." / "good.py"))}, "different names"),
    ):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=words):
            dataclasses.replace(config, **changed)
    for path in (str(tmp_path), str(tmp_path / "absent.py")):
        with pytest.raises(NotFoundError, match="there is no file"):
            ScriptConfig(script=path, num_ranks=2)


def test_a_script_finds_its_place_under_known_names() -> None:
    found = environment(World.from_hosts(2, ["a", "b", "b"], 4), [("a", 29500), ("b", 1), ("b", 2)])
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["LOCKSTEP_GENERATION"]) == ("a", "29500", "4")
    assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"], found["ROLE_RANK"]) == ("1", "2", "2")
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_RUN_ID"]) == ("3", "lockstep")
    cluster = {"worker": ["a:29500", "b:1", "[::1]:2"]}
    found = environment(World.from_hosts(2, ["a", "b", "b"], 4), [("a", 29500), ("b", 1), ("::1", 2)])
    assert json.loads(found["TF_CONFIG"]) == {"cluster": cluster, "task": {"type": "worker", "index": 2}}


def lines_of(*pieces: bytes) -> list[bytes]:
    """What `read_lines` makes of pieces that are written one after another."""
    reading, writing = os.pipe()

    def write() -> None:
        for piece in pieces:
            os.write(writing, piece)
            time.sleep(0.01)
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        return list(read_lines(reading))
    finally:
        thread.join()
        os.close(reading)


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ((b"a\nb\n",), [b"a", b"b"]),
        ((b"a\r", b"\nb\r\n"), [b"a", b"b"]),  # an end of two bytes in two pieces is one end
        ((b" 1 %\r 2 %\r", b"done"), [b" 1 %", b" 2 %", b"done"]),  # a progress bar; no end at all
        ((b"\n\n\r\n",), [b"", b"", b""]),
        ((b"\xff\x00\xfe\n",), [b"\xff\x00\xfe"]),
        ((b"", b"x" * (LINE_BYTES + 5) + b"\ny"), [b"x" * LINE_BYTES, b"xxxxx", b"y"]),
        ((), []),
    ],
)
def test_lines_are_cut_at_their_ends(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...], lines: list[bytes]
) -> None:
    monkeypatch.setattr("lockstep.training.launch.output.PARTIAL_S", 60.0)  # the next piece may come late
    assert lines_of(*pieces) == lines


@given(st.lists(st.binary(max_size=20).map(lambda piece: piece.replace(b"\r", b"")), max_size=5))
def test_no_byte_is_lost(pieces: list[bytes]) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"".join(pieces) + b"\n")
    os.close(writing)
    try:
        assert b"\n".join(read_lines(reading)) + b"\n" == b"".join(pieces) + b"\n"
    finally:
        os.close(reading)


def test_a_line_that_does_not_end_is_shown_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.launch.output.PARTIAL_S", 0.05)
    reading, writing = os.pipe()
    os.write(writing, b"password: ")
    lines = read_lines(reading)
    assert next(lines) == b"password: "
    os.close(writing)
    assert list(lines) == []
    os.close(reading)


def test_a_full_buffer_drops_and_says_how_many() -> None:
    buffer = LineBuffer(most_bytes=10_000, patience_s=0.05)
    began = time.monotonic()
    for number in range(10_000):
        buffer.put(f"line {number}")
    assert time.monotonic() - began < 60  # one patience, not one for each of some 9,900 lines
    kept = buffer.take()
    assert kept is not None and kept == [f"line {number}" for number in range(len(kept))]
    assert 10_000 <= sum(len(line) + 64 for line in kept) < 11_000
    buffer.put("later")
    assert buffer.take() == [f"[{10_000 - len(kept)} lines dropped: they came faster than they were taken]", "later"]
    buffer.close()
    assert buffer.take() is None


def test_a_buffer_waits_for_who_takes_in_time() -> None:
    buffer, taken = LineBuffer(most_bytes=2_000, patience_s=30.0), []

    def take() -> None:
        while (lines := buffer.take()) is not None:
            taken.extend(lines)

    thread = threading.Thread(target=take)
    thread.start()
    for number in range(5_000):
        buffer.put(str(number))
    buffer.close()
    thread.join()
    assert taken == [str(number) for number in range(5_000)]
    buffer = LineBuffer(most_bytes=1 << 30)
    for _ in range(8):
        buffer.put("x" * LINE_BYTES)
    assert sum(map(len, buffer.take() or [])) <= BATCH_BYTES + LINE_BYTES  # a frame's worth, however much there is


class Terminal:
    """A stream that knows ASCII alone, or that nobody reads any more."""

    encoding = "ascii"

    def __init__(self, gone: bool = False) -> None:
        self.text, self._gone = "", gone

    def write(self, text: str) -> None:
        if self._gone:
            raise BrokenPipeError(32, "Broken pipe")
        self.text += text.encode(self.encoding).decode()

    def flush(self) -> None:
        """Nothing is held back."""


@pytest.mark.parametrize(("which", "wanted"), [("all", ["[rank 0] a", "[rank 1] \\xe4"]), ("leader", ["[rank 0] a"])])
def test_each_line_has_its_rank(which: str, wanted: list[str]) -> None:
    terminal = Terminal()
    with OutputPrinter(which, terminal) as printer:  # type: ignore[arg-type] # a stand-in
        printer.take(0, ["a"])
        printer.take(1, ["\xe4"])
    assert terminal.text.splitlines() == wanted


def test_a_reader_that_is_gone_is_told_once_and_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with OutputPrinter("all", Terminal(gone=True)) as printer:  # type: ignore[arg-type] # a stand-in
        for _ in range(3):
            printer.take(0, ["a"])
            time.sleep(0.02)
    assert capfd.readouterr().err.count("can no longer be printed") == 1
