"""Which records of datasets a run selects by its --where: how many of each block, which the plan is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from lockstep.storage import documents
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import SplitInfo
from lockstep.storage.errors import DataError


@dataclass(frozen=True, slots=True)
class Selection:
    """The records that meet a condition, in each split that a run reads."""

    where: str
    """The condition, as lockstep.features.condition writes it."""
    kept: Mapping[tuple[str, str], tuple[int, ...]]
    """For each dataset's digest and split, how many records of each block meet it, in the order of the shards."""

    def applied(self, manifest: DatasetManifest, split: str) -> DatasetManifest:
        """The manifest of a dataset with only these records in `split`. Raises DataError for a split not counted."""
        if split not in manifest.splits:
            return manifest  # its caller names the splits that there are
        info = manifest.splits[split]
        kept = self.kept.get((manifest.digest, split))
        if kept is None or len(kept) != num_blocks(info):
            raise DataError(
                f"the records that meet --where are not counted for split `{split}`",
                got=f"{'no counts' if kept is None else f'{len(kept)} blocks'} for dataset {manifest.digest}",
                allowed=f"counts of {num_blocks(info)} blocks",
                next_step="Give the dataset that the run began with.",
            )
        return replace(manifest, splits={**manifest.splits, split: replace(info, where=self.where, kept=kept)})

    def to_json(self) -> dict[str, Any]:
        """The selection as a JSON object."""
        counts = [
            {"dataset_digest": digest, "split": split, "kept": list(kept)}
            for (digest, split), kept in self.kept.items()
        ]
        return {"where": self.where, "splits": counts}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], where: str) -> Self:
        """Rebuild a selection from what `to_json` gave, read from the file `where`. Raises DataError."""
        kept: dict[tuple[str, str], tuple[int, ...]] = {}
        for value in documents.items(document.get("splits"), where=f"{where}: splits"):
            one = documents.obj(value, ("dataset_digest", "split", "kept"), where=f"{where}: splits")
            names = (documents.string(one[name], where=f"{where}: {name}") for name in ("dataset_digest", "split"))
            counts = documents.items(one["kept"], where=f"{where}: kept")
            digest, split = names
            kept[digest, split] = tuple(documents.count(count, where=f"{where}: kept") for count in counts)
        return cls(documents.string(document.get("where"), where=f"{where}: where"), kept)


def num_blocks(info: SplitInfo) -> int:
    """The blocks of all shards of a split."""
    return sum(-(-shard.records // info.block_records) for shard in info.shards)
