"""The ready models by name, with the settings that `--set` changes and where their functions are. No TensorFlow."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.storage.errors import ConfigError, nearest
from lockstep.training.config import Value

_RESNET = re.compile(r"resnet(\d{1,4})")
RESNET = "resnet{6n+2}"
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
# What others call a setting.
_ALSO = {"depth": "layers", "num_layers": "layers", "units": "width", "hidden": "width", "neurons": "width"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a ready model, of the type of its default: `least` <= value < `below`."""

    default: Value
    help: str
    least: float = 0
    below: float = math.inf
    choices: tuple[str, ...] = ()
    """The allowed values of a text; none: any."""

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices:
            return " or ".join(self.choices)
        kind = _KINDS[type(self.default)]
        if isinstance(self.default, bool | str):
            return kind
        return f"{kind} from {self.least:g} up" + (f", below {self.below:g}" if self.below < math.inf else "")

    def fits(self, value: Value) -> bool:
        """Whether `value` has the type and is in the range; a float may be given as an integer."""
        if isinstance(self.default, bool | str) or isinstance(value, bool | str):
            return type(value) is type(self.default) and (not self.choices or value in self.choices)
        return (isinstance(value, int) or isinstance(self.default, float)) and self.least <= value < self.below


DECAY = Setting(0.0, "L2 penalty: times the sum of the squared weights, added to the loss")
DROPOUT = Setting(0.1, "share of values that a training step sets to 0", below=1)
LAYERS = Setting(2, "hidden layers", least=1)
WIDTH = Setting(128, "neurons of a hidden layer", least=1)
EMBEDDING = Setting(16, "numbers of the vector that each id gets", least=1)
TABLES = {
    "table_rate": Setting(0.05, "learning rate of tables in shards (--shard-embeddings, any_ids)"),
    "table_optimizer": Setting(
        "adagrad", "row-wise Adagrad or lazy Adam, of tables in shards", choices=("adagrad", "adam")
    ),
    "any_ids": Setting("", "columns of int64, by commas, that are ids without a bound; their tables grow, in shards"),
    "admit_after": Setting(1, "such an id has a row once it was seen so many times in training", least=1),
    "evict_after_steps": Setting(0, "steps without an id after which its row is removed; 0: never"),
}
SEQUENCE = Setting("", "the column of ids in order (default: the only one)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A model that `--model NAME` builds."""

    function: str
    """MODULE:FUNCTION below lockstep.training.models."""
    help: str
    """What it is and which labels it takes, in one line."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    takes_tasks: bool = False
    """Whether it has an output layer for each task of --tasks."""
    has_schedule: bool = False
    """Whether its own learning rate grows with the global batch, warms up and falls over the steps of the run."""


READY: dict[str, Ready] = {
    "linear": Ready(function="linear:linear", help="linear regression; label a number", settings={"decay": DECAY}),
    "logistic": Ready(
        function="logistic:logistic", help="logistic regression; label yes or no", settings={"decay": DECAY}
    ),
    "mlp": Ready(
        function="mlp:mlp",
        help="dense layers over all features; label yes or no, classes, or a number",
        settings={"layers": LAYERS, "width": WIDTH, "dropout": DROPOUT, "embedding": EMBEDDING, "decay": DECAY},
        takes_tasks=True,
    ),
    "wide-deep": Ready(
        function="wide_deep:wide_deep",
        help="a weighted sum and dense layers, trained as one; label yes or no, or a number",
        settings={
            "layers": LAYERS,
            "width": WIDTH,
            "dropout": DROPOUT,
            "embedding": EMBEDDING,
            "decay": DECAY,
            **TABLES,
        },
    ),
    "two-tower": Ready(
        function="two_tower:two_tower",
        help="a vector and a bias for each user and item; label a number (a rating), or yes or no; or retrieval",
        settings={
            "user": Setting("", "the users' column of ids (default: of two columns, the first by name)"),
            "item": Setting("", "the items' column of ids (default: the other one)"),
            "loss": Setting(
                "label",
                "of the label; or in_batch: find each row's item among those of the batch, whatever the label",
                choices=("label", "in_batch"),
            ),
            "embedding": Setting(32, "numbers of the vector of each user and item", least=1),
            # MovieLens 100K, fold-0, 15 epochs: RMSE 0.914; 3e-5 0.930 (it overfits).
            "decay": Setting(1e-4, DECAY.help),
            **TABLES,
        },
    ),
    "gru": Ready(
        function="gru:gru",
        help="a recurrent layer over a sequence of ids; label classes (the next id), yes or no, or a number",
        settings={
            "sequence": SEQUENCE,
            "embedding": Setting(64, EMBEDDING.help, least=1),
            "width": Setting(64, "numbers of the layer's state", least=1),
            "dropout": Setting(0.5, DROPOUT.help, below=1),
        },
    ),
    "transformer": Ready(
        function="transformer:transformer",
        help="self-attention over a sequence of ids; label classes (the next id), yes or no, or a number",
        settings={
            "sequence": SEQUENCE,
            "layers": Setting(1, "blocks of attention and dense layers", least=1),
            "heads": Setting(2, "attention heads of a block", least=1),
            "width": Setting(64, "numbers of the vector of each id", least=1),
            "dropout": Setting(0.4, DROPOUT.help, below=1),
        },
    ),
    "policy": Ready(
        function="policy:policy",
        help="probabilities of actions, from logged decisions; label classes (the action that was taken)",
        settings={
            "loss": Setting(
                "ips",
                "less the reward by inverse propensities, the same divided by their sum, or doubly robust",
                choices=("ips", "snips", "dr"),
            ),
            "reward": Setting("", "the column of what the action earned"),
            "propensity": Setting("", "the column of the probability with which the action was taken"),
            "least_propensity": Setting(0.001, "smaller propensities count as this one"),
            "layers": LAYERS,
            "width": WIDTH,
            "dropout": DROPOUT,
            "embedding": EMBEDDING,
            "decay": DECAY,
        },
    ),
    RESNET: Ready(
        function="resnet:resnet",
        help="the CIFAR ResNet: resnet8, resnet14, resnet20, ...; one image, label classes",
        settings={
            "decay": Setting(1e-4, DECAY.help),
            "nesterov": Setting(True, "Nesterov's form of momentum; --compression dgc needs false"),
        },
        takes_tasks=True,
        has_schedule=True,
    ),
}
_ALSO |= {"l2": "decay", "weight_decay": "decay", "rate": "dropout", "dim": "embedding", "embedding_dim": "embedding"}
NAMES = (*READY, "module:function")


def ready_model(name: str) -> Ready | None:
    """The ready model of this name; None for another name."""
    return READY[RESNET] if depth_of(name) else READY.get(name) if name != RESNET else None


def depth_of(name: str) -> int | None:
    """The layers of a `resnet{6n+2}`; None for another name."""
    match = _RESNET.fullmatch(name)
    depth = int(match[1]) if match else 0
    return depth if depth >= 8 and depth % 6 == 2 else None


def nearest_model(name: str) -> str | None:
    """The known name that is most like an unknown one; None if none is."""
    if match := _RESNET.fullmatch(name):
        return f"resnet{max(1, round((int(match[1]) - 2) / 6)) * 6 + 2}"
    if "." in name and ":" not in name:  # a function as Python writes it
        return ":".join(name.rpartition(".")[::2])
    return next(iter(difflib.get_close_matches(name, ("resnet20", *READY.keys() - {RESNET}), 1)), None)


def settings_of(name: str, given: Mapping[str, Value]) -> dict[str, Any]:
    """All settings of the ready model `name`: `given` ones, and the defaults of the others.

    Raises ConfigError for a setting that it does not have, with the nearest one, and for a value outside its range.
    """
    model = ready_model(name)
    known = {} if model is None else model.settings
    for setting, value in given.items():
        if setting not in known:
            meant = _ALSO.get(setting.lower(), "")
            hint = f" (perhaps `{meant}`)" if meant in known else nearest(setting, known)
            raise ConfigError(
                f"the model {name} has no setting `{setting}`",
                got=f"--set {setting}={value}{hint}",
                allowed=", ".join(known),
                next_step="Correct --set; `lockstep models` lists the settings of each model.",
            )
        if not known[setting].fits(value):
            raise ConfigError(
                f"the model {name} cannot take this value of `{setting}`",
                got=f"--set {setting}={value!r}",
                allowed=known[setting].allowed,
                next_step=f"Correct --set; {setting} is: {known[setting].help}.",
            )
    return {setting: type(one.default)(given.get(setting, one.default)) for setting, one in known.items()}


def check_settings(name: str, given: Mapping[str, Value]) -> None:
    """Raise ConfigError for settings that a ready model does not take; a `module:function` judges its own."""
    if ready_model(name) is not None:
        settings_of(name, given)
