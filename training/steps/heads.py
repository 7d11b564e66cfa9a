"""The output layers of a model's tasks, which have names by which --strategy tasks finds them."""

from __future__ import annotations

import keras


def head_name(number: int) -> str:
    """The name of the output layer of task `number`, by which --strategy tasks knows it; your own model's too."""
    return f"_task_{number}"


def heads_of(model: keras.Model) -> dict[int, keras.layers.Layer]:
    """The output layers of a model, by the number of their task."""
    layers = {layer.name: layer for layer in model._flatten_layers(include_self=False)}
    found: dict[int, keras.layers.Layer] = {}
    while (layer := layers.get(head_name(len(found)))) is not None:
        found[len(found)] = layer
    return found
