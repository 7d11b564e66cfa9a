"""Models by name, or the user's own by `module:function`.

A model's function takes the signature of its inputs and the options of the run, and returns a compiled `keras.Model`,
or (model, list of Keras callbacks). Importing this loads no TensorFlow; building does.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError, nearest
from lockstep.training.models.ready import NAMES, READY, check_settings, depth_of, nearest_model, ready_model

if TYPE_CHECKING:
    import keras

SENT = "__main__"
"""The module in the name of a function that ranks cannot import: `__main__:build`."""
_sent: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """A run's options for the function that builds its model.

    >>> import lockstep
    >>> options = lockstep.ModelOptions(learning_rate=0.1, extra={"width": 64})
    >>> options.extra.get("width", 32), options.seed
    (64, 0)
    """

    seed: int = 0
    """The seed of the first weights; already set in Keras when the function is called."""
    group_rows: int | None = None
    """Rows of a lane group: batch normalisation is over these (ghost); None: Keras' own, over a rank's rows."""
    learning_rate: float | None = None
    """The learning rate; None: the model's own."""
    global_batch: int = 1
    """Rows of one optimizer step over all ranks."""
    steps: int = 1
    """Optimizer steps of the whole run."""
    shard_embeddings: int | None = None
    """Tables of at least so many bytes are to be layers ShardedEmbedding; None: none."""
    tasks: str | None = None
    """What `--tasks` says of the losses' weights; None without tasks."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What `--set NAME=VALUE` gives (`lockstep.train(..., extra={...})`): int, float, bool or str by name."""


class Built(NamedTuple):
    """A compiled model and its callbacks."""

    model: keras.Model
    callbacks: list[Any]


def build(name: str, signature: Signature, options: ModelOptions) -> Built:
    """Build and compile the model `name`. Raises ConfigError for an unknown name, or if a function returns no model."""
    function = function_of(name)
    if signature.tasks is not None:
        check_tasks(name)
    own = ":" in name
    returned = _called(name, function, signature, options) if own else function(signature, options)
    built = check_built(name, returned)
    _check_soft_labels(name, built.model, signature)
    return built


def _check_soft_labels(name: str, model: keras.Model, signature: Signature) -> None:
    """Raise ConfigError if labels are shares of classes and the loss takes the number of a class."""
    if signature.label is None or not signature.label.shape:
        return
    import keras

    losses = keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None))
    names = [loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__) for loss in losses]
    if any(name.replace("_", "").lower() == "sparsecategoricalcrossentropy" for name in names):
        raise ConfigError(
            f"the model {name} takes the numbers of classes, but mixup makes shares of classes",
            got=", ".join(names),
            allowed=f"a loss of labels (n, {signature.label.shape[0]}) float32, such as CategoricalCrossentropy",
            next_step="Choose the loss by signature.label.shape, or leave mixup out.",
        )


def check_tasks(name: str) -> None:
    """Raise ConfigError for a ready model that has no output layer for each task."""
    if (known := ready_model(name)) is not None and not known.takes_tasks:
        raise ConfigError(
            f"the model {name} has one output layer, and --tasks needs one for each dataset",
            got=f"--model {name} with --tasks",
            allowed=f"{', '.join(each for each, model in READY.items() if model.takes_tasks)}, or module:function",
            next_step="Choose another --model, or leave --tasks out.",
        )


def receive(name: str, text: str) -> None:
    """Have `name` mean the function in `text`, as lockstep.training.launch.model_function made it, in this process."""
    _sent[name] = text


def check_name(name: str, extra: Mapping[str, Any] | None = None, *, here: bool = False) -> None:
    """Raise ConfigError for a model that no rank can build, or `extra` settings that it does not take; loads nothing.

    `here`: ranks run on this host with this process' import path, which must have the module of a `module:function`.
    """
    module, _, function = name.partition(":")
    if ready_model(name) is not None:
        check_settings(name, extra or {})
        return
    if not module or not function.isidentifier():
        near = nearest_model(name)
        raise ConfigError(
            f"there is no model `{name}`",
            got=name,
            allowed=", ".join(NAMES),
            next_step=(f"Did you mean `{near}`? " if near else "")
            + "Correct --model; `lockstep models` lists them. A ResNet's depth is 6n + 2, as in resnet20.",
        )
    if here and (missing := _missing(module)) is not None:
        raise ConfigError(
            f"the model {name} cannot be imported",
            got=f"no module named `{missing}` on the import path{_hidden(module)}",
            allowed="module:function, importable where the ranks run",
            next_step="Correct --model, call from the module's folder, or name that with --code.",
        )


def _missing(module: str) -> str | None:
    """The first part of a dotted name that is no module, None if all are; imports none of them."""
    parts, path = module.split("."), None
    for number in range(1, len(parts) + 1):
        part = ".".join(parts[:number])
        if part in sys.modules:
            path = getattr(sys.modules[part], "__path__", [])
            continue
        try:
            spec = importlib.util.find_spec(part) if path is None else PathFinder.find_spec(part, path)
        except KeyError:  # a folder without __init__.py in one: Python asks for its parent, which is not imported
            return None
        if spec is None:
            return part
        path = spec.submodule_search_locations or []
    return None


def _hidden(module: str) -> str:
    """A sentence if a package that comes first on the import path hides a later one of the same name."""
    top = module.partition(".")[0]
    specs = [PathFinder.find_spec(top, [entry or "."]) for entry in sys.path]
    found = [str(Path(spec.origin).parent) for spec in specs if spec is not None and spec.origin]
    first = list(dict.fromkeys(found))
    return f": the `{top}` in {first[0]} hides that in {first[1]}; rename yours" if len(first) > 1 else ""


def function_of(name: str) -> Callable[[Signature, ModelOptions], Any]:
    """The function of a model's name; raises ConfigError listing the known names."""
    if (known := ready_model(name)) is not None:
        module, _, function = known.function.partition(":")
        build_it = getattr(importlib.import_module(f"lockstep.training.models.{module}"), function)
        return partial(build_it, depth=depth) if (depth := depth_of(name)) else build_it
    check_name(name)
    module, _, function = name.partition(":")
    if module == SENT and name not in _sent:
        raise ConfigError(
            f"the model {name} is a function of a notebook or script, which only its own call can send",
            got=name,
            allowed="lockstep.train(..., model=FUNCTION), which sends the function; or module:function",
            next_step="Call lockstep.train with the function, or move it into a file and pass `mymodel:build`.",
        )
    try:
        if module == SENT:
            return _loaded(_sent[name])
        loaded = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"the model {name} cannot be imported",
            got=_text_of(error),
            allowed="module:function, importable where the ranks run",
            next_step="Fix the module, ship it with --py-files or put it on PYTHONPATH.",
        ) from error
    found: Callable[[Signature, ModelOptions], Any] | None = getattr(loaded, function, None)
    if not callable(found):
        raise ConfigError(
            f"the module {module} has no function `{function}`",
            got=name + nearest(function, [known for known, value in vars(loaded).items() if callable(value)]),
            allowed="module:function, a function of (signature, options) at the module's top level",
            next_step="Correct --model, or add the function to the module.",
        )
    return found


def _loaded(text: str) -> Callable[..., Any]:
    function: Callable[..., Any] = pickle.loads(base64.b64decode(text))  # noqa: S301 - of this rank's own driver
    return function


def scales_learning_rate(name: str) -> bool:
    """Whether this model's own learning rate follows the global batch and warms up, like a resnet's."""
    known = ready_model(name)
    return known is not None and known.has_schedule


def may_follow_length(name: str) -> bool:
    """Whether training this model may depend on `options.steps`, like the learning rate of a resnet."""
    known = ready_model(name)
    return known is None or known.has_schedule


def _called(name: str, function: Callable[..., Any], signature: Signature, options: ModelOptions) -> Any:
    """Call a user's function; its exception becomes a ConfigError, since a restart would raise it again."""
    try:
        return function(signature, options)
    except Exception as error:
        traceback.print_exception(error)  # into the rank's log
        raise ConfigError(
            f"the model {name} raised {type(error).__name__}",
            got=_text_of(error),
            allowed="a function of (signature, options) that returns a compiled model",
            next_step="Fix the function; the rank's log has the whole trace.",
        ) from error


def _text_of(error: Exception) -> str:
    """An error's text, with the innermost line outside of libraries."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    line = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{' '.join(str(error).split())[:500] or type(error).__name__}{line}"


def check_built(name: str, returned: Any) -> Built:
    """A function's return value as Built; raises ConfigError for anything but a compiled model and callbacks."""
    import keras

    model, callbacks = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, [])
    right = isinstance(model, keras.Model) and model.compiled and isinstance(callbacks, list)
    if not right or not all(isinstance(callback, keras.callbacks.Callback) for callback in callbacks):
        raise ConfigError(
            f"the model {name} returned an object that cannot be trained",
            got=f"{type(returned).__name__}, {'not ' if not getattr(model, 'compiled', False) else ''}compiled",
            allowed="a compiled keras.Model, or (model, list of Keras callbacks)",
            next_step="Call model.compile(...) and return the model.",
        )
    return Built(model, callbacks)
