"""The way without options: one sum of gradients in each step, where no flag asks for another way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep.training.ways.way import Way


@dataclass(frozen=True, kw_only=True, slots=True)
class EveryStep(Way):
    """Ranks add their gradients in each step, and apply the sum in that step."""

    flag: ClassVar[str] = "--strategy sync"
    module: ClassVar[str] = "every_step"
