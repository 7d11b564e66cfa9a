"""What lockstep.training.batches.torch_data uses of PyTorch, for tests where PyTorch is not installed: no tensors, no
processes.

`install` puts it in PyTorch's place. Its DataLoader does what PyTorch's promises for an IterableDataset: a worker has
a copy of the dataset and its own get_worker_info, and items are taken from the workers in turn.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class WorkerInfo:
    """One worker's place."""

    id: int
    num_workers: int


_info: ContextVar[WorkerInfo | None] = ContextVar("worker", default=None)


class IterableDataset:
    """A dataset that is iterated over."""


class DataLoader:
    """Hands out the items of copies of a dataset, one of each in turn."""

    def __init__(self, dataset: Any, batch_size: int | None, num_workers: int) -> None:
        assert batch_size is None
        self._dataset, self._workers = dataset, num_workers

    def __iter__(self) -> Iterator[Any]:
        if not self._workers:
            yield from self._dataset
            return
        streams = []
        for number in range(self._workers):
            worker = copy.copy(self._dataset)
            streams.append(self._in_worker(iter(worker), WorkerInfo(number, self._workers)))
        while streams:
            for stream in list(streams):
                try:
                    yield next(stream)
                except StopIteration:
                    streams.remove(stream)

    @staticmethod
    def _in_worker(items: Iterator[Any], info: WorkerInfo) -> Iterator[Any]:
        while True:
            token = _info.set(info)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                _info.reset(token)
            yield item


def install(monkeypatch: Any) -> None:
    """Be `torch` and `torch.utils.data` until the test ends."""
    torch, utils, data = (ModuleType(name) for name in ("torch", "torch.utils", "torch.utils.data"))
    parts: dict[str, Any] = {"IterableDataset": IterableDataset, "DataLoader": DataLoader, "get_worker_info": _info.get}
    for name, part in parts.items():
        setattr(data, name, part)
    torch.from_numpy = lambda array: array  # type: ignore[attr-defined]  # a module made here
    for module in (torch, utils, data):
        monkeypatch.setitem(sys.modules, module.__name__, module)
