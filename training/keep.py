"""Which checkpoints of a chain stay: the last few, one every so many steps, and the best by a metric."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.storage.errors import ConfigError
from training.run.lineage import CheckpointRef

BEST = re.compile(r"(?P<metric>.+):(?P<way>min|max)")
BEST_ALLOWED = "METRIC:min or METRIC:max, such as loss:min or auc:max"


@dataclass(frozen=True, slots=True)
class Keep:
    """The rule. A checkpoint stays if any part of it holds."""

    last: int = 3
    """The newest ones of the chain."""
    every_steps: int | None = None
    """The first one at or after each multiple of so many steps."""
    best: str | None = None
    """METRIC:min or METRIC:max: the best one at the end of an epoch, of equal ones the earliest."""

    def chosen(
        self, chain: Sequence[CheckpointRef], value_of: Callable[[CheckpointRef], float | None]
    ) -> set[CheckpointRef]:
        """Those of `chain` (newest first) that stay. `value_of` is a checkpoint's metric, None where it has none."""
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
        """The best checkpoint of `chain` (newest first); None without a rule for it or a value."""
        if self.best is None:
            return None
        sign = 1.0 if self.best.endswith(":min") else -1.0
        values = [(sign * value, ref.step, ref) for ref in chain if (value := value_of(ref)) is not None]
        return min(values)[2] if values else None


def metric_of(state: dict[str, Any], metric: str) -> float | None:
    """A metric in a checkpoint's state: of the epoch that it ends; None within an epoch and for what is not finite."""
    value = None if state.get("in_epoch", True) else state.get("metrics", {}).get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def check_metric(best: str | None, metrics: dict[str, Any]) -> None:
    """Raise ConfigError where a rule names a metric that an epoch's `metrics` lack."""
    found = BEST.fullmatch(best) if best is not None else None
    if found is not None and metrics and found["metric"] not in metrics:
        raise ConfigError(
            f"there is no metric `{found['metric']}` to keep the best checkpoint by",
            got=f"--keep-best {best}",
            allowed=", ".join(f"{name}:min, {name}:max" for name in sorted(metrics)),
            next_step="Correct --keep-best, or compile the model with that metric.",
        )
