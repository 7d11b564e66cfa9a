"""The configuration of a training run: a file for each part, composed in TrainConfig."""

from lockstep.training.config.exactness import NonFinite, OnBadRecord
from lockstep.training.config.model import Value
from lockstep.training.config.ranks import Launcher, Switch
from lockstep.training.config.reading import CACHE_BYTES, READ_AHEAD_BYTES, BadImages, Verify
from lockstep.training.config.step import LANE_GROUPS, BatchNorm, Precision, ScalingRule
from lockstep.training.config.train_config import TrainConfig, groups, option_names, options, options_in
from lockstep.training.parts import flag_of

__all__ = [
    "CACHE_BYTES",
    "LANE_GROUPS",
    "READ_AHEAD_BYTES",
    "BadImages",
    "BatchNorm",
    "Launcher",
    "NonFinite",
    "OnBadRecord",
    "Precision",
    "ScalingRule",
    "Switch",
    "TrainConfig",
    "Value",
    "Verify",
    "flag_of",
    "groups",
    "option_names",
    "options",
    "options_in",
]
