"""The configuration of a training run: a file for each part, composed in TrainConfig."""

from lockstep.training.config.model import Value
from lockstep.training.config.ranks import Launcher
from lockstep.training.config.reading import CACHE_BYTES, READ_AHEAD_BYTES, BadImages, Verify
from lockstep.training.config.train_config import (
    TrainConfig,
    all_options,
    groups,
    names_by_part,
    option_names,
    options_in,
)
from lockstep.training.parts import flag_of

__all__ = [
    "CACHE_BYTES",
    "READ_AHEAD_BYTES",
    "BadImages",
    "Launcher",
    "TrainConfig",
    "Value",
    "Verify",
    "all_options",
    "flag_of",
    "groups",
    "names_by_part",
    "option_names",
    "options_in",
]
