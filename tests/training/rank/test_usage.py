"""What a rank uses: control groups from folders as the kernel shows them, real processes, and a stand-in for NVML."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.training.rank.usage import Sampler, Usage, children, container_memory, gpu_reader
from tests.waiting import until

NO_LIMIT_V1 = 9223372036854771712


def group(folder: Path, limit: object, held: int, dropped: int, *, v2: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, held), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'' if v2 else 'total_'}inactive_file {dropped}\n")


@pytest.mark.parametrize(
    ("lines", "groups", "expected"),
    [
        ("0::/yarn/c1", {"yarn/c1": ("1000", 800, 100)}, (700, 1000)),
        ("0::/yarn/c1", {"yarn/c1": ("max", 800, 100), "yarn": ("2000", 900, 0)}, (900, 2000)),  # a limit above
        ("0::/a/b", {"a/b": ("1000", 800, 0), "a": ("1000", 990, 0)}, (990, 1000)),  # the nearest to its limit
        ("0::/", {"": ("1000", 800, 0)}, (800, 1000)),  # a container's own namespace
        ("0::/host/pod", {"": ("1000", 800, 0)}, (800, 1000)),  # the host's path, the container's mount
        ("0::/a", {"a": ("max", 800, 0)}, None),
        ("3:cpu:/x\n4:memory:/y", {"memory/y": (1000, 800, 100)}, (700, 1000)),  # cgroup v1
        ("4:hugetlb,memory:/y", {"memory/y": (NO_LIMIT_V1, 800, 0)}, None),
        ("4:memory:/y\n0::/", {"memory/y": (NO_LIMIT_V1, 8, 0), "memory": (50, 9, 0)}, (9, 50)),
        ("3:cpu:/x", {"cpu/x": (1000, 800, 0)}, None),
    ],
)
def test_a_container_s_memory_is_that_of_its_control_group(
    tmp_path: Path, lines: str, groups: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    (tmp_path / "cgroup").write_text(lines + "\n")
    for name, sizes in groups.items():
        group(tmp_path / "mounted" / name, *sizes, v2=lines.startswith("0::"))
    assert container_memory(tmp_path, tmp_path / "mounted") == expected


def test_memory_and_processor_of_children_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.rank.usage.CHILDREN_EVERY", 1)
    sampler = Sampler()
    before = sampler.sample()
    code = "import time; kept = bytearray(80 << 20); print(flush=True)\nwhile time.process_time() < 60: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in children(sampler._own.pid)
        after = sampler.sample()
        while (busy := sampler.sample()["cores"]) == 0.0:  # no time of the child has been counted yet
            time.sleep(0.05)
        child.kill()
    assert after["rss_bytes"] - before["rss_bytes"] > 80 << 20
    assert busy > 0
    assert 0 < before["held_bytes"] < before["limit_bytes"] and before["limit_of"] in ("container", "host")


class Control:
    """Keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.step = 0

    def notify(self, kind: str, **fields: Any) -> None:
        assert kind == "metrics"
        self.rows += fields["rows"]


def test_samples_are_sent_from_the_start_to_the_end() -> None:
    control: Any = Control()
    with Usage(control, 3, every_s=0.01):
        until(lambda: len(control.rows) >= 2)
        control.step = 7
    assert {(row["kind"], row["rank"]) for row in control.rows} == {("usage", 3)}
    assert (control.rows[0]["step"], control.rows[-1]["step"]) == (0, 7)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"gpu_bytes": 100, "gpu_share": 0.25}),
        ("1,0", {"gpu_bytes": 101, "gpu_share": 0.25}),
        ("GPU-b", {"gpu_bytes": 202, "gpu_share": 0.25}),
        ("MIG-b", {"gpu_bytes": 203}),  # has no utilization
        ("", None),
        ("7", None),
    ],
)
def test_the_gpu_is_the_first_that_the_rank_sees_with_a_stand_in_for_nvml(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: dict[str, Any] | None
) -> None:
    class NVMLError(Exception):
        pass

    def by_index(index: int) -> int:
        if index > 1:
            raise NVMLError
        return 100 + index

    def rates(gpu: int) -> Any:
        if gpu == 203:
            raise NVMLError
        return SimpleNamespace(gpu=25)

    stand_in: Any = ModuleType("pynvml")
    stand_in.NVMLError, stand_in.nvmlInit = NVMLError, lambda: None
    stand_in.nvmlDeviceGetHandleByIndex = by_index
    stand_in.nvmlDeviceGetHandleByUUID = {"GPU-b": 202, "MIG-b": 203}.__getitem__
    stand_in.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(used=gpu)
    stand_in.nvmlDeviceGetUtilizationRates = rates
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    read = gpu_reader()
    assert (None if read is None else read()) == expected
