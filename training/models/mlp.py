"""A multi-layer perceptron over all features: Rumelhart, Hinton and Williams, "Learning representations by
back-propagating errors" (1986), with dropout (Srivastava et al., 2014)."""

from __future__ import annotations

import keras

from lockstep.features.schema.signature import DATASET, Signature
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import dense_layers, embedded, ids_of, inputs_of
from lockstep.training.models.outputs import CLASSES, NUMBER, YES_NO, compile_for, label_of
from lockstep.training.models.ready import settings_of
from lockstep.training.models.tasks import model_of

LEARNING_RATE = 0.001


def mlp(signature: Signature, options: ModelOptions) -> keras.Model:
    """Dense layers with ReLU and dropout; inputs by name, any shapes; label yes or no, classes, or a number.

    Pixels (uint8) are scaled to 0..1, each feature of ids becomes a learned vector, and numbers are used unchanged:
    give them the encoding `standardise`. With --tasks each task has an output layer. Raises ConfigError without a
    label.
    """
    label = label_of("mlp", signature, YES_NO, CLASSES, NUMBER)
    chosen, inputs = settings_of("mlp", options.extra), inputs_of(signature)
    features = {name: tensor for name, tensor in inputs.items() if name != DATASET}
    x = embedded(features, ids_of(signature), chosen["embedding"], chosen["decay"])
    model = model_of(inputs, dense_layers(x, chosen), label, signature, options, "mlp")
    return compile_for(model, label, signature, keras.optimizers.Adam(options.learning_rate or LEARNING_RATE))
