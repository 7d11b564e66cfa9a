"""The plan of a mixture: each global batch takes exactly its share of each of several datasets. Decision 020.

Each dataset has its own epoch plan, with the same L lanes and a global batch of G * r / (sum of the ratios). A lane of
the mixture's batch has that lane's samples of the first dataset, then of the second, and so on; each dataset runs
through its own endless epochs. So the content of a batch depends on nothing more than an epoch plan's, and the rules
for lanes, ranks and steps hold for each dataset separately. An epoch, as Keras counts, is a pass over the first
dataset; the others may have made more or less than one pass by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError
from lockstep.training.plan.client_plan import RunPlan
from lockstep.training.plan.epoch_plan import DEFAULT_WINDOW_BYTES, EpochPlan
from lockstep.training.plan.lane_count import check_lanes, default_lanes, largest_divisor


@dataclass(frozen=True, kw_only=True)
class MixedPlan:
    """Used like an EpochPlan. Raises ConfigError for ratios that do not fit the global batch and lanes."""

    dataset_digest: str
    """Digest of the list of the datasets' digests."""
    ratios: tuple[int, ...]
    """A weight for each dataset, in lowest terms."""
    parts: tuple[EpochPlan, ...]
    """A plan for each dataset: its `global_batch` is its share, its `lanes` are the mixture's."""

    @classmethod
    def for_datasets(
        cls,
        manifests: Sequence[DatasetManifest],
        digest: str,
        split: str,
        ratios: Sequence[int],
        *,
        seed: int,
        global_batch: int,
        lanes: int | None = None,
        groups: int | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        cache_groups: int | None = None,
        interleave: int | None = None,
    ) -> Self:
        """The plan for a split of each dataset, which share `window_bytes` in the ratio of the mixture."""
        ratios = lowest(ratios)
        share = check_ratios(global_batch, lanes, ratios, groups, cache_groups)
        if lanes is None:
            fewest = min(manifest.splits[split].records for manifest in manifests if split in manifest.splits)
            lanes = default_lanes(share, groups, max(1, fewest), cache_groups)
        parts = tuple(
            EpochPlan.for_dataset(
                manifest,
                split,
                seed=seed,
                global_batch=share * ratio,
                lanes=lanes,
                groups=groups,
                window_bytes=max(1, window_bytes * ratio // sum(ratios)),
                cache_groups=cache_groups,
                interleave=interleave,
            )
            for manifest, ratio in zip(manifests, ratios, strict=True)
        )
        return cls(dataset_digest=digest, ratios=ratios, parts=parts)

    @property
    def global_batch(self) -> int:
        """G: samples of one optimizer step, of all datasets."""
        return sum(part.global_batch for part in self.parts)

    @property
    def lanes(self) -> int:
        """The number of lanes L, which each dataset has."""
        return self.parts[0].lanes

    @property
    def total(self) -> int:
        """Samples of all datasets in a pass over the first one, rounded down; total // G are its steps."""
        return self.parts[0].total * self.global_batch // self.parts[0].global_batch

    def identity(self) -> dict[str, Any]:
        """JSON that is equal exactly if all batches are equal; kept in run.json and in every checkpoint."""
        first = self.parts[0].identity()
        return {
            **{name: first[name] for name in ("version", "split", "seed", "lanes")},
            "dataset_digest": self.dataset_digest,
            "global_batch": self.global_batch,
            "ratios": list(self.ratios),
            "parts": [part.identity() for part in self.parts],
        }

    # Steps and epochs

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch, which is a pass over the first dataset."""
        return self.parts[0].first_step(epoch)

    def steps(self, epochs: int) -> int:
        """Steps of a run of `epochs` epochs. Raises ConfigError if they do not fill one global batch."""
        steps = self.first_step(epochs)
        if steps < 1:
            first, most = self.parts[0], epochs * self.parts[0].total // self.ratios[0] * sum(self.ratios)
            raise ConfigError(
                "the whole run has not one full global batch",
                got=f"{epochs} epochs of {first.total} samples of the first dataset, {first.global_batch} in a batch",
                allowed="epochs * samples of the first dataset >= its part of a global batch",
                next_step=f"Use --global-batch {max(most, sum(self.ratios))} or less, or more epochs.",
            )
        return steps

    def epoch_of_step(self, step: int) -> int:
        """The epoch of step `step`."""
        return self.parts[0].epoch_of_step(step)

    def epochs_begun(self, part: int, steps: int) -> int:
        """How many of its own epochs dataset `part` has begun after `steps` steps."""
        plan = self.parts[part]
        last = steps * (plan.global_batch // plan.lanes) - 1
        return 0 if last < 0 else 1 + max(plan.lane_at(lane, last)[0] for lane in range(plan.lanes))

    # Ranks

    def rank_lanes(
        self, rank: int, num_ranks: int, groups: int | None = None, shares: Sequence[int] | None = None
    ) -> range:
        """The contiguous lanes of one rank, the same of each dataset."""
        check_lanes(self.global_batch, self.lanes, groups, num_ranks)
        return self.parts[0].rank_lanes(rank, num_ranks, groups, shares)

    def rows(self, rank: int, num_ranks: int, groups: int | None = None, shares: Sequence[int] | None = None) -> int:
        """Return n_r: samples of each global batch that are this rank's."""
        return len(self.rank_lanes(rank, num_ranks, groups, shares)) * (self.global_batch // self.lanes)

    def row_datasets(self, rows: int) -> npt.NDArray[np.int64]:
        """The dataset (from 0) of each of a rank's rows of a batch: (rows,) int64, lane after lane."""
        lane = np.repeat(np.arange(len(self.parts)), [part.global_batch // self.lanes for part in self.parts])
        return np.tile(lane, rows // len(lane))


Plan = EpochPlan | MixedPlan


def steps_asked(plan: RunPlan, epochs: int, max_steps: int | None) -> int:
    """Steps of a run of `epochs` epochs that ends after `max_steps`. Raises ConfigError as `plan.steps` does."""
    steps = plan.steps(epochs)
    return steps if max_steps is None else min(steps, max_steps)


def lowest(ratios: Sequence[int]) -> tuple[int, ...]:
    """Ratios in lowest terms: 6 2 is 3 1."""
    common = math.gcd(*ratios)
    return tuple(ratio // common for ratio in ratios)


def check_ratios(
    global_batch: int, lanes: int | None, ratios: tuple[int, ...], groups: int | None, cache_groups: int | None
) -> int:
    """Samples of a batch for a ratio of 1. Raises ConfigError, naming a G or L that fits, if the ratios cannot divide a
    lane's part of a batch."""
    total = sum(ratios)
    multiple = lanes or math.lcm(groups or 1, cache_groups or 1)
    if global_batch % (total * multiple) == 0:
        return global_batch // total
    hint = f"--global-batch {-(-global_batch // (total * multiple)) * total * multiple}"
    base = math.lcm(groups or 1, cache_groups or 1)
    if lanes is not None and global_batch % (total * base) == 0:
        fewer = base * largest_divisor(global_batch // total // base, max(1, lanes // base))
        hint = f"--lanes {fewer} or {hint}"
    raise ConfigError(
        "the ratios of the mixture do not fit the global batch",
        got=f"--mix {' '.join(map(str, ratios))}, a global batch of {global_batch}"
        + (f", {lanes} lanes" if lanes is not None else f", lanes in multiples of {multiple}" if multiple > 1 else ""),
        allowed=f"lanes that divide G / {total}: the ratios divide each lane's part of a batch",
        next_step=f"Use {hint}.",
    )
