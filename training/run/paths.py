"""All names inside a run directory; no other module spells one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.storage.errors import StorageError

_CHECKPOINT = re.compile(r"step-([0-9]{10})\.g([0-9]{4,})")
_CLAIM = re.compile(r"([0-9]{6,})\.json")
_AUDIT = re.compile(r"step-([0-9]{10})\.csv")
_COMM_PLAN = re.compile(r"ranks-([0-9]{5,})-[0-9a-f]{16}\.json")
_GENERATION = re.compile(r"g([0-9]{4,})(?:-[0-9a-f]+)?")


def generation_name(generation: int) -> str:
    """`g0007`: a generation in names of files and directories."""
    return f"g{generation:04d}"


def generation_of(name: str) -> int | None:
    """The generation in `g0007` or `g0007-NONCE`; None for any other name."""
    match = _GENERATION.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_name(step: int, generation: int) -> str:
    """`step-0000000400.g0007`: one checkpoint's directory."""
    return f"step-{step:010d}.{generation_name(generation)}"


def checkpoint_of(name: str) -> tuple[int, int] | None:
    """(step, generation) of a checkpoint directory's name; None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def audit_step_of(name: str) -> int | None:
    """The step of an audit file's name; None for any other name."""
    match = _AUDIT.fullmatch(name)
    return int(match[1]) if match else None


def claim_of(name: str) -> int | None:
    """The generation of a claim's file name; None for any other name."""
    match = _CLAIM.fullmatch(name)
    return int(match[1]) if match else None


def comm_plan_name(num_ranks: int, key: str) -> str:
    """The file name of a plan for so many ranks."""
    return f"ranks-{num_ranks:05d}-{key}.json"


def is_comm_plan_of(name: str, num_ranks: int) -> bool:
    """Whether this is the name of a frozen communication plan of so many ranks."""
    match = _COMM_PLAN.fullmatch(name)
    return match is not None and int(match[1]) == num_ranks


def staged_checkpoint(staging: str, step: int) -> str:
    """Where ranks upload the files of the checkpoint of `step`; `staging` is a generation's staging directory."""
    return f"{staging}/step-{step:010d}"


def staged_model(staging: str) -> str:
    """Where rank 0 uploads the final export."""
    return f"{staging}/model"


def rank_name(rank: int) -> str:
    """`rank-00003`: a rank in names of files and directories."""
    return f"rank-{rank:05d}"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The URLs of one run; `root` is a URL or a local path without a slash at its end."""

    root: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", self.root.rstrip("/") or "/")

    @property
    def run_json(self) -> str:
        """Config, plan identity and versions, written once by the first driver."""
        return f"{self.root}/run.json"

    @property
    def lease(self) -> str:
        """The sign of a living driver, rewritten every few seconds."""
        return f"{self.root}/lease.json"

    @property
    def claims(self) -> str:
        """Directory of the generation claims."""
        return f"{self.root}/generations"

    def claim(self, generation: int) -> str:
        """One generation's claim."""
        return f"{self.claims}/{generation:06d}.json"

    @property
    def comm_plans(self) -> str:
        """Directory of the frozen communication plans."""
        return f"{self.root}/comm"

    def comm_plan(self, num_ranks: int, key: str) -> str:
        """The plan of so many ranks; `key` is CommPlan.key."""
        return f"{self.comm_plans}/{comm_plan_name(num_ranks, key)}"

    @property
    def checkpoints(self) -> str:
        """Directory of the committed checkpoints."""
        return f"{self.root}/checkpoints"

    def checkpoint(self, step: int, generation: int) -> str:
        """One committed checkpoint."""
        return f"{self.checkpoints}/{checkpoint_name(step, generation)}"

    @property
    def stagings(self) -> str:
        """Parent of the staging directories."""
        return f"{self.root}/.staging"

    def staging(self, generation: int, nonce: str) -> str:
        """Where a generation's ranks upload files, which the driver renames."""
        return f"{self.stagings}/{generation_name(generation)}-{nonce}"

    @property
    def trashes(self) -> str:
        """Parent of the trash directories."""
        return f"{self.root}/.trash"

    def trash(self, generation: int) -> str:
        """Where a generation's retention moves checkpoints."""
        return f"{self.trashes}/{generation_name(generation)}"

    @property
    def all_metrics(self) -> str:
        """Parent of all generations' metric parts."""
        return f"{self.root}/metrics"

    def metrics(self, generation: int) -> str:
        """Directory of a generation's closed metric parts."""
        return f"{self.all_metrics}/{generation_name(generation)}"

    def logs(self, generation: int) -> str:
        """Directory of a generation's rank logs."""
        return f"{self.root}/logs/{generation_name(generation)}"

    def log(self, generation: int, rank: int) -> str:
        """Directory of one rank's closed log parts."""
        return f"{self.logs(generation)}/{rank_name(rank)}"

    def audits(self, generation: int) -> str:
        """Directory of a generation's audits, with one directory a rank."""
        return f"{self.root}/audit/{generation_name(generation)}"

    def audit(self, generation: int, rank: int, step: int) -> str:
        """The audit file that belongs to the checkpoint of `step`."""
        return f"{self.audits(generation)}/{rank_name(rank)}/step-{step:010d}.csv"

    def model(self, generation: int) -> str:
        """A generation's final export."""
        return f"{self.root}/models/{generation_name(generation)}"

    @property
    def results(self) -> str:
        """Directory of the generations' results."""
        return f"{self.root}/results"

    def result(self, generation: int) -> str:
        """A generation's result."""
        return f"{self.results}/{generation_name(generation)}.json"

    def report(self, generation: int) -> str:
        """A generation's report."""
        return f"{self.root}/reports/{generation_name(generation)}.html"

    def relative(self, url: str) -> str:
        """`url` relative to the run's root, as manifests name files."""
        if not url.startswith(self.root + "/"):
            raise StorageError(
                "a file is outside the run that lists it",
                got=url,
                allowed=f"a path below {self.root}",
                next_step="Resume the run by the URL that it was started with.",
            )
        return url[len(self.root) + 1 :]
