"""A configuration is flat where it is made and composed where it is read: no option is lost or doubled between."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig, all_options, option_names, options_in
from lockstep.training.config.data import DataConfig
from lockstep.training.config.train_config import parts
from lockstep.training.parts import options_of
from lockstep.training.ways import WAYS

NEEDED: dict[str, Any] = {
    "datasets": ("d",), "run": "r", "model": "m", "num_ranks": 2, "global_batch": 8, "epochs": 3,
}  # fmt: skip
# Values other than the default, which can all be combined.
OTHERS: dict[str, Any] = {
    "split": "fold-1,fold-2", "seed": 7, "lanes": 4, "window_bytes": 1024, "cache": "/disk", "verify": "full",
    "augment": "flip:horizontal", "learning_rate": 0.5, "validate": "test", "early_stop": "val_auc:max:3",
    "checkpoint_every": "60s", "keep_best": "val_auc:max", "audit": True, "launcher": "local", "tls": "on",
    "stall_limit_s": 9.5, "extra": {"width": 64}, "batchnorm": "local", "precision": "mixed_bfloat16",
}  # fmt: skip
OF_WAYS: list[dict[str, Any]] = [
    {}, {"delay": 2}, {"sync_every": 3, "outer_momentum": 0.9}, {"strategy": "async", "staleness": 1},
    {"strategy": "parameter-server", "staleness": 1, "servers": 2},
]  # fmt: skip
GIVEN = st.builds(
    lambda names, way: {**NEEDED, **{name: OTHERS[name] for name in names | {"validate"}}, **way},
    st.sets(st.sampled_from(sorted(OTHERS))), st.sampled_from(OF_WAYS),
)  # fmt: skip


@given(GIVEN)
def test_options_come_back_by_name_through_json_and_copies(options: dict[str, Any]) -> None:
    config = TrainConfig(**options)
    assert config.options() == {**TrainConfig.defaults(), **options}
    stored = json.loads(json.dumps(config.to_json()))
    for same in (TrainConfig.from_json(stored), TrainConfig(**config.options()), config.but()):
        assert same == config and hash(same) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)  # noqa: S301 - what was just made
    assert {name: value for name, value in options_in(stored).items() if name in options} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }


@given(GIVEN, st.sampled_from(["seed", "stall_limit_s", "audit"]))
def test_a_copy_differs_by_what_it_names(options: dict[str, Any], name: str) -> None:
    config = TrainConfig(**options)
    value: Any = {"seed": 8, "stall_limit_s": 3.5, "audit": False}[name]
    changes: Any = {name: value}
    assert config.but(**changes).options() == {**config.options(), name: value}
    assert config.options()[name] == options.get(name, TrainConfig.defaults()[name]), "it stays as it is"


def test_an_option_has_one_place_and_one_sentence() -> None:
    of_parts = Counter(field.name for part in parts().values() for field in fields(part))
    ways = {field.name for way in WAYS for field in fields(way)}
    assert set(of_parts.values()) == {1} and not ways & of_parts.keys() and "run" not in of_parts
    explained = Counter(name for part in (*parts().values(), *WAYS) for name in options_of(part))
    assert set(explained.values()) == {1} and explained.keys() | {"run"} == set(option_names()) == all_options().keys()
    defaults = {(field.name, field.default) for way in WAYS for field in fields(way)}
    assert len(defaults) == len(ways), "ways that share an option share its default"


def test_a_part_is_checked_alone_and_frozen() -> None:
    with pytest.raises(ConfigError, match="`lanes`"):
        DataConfig(datasets=("d",), global_batch=8, epochs=1, lanes=3)
    config = TrainConfig(**NEEDED)
    with pytest.raises(FrozenInstanceError):
        config.data.seed = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        config.run = "elsewhere"  # type: ignore[misc]


def test_no_option_is_read_flat_and_no_unknown_one_is_taken() -> None:
    config = TrainConfig(**NEEDED)
    flat = set(option_names()) - {"run", "model"}  # `model` is a part
    assert not any(hasattr(config, name) for name in flat)
    unknown: Any = {"stale": 1}
    with pytest.raises(TypeError, match=r"no option `stale` \(perhaps `staleness`\)"):
        TrainConfig(**NEEDED, **unknown)
