"""The run's frozen communication plans: a restart that added gradients in another order would change last bits.

The first start with a number of ranks, a layout of hosts and options makes a plan; each has its own file.
"""

from __future__ import annotations

from typing import Any

from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import CommunicationError, DataError, ExistsError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import write_file
from lockstep.training.comm.comm_plan import CommPlan
from lockstep.training.run.lineage import check_newest
from lockstep.training.run.paths import RunPaths, comm_plan_name, is_comm_plan_of

FORMAT_VERSION = 1


def read_plans(fs: FileSystem, paths: RunPaths, num_ranks: int) -> list[dict[str, Any]]:
    """The run's plans for so many ranks, as documents of CommPlan.

    Raises CorruptionError or DataError naming a changed file: without its plan the result could change.
    """
    try:
        names = sorted(entry.name for entry in fs.list(paths.comm_plans))
    except NotFoundError:
        return []
    urls = [f"{paths.comm_plans}/{name}" for name in names if is_comm_plan_of(name, num_ranks)]
    return [_read(fs, url).to_json() for url in urls]


def freeze_plan(fs: FileSystem, paths: RunPaths, generation: int, document: Any) -> str:
    """Write the plan that the ranks of `generation` have made; returns its URL.

    Raises SupersededError for an older driver, and CommunicationError if another driver has frozen a different plan in
    the meantime: these ranks must not continue with theirs.
    """
    plan = CommPlan.from_json(document, where="the ranks' communication plan")
    check_newest(fs, paths, generation)
    url = paths.comm_plan(len(plan.layout.host_of), plan.key)
    content = {"format_version": FORMAT_VERSION, "kind": "comm_plan", "generation": generation, "plan": plan.to_json()}
    try:
        write_file(fs, url, seal(content), confirm=lambda: check_newest(fs, paths, generation))
    except ExistsError:
        if _read(fs, url) != plan:
            raise CommunicationError(
                "the ranks would add gradients in another order than the run has frozen",
                got=f"a plan of another driver in {url}",
                allowed="one plan for these ranks",
                next_step="Nothing: the ranks start again and follow the frozen plan.",
            ) from None
    return url


def _read(fs: FileSystem, url: str) -> CommPlan:
    document = unseal_as("comm_plan", fs.read_bytes(url), url, version=FORMAT_VERSION)
    plan = CommPlan.from_json(document.get("plan"), where=url)
    ranks = len(plan.layout.host_of)
    # Ranks select plans by content: one under a wrong name would be ignored, and no new one written.
    if not url.endswith(comm_plan_name(ranks, plan.key)):
        raise DataError(
            f"{url} holds a plan for other ranks than its name says",
            got=f"a plan for {ranks} ranks, whose name is {comm_plan_name(ranks, plan.key)}",
            allowed="files as the run wrote them",
            next_step="Rename it, or restore the folder from a backup.",
        )
    return plan
