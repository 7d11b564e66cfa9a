"""A rank's part of an evaluation: the model's and the baseline's metrics over its share of the rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf

from features.encode import Encoded, Encoder
from features.signature import Signature
from storage.manifest import load_dataset
from training import state
from training.augmenting import labels_of, soft_labels
from training.baseline import Baseline
from training.batches import eval_batches
from training.config import TrainConfig
from training.control.carry import json_safe
from training.control.protocol import OPENING
from training.dataset_encoder import load_encoder
from training.launch.context import RankContext
from training.open_split import OpenSplit
from training.output_losses import weigh_tests
from training.parts import held_out
from training.reader import SplitReader
from training.trained_model import load_checkpoint, load_export

SHOWN_BATCH_ROWS = 8  # of the batch of zeros that builds the metrics


def run(context: RankContext, config: TrainConfig) -> dict[str, Any]:
    """Load, evaluate without any collective until this rank is done, then sum the metrics' state."""
    payload, world = context.payload, context.world
    context.control.beat(0, OPENING)
    split = open_split(payload["dataset"], payload["split"], config)
    signature = labels_of(config, split.encoder.signature)
    context.control.beat(0, "load the model")
    if payload["model"] is not None:
        model = load_export(payload["model"], config, split.manifest)
    else:
        model = load_checkpoint(payload["checkpoint"], config, split.manifest, signature)
    model.jit_compile = False
    state.build_all(model, signature, SHOWN_BATCH_ROWS)
    weigh_tests(model)
    comm = context.communicator()
    comm.deadline_s = config.stall_limit_s
    scored: _Scored | None = None
    if payload["baseline"] is not None:
        context.control.beat(0, "count the baseline")
        baseline = Baseline(payload["baseline"], split.encoder.schema)
        baseline.fit(OpenSplit.at(payload["dataset"], config.split, training=True).reader, comm)
        scored = _Scored(model, baseline, signature)
    context.control.beat(0, "evaluate")
    watched = _Watched(split.encoder)
    batches = eval_batches(split.reader, watched, world.rank, world.num_ranks, payload["batch"])
    share = _Share(batches, watched, scored)
    model.reset_metrics()
    rows = _rows(split.reader, world.rank, world.num_ranks)
    if rows:  # a rank without a block has nothing to do until the sums
        try:
            model.evaluate(share.dataset(signature), steps=-(-rows // payload["batch"]), verbose=0)
        except Exception as error:
            raise share.failure or error from None
    context.control.beat(1, "sum the metrics")
    state.summed_metrics(model, comm)
    samples = np.array([share.samples], np.int64)
    comm.all_reduce(samples)
    return {
        "samples": int(samples[0]),
        "metrics": json_safe(state.as_floats(model.get_metrics_result())),
        "baseline": None if scored is None else {"name": scored.baseline.name, "metrics": scored.result(comm)},
    }


def open_split(dataset: str, split: str, config: TrainConfig) -> OpenSplit:
    """A split to evaluate a run of `config` on. One that the run was trained on is encoded as it was then: with what
    was fitted without the fold that the run left out.
    """
    if split not in config.split.split(","):
        return OpenSplit.at(dataset, split)
    manifest = load_dataset(dataset)
    encoder = load_encoder(dataset, manifest, held_out(manifest, config.split, training=True))
    return OpenSplit(manifest, encoder, SplitReader(dataset, manifest, split, encoder))


def _rows(reader: SplitReader, rank: int, num_ranks: int) -> int:
    """Rows of this rank's share of the blocks, as `eval_batches` cuts it."""
    blocks = reader.table.num_blocks
    return sum(reader.table.run(i).count for i in range(rank * blocks // num_ranks, (rank + 1) * blocks // num_ranks))


class _Watched(Encoder):
    """An encoder that keeps the rows it encoded last: the baseline is computed from a raw column of them."""

    def __init__(self, encoder: Encoder) -> None:
        self._inner = encoder
        self.rows = pa.RecordBatch.from_pylist([], schema=encoder.schema.arrow_schema())

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        self.rows = batch
        return self._inner.encode(batch)


class _Scored:
    """The model's own metric classes, fed with the baseline's predictions."""

    def __init__(self, model: keras.Model, baseline: Baseline, signature: Signature) -> None:
        self.baseline, self._binary = baseline, signature.num_classes is None
        own = [metric for metric in model.metrics for metric in getattr(metric, "metrics", [])]
        self._metrics = [type(metric).from_config(metric.get_config()) for metric in own]
        self._loss = _loss_of(model)
        self._logits = self._loss is not None and bool(self._loss.get_config().get("from_logits", False))
        self._mean_loss = keras.metrics.Mean(name="loss")
        columns = 1 if self._binary else baseline.classes
        label = () if signature.label is None else signature.label.shape
        for metric in self._metrics:  # some make their variables at the first update, which a rank may never come to
            metric.update_state(np.zeros((1, *label), np.float32), np.zeros((1, columns), np.float32))
            metric.reset_state()

    def update(self, rows: pa.RecordBatch, labels: Any, weights: Any) -> None:
        predicted: Any = self.baseline.predict(rows, binary=self._binary)
        if self._logits:
            # What the model's metrics and loss expect: log-odds, or logarithms of probabilities.
            safe = np.clip(predicted, 1e-7, 1 - 1e-7)
            predicted = np.log(safe / (1 - safe)) if self._binary else np.log(safe)
        for metric in self._metrics:
            metric.update_state(labels, predicted)
        if self._loss is not None:
            truth = labels.reshape(-1, 1) if self._binary else labels  # (n,) -> (n, 1) as the model's output
            self._mean_loss.update_state(self._loss(truth, predicted, weights), sample_weight=len(labels))

    def result(self, communicator: Any) -> dict[str, Any]:
        """Over all ranks; a rank without rows adds zeros."""
        metrics = [*self._metrics, *([self._mean_loss] if self._loss is not None else [])]
        for metric in metrics:
            state.sum_variables(metric.variables, communicator)
        return json_safe(state.as_floats({metric.name: metric.result() for metric in metrics}))


class _Share:
    """This rank's batches as a tf.data pipeline; the baseline sees each batch as it passes."""

    def __init__(self, batches: Iterator[Encoded], watched: _Watched, scored: _Scored | None) -> None:
        self._batches, self._watched, self._scored = batches, watched, scored
        self.samples = 0
        self.failure: BaseException | None = None

    def dataset(self, signature: Signature) -> tf.data.Dataset:
        """(x by name, y), with weights (x, y, weights); uneven last batch; to be gone through once."""
        specs: Any = {n: tf.TensorSpec((None, *s.shape), s.dtype) for n, s in signature.features.items()}
        if signature.label is not None:
            others = [spec for spec in (signature.label, signature.weight) if spec is not None]
            specs = (specs, *(tf.TensorSpec((None, *spec.shape), spec.dtype) for spec in others))
        options = tf.data.Options()
        options.autotune.enabled = False  # TensorFlow 2.21's holds up the end of an iteration
        generator = partial(self._generate, signature)
        return tf.data.Dataset.from_generator(generator, output_signature=specs).with_options(options)

    def _generate(self, signature: Signature) -> Iterator[Any]:
        try:
            for batch in self._batches:
                labels = soft_labels(batch.y, signature)
                self.samples += len(batch.sample_id)
                if self._scored is not None and labels is not None:
                    self._scored.update(self._watched.rows, labels, batch.weight)
                others = [array for array in (labels, batch.weight) if array is not None]
                yield (batch.x, *others) if others else batch.x
        except Exception as error:
            self.failure = error  # TensorFlow repeats only the text; the caller raises this one
            raise


def _loss_of(model: keras.Model) -> Any:
    """The one loss function of the model, None where it has several or its own way to compute one."""
    losses = getattr(model._compile_loss, "_user_loss", None)
    return losses if isinstance(losses, keras.losses.Loss) else None
