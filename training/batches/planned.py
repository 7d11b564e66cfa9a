"""The batches of an epoch plan for any program: NumPy arrays, on any number of ranks, from any step on."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack, get_args

from lockstep.features.images.augment import canonical
from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.urls import several
from lockstep.training.batches.augmenting import Augmentation
from lockstep.training.batches.feed import DEADLINE_S, Batch
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.config import CACHE_BYTES, READ_AHEAD_BYTES, BadImages, Verify
from lockstep.training.plan.epoch_plan import DEFAULT_WINDOW_BYTES
from lockstep.training.plan.make_plan import make_plan, refuse_rotation
from lockstep.training.plan.mixture import MixedPlan, Plan
from lockstep.training.reading.background import ReadAhead
from lockstep.training.reading.open import verify_share
from lockstep.training.reading.reader import ReadOptions
from lockstep.training.world import World

log = logging.getLogger(__name__)

_LATER_S = 30.0


@dataclass(frozen=True, slots=True)
class PlannedBatches:
    """One rank's part of every global batch of an epoch plan; `open` makes it.

    It holds only settings, so it can be pickled; each iteration opens the files again.

    >>> from lockstep import data
    >>> planned = data.PlannedBatches.open("data", global_batch=16, epochs=2, rank=1, num_ranks=2)
    >>> planned.steps, [len(batch.sample_ids) for batch in planned.batches(start_step=10)]
    (12, [8, 8])
    """

    datasets: tuple[str, ...]
    plan: Plan
    rank: int
    num_ranks: int
    steps: int | None
    """Global batches of all epochs; None is endless."""
    augment: str
    bad_images: BadImages
    signature: Signature
    """Names, shapes and dtypes of a row."""
    options: ReadOptions
    """How the files are read; does not change the batches."""

    @classmethod
    def open(
        cls,
        datasets: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        split: str = "train",
        *,
        global_batch: int,
        epochs: int | None = None,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        lanes: int | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        mix: Sequence[int] | None = None,
        interleave: int = 1,
        cache_groups: int | None = None,
        augment: str | Sequence[str] = (),
        bad_images: BadImages = "refuse",
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        cache: str | None = None,
        cache_bytes: int = CACHE_BYTES,
        verify: Verify = "start",
    ) -> PlannedBatches:
        """Plan the batches of a split of one or more datasets. Each option means the same as the flag of `lockstep
        train` with its name; `augment` is a text or a list of its words. With `verify` "full" this call checks every
        byte of this rank's share of the shards against its digest.

        Batches are those of `lockstep train` with the same seed, global batch, lanes, window, mix, interleave and cache
        groups, which are in its run.json. Raises ConfigError for options that do not fit together, NotFoundError for a
        missing dataset, CorruptionError for damage that a full verification finds.
        """
        urls = several(datasets)
        words = canonical(augment.split() if isinstance(augment, str) else augment)
        World.local(rank, num_ranks)
        ratios = None if mix is None else _ratios(mix, len(urls))
        _check_choices(bad_images=(bad_images, BadImages), verify=(verify, Verify))
        options = ReadOptions(read_ahead_bytes=read_ahead_bytes, cache=cache, cache_bytes=cache_bytes, ranks=num_ranks)
        with ExitStack() as stack:
            opened = _open(urls, split, ratios, bad_images, None, stack)
            plan = make_plan(
                opened.manifest,
                split,
                ratios,
                seed=seed,
                global_batch=global_batch,
                lanes=lanes,
                window_bytes=window_bytes,
                interleave=interleave,
                cache_groups=cache_groups,
            )
            plan.rows(rank, num_ranks)  # raises here, not in the first iteration
            signature = opened.encoder.signature
            if words:
                signature = Augmentation(words, seed, signature, plan.global_batch // plan.lanes).signature
            steps = None if epochs is None else plan.steps(epochs)
            if verify == "full":
                verify_share(opened.readers, rank, num_ranks, log.info)
        return cls(urls, plan, rank, num_ranks, steps, " ".join(words), bad_images, signature, options)

    def batches(self, start_step: int = 0, *, every: int = 1) -> Generator[Batch, None, None]:
        """Batches `start_step`, `start_step + every`, ... up to the last epoch's end.

        Threads make them ahead of their use, and end with the iterator (exhausted or closed). With `every` above 1 all
        records are read, but only those of these batches are decoded, encoded and augmented. Raises CorruptionError for
        bytes that do not match their checksums, StorageTimeoutError for a read that does not end.
        """
        if start_step < 0 or every < 1:
            raise ConfigError(
                "batches cannot begin there",
                got=f"start_step={start_step}, every={every}",
                allowed="a start_step from 0 up, every 1 or more",
                next_step="Start at the step in the state.",
            )
        first = self.plan.parts[0] if isinstance(self.plan, MixedPlan) else self.plan
        ratios = self.plan.ratios if isinstance(self.plan, MixedPlan) else None
        stop = sys.maxsize if self.steps is None else self.steps
        with ExitStack() as stack:
            opened = _open(self.datasets, first.split, ratios, self.bad_images, self.options, stack)
            plan = opened.plan(self.plan.identity())  # raises if the dataset has changed since
            feed = opened.feed(plan, World.local(self.rank, self.num_ranks))
            if every == 1:
                inner = feed.batches(start_step, stop)
            else:
                inner = (feed.batch(step) for step in range(start_step, stop, every))
            stack.callback(_close, inner)
            if not self.augment:
                yield from inner
                return
            words, lane_rows = self.augment.split(), plan.global_batch // plan.lanes
            augmentation = Augmentation(words, first.seed, opened.encoder.signature, lane_rows)
            what = f"augmented batches of split `{first.split}`"
            # Longer than the feed's own deadline, whose error names what it waits for.
            with ReadAhead(map(augmentation, inner), lambda: what, DEADLINE_S + _LATER_S) as ahead:
                yield from ahead

    def identity(self) -> dict[str, Any]:
        """JSON that is equal exactly if all global batches are equal."""
        return {**self.plan.identity(), "augment": self.augment, "bad_images": self.bad_images}

    def check(self, identity: object) -> None:
        """Raise DataError naming the first field in which a stored `identity` differs from that of these batches."""
        mine, stored = self.identity(), identity if isinstance(identity, dict) else {}
        refuse_rotation(stored, "the state")
        for name in sorted(mine.keys() | stored.keys()):
            if mine.get(name) != stored.get(name):
                raise DataError(
                    f"the state belongs to batches with another `{name}`",
                    got=repr(stored.get(name)),
                    allowed=repr(mine.get(name)),
                    next_step="Open the batches with the options of the saved state; only ranks may differ.",
                )


def _close(batches: Generator[Batch, None, None]) -> None:
    # A thread that waits in the generator for a batch releases it when the batch comes, or at its deadline.
    if inspect.getgeneratorstate(batches) != inspect.GEN_RUNNING:
        batches.close()


def _open(
    urls: Sequence[str],
    split: str,
    mix: Sequence[int] | None,
    bad_images: BadImages,
    options: ReadOptions | None,
    stack: ExitStack,
) -> TrainingSet:
    """Open what is read; `stack` closes its files."""
    opened = TrainingSet.at(urls, split, mix, options)
    for reader in opened.readers:
        stack.enter_context(closing(reader))
    return opened if bad_images == "refuse" else opened.skipping_bad_images()


def _ratios(mix: Sequence[int], datasets: int) -> tuple[int, ...]:
    if len(mix) == datasets >= 2 and all(type(ratio) is int and ratio >= 1 for ratio in mix):
        return tuple(mix)
    raise ConfigError(
        "mix does not fit the datasets",
        got=f"{list(mix)} for {datasets} dataset" + "s" * (datasets != 1),
        allowed="two datasets or more and an integer from 1 up for each of them",
        next_step="Correct mix, or leave it out to read the datasets end to end.",
    )


def _check_choices(**options: tuple[str, Any]) -> None:
    for name, (value, choices) in options.items():
        if value not in get_args(choices):
            raise ConfigError(
                f"{name} is invalid",
                got=repr(value),
                allowed=" or ".join(get_args(choices)),
                next_step=f"Correct {name}.",
            )


class PlannedOptions(TypedDict, total=False):
    """The options of PlannedBatches.open after the split; a test compares the two."""

    global_batch: Required[int]
    epochs: int | None
    seed: int
    rank: int
    num_ranks: int
    lanes: int | None
    window_bytes: int
    mix: Sequence[int] | None
    interleave: int
    cache_groups: int | None
    augment: str | Sequence[str]
    bad_images: BadImages
    read_ahead_bytes: int
    cache: str | None
    cache_bytes: int
    verify: Verify


def numpy_batches(
    datasets: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    split: str = "train",
    *,
    start_step: int = 0,
    **options: Unpack[PlannedOptions],
) -> Generator[Batch, None, None]:
    """One rank's part of each global batch as NumPy arrays, from `start_step` on.

    `options` are those of PlannedBatches.open: global_batch, epochs (default: endless), seed, rank, num_ranks,
    lanes, window_bytes, mix, interleave, cache_groups, augment, bad_images, read_ahead_bytes, cache,
    cache_bytes, verify. All ranks together get each sample of an epoch once; batch k is the same
    at any num_ranks and after any start. A Batch holds `x` by feature name, `y`, `sample_ids`, `epochs` and `weight`,
    n_r rows each. Raises what PlannedBatches.open and PlannedBatches.batches raise.

    >>> from lockstep import data
    >>> for batch in data.numpy_batches("data", global_batch=32, epochs=1):
    ...     print(batch.step, batch.x["a"].shape, batch.y.shape, batch.y.dtype)
    0 (32, 1) (32,) float32
    1 (32, 1) (32,) float32
    2 (32, 1) (32,) float32
    """
    return PlannedBatches.open(datasets, split, **options).batches(start_step)
