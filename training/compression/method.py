"""The methods of compression, as `--compression` names them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

NAMES = ("none", "bf16", "fp16", "int8", "1bit", "qsgd", "terngrad", "topk", "dgc", "powersgd", "auto")
ALLOWED = "none, bf16, fp16, int8, 1bit, qsgd:LEVELS (1 to 127), terngrad, topk:1%, dgc:0.1%, powersgd:RANK or auto"
_WITH = {"qsgd": re.compile(r"[0-9]{1,3}"), "powersgd": re.compile(r"[0-9]{1,4}")}
_WITH |= dict.fromkeys(("topk", "dgc"), re.compile(r"[0-9]{1,2}(\.[0-9]{1,6})?%"))
KEEPS = ("1bit", "topk", "dgc", "powersgd")
"""Methods that keep what they did not send, and send it later: their checkpoints hold it."""


@dataclass(frozen=True, slots=True)
class Compression:
    """A method, and what it needs to know of its run."""

    name: str = "none"
    value: float = 0.0
    """Levels of `qsgd`, the share of elements that `topk` and `dgc` send (1 % is 0.01), the rank of `powersgd`."""
    seed: int = 0
    """The seed of stochastic rounding and of the first matrices of `powersgd`; the same on all ranks."""
    momentum: float = 0.0
    """The momentum of `dgc`, which takes the place of the optimizer's."""
    clip_norm: float | None = None
    """The largest norm of a tensor's gradient with `dgc`, which takes the place of the optimizer's."""
    warm_up_steps: int = 0
    """Steps in which `dgc` goes from a quarter of the elements to its share."""

    @classmethod
    def parse(cls, text: str, **of_run: Any) -> Compression:
        """Parse a value of `--compression`. Raises ValueError for anything else."""
        name, colon, value = text.partition(":")
        form = _WITH.get(name)
        if name not in NAMES or bool(colon) != (form is not None) or (form and not form.fullmatch(value)):
            raise ValueError(ALLOWED)
        number = float(value[:-1]) / 100 if value.endswith("%") else float(value or 0)
        if form and not (0 < number <= (127 if name == "qsgd" else 0.25 if value.endswith("%") else 1024)):
            raise ValueError(ALLOWED)
        return cls(name, number, **of_run)

    @property
    def keeps(self) -> bool:
        """Whether ranks keep what they did not send."""
        return self.name in KEEPS

    def __bool__(self) -> bool:
        return self.name != "none"


NONE = Compression()
