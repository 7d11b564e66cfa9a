"""The command that a report shows gives the run's own configuration."""

from __future__ import annotations

import shlex

import pytest

from lockstep.jobs._train import config_of, parser
from lockstep.training.config import TrainConfig
from lockstep.training.run.command import command_of, setting_word

PLAIN = TrainConfig(
    datasets=("/data/a set", "hdfs://host/b"), run="/runs/it's", model="mlp", num_ranks=2, global_batch=64, epochs=3
)


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        PLAIN.but(mix=(3, 1), lanes=8, audit=True, launcher="local", learning_rate=1e-4, early_stop="loss:min:2"),
        PLAIN.but(extra={"width": 32, "decay": 1e-5, "name": "64", "flag": True, "way": "a b"}, validate="test"),
        PLAIN.but(augment="flip crop:4", split="fold-1,fold-2", checkpoint_every="auto", stall_limit_s=7.5),
    ],
)
def test_the_command_of_a_configuration_is_read_back_as_it(config: TrainConfig) -> None:
    words = shlex.split(command_of(config.to_json()))
    assert words[:2] == ["lockstep", "train"]
    assert config_of(parser("").parse(words[2:])) == config


def test_options_with_their_default_are_left_out_and_fields_may_be_missing() -> None:
    assert command_of({"model": {"model": "mlp", "extra": {}}, "data": {"seed": 0}}) == "lockstep train --model mlp"
    assert setting_word("64") == '"64"' and setting_word("relu") == "relu" and setting_word(False) == "false"
