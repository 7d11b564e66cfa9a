"""The paths inside a run directory; lockstep.storage.run_layout has the names."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.storage import run_layout
from lockstep.storage.errors import StorageError
from lockstep.storage.run_layout import (
    audit_name,
    audit_step_of,
    checkpoint_name,
    checkpoint_of,
    claim_name,
    claim_of,
    comm_plan_name,
    generation_name,
    generation_of,
    rank_name,
    result_name,
)

__all__ = [
    "RunPaths", "audit_step_of", "checkpoint_name", "checkpoint_of", "claim_of", "comm_plan_name", "generation_name",
    "generation_of", "is_comm_plan_of", "rank_name", "staged_checkpoint", "staged_model",
]  # fmt: skip


def is_comm_plan_of(name: str, num_ranks: int) -> bool:
    """Whether this is the name of a frozen communication plan of `num_ranks` ranks."""
    return run_layout.comm_plan_ranks_of(name) == num_ranks


def staged_checkpoint(staging: str, step: int) -> str:
    """Where ranks upload the files of the checkpoint of `step`; `staging` is a generation's staging directory."""
    return f"{staging}/step-{step:010d}"


def staged_model(staging: str) -> str:
    """Where rank 0 uploads the final export."""
    return f"{staging}/model"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The URLs of one run; `root` is a URL or a local path without a slash at its end."""

    root: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", self.root.rstrip("/") or "/")

    @property
    def run_json(self) -> str:
        """Config, plan identity and versions, written once by the first driver."""
        return f"{self.root}/{run_layout.RUN_JSON}"

    @property
    def agent_json(self) -> str:
        """The configuration of a run of lockstep agent, which has no run.json."""
        return f"{self.root}/{run_layout.AGENT_JSON}"

    @property
    def selection(self) -> str:
        """How many samples of each block meet the run's --where; only with that flag."""
        return f"{self.root}/{run_layout.SELECTION}"

    @property
    def lease(self) -> str:
        """The sign of a living driver, rewritten every few seconds."""
        return f"{self.root}/{run_layout.LEASE}"

    @property
    def stopped(self) -> str:
        """How the run was stopped in good order, until it is resumed."""
        return f"{self.root}/{run_layout.STOPPED}"

    @property
    def status(self) -> str:
        """What the run is doing, replaced by its driver every few seconds."""
        return f"{self.root}/{run_layout.STATUS}"

    @property
    def control(self) -> str:
        """Directory of requests to the driver and its answers."""
        return f"{self.root}/{run_layout.CONTROL}"

    @property
    def claims(self) -> str:
        """Directory of the generation claims."""
        return f"{self.root}/{run_layout.CLAIMS}"

    def claim(self, generation: int) -> str:
        """One generation's claim."""
        return f"{self.claims}/{claim_name(generation)}"

    @property
    def comm_plans(self) -> str:
        """Directory of the frozen communication plans."""
        return f"{self.root}/{run_layout.COMM_PLANS}"

    def comm_plan(self, num_ranks: int, key: str) -> str:
        """The plan of so many ranks; `key` is CommPlan.key."""
        return f"{self.comm_plans}/{comm_plan_name(num_ranks, key)}"

    @property
    def checkpoints(self) -> str:
        """Directory of the committed checkpoints."""
        return f"{self.root}/{run_layout.CHECKPOINTS}"

    def checkpoint(self, step: int, generation: int) -> str:
        """One committed checkpoint."""
        return f"{self.checkpoints}/{checkpoint_name(step, generation)}"

    @property
    def stagings(self) -> str:
        """Parent of the staging directories."""
        return f"{self.root}/{run_layout.STAGINGS}"

    def staging(self, generation: int, nonce: str) -> str:
        """Where a generation's ranks upload files, which the driver renames."""
        return f"{self.stagings}/{generation_name(generation)}-{nonce}"

    @property
    def trashes(self) -> str:
        """Parent of the trash directories."""
        return f"{self.root}/{run_layout.TRASHES}"

    def trash(self, generation: int) -> str:
        """Where a generation's retention moves checkpoints."""
        return f"{self.trashes}/{generation_name(generation)}"

    @property
    def all_metrics(self) -> str:
        """Parent of all generations' metric parts."""
        return f"{self.root}/{run_layout.METRICS}"

    def metrics(self, generation: int) -> str:
        """Directory of a generation's closed metric parts."""
        return f"{self.all_metrics}/{generation_name(generation)}"

    def logs(self, generation: int) -> str:
        """Directory of a generation's rank logs."""
        return f"{self.root}/{run_layout.LOGS}/{generation_name(generation)}"

    def log(self, generation: int, rank: int) -> str:
        """Directory of one rank's closed log parts."""
        return f"{self.logs(generation)}/{rank_name(rank)}"

    def audits(self, generation: int) -> str:
        """Directory of a generation's audits, with one directory a rank."""
        return f"{self.root}/{run_layout.AUDITS}/{generation_name(generation)}"

    def audit(self, generation: int, rank: int, step: int) -> str:
        """The audit file that belongs to the checkpoint of `step`."""
        return f"{self.audits(generation)}/{rank_name(rank)}/{audit_name(step)}"

    @property
    def models(self) -> str:
        """The directory of final exports."""
        return f"{self.root}/{run_layout.MODELS}"

    def model(self, generation: int) -> str:
        """A generation's final export."""
        return f"{self.models}/{generation_name(generation)}"

    @property
    def results(self) -> str:
        """Directory of the generations' results."""
        return f"{self.root}/{run_layout.RESULTS}"

    def result(self, generation: int) -> str:
        """A generation's result."""
        return f"{self.results}/{result_name(generation)}"

    def evaluations(self, key: str) -> str:
        """Directory of the scores of checkpoints that were evaluated next to the training; `key` names how."""
        return f"{self.root}/evaluations/{key}"

    def report(self, generation: int) -> str:
        """A generation's report."""
        return f"{self.root}/reports/{generation_name(generation)}.html"

    @property
    def baselines(self) -> str:
        """Directory of the results of lockstep baseline."""
        return f"{self.root}/{run_layout.BASELINES}"

    def relative(self, url: str) -> str:
        """Return `url` relative to the run's root, as manifests name files."""
        if not url.startswith(self.root + "/"):
            raise StorageError(
                "a file is outside the run that lists it",
                got=url,
                allowed=f"a path below {self.root}",
                next_step="Resume the run by the URL that it was started with.",
            )
        return url[len(self.root) + 1 :]
