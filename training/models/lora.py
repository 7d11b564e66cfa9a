"""--lora-rank: a model keeps its weights, and trains two narrow matrices for each of its layers.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022), by Keras' own `enable_lora`: a layer with
the kernel W computes with W + A B, where A has R columns and B has R rows. B is zero at first. Gradients are sent, and
optimizer state is held, for A and B only. docs/decisions/087-which-mode.md.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training import models
from lockstep.training.config import TrainConfig
from lockstep.training.models import ModelOptions
from lockstep.training.steps.batchnorm import normalisations

KERNELS = {"lora_kernel_a": ("_kernel", "lora_kernel_b"), "lora_embeddings_a": ("embeddings", "lora_embeddings_b")}
"""The attribute of a layer's first matrix, and those of its kernel and of its second matrix."""


def adapter_seed(seed: int, number: int) -> int:
    """The seed of the first values of A in the layer with this number, in a run with this seed."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)


def enable_lora(model: keras.Model, rank: int, seed: int) -> None:
    """Freeze all weights of a built model, and give each layer that trains a kernel two matrices of this rank.

    Layers that the model has frozen get none. Raises ConfigError naming a layer that trains a matrix and cannot be
    adapted, such as a recurrent one, and for a model whose optimizer is built.
    """
    if model.optimizer.built:
        raise _refused(model, "an optimizer that is built already", "Do not build the optimizer in the function.")
    layers = list({id(layer): layer for layer in model._flatten_layers(include_self=False)}.values())
    taken = [layer for layer in layers if any(one.trainable for one in _own(layer)) and hasattr(layer, "enable_lora")]
    matrices = [one for layer in layers if layer not in taken for one in _own(layer) if one.trainable]
    if wrong := [one.path for one in matrices if len(one.shape) > 1]:
        raise _refused(model, f"{', '.join(wrong[:5])}, of layers without enable_lora", "Set trainable=False for them.")
    if not taken:
        raise _refused(model, "no layer that trains a kernel", "Leave out --lora-rank.")
    for layer in normalisations(model):
        layer.trainable = False  # else its moving averages would follow the new data
    for variable in model.trainable_variables:
        variable.trainable = False
    for number, layer in enumerate(taken):
        try:
            layer.enable_lora(rank, a_initializer=keras.initializers.HeUniform(adapter_seed(seed, number)))
        except (ValueError, NotImplementedError) as error:
            next_step = "Leave the constraint out, or set trainable=False for the layer."
            raise _refused(model, f"{layer.path}: {error}", next_step) from error


def adapters_of(model: keras.Model) -> list[keras.Variable]:
    """All matrices that `enable_lora` has added; empty for another model."""
    return [one for _, *both in _adapted(model) for one in both]


def plain_variables(model: keras.Model) -> list[keras.Variable]:
    """The weights of a model without its adapters, in the order in which the same model has them without LoRA."""
    added = {id(one) for one in adapters_of(model)}
    return [one for one in model.weights if id(one) not in added]


def merged_weights(model: keras.Model) -> list[NDArray[Any]]:
    """The values of `plain_variables`, with A B added to each kernel."""
    products = {}
    for kernel, first, second in _adapted(model):  # alpha is the rank, so that the product counts once
        products[id(kernel)] = np.tensordot(np.asarray(first.numpy(), np.float64), second.numpy(), 1)
    values = []
    for variable in plain_variables(model):
        value = np.asarray(variable.numpy())
        if (product := products.get(id(variable))) is not None:
            value = (value + product).astype(value.dtype)
        values.append(value)
    return values


def merged_model(model: keras.Model, config: TrainConfig, signature: Signature) -> keras.Model:
    """The model of `config` without LoRA, with the merged weights of `model`.

    Its optimizer is SGD, which has no state: that of the model would need numbers for each weight.
    """
    groups = config.step.lane_groups
    rows = config.data.global_batch // groups if groups else None
    options = ModelOptions(seed=config.data.seed, group_rows=rows, tasks=config.data.tasks, extra=config.model.extra)
    plain = models.build(config.model.model, signature, options).model
    rate = float(str(np.asarray(model.optimizer.learning_rate)))  # 0.05, not its float32 value
    plain.set_weights(merged_weights(model))
    plain.optimizer = keras.optimizers.SGD(rate)
    plain.optimizer.build(plain.trainable_variables)
    compiled = {**plain.get_compile_config(), "optimizer": keras.saving.serialize_keras_object(plain.optimizer)}
    object.__setattr__(plain, "get_compile_config", lambda: compiled)  # bypasses Keras' tracking
    return plain


def _own(layer: Any) -> list[keras.Variable]:
    """The trained variables of a layer itself, without those of layers in it."""
    return list(layer._trainable_variables) if layer.trainable else []


def _adapted(model: keras.Model) -> list[tuple[Any, Any, Any]]:
    """Kernel, A and B of each layer."""
    found = {}
    for layer in model._flatten_layers(include_self=False):
        for first, (kernel, second) in KERNELS.items():
            if getattr(layer, "lora_enabled", False) and hasattr(layer, first):
                found[id(layer)] = getattr(layer, kernel), getattr(layer, first), getattr(layer, second)
    return list(found.values())


def _refused(model: keras.Model, got: str, next_step: str) -> ConfigError:
    return ConfigError(
        f"the model {model.name} cannot be fine-tuned with --lora-rank",
        got=got,
        allowed="layers Dense, EinsumDense, Embedding, Conv1D, Conv2D, Conv3D and those made of them; others frozen",
        next_step=next_step,
    )
