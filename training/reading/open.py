"""A split opened to be read: found by the URLs of its datasets, with its encoder and the reader of all its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from lockstep.features.encode.encoder import Encoder
from lockstep.storage.dataset.manifest import DatasetManifest
from training.plan.datasets import held_out, open_parts
from training.reading.dataset_encoder import load_encoder
from training.reading.read_options import ReadOptions
from training.reading.reader import SplitReader


@dataclass(frozen=True, slots=True)
class OpenSplit:
    """A split ready to read, with what it was opened by."""

    manifest: DatasetManifest
    encoder: Encoder
    reader: SplitReader

    @classmethod
    def at(
        cls,
        datasets: str | Sequence[str],
        split: str,
        *,
        training: bool = False,
        options: ReadOptions | None = None,
    ) -> Self:
        """Open a split of the dataset at a URL, or what training.plan.datasets makes of several; everything that is
        checked at the start is. `training` says which of the statistics fitted for each fold are meant.
        """
        parts, manifest = open_parts(datasets, split)
        first = parts[0]
        encoder = load_encoder(first.url, first.manifest, held_out(first.manifest, split, training=training))
        reader = SplitReader(first.url, first.manifest, first.split, encoder, options=options)
        for part in parts[1:]:
            reader.add(part.url, part.manifest, part.split)
        reader.split = split  # of all parts together, as the plan calls it
        return cls(manifest, encoder, reader)
