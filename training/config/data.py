"""What a run trains on, in which order and in which batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from lockstep.storage.urls import several
from lockstep.training.parts import Part

EQUAL, UNCERTAINTY = "equal", "uncertainty"
"""What --tasks says in place of weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Part):
    """The datasets, and the order of their samples. Raises ConfigError for invalid values."""

    title: ClassVar[str] = "order of samples (docs/batches.md)"

    datasets: Annotated[tuple[str, ...], "URL"]
    """Datasets to train on, in this order; several must fit together, as a dataset and its appends do."""
    global_batch: Annotated[int, "G"]
    """Samples of one optimizer step, over all ranks."""
    epochs: Annotated[int, "E"]
    """Passes over the split in total; a resumed run counts those it has done."""
    split: Annotated[str, "NAME"] = "train"
    """The split to train on; several folds with commas between them: fold-1,fold-2."""
    where: Annotated[str | None, "CONDITION"] = None
    """Train and validate only on the samples that meet a condition in SQL on their columns, such as "age >= 18 AND
    country IN ('DE', 'AT')" (docs/batches.md; default: all)."""
    since: Annotated[str | None, "DATASET|TIME"] = None
    """Train on all datasets that the given one, or the newest in a folder of increments, continues after this one or
    this time, such as 2026-01-31T06:00 UTC (docs/formats.md; default: on those given)."""
    mix: Annotated[tuple[int, ...] | None, "R"] = None
    """Each dataset's share of every global batch, such as 3 1; the last is that of all datasets that remain, end to
    end. An epoch is then a pass over the first dataset (default: datasets end to end)."""
    tasks: Annotated[str | None, "WEIGHTS"] = None
    """With --mix, make each dataset a task: one trunk, an output layer and a loss for each (docs/tasks.md). The losses
    weigh as their rows (equal), as given (2,1), or as the run learns it (uncertainty)."""
    replay: Annotated[float | None, "SHARE"] = None
    """Take this share of every global batch, such as 0.25, from all datasets that the given one, or the newest in a
    folder of increments, continues: --dataset and --mix with these (docs/days.md; default: none)."""
    seed: int = 0
    """Seed of the order of samples and of the first weights."""
    lanes: Annotated[int | None, "L"] = None
    """Streams of samples that a global batch is taken from; divides G (default: the largest divisor up to 64)."""
    window_bytes: int = 8 << 20
    """Memory of a rank in which samples are shuffled, over all lanes."""
    interleave: Annotated[int, "B"] = 1
    """Number of places that a lane reads from at once; for sorted data, 64 / L."""
    cache_groups: Annotated[int | None, "C"] = None
    """With --cache, the number of nodes: each reads the same blocks in every epoch; divides L (default: no groups)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "datasets", several(self.datasets))
        if self.mix is not None:
            object.__setattr__(self, "mix", tuple(self.mix))
        count = len(self.datasets)
        self.check("datasets", count > 0 and all(self.datasets), "one dataset URL or more")
        self.check("split", bool(self.split), "a split's name")
        if self.where is not None:
            from lockstep.features.condition import one_form  # its parser is loaded only for those who need it

            object.__setattr__(self, "where", one_form(self.where))
        if self.mix is not None:
            right = 2 <= len(self.mix) <= count and all(type(ratio) is int and ratio >= 1 for ratio in self.mix)
            allowed = f"two datasets or more and an integer from 1 up for each, or fewer, of them, here {count}"
            self.check("mix", right, allowed)
        if self.tasks is not None:
            right = self.mix is not None and len(self.mix) == count
            right = right and (self.tasks in (EQUAL, UNCERTAINTY) or self._weights_fit())
            allowed = (
                f"with a ratio of --mix for each dataset: equal, uncertainty or {count} numbers above 0, such as 2,1"
            )
            self.check("tasks", right, allowed)
        self.check("replay", self.replay is None or 0.01 <= self.replay <= 0.99, "a share from 0.01 to 0.99")
        self.check_count("epochs", "global_batch", "window_bytes", "interleave")
        self.check("seed", 0 <= self.seed < 2**63, "an integer from 0 to 2^63 - 1")
        if self.lanes is not None:
            right = self.lanes >= 1 and self.global_batch % self.lanes == 0
            self.check("lanes", right, f"a divisor of global_batch={self.global_batch}")
        self.check("cache_groups", self.cache_groups is None or self.cache_groups >= 1, "an integer from 1 up")

    def _weights_fit(self) -> bool:
        try:
            weights = weights_of(self.tasks or "", len(self.datasets))
        except ValueError:
            return False
        return len(weights) == len(self.datasets) and all(0 < weight < math.inf for weight in weights)


def weights_of(tasks: str, count: int) -> tuple[float, ...]:
    """The weights of the losses of `count` tasks that --tasks gives; 1 for each where they are equal or learned. Raises
    ValueError for another text.
    """
    return (1.0,) * count if tasks in (EQUAL, UNCERTAINTY) else tuple(map(float, tasks.split(",")))
