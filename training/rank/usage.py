"""Samples what a rank uses, every few seconds: memory, processor and GPU, and how full its container is."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from lockstep.storage.errors import LockstepError
from lockstep.training.control.client import ControlClient
from lockstep.training.devices import listed
from lockstep.training.run.metrics import USAGE

SAMPLE_EVERY_S = 5.0
CHILDREN_EVERY = 6  # samples: to look for children takes four times as long as the rest, with 60 threads
_NO_LIMIT = 1 << 60  # cgroup v1 has a number of this size in place of no limit
# The folder of a group under /sys/fs/cgroup, and the files of its limit, its use and the pages that can be dropped.
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("", "memory.max", "memory.current", "inactive_file")


def container_memory(proc: Path = Path("/proc/self"), mounted: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Return (bytes held, limit) of this process's control group that is nearest to its limit; None without a limit.

    Pages of files that the kernel can drop do not count, as for Kubernetes. cgroup v1 and v2.
    """
    found = []
    for line in proc.joinpath("cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        folder, limit_name, held_name, dropped_name = _V2 if controllers == "" else _V1
        top = mounted / folder
        group = top / path.lstrip("/")
        # Inside a container the mount shows its own group at the top, and the path may be the host's.
        for level in [group, *group.parents] if group.is_dir() else [top]:
            with contextlib.suppress(OSError, ValueError):  # no limit: "max", or no such file at the top of all groups
                limit = int((level / limit_name).read_text())
                stat = dict(row.split() for row in (level / "memory.stat").read_text().splitlines())
                if limit < _NO_LIMIT:
                    found.append((int((level / held_name).read_text()) - int(stat.get(dropped_name, 0)), limit))
            if level == top:
                break
    return max(found, key=lambda one: one[0] / one[1], default=None)


def children(pid: int) -> list[int]:
    """The processes that `pid` and its children have started and that still run; psutil would look at all processes."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended, or a kernel without this file
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    return found


class Sampler:
    """Takes samples of this process and its children."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._processes: list[psutil.Process] = []
        self._samples = 0
        self._cpu_s: float | None = None
        self._at = 0.0
        self._gpu = gpu_reader()

    def sample(self) -> dict[str, Any]:
        """Return {rss_bytes, cores (that were busy since the last sample), held_bytes and limit_bytes (of the
        container, or of the host if it has no limit), limit_of, and with a GPU gpu_share and gpu_bytes}.
        """
        if self._samples % CHILDREN_EVERY == 0:
            self._processes = [self._own, *filter(None, map(_process, children(self._own.pid)))]
        self._samples += 1
        rss = cpu_s = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):  # it has ended
                rss += process.memory_info().rss
                times = process.cpu_times()
                cpu_s += times.user + times.system
        now = time.monotonic()
        cores = 0.0 if self._cpu_s is None else max(0.0, cpu_s - self._cpu_s) / (now - self._at)
        self._cpu_s, self._at = cpu_s, now
        held = None
        with contextlib.suppress(OSError):  # not Linux
            held = container_memory()
        of = "container"
        if held is None:
            memory, of = psutil.virtual_memory(), "host"
            held = memory.total - memory.available, memory.total
        row = {"rss_bytes": int(rss), "cores": round(cores, 3), "held_bytes": held[0], "limit_bytes": held[1]}
        return {**row, "limit_of": of, **(self._gpu() if self._gpu is not None else {})}


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid)
    return None


def gpu_reader() -> Callable[[], dict[str, Any]] | None:
    """Reads {gpu_bytes, gpu_share} of the GPU that this process computes on; None without one, or nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        return None
    visible = listed(os.environ)
    if visible == ():
        return None
    name = visible[0] if visible else "0"
    try:
        pynvml.nvmlInit()
        by_index = name.isdigit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError:  # no driver, or no GPU
        return None

    def read() -> dict[str, Any]:
        row: dict[str, Any] = {}
        with contextlib.suppress(pynvml.NVMLError):  # a part of a GPU (MIG) has memory, and no utilization
            row["gpu_bytes"] = int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)
            row["gpu_share"] = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
        return row

    return read


class Usage(AbstractContextManager["Usage"]):
    """Sends a sample every SAMPLE_EVERY_S seconds as a row {kind: usage, rank, step, host, ...}, and one at its end."""

    def __init__(self, control: ControlClient, rank: int, every_s: float = SAMPLE_EVERY_S) -> None:
        self._control, self._rank, self._every_s = control, rank, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="usage", daemon=True)

    def __enter__(self) -> Usage:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(SAMPLE_EVERY_S)

    def _work(self) -> None:
        sampler, host = Sampler(), socket.gethostname()
        with contextlib.suppress(LockstepError):  # the driver has ended: the rank's own calls report it
            while True:
                last = self._ended.is_set()
                row = {"kind": USAGE, "rank": self._rank, "step": self._control.step, "host": host, **sampler.sample()}
                self._control.notify("metrics", rows=[row])
                if last:
                    return
                self._ended.wait(self._every_s)
