"""The texts of flags that state a rule, such as 60s or val_auc:max:3: when to write, keep and end by."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.training.run.lineage import CheckpointRef

BEST = re.compile(r"(?P<metric>.+):(?P<way>min|max)")
BEST_ALLOWED = "METRIC:min or METRIC:max, such as loss:min or auc:max"
VALIDATION = "val_"
"""What the names of validation metrics begin with."""
STOP_ALLOWED = "METRIC:min:K or METRIC:max:K with K from 1 up, such as val_auc:max:3"
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)s")
AUTO = "auto"
ALLOWED = "steps from 1 up (200), seconds above 0 (60s) or auto"


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints are kept: those that any of these rules selects."""

    last: int = 3
    """The number of newest checkpoints of the chain."""
    every_steps: int | None = None
    """The first checkpoint at or after each multiple of so many steps."""
    best: str | None = None
    """METRIC:min or METRIC:max: the best at the end of an epoch, the earliest of equal ones."""

    def chosen(
        self, chain: Sequence[CheckpointRef], value_of: Callable[[CheckpointRef], float | None]
    ) -> set[CheckpointRef]:
        """The checkpoints of `chain` (newest first) to keep. `value_of` is a checkpoint's metric, None without one."""
        kept = set(chain[: self.last])
        if self.every_steps is not None:
            reached = 0
            for ref in reversed(chain):
                if ref.step // self.every_steps > reached:
                    reached = ref.step // self.every_steps
                    kept.add(ref)
        if (best := self.best_of(chain, value_of)) is not None:
            kept.add(best)
        return kept

    def best_of(
        self, chain: Sequence[CheckpointRef], value_of: Callable[[CheckpointRef], float | None]
    ) -> CheckpointRef | None:
        """The best checkpoint of `chain` (newest first); None without such a rule or a value."""
        if self.best is None:
            return None
        sign = 1.0 if self.best.endswith(":min") else -1.0
        values = [(sign * value, ref.step, ref) for ref in chain if (value := value_of(ref)) is not None]
        return min(values)[2] if values else None


def metric_in(best: str) -> str:
    """The metric of METRIC:min or METRIC:max."""
    return best.rpartition(":")[0]


def of_validation(metric: str | None) -> bool:
    """Whether a metric (or METRIC:max) is one of the validation split, and not of the training rows."""
    return metric is not None and metric.startswith(VALIDATION)


def check_metric(best: str | None, metrics: Mapping[str, Any], flag: str = "--keep-best") -> None:
    """Raise ConfigError if `best`, the value of `flag`, names a metric that is missing from an epoch's `metrics`.

    An epoch without a validation has no validation metrics.
    """
    found = BEST.fullmatch(best) if best is not None else None
    if found is None or not metrics or found["metric"] in metrics:
        return
    if of_validation(found["metric"]) and not any(map(of_validation, metrics)):
        return
    raise ConfigError(
        f"an epoch has no metric `{found['metric']}`",
        got=f"{flag} {best}",
        allowed=", ".join(f"{name}:min, {name}:max" for name in sorted(metrics)),
        next_step=f"Correct {flag}, or compile the model with that metric.",
    )


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a run ends early: `metric` has not improved in the last `patience` epochs that have it."""

    metric: str
    way: Literal["min", "max"]
    patience: int

    @classmethod
    def parse(cls, text: str) -> StopRule:
        """Parse METRIC:min:K or METRIC:max:K. Raises ValueError for anything else."""
        best, _, patience = text.rpartition(":")
        found = BEST.fullmatch(best)
        if found is None or not (patience.isascii() and patience.isdigit() and 1 <= int(patience) < 2**31):
            raise ValueError(STOP_ALLOWED)
        return cls(found["metric"], "min" if found["way"] == "min" else "max", int(patience))

    @property
    def best(self) -> str:
        """The metric and its direction: METRIC:min or METRIC:max."""
        return f"{self.metric}:{self.way}"

    def improves(self, value: float, best: float | None) -> bool:
        """Whether `value` is better than `best`, the best so far; NaN never is."""
        if math.isnan(value) or best is None:
            return not math.isnan(value)
        return value < best if self.way == "min" else value > best


@dataclass(frozen=True, slots=True)
class CheckpointEvery:
    """`steps`, or `seconds`, or neither: the interval that loses least time (`auto`)."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str) -> CheckpointEvery:
        """Parse 200 or `200`, `60s`, `auto`. Raises ValueError for anything else."""
        text = str(value)
        if text == AUTO:
            return cls()
        if text.isascii() and text.isdigit() and int(text) >= 1:
            return cls(steps=int(text))
        found = _SECONDS.fullmatch(text)
        if found is None or float(found[1]) <= 0:
            raise ValueError(ALLOWED)
        return cls(seconds=float(found[1]))


def is_error(metric: str) -> bool:
    """Whether the lower value of a metric is the better one, by its name."""
    return any(word in metric for word in ("loss", "error", "brier"))
