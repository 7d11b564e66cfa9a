"""The typed options of public calls are the fields of the configurations that check them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

import lockstep
from lockstep import options
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs.config import LogsConfig
from lockstep.training.batches.planned import PlannedBatches, PlannedOptions
from lockstep.training.config import TrainConfig, all_options
from lockstep.training.config.options import Changes
from lockstep.training.search.space import NOT_OF_FOLDS

# A call also takes what the configuration makes a tuple of.
WIDER: dict[Any, Any] = {tuple[str, ...]: str | Iterable[str], tuple[int, ...] | None: Sequence[int] | None}
NAMED = {"global_batch", "epochs", "num_ranks"}
CALLS = [
    ("write_logs", options.LogsOptions, LogsConfig, {"inputs", "output"}),
    ("write_images", options.ImagesOptions, ImagesConfig, {"inputs", "output"}),
    ("train", options.TrainOptions, TrainConfig, {"datasets", "run", "model", "launcher", *NAMED}),
    ("tune", options.TrainOptions, TrainConfig, {"datasets", "run", "model", "launcher", *NAMED}),
    ("cross_validate", options.FoldOptions, TrainConfig,
     {"datasets", "run", "model", "launcher", *NAMED, *NOT_OF_FOLDS}),
]  # fmt: skip


def types_of(config: Any) -> dict[str, Any]:
    """The types of a configuration's options: those of the fields of all parts, or of a dataclass without parts."""
    if config is TrainConfig:
        return {name: get_args(kind.hint)[0] if get_origin(kind.hint) is Annotated else kind.hint
                for name, kind in all_options().items()}  # fmt: skip
    hints = get_type_hints(config)
    return {field.name: hints[field.name] for field in fields(config)}


@pytest.mark.parametrize(("call", "typed", "config", "others"), CALLS, ids=[call[0] for call in CALLS])
def test_options_are_the_fields_of_the_configuration(call: str, typed: Any, config: Any, others: set[str]) -> None:
    wanted = {name: kind for name, kind in types_of(config).items() if name not in others}
    assert get_type_hints(typed) == {name: WIDER.get(kind, kind) for name, kind in wanted.items()}
    signature = inspect.signature(getattr(lockstep, call))
    assert signature.parameters["options"].annotation == f"Unpack[{typed.__name__}]"
    assert others - {"inputs", "datasets"} - signature.parameters.keys() <= {"launcher", "run", *NOT_OF_FOLDS}


def test_the_constructor_and_but_take_all_options_and_need_those_without_a_default() -> None:
    known = {name: WIDER.get(kind, kind) for name, kind in types_of(TrainConfig).items()}
    assert get_type_hints(Changes) == known
    needed = {
        name: hint for name, hint in get_type_hints(TrainConfig.__init__).items() if name not in ("options", "return")
    }
    assert needed == {name: known[name] for name, option in all_options().items() if option.default is MISSING}


def test_options_of_batches_are_those_of_planned_batches() -> None:
    hints = get_type_hints(PlannedBatches.open)
    named = {"datasets", "split", "return"}
    assert get_type_hints(PlannedOptions) == {name: kind for name, kind in hints.items() if name not in named}


def test_no_public_call_takes_any_option() -> None:
    calls: list[Any] = [value for name in lockstep.__all__ if inspect.isfunction(value := getattr(lockstep, name))]
    assert len(calls) > 15
    for call in (*calls, lockstep.data.numpy_batches):
        assert "**options: 'Any'" not in str(inspect.signature(call)), call
