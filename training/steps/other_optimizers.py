"""The optimizers that a train_step applies other than that of `compile`, as for a generator and its critic.

Each has an exchange of its own, in the order in which a step applies them, and its state is in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras

from lockstep.storage.errors import ConfigError

_OTHERS: WeakKeyDictionary[keras.Model, tuple[keras.optimizers.Optimizer, ...]] = WeakKeyDictionary()


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers that are attributes of `model`, also in lists and dicts: that of `compile` first."""
    kinds = keras.optimizers.Optimizer | list | tuple | dict
    attributes = sorted((name, value) for name, value in vars(model).items() if isinstance(value, kinds))
    found = [model.optimizer, *keras.tree.flatten([value for name, value in attributes if name[0] != "_"])]
    return list({id(one): one for one in found if isinstance(one, keras.optimizers.Optimizer)}.values())


def others_of(model: keras.Model) -> tuple[keras.optimizers.Optimizer, ...]:
    """The optimizers other than that of `compile` which `model` applies, in order, once they are built."""
    return _OTHERS.get(model, ())


def build_others(
    model: keras.Model, applied: Sequence[tuple[keras.optimizers.Optimizer, Sequence[Any]]], name: str
) -> list[keras.optimizers.Optimizer]:
    """Build the optimizers that a step applies other than that of `compile`, on the variables that they are given.

    `applied` are the calls of `apply` in a step: the optimizer, and the variables. `name` is the model's. If the step
    does not apply that of `compile`, the last one takes its place as `model.optimizer`, which says when a step is done.
    Returns them all, none for a model of one. Raises ConfigError unless `model.optimizer` is applied once a step, and
    each other one always to the same variables.
    """
    given: dict[int, tuple[keras.optimizers.Optimizer, list[Any]]] = {}
    for optimizer, variables in applied:
        known = given.setdefault(id(optimizer), (optimizer, list(variables)))[1]
        if [id(one) for one in known] != [id(one) for one in variables]:
            raise ConfigError(
                f"the model {name} applies one optimizer to different variables in a step",
                got=f"{optimizer.name}: {_paths(known)}, then {_paths(variables)}",
                allowed="an optimizer for each group of variables",
                next_step="Make an optimizer for each group, and keep it as an attribute of the model.",
            )
    found = [one for one, _ in given.values() if one is not model.optimizer]
    if not found:
        return []
    if id(model.optimizer) not in given:  # compile() without one makes one that nothing uses
        model.optimizer = found[-1]
    count = sum(optimizer is model.optimizer for optimizer, _ in applied)
    if count != 1:
        raise ConfigError(
            f"the model {name} has several optimizers, and applies that of `compile` {count} times a step",
            got=f"{count} calls of {model.optimizer.name}.apply",
            allowed="one: it says when a step is done",
            next_step="Pass to super().compile(optimizer=...) one that is applied once, such as the generator's.",
        )
    for one, variables in given.values():
        if not one.built:
            one.build(variables)
    _OTHERS[model] = tuple(one for one, _ in given.values() if one is not model.optimizer)
    return found


def _paths(variables: Sequence[Any]) -> str:
    return ", ".join(one.path for one in variables[:3]) + (", ..." if len(variables) > 3 else "")
