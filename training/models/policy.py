"""A policy that learns from logged decisions: a softmax over actions, trained on what they would have earned.

IPS and DR as in Dudík, Langford and Li, "Doubly Robust Policy Evaluation and Learning" (ICML 2011), SNIPS as in
Swaminathan and Joachims, "The Self-Normalized Estimator for Counterfactual Learning" (NeurIPS 2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
from keras import ops
from keras.config import floatx

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import column_of, dense_layers, embedded, ids_of, inputs_of
from lockstep.training.models.outputs import CLASSES, label_of, output_of, units_of
from lockstep.training.models.ready import settings_of
from lockstep.training.steps.distribute import own_class
from lockstep.training.steps.over_ranks import gather_from

LEARNING_RATE = 0.001


@dataclass(frozen=True, slots=True)
class Rule:
    """The loss, and the columns of a decision: its reward, and the probability with which it was taken."""

    loss: str
    reward: str
    propensity: str
    least: float
    """Propensities below it count as it."""


class Policy(keras.Model):
    """Probabilities of actions (n, k). Its loss is less the mean reward that they would have earned, by its `rule`.

    With the loss `dr`, its `judge` says each action's reward (n, k) for a row, and learns it from the logged actions.
    """

    rule: Rule
    judge: keras.Model | None = None

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """The loss of decisions: y (n,) the actions that were taken."""
        rule, dtype = self.rule, y_pred.dtype
        reward, propensity = (ops.cast(ops.reshape(x[one], (-1,)), dtype) for one in (rule.reward, rule.propensity))
        weight = _of_actions(y_pred, y) / ops.maximum(propensity, rule.least)
        if self.judge is not None:
            judged = self.judge(x, training=training)
            error = reward - _of_actions(judged, y)
            sure = ops.stop_gradient(judged)
            gains = ops.sum(y_pred * sure, axis=1) + weight * (reward - _of_actions(sure, y))
            loss = ops.mean(ops.square(error)) - ops.mean(gains)
        elif rule.loss == "snips":
            weights, _ = gather_from(weight)
            loss = -ops.mean(weight * reward) / ops.mean(weights)
        else:
            loss = -ops.mean(weight * reward)
        return loss + sum(self.losses)

    def deployed(self) -> keras.Model:
        """The policy with Keras' classes only, and without its judge; compiled with an optimizer of the same settings,
        new state, and no loss.
        """
        plain = keras.Model(self.input, self.output, name=self.name)
        plain.compile(own_class(self.optimizer).from_config(self.optimizer.get_config()), jit_compile=False)
        plain.optimizer.build(plain.trainable_variables)
        return plain


def _of_actions(values: Any, actions: Any) -> Any:
    """Each row's value (n, k) of its action (n,): (n,)."""
    numbers = ops.expand_dims(ops.cast(actions, "int32"), -1)
    return ops.take_along_axis(values, numbers, axis=1)[:, 0]


def policy(signature: Signature, options: ModelOptions) -> keras.Model:
    """Probabilities of actions from a row's features, without its reward and its propensity, by layers as in mlp.

    The label is the action that was taken: classes. Raises ConfigError for another label, for rows with weights, and
    unless `--set reward=COLUMN propensity=COLUMN` name two numbers.
    """
    label = label_of("policy", signature, CLASSES)
    chosen, inputs = settings_of("policy", options.extra), inputs_of(signature)
    ids = ids_of(signature)
    numbers = [name for name, spec in signature.features.items() if spec.shape in ((), (1,)) and name not in ids]
    kind = "a column of one number a row, with the encoding `number`"
    reward = column_of("policy", "reward", chosen["reward"], numbers, kind)
    others = [name for name in numbers if name != reward]
    propensity = column_of("policy", "propensity", chosen["propensity"], others, kind)
    if signature.weight is not None:
        raise ConfigError(
            "the model policy takes no weights of rows",
            got="a dataset with a field of kind weight",
            allowed="rows that count by their propensities",
            next_step="Write the dataset without --weights.",
        )
    hidden = _hidden(inputs, signature, chosen, (reward, propensity))
    model = Policy(inputs, output_of(hidden, label, signature), name="policy")
    model.rule = Rule(chosen["loss"], reward, propensity, chosen["least_propensity"])
    if chosen["loss"] == "dr":
        model.judge = _judge(signature, chosen, (reward, propensity))
    model.compile(keras.optimizers.Adam(options.learning_rate or LEARNING_RATE), jit_compile=False)
    return model


def _hidden(inputs: dict[str, Any], signature: Signature, chosen: dict[str, Any], outcome: tuple[str, str]) -> Any:
    """The layers over all inputs but the `outcome`: (n, width)."""
    context = {name: tensor for name, tensor in inputs.items() if name not in outcome}
    ids = {name: number for name, number in ids_of(signature).items() if name in context}
    return dense_layers(embedded(context, ids, chosen["embedding"], chosen["decay"]), chosen)


def _judge(signature: Signature, chosen: dict[str, Any], outcome: tuple[str, str]) -> keras.Model:
    """A model of each action's reward (n, k), with layers as the policy's."""
    inputs, units = inputs_of(signature), units_of(CLASSES, signature)
    rewards = keras.layers.Dense(units, name="_rewards", dtype=floatx())(_hidden(inputs, signature, chosen, outcome))
    return keras.Model(inputs, rewards, name="judge")
