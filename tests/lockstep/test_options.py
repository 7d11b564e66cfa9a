"""The typed options of public calls are the fields of the configurations that check them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import lockstep
from lockstep import options
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs.config import LogsConfig
from lockstep.training.batches.planned import PlannedBatches, PlannedOptions
from lockstep.training.config import TrainConfig
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


@pytest.mark.parametrize(("call", "typed", "config", "others"), CALLS, ids=[call[0] for call in CALLS])
def test_options_are_the_fields_of_the_configuration(call: str, typed: Any, config: Any, others: set[str]) -> None:
    kinds = get_type_hints(config)
    wanted = {field.name: kinds[field.name] for field in fields(config) if field.name not in others}
    assert get_type_hints(typed) == {name: WIDER.get(kind, kind) for name, kind in wanted.items()}
    signature = inspect.signature(getattr(lockstep, call))
    assert signature.parameters["options"].annotation == f"Unpack[{typed.__name__}]"
    assert others - {"inputs", "datasets"} - signature.parameters.keys() <= {"launcher", "run", *NOT_OF_FOLDS}


def test_options_of_batches_are_those_of_planned_batches() -> None:
    hints = get_type_hints(PlannedBatches.open)
    named = {"datasets", "split", "return"}
    assert get_type_hints(PlannedOptions) == {name: kind for name, kind in hints.items() if name not in named}


def test_no_public_call_takes_any_option() -> None:
    calls: list[Any] = [value for name in lockstep.__all__ if inspect.isfunction(value := getattr(lockstep, name))]
    assert len(calls) > 15
    for call in (*calls, lockstep.data.numpy_batches):
        assert "**options: 'Any'" not in str(inspect.signature(call)), call
