"""The GPUs that a rank may see, set before TensorFlow is imported, since it reads CUDA_VISIBLE_DEVICES once.

A device is named as by CUDA and Spark's discovery scripts: an index ("0"), a UUID ("GPU-5d2f...") or a MIG slice
("MIG-..."). Indices follow the order of the PCI bus, as in nvidia-smi.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.storage.errors import ConfigError

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
LIST_LIMIT_S = 30.0  # nvidia-smi takes seconds where the driver's persistence mode is off
NODES = Path("/dev")  # where the driver puts nvidia0, nvidia1, ...
_DEVICE = re.compile(r"\d+|GPU-[\w-]+|MIG-[\w/-]+")
_LISTED = re.compile(r"GPU (?P<index>\d+): (?P<name>.+) \(UUID: (?P<uuid>GPU-[0-9a-fA-F-]+)\)")
_SLICE = re.compile(r"\s+MIG .+\(UUID: (MIG-[\w/-]+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host, as nvidia-smi lists it."""

    index: str
    name: str
    uuid: str
    slices: tuple[str, ...] = ()
    """UUIDs of the GPU's MIG slices."""

    def holds(self, device: str) -> bool:
        """Whether `device` is this GPU or a slice of it."""
        whole = device == self.index or _same(device, self.uuid)
        return whole or device.startswith(f"MIG-{self.uuid}/") or any(_same(device, part) for part in self.slices)


def host_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this host; empty without nvidia-smi, which NVIDIA's driver installs.

    Raises ConfigError if nvidia-smi fails or does not answer.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=LIST_LIMIT_S)
        trouble = f"exit code {done.returncode}: {done.stdout} {done.stderr}".strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unlisted(str(error)) from error
    if trouble:
        raise _unlisted(" ".join(trouble.split()))
    found: list[Gpu] = []
    for line in done.stdout.splitlines():
        if match := _LISTED.match(line):
            found.append(Gpu(match["index"], match["name"], match["uuid"]))
        elif found and (match := _SLICE.match(line)):
            found[-1] = replace(found[-1], slices=(*found[-1].slices, match[1]))
    return tuple(found)


def listed(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The devices in CUDA_VISIBLE_DEVICES; None if it is not set. CUDA stops at the first invalid name."""
    if VISIBLE not in environment:
        return None
    names: list[str] = []
    for name in (part.strip() for part in environment[VISIBLE].split(",")):
        if not _DEVICE.fullmatch(name):
            break
        names.append(name)
    return tuple(names)


def expose(devices: Sequence[str], environment: MutableMapping[str, str], where: str) -> None:
    """Let this process see only `devices`; called in a rank before TensorFlow is imported.

    `devices` are those that Spark or the local launcher gave to the rank. An empty sequence hides all: a rank without a
    GPU must not use one that another rank has. CUDA_VISIBLE_DEVICES of the executor may list more, since an executor
    runs several tasks. Raises ConfigError if it lacks a given device, and for a name that CUDA cannot read.
    """
    inherited = listed(environment)
    if strange := [name for name in devices if not _DEVICE.fullmatch(name)]:
        raise ConfigError(
            f"a rank on {where} was given GPUs by names that CUDA cannot read",
            got=", ".join(strange),
            allowed="an index of nvidia-smi (0), a UUID (GPU-...) or a MIG slice (MIG-...)",
            next_step="Have the discovery script (spark.executor.resource.gpu.discoveryScript) print such addresses.",
        )
    if inherited is not None and devices:
        _check(devices, inherited, environment[VISIBLE], where)
    elif inherited:
        print(f"the devices {', '.join(inherited)} of {where} are hidden from this rank, which was given no GPU")
    elif inherited is None and not devices and (idle := len([*NODES.glob("nvidia[0-9]*")])):
        print(f"{where} has {idle} GPUs, and this rank was given none of them: it computes on the CPU (docs/gpu.md)")
    environment[VISIBLE] = ",".join(devices)
    environment.setdefault(ORDER, "PCI_BUS_ID")  # CUDA's own order is by speed; indices here are nvidia-smi's
    environment.setdefault(GROWTH, "true")  # also for a user's script: by default a process allocates all memory


def _check(devices: Sequence[str], inherited: Sequence[str], value: str, where: str) -> None:
    known = [*inherited]
    if {_kind(name) for name in inherited} != {_kind(name) for name in devices}:
        # One side has indices, the other UUIDs: only nvidia-smi relates them.
        for gpu in host_gpus():
            if any(name == gpu.index or _same(name, gpu.uuid) for name in inherited):
                known += [gpu.index, gpu.uuid]
    if not all(any(_same(name, other) for other in known) for name in devices):
        raise ConfigError(
            f"{VISIBLE} on {where} contradicts the GPUs that were given to a rank there",
            got=f"given: {', '.join(devices)}; {VISIBLE}={value!r}",
            allowed=f"all devices from Spark in {VISIBLE}, or {VISIBLE} not set",
            next_step=f"Unset {VISIBLE} on the executors (spark.executorEnv.{VISIBLE}, the workers' environment), or "
            "have the discovery script (spark.executor.resource.gpu.discoveryScript) list the same devices.",
        )


def of_host(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The devices that a process of this host may use: those of CUDA_VISIBLE_DEVICES if set, else all.

    A driver that does not answer is only logged: many hosts have nvidia-smi and no GPU.
    """
    named = listed(environment)
    if named is not None:
        return named
    try:
        return tuple(gpu.index for gpu in host_gpus())
    except ConfigError as error:
        log.warning("ranks run without a GPU: %s (%s)", error.what, error.got)
        return ()


def share_out(devices: Sequence[str], num_ranks: int) -> list[tuple[str, ...]]:
    """One device for each rank, in order; with fewer devices than ranks, neighbouring ranks share one.

    Each tuple is empty without devices. A rank never gets two: its model uses one, and would only block the other.
    """
    if not devices:
        return [()] * num_ranks
    if len(devices) >= num_ranks:
        return [(device,) for device in devices[:num_ranks]]
    return [(devices[rank * len(devices) // num_ranks],) for rank in range(num_ranks)]


def of_runs(environment: Mapping[str, str], runs: int, num_ranks: int) -> list[tuple[str, ...]]:
    """The devices of each of `runs` runs that train on this host at once: no two runs share one.

    Each tuple is empty on a host without devices. Raises ConfigError for several runs with fewer devices than ranks.
    """
    found = of_host(environment)
    if runs > 1 and 0 < len(found) < runs * num_ranks:
        fit = max(1, len(found) // num_ranks)
        raise ConfigError(
            f"{runs} trials of {num_ranks} ranks at once need a GPU for each rank",
            got=f"{len(found)} GPUs of this host: {', '.join(found)}",
            allowed=f"{runs * num_ranks} GPUs or more, or none",
            next_step=f"Lower --parallel to {fit}, or hide the GPUs: {VISIBLE}= (empty) trains on the CPU.",
        )
    each = len(found) // runs
    return [found[run * each : (run + 1) * each] for run in range(runs)]


def shares_of_host(
    environment: Mapping[str, str], num_ranks: int, devices: Sequence[str] | None = None
) -> list[tuple[str, ...]]:
    """The devices of each rank if all ranks are processes of this host; logs a warning if ranks share one.

    `devices` are those of their run, if other runs have the others (`of_runs`); by default all that `of_host` finds.
    """
    found = of_host(environment) if devices is None else devices
    if 0 < len(found) < num_ranks:
        log.warning(
            "%d ranks share %d GPUs of this host: gradients go through its memory, since NCCL does not allow two ranks "
            "on one GPU",
            num_ranks,
            len(found),
        )
    return share_out(found, num_ranks)


def identity(environment: Mapping[str, str], hostname: str) -> str:
    """A unique name of this process's first GPU: its UUID, else host name and index.

    For a MIG slice it is the GPU's name, as in NCCL. Raises ConfigError as `host_gpus` does.
    """
    first = (listed(environment) or ("0",))[0]
    found = next((gpu.uuid for gpu in host_gpus() if gpu.holds(first)), None)
    return found or (first if _kind(first) == "uuid" else f"{hostname}:{first}")


def _same(one: str, other: str) -> bool:
    """Whether two names mean one device; CUDA accepts the first characters of a UUID."""
    if _kind(one) == _kind(other) == "uuid":
        return one.startswith(other) or other.startswith(one)
    return one == other


def _kind(name: str) -> str:
    return "index" if name.isdigit() else "uuid"


def _unlisted(got: str) -> ConfigError:
    return ConfigError(
        "nvidia-smi cannot list the GPUs of this host",
        got=got[:500],
        allowed="a driver that answers",
        next_step=f"Repair the driver, or name the devices in {VISIBLE} ('' for none).",
    )
