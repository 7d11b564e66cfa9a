"""Scores the rows of a split with a model: its own metrics, exact ones from the rows, and those of a baseline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.features.encode.encoder import Encoded, Encoder
from lockstep.features.schema.sampled import sampled_of, shares_of_classes
from lockstep.features.schema.schema import class_word
from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.batches.augmenting import soft_labels
from lockstep.training.batches.feed import eval_batches, eval_rows
from lockstep.training.batches.tf_dataset import ArrayPipeline, Arrays
from lockstep.training.comm.base import Communicator
from lockstep.training.control.protocol import json_safe
from lockstep.training.reading.open import OpenSplit
from lockstep.training.run.notes import NAMED
from lockstep.training.scoring.calibration import calibration_of, class_columns, confusion_of, roc_of
from lockstep.training.scoring.ensemble import NEXT_TO_0, NEXT_TO_1
from lockstep.training.scoring.estimates import Floats
from lockstep.training.scoring.naive_baseline import Baseline, NumberBaseline
from lockstep.training.scoring.scores import (
    OUTPUTS,
    Kind,
    OutputForm,
    RowMetric,
    compared,
    gathered_on_first,
    output_columns,
    sorted_rows,
    with_row_metrics,
)
from lockstep.training.scoring.slices import ClusterColumn, SliceBy, SliceColumn, metrics_of_slices
from lockstep.training.steps import model_state
from lockstep.training.steps.patching import swapped

LOSS, DATA_LOSS = "loss", "loss_without_regularisation"
_KINDS: dict[type, Kind] = {
    keras.metrics.MeanAbsoluteError: "mean_absolute_error",
    keras.metrics.MeanSquaredError: "mean_squared_error",
    keras.metrics.RootMeanSquaredError: "root_mean_squared_error",
    keras.metrics.R2Score: "r2",
}


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """A built model, and the rows of a split as this model is fed."""

    model: keras.Model
    split: OpenSplit
    signature: Signature
    kept: tuple[float, ...] | None = None
    """The share of each class that training kept."""
    skip_bad_images: bool = False
    """Whether to leave out rows of images that cannot be decoded."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores models on splits: each rank evaluates its share without any collective, then states and rows of all ranks
    are put together.
    """

    comm: Communicator
    beat: Callable[[int, str], None]
    batch: int
    """Rows computed at a time."""
    baseline: Baseline | NumberBaseline | None = None
    """A fitted one."""
    details: Details | None = None
    callbacks: keras.callbacks.CallbackList | None = None
    """They get the test hooks of this rank's part."""
    serve: Callable[[], None] = lambda: None
    """Called after this rank's last batch: a model whose ranks need each other answers the others until theirs."""

    def score(
        self,
        scored: ScoredModel,
        outputs: Outputs | None = None,
        members: Sequence[tuple[str, Outputs]] = (),
        pool: Pool | None = None,
    ) -> dict[str, Any]:
        """Score a model. A collective.

        Returns samples, left_out ({samples, first}: rows of images that cannot be decoded), metrics, intervals,
        class_counts, baseline, difference and compared_by, with `details` also calibration, roc, confusion and slices,
        and the names of `weighted` metrics (None without weights); {} on other ranks than 0. `outputs` collect this
        model's, in detail if there are `details`: those of an earlier score save tracing its test step again.
        `members` are names and outputs of the models that this one averages, from their own scores: then `comparisons`
        are those of lockstep.training.scoring.scores.compared, of `mean` and `members`. `pool` takes
        the rows on rank 0.
        """
        self.beat(0, "evaluate")
        outputs = outputs or Outputs(scored.model, scored.kept, self.details is not None)
        share = self._share(scored)
        self._evaluate(scored, share, outputs)
        self.serve()
        self.beat(1, "put the ranks' rows together")
        result, of_loss = self._of_states(scored, share, outputs)
        form = replace(outputs.agreed_form(self.comm, share.samples), thinned=_thinned(scored.split))
        columns = [share.labels_and_weights()]
        if form.width is not None:
            columns.append(outputs.columns(form))
        if self.baseline is not None:
            result["baseline"], predicted = self._of_baseline(self.baseline, scored.model, share, form, of_loss)
            columns.append(predicted)
        names, rest = share.columns(self.comm)
        rest = [outputs.details(form, len(columns[0])), *rest]
        alike = form.width is not None and all(
            one.agreed_form(self.comm, share.samples).width == form.width for _, one in members
        )
        others = [one.columns(form) for _, one in members] if alike else []
        table = gathered_on_first(np.concatenate([*columns, *rest, *others], axis=1), self.comm, _width(columns))
        if self.comm.rank:
            return {}
        rows, more, theirs = np.split(table, np.cumsum([_width(columns), _width(rest)]), axis=1)
        judged = _Judged.of(scored, form, rows, more, clustered=share.clusters is not None)
        if pool is not None:
            pool.add(judged)
        if share.clusters is not None and judged.clusters is not None:
            result["clusters"] = {"column": share.clusters.column, "clusters": len(np.unique(judged.clusters))}
        found = judged.metrics(result)
        found["weighted"] = None if scored.signature.weight is None else _weighted(scored.model, found["metrics"])
        if self.details is not None:
            found |= self._details(self.details, scored, judged, names)
        if members:
            mine, of = table[:, : OUTPUTS + form.columns], ["mean", *(name for name, _ in members)]
            compare = partial(compared, np.hstack([mine, theirs]), of, judged.asked, form, judged.clusters)
            found["comparisons"] = compare() if others else []
        return json_safe(found)

    def _share(self, scored: ScoredModel) -> _Share:
        watched = Watched(scored.split, scored.skip_bad_images)
        batches = eval_batches(scored.split.reader, watched, self.comm.rank, self.comm.num_ranks, self.batch)
        details = self.details or Details()
        slices = [SliceColumn(by) for by in details.slices]
        clusters = None if details.clusters is None else ClusterColumn(details.clusters)
        return _Share(batches, watched, self.baseline, scored.signature, slices, clusters)

    def _evaluate(self, scored: ScoredModel, share: _Share, outputs: Outputs) -> None:
        """Run Keras' evaluate over this rank's share, whose outputs `outputs` collect."""
        outputs.begin(scored.model)
        scored.model.reset_metrics()
        start, stop = eval_rows(scored.split.reader, self.comm.rank, self.comm.num_ranks, self.batch)
        if start == stop:
            return  # a rank without a batch waits for the sums
        steps = -(-(stop - start) // self.batch)

        def arrays(number: int) -> Arrays:
            self.beat(number, "evaluate")  # a long evaluation is no stall
            return share.next_arrays(number)

        pipeline = ArrayPipeline(scored.signature, arrays, 0, steps, rows=None)  # the split's last batch is shorter
        try:
            scored.model.evaluate(pipeline.dataset, steps=steps, verbose=0, callbacks=self.callbacks)
        except Exception as error:
            if not isinstance(pipeline.failure, _NoBatchLeft):
                raise pipeline.failure or error from None

    def _of_states(self, scored: ScoredModel, share: _Share, outputs: Outputs) -> tuple[dict[str, Any], str]:
        """What the states of the model's own metrics say over all ranks, and the name of its loss of rows. A
        collective.

        Raises DataError if no row was left.
        """
        samples = np.array([share.samples], np.int64)
        self.comm.all_reduce(samples)
        left_out = share.left_out(self.comm)
        if left_out["samples"] and not samples[0]:
            raise DataError(
                f"no row of split `{scored.split.reader.split}` can be decoded",
                got=left_out["first"][0],
                allowed="a split with records and images that can be decoded",
                next_step="Build the dataset again.",
            )
        model_state.summed_metrics(scored.model, self.comm)
        metrics, of_loss = model_state.as_floats(scored.model.get_metrics_result()), LOSS
        if regularisation := outputs.regularisation(self.comm):
            of_loss = DATA_LOSS
            metrics[DATA_LOSS] = metrics[LOSS] - regularisation
        return {"samples": int(samples[0]), "left_out": left_out, "metrics": metrics, "baseline": None}, of_loss

    def _of_baseline(
        self, baseline: Baseline | NumberBaseline, model: keras.Model, share: _Share, form: OutputForm, of_loss: str
    ) -> tuple[dict[str, Any], Floats]:
        """What the model's own metrics say of the baseline, and its columns of this rank's rows. A collective."""
        seen = list(share.with_baseline(form))
        metrics = _metrics_of(seen, model, of_loss, self.comm)
        columns = _joined([output_columns(labels, predicted, form) for labels, predicted, _ in seen], form)
        return {"name": baseline.name, "metrics": metrics, "class_counts": baseline.class_counts}, columns

    def _details(self, details: Details, scored: ScoredModel, judged: _Judged, names: Sequence[Any]) -> dict[str, Any]:
        found = judged.details(details, None if self.baseline is None else self.baseline.name, names)
        label = scored.split.encoder.schema.label
        if details.class_names is not None and label is not None:
            _name_classes(found["slices"].get(label.name, []), details.class_names)
        return found


def _width(columns: Iterable[Floats]) -> int:
    return sum(part.shape[1] for part in columns)


def _thinned(split: OpenSplit) -> tuple[float, ...] | None:
    """The share of each class that the split itself kept, if it was sampled."""
    sampled = sampled_of(split.manifest)
    if sampled is None or split.reader.split not in sampled.splits:
        return None
    return shares_of_classes(sampled.unweighted(), split.encoder.schema.label)


@dataclass(frozen=True, slots=True)
class _Judged:
    """The rows of all ranks on rank 0, and how they are measured."""

    rows: Floats
    rest: Floats
    """Columns of classes, then one for each slice."""
    asked: Sequence[RowMetric]
    form: OutputForm
    classes: int | None
    clusters: NDArray[Any] | None

    @classmethod
    def of(cls, scored: ScoredModel, form: OutputForm, rows: Floats, rest: Floats, *, clustered: bool) -> Self:
        """The rows of a model; the last column of `rest` has their clusters if they are `clustered`."""
        asked = _row_metrics(scored.model, binary=form.binary, weighted=scored.signature.weight is not None)
        rest, clusters = (rest[:, :-1], rest[:, -1]) if clustered else (rest, None)
        return cls(rows, rest, asked, form, scored.signature.num_classes, clusters)

    def metrics(self, result: dict[str, Any]) -> dict[str, Any]:
        """`result` with the metrics that rows decide (lockstep.training.scoring.scores.with_row_metrics)."""
        return with_row_metrics(result, self.rows, self.asked, self.form, self.classes, self.clusters)

    def details(self, details: Details, baseline: str | None, values: Sequence[Any]) -> dict[str, Any]:
        """Calibration, roc, confusion and slices; `values` are the names of each slice's values."""
        cut = self.rest.shape[1] - len(details.slices)
        of_classes, by_column, form = self.rest[:, :cut], self.rest.T[cut:], self.form
        how = (self.rows, self.asked, form, self.classes, baseline, self.clusters)
        return {
            "calibration": calibration_of(self.rows, of_classes, form),
            "roc": roc_of(self.rows[:, : OUTPUTS + 1 + (baseline is not None)], form),
            "confusion": confusion_of(self.rows, of_classes, form, self.classes, details.class_names),
            "slices": {
                by.name: metrics_of_slices(by, column, names, *how)
                for by, column, names in zip(details.slices, by_column, values, strict=True)
            },
        }


class Pool:
    """The rows of several scores, each of another model on other rows, such as folds and those that were held out of
    each: their metrics are those of all predictions together.
    """

    def __init__(self) -> None:
        self._judged: list[_Judged] = []

    def add(self, judged: _Judged) -> None:
        """Add the rows of one score."""
        self._judged.append(judged)

    def result(self) -> dict[str, Any]:
        """Return {samples, metrics, intervals}: the metrics that rows decide, no other ones of the models; {} if there
        are no rows, as on other ranks than 0.
        """
        if not self._judged:
            return {}
        rows = np.concatenate([one.rows for one in self._judged])
        clusters = [one.clusters for one in self._judged if one.clusters is not None]
        columns = rows.shape[1]
        table = sorted_rows(np.column_stack([rows, *([np.concatenate(clusters)] if clusters else [])]), columns)
        together = replace(self._judged[-1], rows=table[:, :columns], clusters=table[:, columns] if clusters else None)
        found = together.metrics({"metrics": {}, "baseline": None})
        kept = {name: found[name] for name in ("metrics", "intervals")}
        return json_safe({"samples": len(rows), **kept})


@dataclass(frozen=True, slots=True)
class Details:
    """What to report in addition to metrics: calibration, confusion, and the metrics of slices."""

    slices: tuple[SliceBy, ...] = ()
    class_names: tuple[str, ...] | None = None
    clusters: str | None = None
    """A stored column: rows of one value depend on each other, and the intervals say so."""


def _name_classes(slices: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Call slices by the label by the names of its classes."""
    for one in slices:
        if one["value"].isdigit():
            one["value"] = class_word(int(one["value"]), names)


class Watched(Encoder):
    """An encoder that keeps the last rows it encoded: baseline and slices need their raw columns. If it `skips` bad
    images, it leaves out their rows, and always those of records that the reader has skipped.
    """

    def __init__(self, split: OpenSplit, skips: bool) -> None:
        encoder, self._skipped = split.encoder, split.reader.skipped
        self._inner = encoder.skipping_bad_images() if skips and encoder.can_skip_images else encoder
        self._weighted = encoder.signature.weight is not None
        self.left_out = 0
        """Rows of the last batch that were left out."""
        self.bad_records: list[str] = []
        """The words for those that are bad records: of a block once."""
        self.rows = pa.RecordBatch.from_pylist([], schema=encoder.schema.arrow_schema())

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        self.rows, found = batch, self._inner.encode(batch)
        skipped = {row: self._skipped[one] for row, one in enumerate(found.sample_id.tolist()) if one in self._skipped}
        left_out = {bad.row for bad in found.bad} | skipped.keys()
        self.left_out, self.bad_records = len(left_out), list(dict.fromkeys(skipped.values()))
        if not left_out:
            return found if self._weighted else replace(found, weight=None)
        left = np.delete(np.arange(len(batch)), sorted(left_out))
        self.rows = batch.take(pa.array(left))
        return Encoded(
            {name: array[left] for name, array in found.x.items()},
            None if found.y is None else found.y[left],
            found.sample_id[left],
            found.weight[left] if self._weighted and found.weight is not None else None,
            found.bad,
        )


class Outputs:
    """Collects a model's output for each row, as test_step passes it to the metrics, and its additions to the loss.

    A traced test step keeps the outputs it was traced with, so both may be used again.
    """

    def __init__(self, model: keras.Model, kept: tuple[float, ...] | None, detailed: bool = False) -> None:
        self._form, self._detailed = OutputForm(takes_logits(model), kept=kept), detailed  # without the width
        self._columns: list[Floats | None] = []
        self._details: list[Floats] = []
        self._outputs = 0  # a row
        self._added = keras.metrics.Mean()
        plain = model.compute_metrics

        def compute_metrics(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if y is not None and not keras.tree.is_nested(y) and not keras.tree.is_nested(y_pred):
                tf.numpy_function(self._take, [y, y_pred], [])
            if losses := model.losses:  # of regularisers, and of add_loss
                added = sum(keras.ops.sum(loss) for loss in losses)
                rows = tf.shape(next(part for part in keras.tree.flatten(x) if part is not None))[0]
                self._added.update_state(added, sample_weight=rows)
            return plain(x, y, y_pred, sample_weight)

        self._compute_metrics = compute_metrics

    def begin(self, model: keras.Model) -> None:
        """Forget the rows so far, and collect those of the next evaluation of `model`."""
        self._columns, self._details, self._outputs = [], [], 0
        self._added.reset_state()
        object.__setattr__(model, "compute_metrics", self._compute_metrics)  # past Keras' tracking

    def _take(self, labels: NDArray[Any], outputs: NDArray[Any]) -> None:
        self._columns.append(output_columns(labels, outputs, self._form))
        self._outputs = outputs.size // len(outputs)
        if self._detailed and self._outputs > 1 and self._columns[-1] is not None:
            self._details.append(class_columns(labels, outputs, self._form))

    def regularisation(self, communicator: Communicator) -> float:
        """The part of the loss that is not from rows, over all ranks; 0 if there is none. A collective."""
        model_state.sum_variables(self._added.variables, communicator)
        return float(self._added.result())

    def agreed_form(self, communicator: Communicator, rows: int) -> OutputForm:
        """The form on all ranks; without a width if some rank did not see one prediction for each of its `rows`:
        several outputs, other shapes, or a test_step that passes none to the metrics. A collective.
        """
        seen = sum(len(part) for part in self._columns if part is not None)
        agreed = np.array([self._outputs, int(seen != rows)], np.int64)
        communicator.all_reduce(agreed, "max")
        return replace(self._form, width=None if agreed[1] else int(agreed[0]) or None)

    def columns(self, form: OutputForm) -> Floats:
        """Columns of row_metrics for this rank's rows, in their order; of yes or no, log-odds if `form` has them."""
        columns = _joined(self._columns, form)
        if not form.binary or self._form.logits == form.logits:
            return columns
        if not form.logits:
            return np.exp(-np.logaddexp(0.0, -columns))
        shares = np.clip(columns, NEXT_TO_0, NEXT_TO_1)
        return np.log(shares) - np.log1p(-shares)

    def class_details(self) -> Floats | None:
        """Columns of class_columns for this rank's rows, in their order; None of other outputs than classes."""
        return np.concatenate(self._details) if self._details else None

    def details(self, form: OutputForm, rows: int) -> Floats:
        """Columns of class_columns for this rank's `rows`; none if there is one output a row, or none was asked for."""
        if not self._detailed or form.width is None or form.binary:
            return np.empty((rows, 0))
        return np.concatenate([np.empty((0, 3)), *self._details])


class _NoBatchLeft(Exception):
    """Fewer batches than were planned: of some, all rows were left out."""


class _Share:
    """This rank's batches, one after another; the baseline and the slices see each batch as it passes."""

    def __init__(
        self,
        batches: Iterator[Encoded],
        watched: Watched,
        baseline: Baseline | NumberBaseline | None,
        signature: Signature,
        slices: Sequence[SliceColumn],
        clusters: ClusterColumn | None,
    ) -> None:
        self._batches, self._watched, self._baseline, self._signature = batches, watched, baseline, signature
        self._slices, self.clusters = slices, clusters
        self._seen: list[tuple[NDArray[Any], NDArray[np.float32] | None, NDArray[np.float32] | None]] = []
        self.samples = 0
        self._left_out = 0
        self._names: list[str] = []

    def next_arrays(self, number: int) -> Arrays:
        """The features, label and weight of the next batch that has rows, in the signature's order."""
        for batch in self._batches:
            self._left_out += self._watched.left_out
            names = [*self._watched.bad_records, *(f"{bad.what} ({bad.detail})" for bad in batch.bad)]
            self._names += [name for name in names if name not in self._names][: NAMED - len(self._names)]
            if len(batch):
                break
        else:
            raise _NoBatchLeft
        labels = soft_labels(batch.y, self._signature)
        self.samples += len(batch.sample_id)
        if labels is not None:
            predicted = None if self._baseline is None else self._baseline.predict(self._watched.rows)
            self._seen.append((labels, batch.weight, predicted))
            for column in (*self._slices, *(() if self.clusters is None else (self.clusters,))):
                column.take(self._watched.rows)
        others = [array for array in (labels, batch.weight) if array is not None]
        return [*(batch.x[name] for name in self._signature.features), *others]

    def left_out(self, communicator: Communicator) -> dict[str, Any]:
        """Return {samples, first} of all ranks: the rows left out, and the first ones' names. A collective."""
        mine = json.dumps([self._left_out, self._names]).encode()
        counts, names = zip(*map(json.loads, communicator.all_gather_bytes(mine)), strict=True)
        return {"samples": sum(counts), "first": [name for each in names for name in each][:NAMED]}

    def columns(self, communicator: Communicator) -> tuple[list[Any], list[Floats]]:
        """The names of each slice's values, and this rank's columns of all slices and of the clusters. A collective."""
        agreed = [column.agreed(communicator) for column in self._slices]
        columns = [values[:, None] for values, _ in agreed]
        if self.clusters is not None:
            columns.append(self.clusters.values()[:, None])
        return [names for _, names in agreed], columns

    def labels_and_weights(self) -> Floats:
        """Return (n, 2): each row's label (of one-hot labels the class) and weight (1 if there is none)."""
        parts = [np.empty((0, 2))]
        for labels, weights, _ in self._seen:
            numbers = labels if labels.ndim == 1 else labels.argmax(axis=1)
            parts.append(np.stack([numbers, np.ones(len(labels)) if weights is None else weights], axis=1))
        return np.concatenate(parts).astype(np.float64)

    def with_baseline(self, form: OutputForm) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (labels, the baseline's predictions in the form of the model's outputs, weights) of each batch."""
        assert self._baseline is not None
        if not form.binary and form.width != self._baseline.classes:
            raise ConfigError(
                f"the baseline {self._baseline.name} cannot be compared with this model",
                got="outputs of another shape" if form.width is None else f"{form.width} outputs a row",
                allowed=f"one output of 1 or {self._baseline.classes} numbers a row, shown to the model's metrics",
                next_step="Leave --baseline out.",
            )
        for labels, weights, predicted in self._seen:
            assert predicted is not None
            shown = predicted[:, -1:] if form.binary else predicted
            if form.logits:  # log-odds, or logarithms of probabilities
                safe = np.clip(shown, 1e-7, 1 - 1e-7)
                shown = np.log(safe / (1 - safe)) if form.binary else np.log(safe)
            yield labels, shown, weights


def _joined(parts: Iterable[Floats | None], form: OutputForm) -> Floats:
    """One predictor's columns of all batches, (n, form.columns)."""
    return np.concatenate([np.empty((0, form.columns)), *(part for part in parts if part is not None)])


def _metrics_of(
    seen: Iterable[tuple[Any, Any, Any]], model: keras.Model, loss_name: str, communicator: Communicator
) -> dict[str, Any]:
    """The model's own metrics and loss for other predictions, over all ranks; a rank without rows adds zeros.

    `seen` are (labels, predictions, weights) of each batch. Metrics are weighted where the model's are.
    """
    metrics, loss, mean = model._compile_metrics, model._compile_loss, keras.metrics.Mean()
    model.reset_metrics()
    for labels, predicted, weights in seen:
        if metrics is not None:
            metrics.update_state(labels, predicted, weights)
        if loss is not None:
            mean.update_state(loss(labels, predicted, weights), sample_weight=len(labels))
    model_state.sum_variables([*(metrics.variables if metrics is not None else ()), *mean.variables], communicator)
    found = metrics.result() if metrics is not None else {}
    return model_state.as_floats(found | ({loss_name: mean.result()} if loss is not None else {}))


def _row_metrics(model: keras.Model, *, binary: bool, weighted: bool) -> list[RowMetric]:
    """The compiled metrics that can be computed from the rows; `weighted`: rows have weights."""
    compiled = model._compile_metrics
    if compiled is None:
        return []
    found = []
    for name, (metric, heavy) in _named(compiled).items():
        by_weight = weighted and heavy
        if binary and _is_plain_auc(metric):
            roc = metric.get_config()["curve"] == "ROC"
            found.append(RowMetric(name, "roc_auc" if roc else "average_precision", by_weight))
        elif binary and type(metric) is keras.metrics.BinaryAccuracy:
            found.append(RowMetric(name, "accuracy", by_weight, metric.get_config()["threshold"]))
        elif binary and (kind := _KINDS.get(type(metric))) and not getattr(metric, "num_regressors", 0):
            found.append(RowMetric(name, kind, by_weight))
        elif not binary and type(metric) in (
            keras.metrics.SparseCategoricalAccuracy,
            keras.metrics.CategoricalAccuracy,
        ):
            found.append(RowMetric(name, "accuracy", by_weight))
    return found


def _named(compiled: Any) -> dict[str, tuple[Any, bool]]:
    """Compiled metrics by the names of their results, and whether the rows' weights count in each."""
    with ExitStack() as stack:  # Keras names the results of metrics: for a moment each result is the metric itself
        for metric in compiled.metrics:
            stack.enter_context(swapped(metric, "result", partial(lambda own: own, metric)))
        named = compiled.result()
    heavy = {id(metric) for each in compiled._flat_weighted_metrics if each for metric in each.metrics}
    return {name: (metric, id(metric) in heavy) for name, metric in named.items()}


def _weighted(model: keras.Model, metrics: Iterable[str]) -> list[str]:
    """The names of the metrics in which rows count by their weights."""
    compiled = model._compile_metrics
    heavy = {name for name, (_, by_weight) in _named(compiled).items() if by_weight} if compiled is not None else set()
    return sorted(name for name in metrics if name in heavy | {LOSS, DATA_LOSS})


def _is_plain_auc(metric: Any) -> bool:
    """Whether it is Keras' AUC of one yes-or-no label: no subclass that changes it, not multi-label."""
    auc = keras.metrics.AUC
    if not isinstance(metric, auc) or metric.multi_label or metric.label_weights is not None:
        return False
    return type(metric).update_state is auc.update_state and type(metric).result is auc.result


def takes_logits(model: keras.Model) -> bool:
    """Whether the model's loss takes log-odds or logarithms; False if it has several losses."""
    losses = getattr(model._compile_loss, "_flat_losses", None) or []
    if len(losses) != 1 or not isinstance(losses[0].loss, keras.losses.Loss):
        return False
    return bool(losses[0].loss.get_config().get("from_logits", False))
