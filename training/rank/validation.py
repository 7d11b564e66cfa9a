"""Validation during training: after an epoch the ranks score a split with the live model, and change nothing of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.features.schema.sampled import sampled_of, shares_of_classes
from lockstep.training.batches.augmenting import labels_of
from lockstep.training.config import TrainConfig
from lockstep.training.control.client import ControlClient
from lockstep.training.control.protocol import json_safe
from lockstep.training.rank.callbacks import RunCallbacks
from lockstep.training.rank.prepare import JoinedModel
from lockstep.training.reading.open import OpenSplit
from lockstep.training.rules import VALIDATION
from lockstep.training.scoring.score_split import Outputs, ScoredModel, Scorer
from lockstep.training.scoring.scores import BATCH_ROWS
from lockstep.training.steps.model_state import METRICS, SEEDS, variables_of
from lockstep.training.steps.patching import swapped

BEAT_EVERY_S = 1.0
OF_A_TASK = re.compile(r"_[0-9]+$")
"""The end of the names of metrics that a model with tasks has of one of them."""


@dataclass(frozen=True, slots=True)
class Validated:
    """What one validation found, the same on every rank."""

    metrics: dict[str, Any]
    """The metrics as numbers, by the names val_METRIC."""
    row: dict[str, Any]
    """The row that is logged, as JSON: {split, samples, left_out, class_counts, intervals, seconds}."""


class Validation:
    """The validations of one rank. Every rank makes the same calls."""

    def __init__(
        self,
        splits: Sequence[OpenSplit],
        config: TrainConfig,
        joined: JoinedModel,
        control: ControlClient,
        callbacks: RunCallbacks,
    ) -> None:
        self._config, self._model = config, joined.to_score()
        self._comm, self._control, self._callbacks = joined.strategy.data, control, callbacks
        first = splits[0]
        self._signature = labels_of(config, first.encoder.signature)
        self._scored = [
            ScoredModel(
                model=self._model, split=split, signature=self._signature, skip_bad_images=config.skips_bad_images
            )
            for split in splits
        ]
        self._outputs = Outputs(self._model, shares_of_classes(sampled_of(first.manifest), first.encoder.schema.label))
        self._tables, self._strategy = joined.tables, joined.strategy
        self._test_function: Any = None  # traced in the first validation, and used again
        self.seconds = 0.0
        """Seconds of all validations since this process began."""

    def after(self, step: int) -> Validated:
        """Score the split with the model after optimizer step `step`, as lockstep evaluate scores its checkpoint, and
        call the callbacks' test hooks. A collective.
        """
        began = time.monotonic()
        beat = Beats(self._control, step)
        self._callbacks.test_begins()  # before the state is kept: what callbacks change stays changed
        with unchanged(self._model, self._test_function):
            scorer = Scorer(comm=self._comm, beat=beat, batch=BATCH_ROWS, callbacks=self._callbacks, serve=self._serve)
            each = [scorer.score(scored, self._outputs) for scored in self._scored]
            found = each[0] if self._signature.tasks is None or not each[0] else of_tasks(each)
            self._test_function = self._model.test_function
        # Only rank 0 has a result, and callbacks of all ranks must see the same numbers.
        found = json.loads(self._comm.all_gather_bytes(json.dumps(found).encode())[0])
        metrics = {name: _number(value) for name, value in found["metrics"].items()}
        self._callbacks.test_ends(dict(metrics))
        self._control.beat(step, "train")
        seconds = time.monotonic() - began
        self.seconds += seconds
        return Validated(
            {f"{VALIDATION}{name}": value for name, value in metrics.items()},
            {
                "split": self._config.validation.validate,
                "samples": found["samples"],
                "left_out": found["left_out"],
                "class_counts": found["class_counts"],
                "intervals": found["intervals"],
                "seconds": round(seconds, 6),
            },
        )

    def _serve(self) -> None:
        self._strategy.serve(self._model, self._signature)
        if self._tables is not None:
            self._tables.serve(self._signature)


def of_tasks(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of the scores of all tasks: METRIC_T of task T, METRIC the mean of the tasks, with equal weights."""
    own = [{name: one for name, one in task["metrics"].items() if not OF_A_TASK.search(name)} for task in each]
    metrics: dict[str, Any] = {
        name: float(np.mean([float(task[name]) for task in own])) for name in own[0] if all(name in one for one in own)
    }
    intervals: dict[str, Any] = {}
    for number, task in enumerate(each):
        metrics |= {f"{name}_{number}": value for name, value in own[number].items()}
        intervals |= {f"{name}_{number}": task["intervals"][name] for name in own[number] if name in task["intervals"]}
    return {
        "samples": sum(task["samples"] for task in each),
        "left_out": {
            "samples": sum(task["left_out"]["samples"] for task in each),
            "first": [name for task in each for name in task["left_out"]["first"]],
        },
        "metrics": json_safe(metrics),
        "intervals": intervals,
        "class_counts": None,  # tasks have classes for themselves
    }


class Beats:
    """Reports parts of long work, such as a validation's batches, as progress, without which a driver ends the ranks.

    Called by two threads.
    """

    def __init__(self, control: ControlClient, step: int, work: str = "validate") -> None:
        self._control, self._step, self._work = control, step, work
        self._at = time.monotonic()
        control.beat(step, work)

    def __call__(self, batch: int, what: str) -> None:
        """This rank does `what`, with its batch number `batch`. The step stays that of the training."""
        now = time.monotonic()
        if now - self._at >= BEAT_EVERY_S:  # each other phase is a message to the driver
            self._at = now
            self._control.beat(self._step, f"{self._work}: {what} {batch}")


@contextmanager
def unchanged(model: keras.Model, test_function: Any = None) -> Iterator[None]:
    """While this is open, tests run `test_function` (None: one that they trace), and may change metrics, seeds and
    statistics of `model`; then all are again what they were. Tests change no trained weight.
    """
    variables = [*model.non_trainable_weights, *variables_of(model, METRICS), *variables_of(model, SEEDS)]
    before = [tf.identity(variable.value) for variable in variables]
    with swapped(model, "compute_metrics", model.compute_metrics), swapped(model, "test_function", test_function):
        yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)


def _number(value: Any) -> Any:
    """JSON for a metric as numbers: "nan" and "inf" become floats, also in lists."""
    return [_number(item) for item in value] if isinstance(value, list) else float(value)
