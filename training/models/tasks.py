"""One trunk with an output layer for each of several datasets, and their losses, weighed as --tasks says.

Learned weights are those of Kendall, Gal and Cipolla, "Multi-Task Learning Using Uncertainty to Weigh Losses for Scene
Geometry and Semantics" (CVPR 2018).
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops
from keras.config import floatx

from lockstep.features.schema.signature import DATASET, Signature
from lockstep.training.config.data import UNCERTAINTY, weights_of
from lockstep.training.models import ModelOptions
from lockstep.training.models.outputs import CLASSES, NAMED, NUMBER, YES_NO, compile_for, output_of
from lockstep.training.steps.distribute import own_class
from lockstep.training.steps.heads import head_name

NEVER = -1e9  # the score of a class that the row's task does not have: its probability is 0


class TaskModel(keras.Model):
    """A model whose rows belong to tasks. Its loss is the mean over rows of each row's loss times its task's weight.

    With `log_variances` s (tasks,) a row of task t counts exp(-s_t) times its loss, of numbers half of that, and adds
    s_t / 2. Tests have no weights. For each task it reports `loss_T` and, of classes and yes or no, `accuracy_T`,
    without weights of tasks, and `weight_T` if it is learned: the mean over the epoch's steps of what its loss counts.
    """

    label: str
    signature: Signature
    task_weights: tuple[float, ...]
    log_variances: keras.Variable | None = None
    of_tasks: list[list[keras.metrics.Metric]]
    learned: list[keras.metrics.Mean]

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """The loss of rows of any tasks; `x` has their numbers as `_dataset` (n,)."""
        if not training:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        task = ops.cast(ops.reshape(x[DATASET], (-1,)), "int32")
        weight = ops.take(ops.convert_to_tensor(self.task_weights, y_pred.dtype), task)
        learned = None
        if self.log_variances is not None:
            learned = ops.take(ops.cast(self.log_variances, y_pred.dtype), task)
            weight = ops.take(ops.cast(self._learned_weights(), y_pred.dtype), task)
        if sample_weight is not None:
            weight = weight * ops.cast(ops.reshape(sample_weight, (-1,)), weight.dtype)
        loss = super().compute_loss(x, y, y_pred, weight, training)
        return loss if learned is None else loss + ops.mean(learned) / 2

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The metrics of all rows, and of each task's."""
        super().compute_metrics(x, y, y_pred, sample_weight)
        task = ops.reshape(x[DATASET], (-1,))
        if ops.ndim(y) < ops.ndim(y_pred) and self.label != CLASSES:
            y = ops.expand_dims(y, -1)  # (n,) -> (n, 1)
        for number, metrics in enumerate(self.of_tasks):
            weight = ops.cast(ops.equal(task, number), floatx())
            if sample_weight is not None:
                weight = weight * ops.cast(ops.reshape(sample_weight, (-1,)), floatx())
            for metric in metrics:
                metric.update_state(y, y_pred, sample_weight=weight)
        for number, mean in enumerate(self.learned):
            mean.update_state(self._learned_weights()[number])
        return self.get_metrics_result()

    def _learned_weights(self) -> Any:
        """What the loss of each task counts (tasks,)."""
        return ops.exp(ops.negative(self.log_variances)) * (0.5 if self.label == NUMBER else 1.0)

    def deployed(self) -> keras.Model:
        """The model with Keras' classes only, which needs no weights of tasks; its optimizer has the same settings and
        new state.
        """
        plain = keras.Model(self.input, self.output, name=self.name)
        optimizer = own_class(self.optimizer).from_config(self.optimizer.get_config())
        compile_for(plain, self.label, self.signature, optimizer)
        plain.optimizer.build(plain.trainable_variables)
        return plain


def model_of(
    inputs: dict[str, Any], x: Any, label: str, signature: Signature, options: ModelOptions, name: str
) -> keras.Model:
    """The model `name` from its last hidden layer `x` (n, k): with one output layer, or one for each task."""
    if signature.tasks is None:
        return keras.Model(inputs, output_of(x, label, signature), name=name)
    asked = options.tasks or ""
    model = TaskModel(inputs, _outputs(x, inputs[DATASET], label, signature.tasks), name=name)
    model.label, model.signature = label, signature
    model.task_weights = weights_of(asked, len(signature.tasks))
    if asked == UNCERTAINTY:
        model.log_variances = model.add_weight(
            shape=(len(signature.tasks),), initializer="zeros", dtype=floatx(), name="log_variances"
        )
    each = range(0 if model.log_variances is None else len(signature.tasks))
    model.learned = [keras.metrics.Mean(name=f"weight_{number}") for number in each]
    model.of_tasks = [_metrics(label, signature, number) for number in range(len(signature.tasks))]
    return model


def _outputs(x: Any, dataset: Any, label: str, widths: tuple[int, ...]) -> Any:
    """What each row's task says of it, (n, k) -> (n, widest)."""
    widest, scores = max(widths), []
    for number, width in enumerate(widths):
        one = keras.layers.Dense(width, name=head_name(number), dtype=floatx())(x)
        scores.append(ops.pad(one, ((0, 0), (0, widest - width)), constant_values=NEVER) if width < widest else one)
    chosen = ops.expand_dims(ops.one_hot(ops.cast(dataset, "int32"), len(widths), dtype=floatx()), -1)  # (n, tasks, 1)
    name, activation = NAMED[label]
    mine = ops.sum(chosen * ops.stack(scores, axis=1), axis=1)  # (n, tasks, widest) -> (n, widest)
    return keras.layers.Activation(activation or "linear", name=name, dtype=floatx())(mine)


def _metrics(label: str, signature: Signature, number: int) -> list[Any]:
    """The metrics of one task's rows, with its number in their names."""
    metrics, loss, accuracy = keras.metrics, f"loss_{number}", f"accuracy_{number}"
    if label == NUMBER:
        return [metrics.MeanSquaredError(name=loss)]
    if label == YES_NO:
        return [metrics.BinaryCrossentropy(name=loss), metrics.BinaryAccuracy(name=accuracy)]
    return [metrics.SparseCategoricalCrossentropy(name=loss), metrics.SparseCategoricalAccuracy(name=accuracy)]
