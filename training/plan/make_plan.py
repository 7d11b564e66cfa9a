"""Makes a plan: from options, or from the `identity` that a run stores, with an error that names any difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.storage import documents
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError, differences
from lockstep.training.plan.datasets import MixedManifest, split_of
from lockstep.training.plan.epoch_plan import OPTIONAL, EpochPlan
from lockstep.training.plan.mixture import MixedPlan, Plan

NUMBERS = {"global_batch": 1, "lanes": 1, "window_records": 1, "version": 0}  # and the least that each can be


def plan_from(identity: Mapping[str, Any], manifest: DatasetManifest, where: str = "a stored plan") -> Plan:
    """The plan that `identity`, read from `where`, describes, over the dataset it was made for.

    Raises DataError naming what differs, or file and field of an invalid value.
    """
    if isinstance(manifest, MixedManifest):
        return _mixed_plan(identity, manifest.mixed, manifest.digest, where)
    return _epoch_plan(identity, manifest, where)


def _epoch_plan(identity: Any, manifest: DatasetManifest, where: str) -> EpochPlan:
    identity = documents.mapping(identity, where=where)
    split = documents.string(identity.get("split"), where=f"{where}: split")
    numbers: dict[str, Any] = {
        name: documents.count(identity.get(name), where=f"{where}: {name}", least=n) for name, n in NUMBERS.items()
    }
    chosen: dict[str, Any] = {
        name: documents.count(identity[name], where=f"{where}: {name}", least=1)
        for name in OPTIONAL
        if name in identity
    }
    try:
        info = split_of(manifest, split)
        plan = EpochPlan(
            dataset_digest=manifest.digest,
            split=split,
            shard_records=tuple(shard.records for shard in info.shards),
            block_records=info.block_records,
            seed=_seed(identity.get("seed"), where),
            where=info.where,
            kept=info.kept,
            **numbers,
            **chosen,
        )
    except ConfigError as error:  # its next step names a flag, which does not help here
        raise DataError(
            f"{where} is not a plan over this dataset: {error.what}",
            got=error.got,
            allowed=error.allowed,
            next_step="Give the dataset that the run began with, or restore the file.",
        ) from error
    differing = _differing(identity, plan)
    if differing:
        raise DataError(
            "a stored plan belongs to another dataset",
            got=", ".join(differing)[:500],
            allowed=f"dataset {manifest.digest}",
            next_step="Give the dataset that the run began with.",
        )
    return plan


def _seed(value: Any, where: str) -> int:
    if type(value) is not int:
        raise DataError(
            f"{where}: seed is invalid",
            got=f"{type(value).__name__} {value!r}"[:200],
            allowed="an integer",
            next_step="It was changed: restore the file.",
        )
    return value


def _mixed_plan(
    identity: Mapping[str, Any], manifests: Sequence[DatasetManifest], digest: str, where: str
) -> MixedPlan:
    parts, ratios = identity.get("parts"), identity.get("ratios")
    if not isinstance(parts, list) or len(parts) != len(manifests):
        raise _other_datasets(f"{len(parts) if isinstance(parts, list) else 'no'} parts (not {len(manifests)})")
    if not isinstance(ratios, list) or [type(ratio) for ratio in ratios] != [int] * len(parts):
        raise _other_datasets(f"ratios = {ratios!r} (not {len(parts)} whole numbers)")
    made = tuple(
        _epoch_plan(part, found, f"{where}: part {number}")
        for number, (part, found) in enumerate(zip(parts, manifests, strict=True))
    )
    plan = MixedPlan(dataset_digest=digest, ratios=tuple(ratios), parts=made)
    differing = _differing(identity, plan)
    if any(part.global_batch * sum(ratios) != plan.global_batch * r for part, r in zip(made, ratios, strict=True)):
        differing.append(f"ratios = {list(ratios)!r} (not those of the parts)")
    if differing or len({part.lanes for part in made}) > 1:
        raise _other_datasets(
            ", ".join(differing) or f"lanes = {[part.lanes for part in made]} (not the same in all parts)"
        )
    return plan


def _differing(identity: Mapping[str, Any], plan: Plan) -> list[str]:
    """The differences between a stored identity and the plan's, unknown keys included."""
    return differences(identity, plan.identity())


def _other_datasets(what: str) -> DataError:
    return DataError(
        "a stored plan belongs to other datasets",
        got=what[:500],
        allowed="the datasets and ratios that the run began with",
        next_step="Give the run's own --dataset and --mix, in its order.",
    )


def make_plan(
    manifest: DatasetManifest, split: str, mix: Sequence[int] | None, *, interleave: int = 1, **numbers: Any
) -> Plan:
    """The plan over the datasets that TrainingSet.at opened with this `mix`; `numbers` as in EpochPlan.for_dataset."""
    numbers["interleave"] = interleave if interleave != 1 else None  # 1 means none, and 0 is refused
    if mix is None:
        return EpochPlan.for_dataset(manifest, split, **numbers)
    assert isinstance(manifest, MixedManifest)
    return MixedPlan.for_datasets(manifest.mixed, manifest.digest, split, mix, **numbers)
