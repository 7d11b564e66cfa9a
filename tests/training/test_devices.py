"""Which GPUs a rank sees: what Spark gave, what the host has, and what an inherited CUDA_VISIBLE_DEVICES allows."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError
from lockstep.training import devices
from lockstep.training.devices import (
    Gpu,
    expose,
    host_gpus,
    identity,
    listed,
    of_host,
    of_runs,
    share_out,
    shares_of_host,
)
from lockstep.training.exchange.compare_ranks import processor
from lockstep.training.launch.barrier import other_resources

SLICE = "MIG-5d2f0c1e-1111-2222-3333-444444444444"
FIRST, SECOND = "GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that lists two GPUs, one cut into slices."""
    lines = [
        f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {FIRST})",
        f"  MIG 3g.40gb     Device  0: (UUID: {SLICE})",
        f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: {SECOND})",
    ]
    return fake_tool(tmp_path, monkeypatch, "\n".join(["cat <<'END'", *lines, "END"]))


def fake_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return tool


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("0,1", ("0", "1")),
        (" 2 , 0", ("2", "0")),  # the order is the user's
        (FIRST, (FIRST,)),
        ("MIG-5d2f0c1e/1/0", ("MIG-5d2f0c1e/1/0",)),
        ("", ()),  # set and empty: CUDA sees none
        ("0,-1,1", ("0",)),  # CUDA stops at the first that is none
        ("NoDevFiles", ()),
    ],
)
def test_listed_devices(value: str, names: tuple[str, ...]) -> None:
    assert listed({"CUDA_VISIBLE_DEVICES": value}) == names
    assert listed({}) is None


@pytest.mark.parametrize(
    ("given_by_spark", "inherited"),
    [
        (["1"], None),
        (["1"], "0,1"),  # the executor has two, this task one of them
        (["1"], "1"),
        (["0", "1"], "1,0"),
        ([FIRST], "0"),  # the same device by another name
        (["1"], f"{FIRST},{SECOND}"),
        ([FIRST], "GPU-2222,GPU-1111"),  # CUDA takes the beginning of a UUID for the whole
        (["0"], "GPU-1111"),
        ([SLICE], f"{SLICE},MIG-7"),
        ([], None),
        ([], "0,1"),  # none asked for: none seen, whatever the executor has
    ],
)
def test_a_rank_sees_what_it_was_given(two_gpus: Path, given_by_spark: list[str], inherited: str | None) -> None:
    environment = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    expose(given_by_spark, environment, "host-1")
    assert environment == {
        "CUDA_VISIBLE_DEVICES": ",".join(given_by_spark),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }


@pytest.mark.parametrize(
    ("given_by_spark", "inherited"),
    [
        (["1"], "0"),
        (["0", "1"], "0"),
        (["0"], ""),  # somebody hid all of them
        (["0"], SECOND),
        ([FIRST], "1"),
        (["0"], SLICE),  # a slice is no whole device
        ([SECOND], "GPU-1111"),
    ],
)
def test_a_contradiction_is_an_error(two_gpus: Path, given_by_spark: list[str], inherited: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": inherited}
    with pytest.raises(ConfigError, match="contradicts") as caught:
        expose(given_by_spark, environment, "host-1")
    assert environment == {"CUDA_VISIBLE_DEVICES": inherited}
    error = caught.value
    assert "host-1" in error.what and given_by_spark[0] in error.got and repr(inherited) in error.got
    assert "discoveryScript" in error.next_step


def test_hidden_devices_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "NODES", tmp_path)
    expose([], {"CUDA_VISIBLE_DEVICES": "3"}, "host-1")
    assert "devices 3 of host-1 are hidden" in capsys.readouterr().out
    expose([], {}, "host-1")
    assert capsys.readouterr().out == ""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    expose([], {}, "host-1")
    assert "host-1 has 2 GPUs, and this rank was given none of them" in capsys.readouterr().out
    expose([], {"CUDA_VISIBLE_DEVICES": ""}, "host-1")  # so it was meant
    expose(["0"], {}, "host-1")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["gpu0", "/dev/nvidia0", "", "0,1", "-1"])
def test_an_address_that_cuda_cannot_read_is_an_error(name: str) -> None:
    """CUDA would see no device at all, and say nothing."""
    environment: dict[str, str] = {}
    with pytest.raises(ConfigError, match="names that CUDA cannot read") as caught:
        expose(["1", name], environment, "host-1")
    assert environment == {} and caught.value.got == name


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        ("1", SECOND),
        (f"{SECOND},{FIRST}", SECOND),  # the first is what the rank computes on
        ("GPU-2222", SECOND),
        (SLICE, FIRST),  # NCCL takes the slices of a GPU for one
        (f"MIG-{SECOND}/3/0", SECOND),  # as older drivers write a slice
        ("7", "host-1:7"),
        ("GPU-9", "GPU-9"),
        (None, FIRST),
    ],
)
def test_ranks_on_one_gpu_are_known_by_its_name(two_gpus: Path, visible: str | None, name: str) -> None:
    assert identity({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, "host-1") == name


def test_resources_that_ranks_make_no_use_of() -> None:
    settings = {
        "spark.task.resource.gpu.amount": "1",
        "spark.executor.resource.fpga.amount": "1",
        "spark.task.cpus": "2",
    }
    assert other_resources(settings) == []
    assert other_resources({**settings, "spark.task.resource.cuda.amount": "1"}) == ["cuda"]


def test_what_the_user_has_set_stays() -> None:
    own = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "TF_FORCE_GPU_ALLOW_GROWTH": "false"}
    environment = dict(own)
    expose(["0"], environment, "host-1")
    assert environment == {**own, "CUDA_VISIBLE_DEVICES": "0"}


def test_the_hosts_devices(two_gpus: Path) -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert host_gpus() == (Gpu("0", name, FIRST, (SLICE,)), Gpu("1", name, SECOND))
    assert of_host({}) == ("0", "1")
    assert of_host({"CUDA_VISIBLE_DEVICES": "1"}) == ("1",)


def test_no_tool_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_gpus() == () and of_host({}) == ()


def test_a_driver_that_is_ill_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_tool(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    with pytest.raises(ConfigError, match="cannot list") as caught:
        host_gpus()
    assert caught.value.got == "exit code 9: NVIDIA-SMI has failed"
    with caplog.at_level(logging.WARNING):
        assert of_host({}) == ()
    assert "ranks run without a GPU" in caplog.text and "has failed" in caplog.text


def test_a_driver_that_hangs_is_told(two_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(ConfigError, match="cannot list") as caught:
        host_gpus()
    assert "30" in caught.value.got


@pytest.mark.parametrize(
    ("found", "num_ranks", "shares"),
    [
        ([], 2, [(), ()]),
        (["0", "1"], 2, [("0",), ("1",)]),
        (["0", "1", "2"], 2, [("0",), ("1",)]),  # a rank never gets two
        (["4", "5"], 4, [("4",), ("4",), ("5",), ("5",)]),  # neighbours share one
        (["0", "1"], 3, [("0",), ("0",), ("1",)]),
    ],
)
def test_shares(found: list[str], num_ranks: int, shares: list[tuple[str, ...]]) -> None:
    assert share_out(found, num_ranks) == shares


@given(st.integers(1, 16), st.integers(1, 40))
def test_shares_are_even(count: int, num_ranks: int) -> None:
    found = [str(number) for number in range(count)]
    taken = [share_out(found, num_ranks)[rank][0] for rank in range(num_ranks)]
    uses = [taken.count(device) for device in found]
    assert sum(uses) == num_ranks
    assert max(uses) - min(uses) <= 1
    assert taken == sorted(taken, key=int)


@given(st.integers(0, 16), st.integers(1, 5), st.integers(1, 5))
def test_runs_at_once_have_gpus_of_their_own(count: int, runs: int, num_ranks: int) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
    if runs > 1 and 0 < count < runs * num_ranks:
        with pytest.raises(ConfigError) as caught:
            of_runs(environment, runs, num_ranks)
        error = caught.value
        assert error.got.startswith(f"{count} GPUs") and f"{runs * num_ranks} GPUs" in error.allowed
        assert f"Lower --parallel to {max(1, count // num_ranks)}, or" in error.next_step
        return
    shares = of_runs(environment, runs, num_ranks)
    assert len(shares) == runs and len({*sum(shares, ())}) == sum(map(len, shares))
    for share in shares:
        ranks = shares_of_host(environment, num_ranks, share)
        given_to = {device for rank in ranks for device in rank}
        assert given_to <= {*share} and (runs == 1 or len(given_to) == (num_ranks if count else 0))


@pytest.mark.slow
def test_memory_grows_by_need_and_missing_gpus_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tensorflow as tf

    from lockstep.training.rank.runtime import _take_gpus

    grown: list[str] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"/physical_device:{kind}:0"])
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: grown.append(f"{gpu} {on}"))
    _take_gpus(1)
    assert (grown, capsys.readouterr().out) == (["/physical_device:GPU:0 True"], "")
    _take_gpus(2)
    assert "sees 1 of the 2 GPUs" in capsys.readouterr().out
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0", f"{kind}:1"])
    _take_gpus(2)
    assert "was given 2 GPUs and computes only on the first" in capsys.readouterr().out
    assert processor() == "GPU"
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    assert processor() == "CPU"
