"""Opens what a rank of a run trains on, and validates on, with all checks of the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from lockstep.features.schema.signature import Signature
from lockstep.training.batches.augmenting import labels_of
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.messages import TrainOrder
from lockstep.training.control.protocol import OPENING
from lockstep.training.plan.datasets import task_of
from lockstep.training.reading.open import OpenSplit, verify_share
from lockstep.training.reading.reader import ReadOptions
from lockstep.training.reading.selecting import selection_of
from lockstep.training.run.metrics import BAD_RECORD
from lockstep.training.ways import Federated


@dataclass(frozen=True, slots=True)
class RankData:
    """The order of a rank, and the splits that it names, open."""

    order: TrainOrder
    training: TrainingSet
    held_out: tuple[OpenSplit, ...]
    """The split of --validate, of tasks that of each; empty without it."""
    signature: Signature
    """The signature of the training set, as the model is fed."""

    @classmethod
    def opened(cls, context: RankContext, config: TrainConfig) -> Self:
        """Open the data of a rank. Raises ConfigError, DataError and CorruptionError."""
        order, world = TrainOrder.from_json(context.payload), context.world
        context.control.beat(0, OPENING)
        options = ReadOptions.of(config, world.num_ranks)
        selection = selection_of(config)
        clients = config.way.clients if isinstance(config.way, Federated) else None
        training = TrainingSet.at(
            config.data.datasets,
            config.data.split,
            config.data.mix,
            options,
            selection,
            also=[clients or ""],
            tasks=config.data.tasks is not None,
        )
        if config.exactness.on_bad_record == "skip":
            training = training.skipping_bad_records(lambda bad: report_bad(context, bad.to_row()))
        elif config.reading.bad_images == "skip":
            training = training.skipping_bad_images()
        held_out: list[OpenSplit] = []
        if config.validation.validate is not None:
            urls = config.data.datasets
            for group in [urls] if config.data.tasks is None else [(url,) for url in urls]:
                one = OpenSplit.at(group, config.validation.validate, options=options, selection=selection)
                held_out.append(one.of_task(task_of(config, group[0])))
            if config.exactness.on_bad_record == "skip":
                for one in held_out:
                    one.leave_out_bad_records()
        if config.reading.verify == "full":
            readers = [*training.readers, *(one.reader for one in held_out)]
            verify_share(readers, world.rank, world.num_ranks, partial(context.control.beat, 0))
        return cls(order, training, tuple(held_out), labels_of(config, training.encoder.signature))


def report_bad(context: RankContext, row: Mapping[str, Any]) -> None:
    """Print and log a record or image that has weight 0, with the words `row["what"]`."""
    print(f"weight 0: {row['what']}", flush=True)
    head = {"kind": BAD_RECORD, "step": context.control.step, "rank": context.world.rank}
    context.control.notify("metrics", rows=[head | {**row}])
