"""GPUs of Horovod scripts, with a fake nvidia-smi and a TensorFlow whose list of devices is fake: no GPU has run it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.eager import context

from lockstep.horovod.gpus import Seat, in_local_order, line_up
from lockstep.storage.errors import ConfigError
from lockstep.training.world import World

pytestmark = pytest.mark.slow  # lockstep.horovod imports TensorFlow

A, B, C = (f"GPU-0000000{i}-aaaa-bbbb-cccc-000000000000" for i in range(3))
LINES = [f"GPU {index}: NVIDIA H100 (UUID: {uuid})" for index, uuid in enumerate((A, B, C))]
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("visible", "tool", "gpu"),
    [
        ("1", LINES, B),
        (C, LINES, C),
        (None, LINES, ""),  # on the CPU
        ("", LINES, ""),
        ("0,1", LINES, ""),  # two of them: none is the rank's own
        ("MIG-1/2/3", LINES, ""),
        ("1", LINES[:1], ""),  # the container lists another one
        ("0", None, ""),  # NVIDIA's driver does not answer
    ],
)
def test_a_fake_gpu_is_told_by_its_uuid(
    visible: str | None,
    tool: list[str] | None,
    gpu: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "nvidia-smi"
    body = ["exit 9"] if tool is None else [f"echo '{line}'" for line in tool]
    script.write_text("\n".join(["#!/bin/sh", *body]))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    environment = {} if visible is None else {VISIBLE: visible}
    seat = Seat.of("a", World.local(1, 2), environment)
    assert (seat.host, seat.rank_of_node, seat.gpu) == ("a", 1, gpu)
    assert Seat.from_bytes(seat.to_bytes()) == seat
    assert ("gpus[0]" in capsys.readouterr().out) is (tool is None)
    assert Seat.of("a", World.local(0, 1), environment) == Seat("a", 0)  # alone: nobody is asked


ALL = (A, B, C)


@pytest.mark.parametrize(
    ("seats", "wanted"),
    [
        ([Seat("a", 0, C, ALL), Seat("a", 1, A, ALL)], (C, A)),
        ([Seat("a", 1, A, ALL), Seat("b", 0, A, ALL), Seat("a", 0, B, ALL)], (B, A)),  # of this host, by local rank
        ([Seat("a", 0, A, ALL)], ()),  # alone: its own is gpus[0] already
        ([Seat("a", 0, A, ALL), Seat("a", 1, A, ALL)], ()),  # shared
        ([Seat("a", 0, A, ALL), Seat("a", 1)], ()),  # one on the CPU
        ([Seat("a", 0, A, (A,)), Seat("a", 1, B, ALL)], ()),  # shut off from the other's
        ([Seat("a", 0, A, ALL), Seat("a", 2, B, ALL)], ()),  # Spark and the network call hosts differently
    ],
)
def test_the_order_of_fake_gpus(seats: list[Seat], wanted: tuple[str, ...]) -> None:
    assert in_local_order(seats, seats[0]) == wanted


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_each_rank_finds_its_fake_gpu_at_its_local_rank(gpus: list[int], order: list[int]) -> None:
    listed = tuple(f"GPU-{i}" for i in range(5))
    seats = [Seat("a", local, f"GPU-{gpus[local]}", listed) for local in order]
    for seat in seats:
        assert in_local_order(seats, seat)[seat.rank_of_node] == seat.gpu


@pytest.mark.parametrize(
    ("count", "started", "chosen", "said"),
    [
        (2, False, f"{B} of {A},{B}", ""),
        (2, True, None, "this rank's GPU is gpus[0]"),  # the list stays as it is
        (0, False, None, "install requirements-gpu.txt"),
        (1, False, None, None),  # which of them is left out?
    ],
)
def test_fake_gpus_are_listed_together_and_one_is_used(
    count: int,
    started: bool,
    chosen: str | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment, used = {VISIBLE: "1"}, []

    def listed(kind: str) -> list[str]:
        assert kind == "GPU" and not started
        return [f"{name} of {environment[VISIBLE]}" for name in environment[VISIBLE].split(",")[:count]]

    state = SimpleNamespace(_physical_devices=["CPU"] if started else None)
    monkeypatch.setattr(context, "context", lambda: state)
    monkeypatch.setattr(tf.config, "list_physical_devices", listed)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: used.append((device, kind)))
    seats = [Seat("a", 0, A, ALL), Seat("a", 1, B, ALL)]
    if said is None:
        with pytest.raises(ConfigError, match="other GPUs than those"):
            line_up(seats, seats[1], environment)
    else:
        line_up(seats, seats[1], environment)
        out = capsys.readouterr().out
        assert said in out if said else not out
    assert used == ([] if chosen is None else [(chosen, "GPU")])
    assert environment == {VISIBLE: "1"}  # child processes see the rank's own
    line_up([dataclasses.replace(seats[0], gpu=""), seats[1]], seats[1], {})  # nothing to choose: nothing happens
