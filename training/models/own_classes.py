"""Whether a model's own classes and functions can be loaded again, asked before it is trained.

Keras writes a class by name and configuration. Export, evaluation and prediction fail if no module registers the name,
or if the class cannot be made from its configuration: by then the training is over.
"""

from __future__ import annotations

import inspect
import json
import random
import traceback
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.saving import serialization_lib

from lockstep.storage.errors import ConfigError
from lockstep.training import models

LOADED_BY_NAME = ("keras", "keras_hub", "keras_cv", "keras_nlp", "lockstep", "builtins")
"""Packages whose classes need no registration: Keras', those that it imports itself, and ours."""
ENTRY = {"module", "class_name", "config", "registered_name"}
UNKNOWN = NOT_REGISTERED, LATE = "not registered", "registered only while the model's function runs"
_REGISTER = "above it, at the top level of its module, write `@keras.saving.register_keras_serializable()`"
_CONFIG = (
    'in it, write `def get_config(self): return {**super().get_config(), "NAME": self.NAME}` with each argument NAME '
    "of its __init__, which takes **kwargs for the others"
)


@dataclass(frozen=True, slots=True)
class _Fault:
    """What cannot be loaded, why, and what to do about it."""

    what: str
    why: str
    mend: str


def registered_by(name: str) -> frozenset[str]:
    """The names of own classes and functions that are registered once the model's module is imported: those that a
    process knows which loads the model.
    """
    models.function_of(name)
    return frozenset(keras.saving.get_custom_objects())


def check_loads(model: keras.Model, name: str, registered: frozenset[str]) -> None:
    """Raise ConfigError if the compiled model `name` cannot be loaded by a process that knows `registered`.

    No weights are copied. Random numbers and the names of later layers are as if this had not been called.
    """
    may_hold_code = serialization_lib.in_safe_mode() is False
    states = random.getstate(), np.random.get_state()
    try:
        with ThreadPoolExecutor(1) as thread:  # Keras keeps names, seeds and strategies by thread
            fault = thread.submit(_fault_of, model, registered, may_hold_code).result()
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    if fault is None:
        return
    sent = name.startswith(f"{models.SENT}:")
    raise ConfigError(
        f"the model {name} could be trained, but not loaded: {fault.what}",
        got="it is of this script or notebook, which no other process imports" if sent and fault.why in UNKNOWN
        else fault.why,
        allowed="classes and functions of Keras, and those that a module registers when it is imported; code in a "
        "lambda only after keras.config.enable_unsafe_deserialization()",
        next_step=f"Move the function into a file, and pass `mymodel:build`; {fault.mend}." if sent
        else f"{fault.mend[0].upper()}{fault.mend[1:]}.",
    )  # fmt: skip


def _fault_of(model: keras.Model, registered: frozenset[str], may_hold_code: bool) -> _Fault | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lambdas; a model that is saved warns again
        try:
            stored = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
        except Exception as error:  # a user's get_config may raise anything
            return _Fault(_name(_writes(error, model)), _words(error), f"{_CONFIG}, and {_REGISTER}")
        return _Search(registered, may_hold_code).fault_in(stored)


def _writes(error: Exception, model: keras.Model) -> type:
    """The class whose configuration raised the error: the innermost that was being written."""
    found = type(model)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        written = frame.f_locals.get("obj") if frame.f_code.co_name == "serialize_keras_object" else None
        if hasattr(written, "get_config") and _is_own(type(written).__module__):
            found = type(written)
    return found


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks for the first entry of a stored configuration that cannot be loaded, as Keras would load it."""

    registered: frozenset[str]
    may_hold_code: bool

    def fault_in(self, stored: Any) -> _Fault | None:
        """The first fault in a JSON value."""
        if isinstance(stored, list):
            return self._first(stored)
        if not isinstance(stored, dict):
            return None
        if stored.get("class_name") == "__lambda__":
            mend = f"give it a name by `def`, and {_REGISTER}"
            return None if self.may_hold_code else _Fault("a lambda", "code, which a file may not hold", mend)
        if not stored.keys() >= ENTRY:
            return self._first(stored.values())
        if stored["class_name"] == "function":
            return self._fault_of_function(stored)
        inner = [stored["config"], stored.get("compile_config")]
        return self._fault_of_own(stored, inner) if _is_own(stored["module"] or "") else self._first(inner)

    def _first(self, several: Iterable[Any]) -> _Fault | None:
        return next((fault for one in several if (fault := self.fault_in(one)) is not None), None)

    def _fault_of_function(self, stored: dict[str, Any]) -> _Fault | None:
        name = stored["config"]
        if name not in self.registered and keras.saving.get_registered_object(name) is None:
            try:
                keras.saving.deserialize_keras_object(stored)  # by its name, one of Keras'
            except Exception:  # Keras raises many kinds
                return _Fault(f"the function {name}", NOT_REGISTERED, _REGISTER)
        elif name not in self.registered:
            return _Fault(f"the function {name.rpartition('>')[2]}", LATE, _REGISTER)
        return None

    def _fault_of_own(self, stored: dict[str, Any], inner: list[Any]) -> _Fault | None:
        what = f"the class {'.'.join(filter(None, (stored['module'], stored['class_name'])))}"
        own = keras.saving.get_registered_object(stored["registered_name"])
        if stored["registered_name"] not in self.registered:
            return _Fault(what, NOT_REGISTERED if own is None else LATE, f"{_REGISTER}; {_CONFIG}")
        if getattr(own, "compile", None) not in (None, keras.Model.compile):
            inner = inner[:1]  # Keras does not call it when it loads the model
        if isinstance(stored["config"].get("layers"), list):
            return self._first(inner)  # inputs, layers and outputs, as `keras.Model` has them
        if lacking := _lacking(own, stored["config"]):
            return _Fault(what, f"its configuration lacks {', '.join(lacking)}, of its __init__", _CONFIG)
        try:
            keras.saving.deserialize_keras_object({name: stored[name] for name in ENTRY}, safe_mode=False)
        except Exception as error:  # a user's class may raise anything
            return self.fault_in(stored["config"]) or _Fault(what, _words(error), _CONFIG)
        return self._first(inner[1:])


def _lacking(own: Any, config: Mapping[str, Any]) -> list[str]:
    """The arguments of a class' __init__ that its configuration lacks: a loaded one would have their defaults."""
    mine = [vars(one) for one in getattr(own, "__mro__", ()) if _is_own(one.__module__)]
    made = next((one["__init__"] for one in mine if "__init__" in one), None)
    if made is None or any("from_config" in one for one in mine):
        return []  # Keras knows its own arguments; and what makes it of its configuration is the user's
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    arguments = list(inspect.signature(made).parameters.values())[1:]
    return [one.name for one in arguments if one.kind in named and one.name not in config]


def _is_own(module: str) -> bool:
    return module.partition(".")[0] not in LOADED_BY_NAME


def _name(kind: type) -> str:
    return f"the class {kind.__module__}.{kind.__qualname__}"


def _words(error: Exception) -> str:
    """The error's text in one line; of Keras' long ones the exception in it, or the first sentence."""
    text = " ".join(str(error).split()).rpartition("Exception encountered: ")[2]
    return (text.partition(" Example:")[0] or type(error).__name__)[:300]
