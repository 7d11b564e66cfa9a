"""The epoch plan's batches for any program: NumPy arrays, on any number of ranks, from any step on."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from features.augment.parse import canonical
from features.encode import Encoder
from features.signature import Signature
from storage.errors import ConfigError, DataError
from training.augmenting import Augmentation
from training.batches import DEADLINE_S, Batch, RankFeed
from training.config import BadImages
from training.open_split import OpenSplit
from training.plan import DEFAULT_WINDOW_BYTES, EpochPlan
from training.read_ahead import ReadAhead
from training.world import World


@dataclass(frozen=True, slots=True)
class PlannedBatches:
    """One rank's part of every global batch of an epoch plan; `open` makes it.

    Plain settings, so that it crosses processes; files are opened anew for each iteration.
    """

    datasets: tuple[str, ...]
    plan: EpochPlan
    rank: int
    num_ranks: int
    steps: int | None
    """Global batches of all epochs; None is without end."""
    augment: str
    bad_images: BadImages
    signature: Signature
    """What a batch holds: names, shapes and dtypes of a row."""

    @classmethod
    def open(
        cls,
        datasets: str | Sequence[str],
        split: str = "train",
        *,
        global_batch: int,
        epochs: int | None = None,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        lanes: int | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        augment: str | Sequence[str] = (),
        bad_images: BadImages = "refuse",
    ) -> PlannedBatches:
        """Plan the batches of one or more datasets' split. `augment` is what --augment takes, a text or its words, and
        `bad_images` what --bad-images does.

        Batches are those of `jobs.train` with the same seed, global batch, lanes and window (its run.json tells them).
        Raises ConfigError for what does not fit together, NotFoundError for a dataset that is not there.
        """
        urls = (datasets,) if isinstance(datasets, str) else tuple(datasets)
        words = canonical(augment.split() if isinstance(augment, str) else augment)
        World.local(rank, num_ranks)
        opened = OpenSplit.at(urls, split, training=True)
        plan = EpochPlan.for_dataset(
            opened.manifest, split, seed=seed, global_batch=global_batch, lanes=lanes, window_bytes=window_bytes
        )
        plan.rows(rank, num_ranks)  # refused here, not in the first iteration
        signature = _encoder(opened, bad_images).signature
        if words:
            signature = Augmentation(words, seed, signature, plan.global_batch // plan.lanes).signature
        steps = None if epochs is None else plan.steps(epochs)
        return cls(urls, plan, rank, num_ranks, steps, " ".join(words), bad_images, signature)

    def batches(self, start_step: int = 0, *, every: int = 1) -> Generator[Batch, None, None]:
        """Batches `start_step`, `start_step + every`, ... up to the last epoch's end.

        They are made ahead of their use by threads that end with the iterator (exhausted or closed). With `every` above
        1 all is read, but only those batches are decoded, encoded and augmented. Raises CorruptionError for what does
        not match its checksums, StorageTimeoutError for what does not come.
        """
        if start_step < 0 or every < 1:
            raise ConfigError(
                "batches cannot begin there",
                got=f"start_step={start_step}, every={every}",
                allowed="a start_step from 0 up, every 1 or more",
                next_step="Start at the step that the state says.",
            )
        opened = OpenSplit.at(self.datasets, self.plan.split, training=True)
        world = World.local(self.rank, self.num_ranks)
        encoder = _encoder(opened, self.bad_images)
        feed = RankFeed(self.plan, opened.reader, encoder, world, start_step)
        stop = sys.maxsize if self.steps is None else self.steps
        if every == 1:
            inner = feed.batches(start_step, stop)
        else:
            inner = (feed.batch(step) for step in range(start_step, stop, every))
        with closing(opened.reader), closing(inner):
            if not self.augment:
                yield from inner
                return
            words, lane_rows = self.augment.split(), self.plan.global_batch // self.plan.lanes
            augmentation = Augmentation(words, self.plan.seed, encoder.signature, lane_rows)
            what = f"augmented batches of split `{self.plan.split}`"
            with ReadAhead(map(augmentation, inner), lambda: what, DEADLINE_S) as ahead:
                yield from ahead

    def identity(self) -> dict[str, Any]:
        """JSON that is equal exactly where all global batches are."""
        return {**self.plan.identity(), "augment": self.augment, "bad_images": self.bad_images}

    def check(self, identity: object) -> None:
        """Raise DataError naming the first field in which a stored `identity` is that of other batches."""
        mine, stored = self.identity(), identity if isinstance(identity, dict) else {}
        for name in sorted(mine.keys() | stored.keys()):
            if mine.get(name) != stored.get(name):
                raise DataError(
                    f"the state belongs to batches with another `{name}`",
                    got=repr(stored.get(name)),
                    allowed=repr(mine.get(name)),
                    next_step="Open the batches as they were opened when the state was saved; only ranks may differ.",
                )


def _encoder(opened: OpenSplit, bad_images: BadImages) -> Encoder:
    return opened.encoder if bad_images == "refuse" else opened.encoder.skipping_bad_images()


def numpy_batches(
    datasets: str | Sequence[str], split: str = "train", *, start_step: int = 0, **options: Any
) -> Generator[Batch, None, None]:
    """One rank's part of each global batch as NumPy arrays, from `start_step` on.

    `options` are those of PlannedBatches.open: global_batch, epochs (default: without end), seed, rank, num_ranks,
    lanes, window_bytes, augment, bad_images. All ranks together get each sample of an epoch once; batch k is the same
    at any num_ranks and after any start. A Batch holds `x` by feature name, `y`, `sample_ids`, `epochs` and `weight`,
    n_r rows each.
    """
    return PlannedBatches.open(datasets, split, **options).batches(start_step)
