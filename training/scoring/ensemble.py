"""An ensemble of models as one Keras model, whose outputs are the mean of its members' probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError

NEXT_TO_0, NEXT_TO_1 = 1e-300, 1 - 2**-53  # probabilities whose log-odds are finite


class Ensemble(keras.Model):
    """Computes `average(inputs)`. The members are no layers of it: it has no weights and no losses of their layers."""

    def __init__(self, average: Callable[[Any], Any]) -> None:
        super().__init__(autocast=False)  # each member casts its own inputs
        self._average = average

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Outputs of the first member's shape and form, float64: of float32, rows that differ could become equal."""
        return self._average(inputs)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Keras' own metrics, and a user's, see outputs in the type of models."""
        return super().compute_metrics(x, y, keras.ops.cast(y_pred, keras.config.floatx()), sample_weight)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Compute the loss of outputs in the type of models, as compute_metrics does."""
        y_pred = keras.ops.cast(y_pred, keras.config.floatx())
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def ensemble_of(members: Sequence[keras.Model], logits: Sequence[bool], signature: Signature) -> Ensemble:
    """The compiled `members`, models of `signature`, as one model with the loss and the metrics of the first, which
    must be unused from now on. `logits` says of each member whether its outputs are log-odds or logarithms.

    Outputs are averaged as probabilities, or unchanged if no member has logits, and returned in the first one's form.
    Raises ConfigError for members whose outputs differ in shape, or that have several.
    """
    _check_shapes(members, signature)
    model = Ensemble(lambda inputs: _average(members, logits, inputs))
    losses, metrics = members[0]._compile_loss, members[0]._compile_metrics  # Keras has no public way to them
    model.compile(
        loss=None if losses is None else losses._user_loss,
        metrics=None if metrics is None else metrics._user_metrics,
        weighted_metrics=None if metrics is None else metrics._user_weighted_metrics,
        jit_compile=False,
    )
    return model


def saved_ensemble_of(
    members: Sequence[keras.Model], logits: Sequence[bool], signature: Signature, inputs: Mapping[str, Any]
) -> keras.Model:
    """Return the mean as a model of Keras' own layers over `inputs`, which can be saved and loads without Lockstep.

    It has no loss. The members become its layers `member>0`, `member>1` ..., which no
    column is called (lockstep.training.models.inputs.scope_name). Raises ConfigError as ensemble_of does.
    """
    _check_shapes(members, signature)
    for number, member in enumerate(members):
        member.name = f"member>{number}"  # a model's layers have different names
    return keras.Model(dict(inputs), _average(members, logits, inputs))


def _average(members: Sequence[keras.Model], logits: Sequence[bool], inputs: Any) -> Any:
    outputs = [keras.ops.cast(model(inputs, training=False), "float64") for model in members]
    mean = sum(_shares(one) if form else one for one, form in zip(outputs, logits, strict=True)) / len(members)
    if not logits[0]:
        return mean
    mean = keras.ops.clip(mean, NEXT_TO_0, NEXT_TO_1)
    return keras.ops.log(mean) - keras.ops.log(1 - mean) if mean.shape[-1] == 1 else keras.ops.log(mean)


def _check_shapes(members: Sequence[keras.Model], signature: Signature) -> None:
    shapes = [_shape(model, signature) for model in members]
    if None in shapes or len(set(shapes)) > 1:
        raise ConfigError(
            "these models cannot be averaged",
            got="outputs a row of " + ", ".join("several parts" if shape is None else str(shape) for shape in shapes),
            allowed="models with one output each, all of one shape",
            next_step="Leave models of another kind out of --run.",
        )


def _shape(model: keras.Model, signature: Signature) -> tuple[int, ...] | None:
    """The shape of one row's output; None for several outputs."""
    row = {name: np.zeros((1, *spec.shape), spec.dtype) for name, spec in signature.features.items()}
    outputs = model(row, training=False)
    return None if keras.tree.is_nested(outputs) else tuple(outputs.shape[1:])


def _shares(outputs: Any) -> Any:
    return keras.ops.sigmoid(outputs) if outputs.shape[-1] == 1 else keras.ops.softmax(outputs)
