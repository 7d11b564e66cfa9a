"""A plan made anew from what was kept of it (its `identity`): the same one, or an error that names what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import DataError
from storage.manifest import DatasetManifest
from training.mixed_plan import MixedPlan, Plan
from training.parts import MixedManifest, split_of
from training.plan import LATER_KEYS, EpochPlan


def plan_from(identity: Mapping[str, Any], manifest: DatasetManifest) -> Plan:
    """The plan that `identity` describes, over what it was made for.

    Raises DataError naming what differs, ConfigError for numbers that no plan has.
    """
    if isinstance(manifest, MixedManifest):
        return _mixed_plan(identity, manifest.mixed, manifest.digest)
    return _epoch_plan(identity, manifest)


def _epoch_plan(identity: Mapping[str, Any], manifest: DatasetManifest) -> EpochPlan:
    info = split_of(manifest, str(identity.get("split")))
    numbers = [identity.get(name) for name in ("seed", "global_batch", "lanes", "window_records", "version")]
    seed, global_batch, lanes, window_records, version = (n if type(n) is int else -1 for n in numbers)
    later = {name: identity[name] for name in LATER_KEYS if type(identity.get(name)) is int}
    plan = EpochPlan(
        dataset_digest=manifest.digest,
        split=str(identity["split"]),
        shard_records=tuple(shard.records for shard in info.shards),
        block_records=info.block_records,
        seed=seed,
        global_batch=global_batch,
        lanes=lanes,
        window_records=window_records,
        version=version,
        **later,
    )
    differing = _differing(identity, plan)
    if differing:
        raise DataError(
            "a stored plan belongs to another dataset",
            got=f"{', '.join(differing)} differ",
            allowed=f"dataset {manifest.digest}",
            next_step="Give the dataset that the run began with.",
        )
    return plan


def _mixed_plan(identity: Mapping[str, Any], manifests: Sequence[DatasetManifest], digest: str) -> MixedPlan:
    parts, ratios = identity.get("parts"), identity.get("ratios")
    if not isinstance(parts, list) or len(parts) != len(manifests):
        raise _other_datasets("parts")
    if not isinstance(ratios, list) or [type(ratio) for ratio in ratios] != [int] * len(parts):
        raise _other_datasets("ratios")
    made = tuple(_epoch_plan(part, found) for part, found in zip(parts, manifests, strict=True))
    plan = MixedPlan(dataset_digest=digest, ratios=tuple(ratios), parts=made)
    differing = _differing(identity, plan)
    if any(part.global_batch * sum(ratios) != plan.global_batch * r for part, r in zip(made, ratios, strict=True)):
        differing.append("ratios")
    if differing or len({part.lanes for part in made}) > 1:
        raise _other_datasets(", ".join(differing) or "lanes")
    return plan


def _differing(identity: Mapping[str, Any], plan: Plan) -> list[str]:
    """Names of what stands in one of the two identities only, or otherwise: a key that we do not know is no detail."""
    own = plan.identity()
    names = sorted(own.keys() | identity.keys())
    return [name for name in names if (name in identity, identity.get(name)) != (name in own, own.get(name))]


def _other_datasets(what: str) -> DataError:
    return DataError(
        "a stored plan belongs to other datasets",
        got=f"{what} differ",
        allowed="the datasets and ratios that the run began with",
        next_step="Give the run's own --dataset and --mix, in its order.",
    )
