"""The names of files and directories in a run: `training` writes them, `lockstep.storage.verify` checks them."""

from __future__ import annotations

import re

RUN_JSON = "run.json"
AGENT_JSON = "agent.json"
SELECTION = "selection.json"
LEASE = "lease.json"
STOPPED = "stopped.json"
STATUS = "status.json"
CONTROL = "control"
CLAIMS = "generations"
COMM_PLANS = "comm"
CHECKPOINTS = "checkpoints"
MODELS = "models"
RESULTS = "results"
METRICS = "metrics"
LOGS = "logs"
AUDITS = "audit"
BASELINES = "baselines"
STAGINGS = ".staging"
TRASHES = ".trash"
BY_GENERATION = (CHECKPOINTS, MODELS, RESULTS, METRICS, LOGS, AUDITS, TRASHES)
"""Directories whose entries are named by the generation that wrote them."""

_CHECKPOINT = re.compile(r"step-([0-9]{10})\.g([0-9]{4,})")
_CLAIM = re.compile(r"([0-9]{6,})\.json")
_RESULT = re.compile(r"g([0-9]{4,})\.json")
_AUDIT = re.compile(r"step-([0-9]{10})\.csv")
_COMM_PLAN = re.compile(r"ranks-([0-9]{5,})-[0-9a-f]{16}\.json")
_GENERATION = re.compile(r"g([0-9]{4,})(?:-[0-9a-f]+)?")
_RANK = re.compile(r"rank-([0-9]{5,})(?:\..*)?", re.DOTALL)
_PART = re.compile(r"part-([0-9]{5,})\.(jsonl|log)")


def generation_name(generation: int) -> str:
    """Name a generation in files and directories: `g0007`."""
    return f"g{generation:04d}"


def generation_of(name: str) -> int | None:
    """The generation in `g0007` or `g0007-NONCE`; None for any other name."""
    match = _GENERATION.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_name(step: int, generation: int) -> str:
    """Name a checkpoint's directory: `step-0000000400.g0007`."""
    return f"step-{step:010d}.{generation_name(generation)}"


def checkpoint_of(name: str) -> tuple[int, int] | None:
    """Return (step, generation) of a checkpoint directory's name; None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def audit_name(step: int) -> str:
    """Name a rank's audit file that belongs to the checkpoint of `step`: `step-0000000400.csv`."""
    return f"step-{step:010d}.csv"


def audit_step_of(name: str) -> int | None:
    """The step of an audit file's name; None for any other name."""
    match = _AUDIT.fullmatch(name)
    return int(match[1]) if match else None


def claim_name(generation: int) -> str:
    """Name a generation's claim: `000007.json`."""
    return f"{generation:06d}.json"


def claim_of(name: str) -> int | None:
    """The generation of a claim's file name; None for any other name."""
    match = _CLAIM.fullmatch(name)
    return int(match[1]) if match else None


def result_name(generation: int) -> str:
    """Name a generation's result: `g0007.json`."""
    return f"{generation_name(generation)}.json"


def result_of(name: str) -> int | None:
    """The generation of a result's file name; None for any other name."""
    match = _RESULT.fullmatch(name)
    return int(match[1]) if match else None


def comm_plan_name(num_ranks: int, key: str) -> str:
    """Name the frozen communication plan of `num_ranks` ranks, `ranks-00004-KEY.json`; `key` is 16 hex digits."""
    return f"ranks-{num_ranks:05d}-{key}.json"


def comm_plan_ranks_of(name: str) -> int | None:
    """The number of ranks in the name of a frozen communication plan; None for any other name."""
    match = _COMM_PLAN.fullmatch(name)
    return int(match[1]) if match else None


def rank_name(rank: int) -> str:
    """Name a rank in files and directories: `rank-00003`."""
    return f"rank-{rank:05d}"


def rank_of(name: str) -> int | None:
    """The rank in `rank-00003` or `rank-00003.EXTENSION`; None for any other name."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


def part_name(number: int, suffix: str) -> str:
    """Name a closed part of metrics (`jsonl`) or of a rank's log (`log`): `part-00002.jsonl`."""
    return f"part-{number:05d}.{suffix}"


def part_of(name: str) -> tuple[int, str] | None:
    """Return (number, suffix) of a closed part's name; None for any other name."""
    match = _PART.fullmatch(name)
    return (int(match[1]), match[2]) if match else None
