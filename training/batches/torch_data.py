"""The batches of an epoch plan for PyTorch: an IterableDataset of whole batches, and a loader that can be resumed.

Only this module needs PyTorch, which is not among Lockstep's requirements.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from lockstep.features.images.decode_many import set_decode_threads
from lockstep.storage import documents
from lockstep.storage.errors import ConfigError
from lockstep.training.batches.feed import Batch
from lockstep.training.batches.planned import PlannedBatches

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    raise ConfigError(
        "lockstep.data.loader needs PyTorch",
        got=str(error),
        allowed="a Python environment with PyTorch (docs/batches.md names the version it was tried with)",
        next_step="Install it, or use lockstep.data.numpy_batches.",
    ) from error

NEXT_STEP, IDENTITY = "next_step", "batches"


class PlannedDataset(IterableDataset):
    """One rank's part of each global batch, as dicts: `step` and `epoch` (int), `x` by feature name, `y`, `sample_ids`,
    `epochs` and `weight`, tensors of n_r rows in the shapes and dtypes of a Batch; `y` and `weight` if there are any.

    Items are whole batches: use `loader`, or a DataLoader with batch_size=None. Worker i of w makes batches i, i + w,
    ..., and a DataLoader takes them in turn, so order and content do not change. Each worker reads all shards of its
    rank: workers help if decoding, encoding or augmentation is slow, not if reading is. After an iteration in this
    process, `state_dict` continues after the last batch that was handed out.
    """

    def __init__(self, planned: PlannedBatches) -> None:
        super().__init__()
        self.planned = planned
        self._next_step = 0
        # Shared by all processes: with workers, only the loader knows how far the training is.
        self._by_workers = multiprocessing.get_context("spawn").Value("b", 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        if info is not None:
            self._by_workers.value = 1
            set_decode_threads(max(1, len(os.sched_getaffinity(0)) // info.num_workers))
            for batch in self.planned.batches(self._next_step + info.id, every=info.num_workers):
                yield self._tensors(batch)
            return
        for batch in self.planned.batches(self._next_step):
            self._next_step = batch.step + 1
            yield self._tensors(batch)

    def state_dict(self) -> dict[str, Any]:
        """The next step and the identity of the batches, as JSON."""
        if self._by_workers.value:
            raise ConfigError(
                "this dataset does not know which batches of its worker processes were used",
                got="an iteration with num_workers above 0",
                allowed="the state of the loader that handed the batches out",
                next_step="Use lockstep.training.batches.torch_data.loader and its state_dict().",
            )
        return self.state_at(self._next_step)

    def state_at(self, next_step: int) -> dict[str, Any]:
        """The state after batch next_step - 1."""
        return {NEXT_STEP: next_step, IDENTITY: self.planned.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the state's next step, at any number of ranks. Raises DataError if it is of other batches."""
        self.planned.check(state.get(IDENTITY))
        self._next_step = documents.count(state.get(NEXT_STEP), where=f"the state: {NEXT_STEP}", least=0)

    def _tensors(self, batch: Batch) -> dict[str, Any]:
        parts = {"y": batch.y, "sample_ids": batch.sample_ids, "epochs": batch.epochs, "weight": batch.weight}
        return {
            "step": batch.step,
            "epoch": self.planned.plan.epoch_of_step(batch.step),
            "x": {name: _tensor(array) for name, array in batch.x.items()},
            **{name: _tensor(array) for name, array in parts.items() if array is not None},
        }


class LoaderOptions(TypedDict, total=False):
    """The options of a DataLoader that do not decide which batches there are."""

    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str


class Loader:
    """A DataLoader over a PlannedDataset that counts what it hands out; `loader` makes it."""

    def __init__(self, dataset: PlannedDataset, num_workers: int, **options: Unpack[LoaderOptions]) -> None:
        self.dataset = dataset
        self._next_step = dataset._next_step
        self._loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.dataset._next_step = self._next_step  # workers begin with a copy of it
        for batch in self._loader:
            if batch["step"] != self._next_step:
                raise ConfigError(
                    "the loader hands out batches in another order than the plan's",
                    got=f"batch {batch['step']}",
                    allowed=f"batch {self._next_step}",
                    next_step="Leave in_order unset, and run one iteration at a time.",
                )
            self._next_step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was handed out, as JSON."""
        return self.dataset.state_at(self._next_step)


def loader(
    planned: PlannedBatches,
    state: dict[str, Any] | None = None,
    *,
    num_workers: int = 0,
    **options: Unpack[LoaderOptions],
) -> Loader:
    """Batches of `planned` as PyTorch tensors, from the start or from a `state_dict()` of an earlier loader.

    Each item is one rank's part of a global batch: `step` and `epoch` (int), `x` by feature name, `y`, `sample_ids`,
    `epochs` and `weight`, tensors of n_r rows. `options` are a DataLoader's, such as pin_memory. Raises DataError for a
    state of other batches; importing the name raises ConfigError without PyTorch.

    >>> from lockstep import data
    >>> planned = data.PlannedBatches.open("data", global_batch=16, epochs=1)
    >>> [tuple(batch["y"].shape) for batch in data.loader(planned)]
    [(16,), (16,), (16,), (16,), (16,), (16,)]
    """
    dataset = PlannedDataset(planned)
    if state is not None:
        dataset.load_state_dict(state)
    return Loader(dataset, num_workers, **options)


def _tensor(array: npt.NDArray[Any]) -> Any:
    # PyTorch has no read-only tensors, and warns about read-only arrays.
    return torch.from_numpy(array if array.flags.writeable else np.array(array))
