"""The plan of a federated run: which clients train in a round, and in which order a client reads its samples.

Pure functions of the dataset's digest, the split's table of clients, seed and round; no state, no I/O. Drawing a fixed
number of clients: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS
2017). Drawing each client by itself, as accounting for noise needs: McMahan et al., "Learning Differentially Private
Recurrent Language Models" (ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import DataError, differences
from lockstep.training.config import TrainConfig
from lockstep.training.plan.datasets import split_of
from lockstep.training.plan.permutation import derive_key, shuffled
from lockstep.training.ways import Federated

CLIENT_PLAN_VERSION = 1
I64 = npt.NDArray[np.int64]


class RunPlan(Protocol):
    """What a driver needs of the plan of a run, whose ranks may read by an epoch plan or by clients."""

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""

    @property
    def total(self) -> int:
        """Samples in an epoch."""

    def identity(self) -> dict[str, Any]:
        """JSON that is equal exactly if all batches are equal."""

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch."""

    def steps(self, epochs: int) -> int:
        """Steps of a run of `epochs` epochs."""

    def epoch_of_step(self, step: int) -> int:
        """The epoch of step `step`."""


@dataclass(frozen=True, slots=True)
class ClientTable:
    """The clients of a split, by number in the order of their values."""

    names: tuple[str, ...]
    """The value of each client, as text."""
    of_row: npt.NDArray[np.int32]
    """The client of each record of the split, in file order."""
    counts: I64
    """The records of each client, (clients,)."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Sequence[Any], npt.NDArray[np.int32]]]) -> Self:
        """Make the table from parts of the split in file order: the values that occur in each, and each row's place
        among them.
        """
        values = sorted({value for known, _ in parts for value in known})
        number = {value: place for place, value in enumerate(values)}
        rows = [np.array([number[value] for value in known], np.int32)[places] for known, places in parts if len(known)]
        of_row = np.concatenate([np.zeros(0, np.int32), *rows])
        return cls(tuple(map(str, values)), of_row, np.bincount(of_row, minlength=len(values)).astype(np.int64))

    def owners(self, num_ranks: int) -> I64:
        """The rank that trains each client, always: the largest client first, to the rank with fewest samples."""
        found, loads = np.zeros(len(self.counts), np.int64), np.zeros(num_ranks, np.int64)
        for client in np.argsort(-self.counts, kind="stable").tolist():
            found[client] = rank = int(loads.argmin())
            loads[rank] += self.counts[client]
        return found


@dataclass(frozen=True, kw_only=True)
class ClientPlan:
    """Everything that decides who trains on what. A step, and an epoch, is a round."""

    dataset_digest: str
    split: str
    records: int
    seed: int
    clients: str
    """The field whose values are the clients."""
    client_fraction: float
    local_epochs: int
    global_batch: int
    """Samples of one step of a client; the last batch of a local epoch may have fewer."""
    each: bool
    """Each client is drawn by itself with probability `client_fraction`, so that the number of clients varies; else a
    fixed number of clients, at least one."""
    version: int = CLIENT_PLAN_VERSION

    @classmethod
    def for_dataset(cls, manifest: DatasetManifest, config: TrainConfig) -> Self:
        """The plan of a run over the split of `config`. Raises DataError for a split without records."""
        records = split_of(manifest, config.data.split).records
        if not records:
            raise DataError(
                f"split `{config.data.split}` has no records",
                got="0 records",
                allowed="at least one",
                next_step="Train on another split, or build the dataset with other --split shares.",
            )
        way = config.way
        assert isinstance(way, Federated) and way.clients is not None
        return cls(
            dataset_digest=manifest.digest,
            split=config.data.split,
            records=records,
            seed=config.data.seed,
            clients=way.clients,
            client_fraction=way.client_fraction,
            local_epochs=way.local_epochs,
            global_batch=config.data.global_batch,
            each=way.noise_multiplier > 0,
        )

    @classmethod
    def of(cls, identity: Mapping[str, Any], manifest: DatasetManifest, where: str = "a stored plan") -> Self:
        """The plan that `identity`, read from `where`, describes. Raises DataError for another dataset or plan."""
        names = {one.name for one in fields(cls)}
        here = {"dataset_digest": manifest.digest, "version": CLIENT_PLAN_VERSION}
        differing = differences({name: identity.get(name) for name in here}, here)
        if differing or set(identity) != names:
            raise DataError(
                f"{where} is not a plan of clients over this dataset",
                got=", ".join(differing)[:500] or f"fields {', '.join(sorted(identity))}"[:500],
                allowed=f"dataset {manifest.digest}, fields {', '.join(sorted(names))}",
                next_step="Give the dataset that the run began with, or restore the file.",
            )
        return cls(**identity)

    @property
    def total(self) -> int:
        """Samples of the split."""
        return self.records

    def identity(self) -> dict[str, Any]:
        """JSON that is equal exactly if all rounds are equal; kept in run.json and in every checkpoint."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def first_step(self, epoch: int) -> int:
        """Return the first step of an epoch: an epoch is one step."""
        return epoch

    def steps(self, epochs: int) -> int:
        """Return the steps of a run of `epochs` epochs: an epoch is one step."""
        return epochs

    def epoch_of_step(self, step: int) -> int:
        """Return the epoch of a step: an epoch is one step."""
        return step

    def drawn(self, round_: int, clients: int) -> I64:
        """The clients, of 0..clients-1, that train in a round (from 0), in order."""
        key = self._key("clients", round_)
        if self.each:
            return np.flatnonzero(self._generator(key).random(clients) < self.client_fraction)
        return np.sort(shuffled(key, clients)[: max(1, round(self.client_fraction * clients))])

    def order(self, round_: int, client: int, local_epoch: int, count: int) -> I64:
        """The order in which a client reads its `count` samples, which are numbered in file order."""
        return shuffled(self._key("client", round_, client, local_epoch), count)

    def noise(self, round_: int) -> np.random.Generator:
        """The source of a round's noise, the same on every rank."""
        return self._generator(self._key("noise", round_))

    def _key(self, purpose: str, *numbers: int) -> bytes:
        root = derive_key(self.dataset_digest.encode(), f"clients {self.version} {self.split}", self.seed)
        return derive_key(root, purpose, *numbers)

    @staticmethod
    def _generator(key: bytes) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
