"""Which model a run trains, and from which weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from lockstep.training.parts import MOST, Part

Value = bool | int | float | str
"""A setting of a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(Part):
    """The model, its settings and its first weights. Raises ConfigError for invalid values."""

    model: Annotated[str, "NAME"]
    """A ready model (linear, logistic, mlp, wide-deep, two-tower, gru, transformer, resnet20, ...; lockstep models
    lists them), or your own: module:function."""
    init_from: Annotated[str | None, "URL"] = None
    """First weights of a new run: a run, a checkpoint, an exported model, a .keras or .weights.h5 file (default: drawn
    by the seed)."""
    lora_rank: Annotated[int, "R"] = 0
    """Fine-tune the first weights: keep them, and train two matrices of this rank for each layer (LoRA;
    docs/which-mode.md). The exported model is plain. 0: train all weights."""
    ewc: Annotated[float | None, "LAMBDA"] = None
    """Store with the exported model how much each weight matters, and pull weights to those of --init-from: LAMBDA / 2
    times that, times the squared distance (elastic weight consolidation; docs/days.md). 0 only stores (default:
    neither)."""
    extra: Annotated[Mapping[str, Value], "NAME=VALUE"] = field(default_factory=dict, hash=False)
    """Settings of the model, such as width=64 decay=1e-4; may be given several times. lockstep models lists those of
    ready models; your own finds them in options.extra."""

    def __post_init__(self) -> None:
        self.check("model", bool(self.model), "a model's name or module:function")
        self.check("lora_rank", 0 <= self.lora_rank < MOST, "an integer from 0 up")
        self.check("ewc", self.ewc is None or 0 <= self.ewc < math.inf, "a number from 0 up")
        for name, value in self.extra.items():
            right = name.isidentifier() and isinstance(value, Value)
            finite = not isinstance(value, float) or math.isfinite(value)
            self.check("extra", right and finite, "names as Python's, each a text, a finite number, true or false")
        # A copy in one order: the configuration stays as it is, and run.json has one form.
        object.__setattr__(self, "extra", {name: self.extra[name] for name in sorted(self.extra)})
