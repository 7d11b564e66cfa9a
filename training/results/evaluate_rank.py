"""One rank of an evaluation: open the split, load the models, score this rank's share with each and with their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from lockstep.features.schema.schema import class_names_of
from lockstep.features.schema.signature import Signature
from lockstep.training.batches.augmenting import labels_of
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.protocol import OPENING
from lockstep.training.models.on_disk import load_checkpoint, load_export
from lockstep.training.reading.open import OpenSplit
from lockstep.training.scoring.baseline import Baseline, NumberBaseline, baseline_of
from lockstep.training.scoring.ensemble import ensemble_of
from lockstep.training.scoring.misjudged import misjudged
from lockstep.training.scoring.score_split import Details, Outputs, Pool, open_split, score, takes_logits
from lockstep.training.scoring.slices import slices_of
from lockstep.training.steps import model_state
from lockstep.training.steps.losses import weigh_tests

SHOWN_BATCH_ROWS = 8  # rows of the batch of zeros that builds the metrics


@dataclass(frozen=True, slots=True)
class _Member:
    """A run's model, and the split as this model is fed."""

    model: keras.Model
    split: OpenSplit
    signature: Signature
    kept: tuple[float, ...] | None
    skip_bad_images: bool


def run(context: RankContext, config: TrainConfig) -> dict[str, Any]:
    """Evaluate each model without any collective, then combine the states and rows of all ranks.

    Returns a result of lockstep.training.results.evaluate from `samples` on, of several models that of their mean, with
    `members`, or of a payload with `pooled` what Pool.result returns; {} on other ranks than 0.
    """
    payload, beat = context.payload, context.control.beat
    members = [_opened(context, member) for member in payload["members"]]
    first = members[0]
    comm = context.communicator()
    comm.deadline_s = config.stall_limit_s
    baseline: Baseline | NumberBaseline | None = None
    if payload["baseline"] is not None:
        beat(0, "count the baseline")
        trained_on = TrainingSet.at(config.datasets, config.split, config.mix)
        if config.on_bad_record == "skip":
            trained_on = trained_on.skipping_bad_records(lambda bad: None)
        baseline = baseline_of(payload["baseline"], trained_on.encoder.schema)
        baseline.fit(trained_on.readers, config.mix, comm)
    slices = slices_of(payload["slices"], first.split.encoder.schema)
    details = Details(slices, class_names_of(first.split.manifest), payload["clusters"])

    def scored(
        model: keras.Model,
        of: _Member,
        outputs: Outputs | None = None,
        members: Sequence[tuple[str, Outputs]] = (),
        pool: Pool | None = None,
    ) -> dict[str, Any]:
        return score(
            model, of.split, of.signature, comm, beat,
            batch=payload["batch"], kept=of.kept, baseline=baseline, details=details,
            skip_bad_images=of.skip_bad_images, outputs=outputs, members=members, pool=pool,
        )  # fmt: skip

    if payload.get("pooled"):
        pool = Pool()
        for member in members:
            scored(member.model, member, pool=pool)
        return pool.result()
    outputs = [Outputs(member.model, member.kept, detailed=True) for member in members]
    found = [scored(member.model, member, one) for member, one in zip(members, outputs, strict=True)]
    if len(members) == 1:
        if payload["pictures"]:
            wrong = misjudged(
                first.split, outputs[0], comm,
                batch=payload["batch"], names=details.class_names, skip_bad_images=first.skip_bad_images,
            )  # fmt: skip
            found[0] |= {"misjudged": wrong} if wrong else {}
        return found[0]
    models = [member.model for member in members]
    together = ensemble_of(models, [takes_logits(model) for model in models], first.signature)
    _build(together, first.signature)
    names = [member["run"] for member in payload["members"]]
    result = scored(together, first, members=list(zip(names, outputs, strict=True)))
    return {**result, "members": found} if result else {}


def _opened(context: RankContext, member: dict[str, Any]) -> _Member:
    payload, config = context.payload, TrainConfig.from_json(member["config"])
    context.control.beat(0, OPENING)
    split = open_split(payload["datasets"], member.get("split", payload["split"]), config)
    if config.on_bad_record == "skip":
        split.leave_out_bad_records()
    signature = labels_of(config, split.encoder.signature)
    context.control.beat(0, "load the model")
    if member["model"] is not None:
        model = load_export(member["model"], config, split.manifest)
    else:
        model = load_checkpoint(member["checkpoint"], config, split.manifest, signature)
    model.jit_compile = False
    _build(model, signature)
    kept = member["kept"] and tuple(member["kept"])
    return _Member(model, split, signature, kept, config.skips_bad_images)


def _build(model: keras.Model, signature: Signature) -> None:
    model_state.build_all(model, signature, SHOWN_BATCH_ROWS)
    weigh_tests(model)
