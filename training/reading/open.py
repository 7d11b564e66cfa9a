"""Opens a split by the URLs of its datasets: its manifest, its encoder, and the reader of all its shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Self

from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.fitted import Fitted, held_out_file, read_fitted
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Task
from lockstep.storage.dataset.layout import fitted_path
from lockstep.storage.dataset.manifest import DatasetManifest, read_checked
from lockstep.storage.documents import parse_canonical
from lockstep.storage.errors import ConfigError, CorruptionError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import file_digest
from lockstep.storage.urls import join
from lockstep.training.plan.datasets import held_out, open_parts
from lockstep.training.plan.selection import Selection
from lockstep.training.reading.bad_records import Skipped
from lockstep.training.reading.cache import CacheCounts
from lockstep.training.reading.reader import ReadOptions, SplitReader


def load_encoder(dataset_url: str, manifest: DatasetManifest, held_out: str | None = None) -> Encoder:
    """The encoder of a dataset; its fitted files are checked against their digests.

    `held_out` is the fold kept for testing in a dataset of folds, which has a fitted file for each; None is for a
    dataset with one fitted file. Raises ConfigError for a fold that has none, CorruptionError, DataError.
    """
    schema = Schema.from_json(manifest.schema)
    return Encoder(schema, load_fitted(schema, dataset_url, manifest, held_out))


def load_fitted(
    schema: Schema, dataset_url: str, manifest: DatasetManifest, held_out: str | None = None
) -> dict[str, Fitted]:
    """The fitted statistics of each field of `schema` that needs them, by field name; raises as `load_encoder` does."""
    fs = filesystem(dataset_url)
    fitted: dict[str, Fitted] = {}
    for field in schema.fitted_fields:
        assert field.fitted_file is not None
        path = _fitted_path(field.fitted_file, manifest, held_out)
        data = read_checked(fs, dataset_url, path, manifest.files[path])
        fitted[field.name] = read_fitted(parse_canonical(data, file=join(dataset_url, path)))
    return fitted


def _fitted_path(file: str, manifest: DatasetManifest, held_out: str | None) -> str:
    """The path of a fitted file in the dataset: fitted on all training data, or without the fold `held_out`."""
    whole = fitted_path(file)
    if whole in manifest.files:
        return whole
    folds = [name for name in manifest.splits if fitted_path(held_out_file(file, name)) in manifest.files]
    if not folds:
        raise DataError(
            f"the fitted file of {whole} is not in the dataset",
            got=f"no {whole} in the manifest",
            allowed="each fitted file that the schema names",
            next_step="Build the dataset again.",
        )
    if held_out not in folds:
        raise ConfigError(
            "this dataset has a fitted file for each fold that is held out",
            got="no fold held out" if held_out is None else f"`{held_out}` held out",
            allowed=", ".join(folds),
            next_step="Train on all folds but one: their names in --split, with `,` between them.",
        )
    return fitted_path(held_out_file(file, held_out))


@dataclass(frozen=True, slots=True)
class OpenSplit:
    """A split that is ready to be read."""

    manifest: DatasetManifest
    encoder: Encoder
    reader: SplitReader

    def of_task(self, task: Task | None) -> Self:
        """This split, whose rows have the number of their task as an input; itself without one."""
        return self if task is None else replace(self, encoder=self.encoder.of_task(task))

    def leave_out_bad_records(self) -> None:
        """Let scores leave out broken records from now on (`SplitReader.skipped`), as they do images."""
        self.reader.skip_bad_records(Skipped(lambda bad: None))

    @classmethod
    def at(
        cls,
        datasets: str | Sequence[str],
        split: str,
        *,
        training: bool = False,
        as_trained_on: str | None = None,
        options: ReadOptions | None = None,
        selection: Selection | None = None,
        schema: Mapping[str, Any] | None = None,
        also: Collection[str] = (),
        encoder: Encoder | None = None,
    ) -> Self:
        """Open a split of one dataset, or of several as lockstep.training.plan.datasets joins them, with all checks
        that are made at the start. `training` chooses the statistics for training among those fitted for each fold;
        `as_trained_on`, the split that a model was trained on, those of its training if `split` is one of its parts.
        `schema` is that of a manifest with more fields, which state a default. Columns that no model is fed are only
        read if they are in `also`. `encoder` takes the place of the dataset's own.
        """
        parts, manifest = open_parts(datasets, split, selection)
        manifest = manifest if schema is None else replace(manifest, schema=schema)
        first, fold = parts[0], split
        if as_trained_on is not None and split in as_trained_on.split(","):
            fold, training = as_trained_on, True
        own = replace(first.manifest, schema=manifest.schema)  # whose splits do not have the name of several
        if encoder is None:
            encoder = load_encoder(first.url, own, held_out(own, fold, training=training))
        stored = Schema.from_json(own.schema)
        reader = SplitReader(
            first.url, first.manifest, first.split, encoder, name=split, options=options, also=also, schema=stored
        )
        for part in parts[1:]:
            reader.add(part.url, part.manifest, part.split)
        return cls(manifest, encoder, reader)


def verify_share(readers: Sequence[SplitReader], rank: int, num_ranks: int, report: Callable[[str], None]) -> None:
    """Check every byte of this rank's share of the shards against the manifest's SHA-256.

    Calls `report` with a line of progress for each shard. Raises CorruptionError naming the file.
    """
    shards = [shard for reader in readers for shard in reader.stored]
    for number in range(rank, len(shards), num_ranks):
        fs, url, info = shards[number]
        report(f"verify shard {number + 1} of {len(shards)}")
        size, digest = file_digest(fs, url)
        if (size, digest) != (info.bytes, info.sha256):
            raise CorruptionError(
                "a shard does not match its digest",
                file=url,
                got=f"{size} bytes, sha256 {digest}",
                allowed=f"{info.bytes} bytes, sha256 {info.sha256}",
            )


@dataclass(frozen=True, slots=True)
class Filled:
    """What a cache has of a split after it was filled: blocks and bytes that were added, and blocks that were there."""

    added: int
    added_bytes: int
    there: int
    whole: bool
    """Whether it has all blocks; else there was no room for more, its disk failed, or row groups are not the blocks."""


def fill_cache(split: OpenSplit, on_block: Callable[[], None] = lambda: None) -> Filled:
    """Read and check the blocks of a split whose options name a cache, until the cache takes no more; calls `on_block`
    after each. Raises what reading raises.
    """
    reader = split.reader
    with closing(reader):
        for _ in reader.sequence(map(reader.table.run, range(reader.table.num_blocks))):
            on_block()
            found = reader.counts.cached
            if found is None or found.misses > found.kept:
                break
        found = reader.counts.cached or CacheCounts()
    return Filled(found.kept, found.kept_bytes, found.hits, found.kept + found.hits >= reader.table.num_blocks)
