"""The call of lockstep train that repeats a run, from its stored configuration."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any

from lockstep.training.config import Value, all_options, flag_of, options_in


def command_of(config: Mapping[str, Any]) -> str:
    """The command line for a shell of the run of this stored configuration, without options that have their default."""
    words, given = ["lockstep", "train"], options_in(config)
    for name, option in all_options().items():
        value = given.get(name)
        if value is None or value == option.default or value == {}:
            continue
        words.append(flag_of(name))
        if isinstance(value, Mapping):
            words += [f"{setting}={setting_word(one)}" for setting, one in value.items()]
        elif isinstance(value, list | tuple):
            words += map(str, value)
        elif name == "augment":
            words += str(value).split()
        elif value is not True:
            words.append(str(value))
    return shlex.join(words)


def setting_word(value: Value) -> str:
    """A setting's value as --set reads it: a text in quotes if it would be read as another value without."""
    if isinstance(value, str):
        try:
            tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            return value
        return json.dumps(value, ensure_ascii=False)  # also a text of TOML
    return str(value).lower() if isinstance(value, bool) else str(value)
