"""One rank of an evaluation: open the split, load the models, score this rank's share with each and with their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from lockstep.features.schema.pictures import image_field
from lockstep.features.schema.schema import Schema, class_names_of
from lockstep.features.schema.signature import Signature
from lockstep.storage.dataset.manifest import has_files, load_dataset
from lockstep.storage.urls import absolute
from lockstep.training.batches.augmenting import labels_of
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.comm.base import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.protocol import OPENING
from lockstep.training.plan.datasets import task_of
from lockstep.training.plan.selection import Selection
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.selecting import selection_of
from lockstep.training.results.evaluate import EvaluateOrder
from lockstep.training.results.predict_rank import FilesOf
from lockstep.training.results.stored_model import StoredModel
from lockstep.training.scoring.ensemble import ensemble_of
from lockstep.training.scoring.misjudged import misjudged
from lockstep.training.scoring.naive_baseline import Baseline, NumberBaseline, baseline_of
from lockstep.training.scoring.score_split import Details, Outputs, Pool, ScoredModel, Scorer, takes_logits
from lockstep.training.scoring.slices import slices_of
from lockstep.training.steps import model_state
from lockstep.training.steps.losses import weigh_tests

SHOWN_BATCH_ROWS = 8  # rows of the batch of zeros that builds the metrics


def run(context: RankContext) -> dict[str, Any]:
    """Evaluate each model without any collective, then combine the states and rows of all ranks.

    Returns a result of lockstep.training.results.evaluate from `samples` on, of several models that of their mean, with
    `members`, or of an order that is `pooled` what Pool.result returns; {} on other ranks than 0.
    """
    order, beat = EvaluateOrder.from_json(context.payload), context.control.beat
    request, config = order.request, order.members[0].config
    splits = order.pooled or [request.split] * len(order.members)
    models = [_opened(context, order, member, split) for member, split in zip(order.members, splits, strict=True)]
    first = models[0]
    comm = context.communicator()
    comm.deadline_s = config.limits.stall_limit_s
    baseline: Baseline | NumberBaseline | None = None
    if request.baseline is not None:
        beat(0, "count the baseline")
        baseline = _fitted(request.baseline, config, comm)
    slices = slices_of(request.slices, first.split.encoder.schema)
    details = Details(slices, class_names_of(first.split.manifest), request.clusters)
    scorer = Scorer(comm=comm, beat=beat, batch=request.batch, baseline=baseline, details=details)
    if order.pooled is not None:
        pool = Pool()
        for one in models:
            scorer.score(one, pool=pool)
        return pool.result()
    outputs = [Outputs(one.model, one.kept, detailed=True) for one in models]
    found = [scorer.score(one, its) for one, its in zip(models, outputs, strict=True)]
    if len(models) == 1:
        if request.pictures:
            wrong = misjudged(
                first.split, outputs[0], comm,
                batch=request.batch, names=details.class_names, skip_bad_images=first.skip_bad_images,
            )  # fmt: skip
            found[0] |= {"misjudged": _with_files(wrong, order.datasets, request.split)} if wrong else {}
        if (request.earlier or config.data.tasks is not None) and order.selection is None:
            each = _by_dataset(order, first, scorer, outputs[0])
            found[0] |= {"by_dataset": each} if found[0] else {}
        return found[0]
    each = [one.model for one in models]
    together = ensemble_of(each, list(map(takes_logits, each)), first.signature)
    _build(together, first.signature)
    names = [member.run for member in order.members]
    result = scorer.score(replace(first, model=together), members=list(zip(names, outputs, strict=True)))
    return {**result, "members": found} if result else {}


def _with_files(wrong: list[dict[str, Any]], datasets: Sequence[str], split: str) -> list[dict[str, Any]]:
    """Misjudged pictures, each with the `file` that it was where a dataset says so."""
    ids, files = [one["sample_id"] for one in wrong], dict[int, str]()
    for url in datasets:
        manifest = load_dataset(url)
        if has_files(manifest):
            files |= FilesOf(url, manifest, split).of_samples(ids)
    return [{**one, "file": files[one["sample_id"]]} if one["sample_id"] in files else one for one in wrong]


def _column_of(baseline: str | None) -> str:
    """The column of a baseline rate:COLUMN; nothing for another one."""
    return (baseline or "").partition(":")[2]


def _fitted(name: str, config: TrainConfig, comm: Communicator) -> Baseline | NumberBaseline:
    """The baseline, counted on the run's training rows. A collective."""
    trained_on = TrainingSet.at(
        config.data.datasets,
        config.data.split,
        config.data.mix,
        selection=selection_of(config),
        also=[_column_of(name)],
        tasks=config.data.tasks is not None,
    )
    if config.exactness.on_bad_record == "skip":
        trained_on = trained_on.skipping_bad_records(lambda bad: None)
    baseline = baseline_of(name, trained_on.encoder.schema)
    baseline.fit(trained_on.readers, config.data.mix, comm)
    return baseline


def _by_dataset(order: EvaluateOrder, model: ScoredModel, scorer: Scorer, outputs: Outputs) -> list[dict[str, Any]]:
    """Compute {dataset, samples, metrics, intervals} of each dataset alone, on rank 0. A collective."""
    scorer = replace(scorer, baseline=None, details=Details(clusters=order.request.clusters))
    config, found = order.members[0].config, []
    if config.data.tasks is None:
        urls, schema = list(order.datasets), model.split.manifest.schema
    else:  # each task has a label for itself
        others = [url for url in map(absolute, config.data.datasets) if url not in order.datasets]
        urls = [*order.datasets, *(url for url in others if load_dataset(url).splits.get(order.request.split))]
        schema = None
    for url in urls:
        split = _split(order, [url], order.request.split, config, schema)
        if scored := scorer.score(replace(model, split=split), outputs):
            found.append({"dataset": url, **{name: scored[name] for name in ("samples", "metrics", "intervals")}})
    return found


def _split(
    order: EvaluateOrder,
    datasets: Sequence[str],
    name: str,
    config: TrainConfig,
    schema: Mapping[str, Any] | None = None,
) -> OpenSplit:
    """The rows of `datasets` that are evaluated, with the stored columns that the request needs."""
    request = order.request
    fields = Schema.from_json(load_dataset(datasets[0]).schema if schema is None else schema)
    also = [*(by.column for by in slices_of(request.slices, fields)), request.clusters, _column_of(request.baseline)]
    image = image_field(fields.fields) if request.pictures else None
    also += [None if image is None else image.name]
    selection = None if order.selection is None else Selection.from_json(order.selection, "the driver's order")
    split = OpenSplit.at(
        datasets, name, as_trained_on=config.data.split, selection=selection, schema=schema,
        also=list(filter(None, also)),
    )  # fmt: skip
    split = split.of_task(task_of(config, datasets[0]))
    if config.exactness.on_bad_record == "skip":
        split.leave_out_bad_records()
    return split


def _opened(context: RankContext, order: EvaluateOrder, member: StoredModel, split_name: str) -> ScoredModel:
    config = member.config
    context.control.beat(0, OPENING)
    split = _split(order, order.datasets, split_name, config)
    context.control.beat(0, "load the model")
    model = member.load(split.manifest, split.encoder.signature)
    model.jit_compile = False
    signature = labels_of(config, split.encoder.signature)
    _build(model, signature)
    return ScoredModel(
        model=model, split=split, signature=signature, kept=member.kept, skip_bad_images=config.skips_bad_images
    )


def _build(model: keras.Model, signature: Signature) -> None:
    model_state.build_all(model, signature, SHOWN_BATCH_ROWS)
    weigh_tests(model)
