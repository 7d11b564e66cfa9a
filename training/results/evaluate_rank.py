"""One rank of an evaluation: open the split, load the model, score this rank's share."""

from __future__ import annotations

from typing import Any

from training.batches.augmenting import labels_of
from training.batches.training_set import TrainingSet
from training.config import TrainConfig
from training.control.context import RankContext
from training.control.protocol import OPENING
from training.models.on_disk import load_checkpoint, load_export
from training.scoring.baseline import Baseline
from training.scoring.score_split import open_split, score
from training.steps import model_state
from training.steps.losses import weigh_tests

SHOWN_BATCH_ROWS = 8  # rows of the batch of zeros that builds the metrics


def run(context: RankContext, config: TrainConfig) -> dict[str, Any]:
    """Load the model, evaluate without any collective, then combine the states and rows of all ranks.

    Returns a result of training.results.evaluate from `samples` on; {} on other ranks than 0.
    """
    payload = context.payload
    context.control.beat(0, OPENING)
    split = open_split(payload["dataset"], payload["split"], config)
    signature = labels_of(config, split.encoder.signature)
    context.control.beat(0, "load the model")
    if payload["model"] is not None:
        model = load_export(payload["model"], config, split.manifest)
    else:
        model = load_checkpoint(payload["checkpoint"], config, split.manifest, signature)
    model.jit_compile = False
    model_state.build_all(model, signature, SHOWN_BATCH_ROWS)
    weigh_tests(model)
    comm = context.communicator()
    comm.deadline_s = config.stall_limit_s
    baseline: Baseline | None = None
    if payload["baseline"] is not None:
        context.control.beat(0, "count the baseline")
        trained_on = TrainingSet.at(config.datasets, config.split, config.mix)
        baseline = Baseline(payload["baseline"], trained_on.encoder.schema)
        baseline.fit(trained_on.readers, config.mix, comm)
    kept = payload["kept"] and tuple(payload["kept"])
    return score(
        model, split, signature, comm, context.control.beat, batch=payload["batch"], kept=kept, baseline=baseline
    )
