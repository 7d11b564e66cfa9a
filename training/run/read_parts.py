"""All ranks' files of a checkpoint in every rank's hands: each file is read and checked by one rank and handed on.

Reading is what restores wait for: 176 MB/s from HDFS, where ranks of one host exchange GB/s (decision 077).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.storage.urls import join
from training.comm.base import Communicator
from training.run import checkpoint_parts
from training.run.checkpoint import Tensors, file_info, file_name, read_rank_bytes, read_rank_file
from training.run.rank_file import tensors_in


def read_parts(url: str, manifest: Mapping[str, Any], communicator: Communicator) -> dict[int, Tensors]:
    """Rank -> the tensors of its file, for all ranks that wrote the checkpoint. A collective, of any number of ranks.

    Raises CorruptionError on the rank that read a changed file; the others learn of it by that rank's end.
    """
    writers, mine, ranks = manifest["num_ranks"], communicator.rank, communicator.num_ranks
    if ranks == 1:
        return {writer: read_rank_file(url, writer, manifest) for writer in range(writers)}
    # All own files first: the ranks read at the same time, and pass on one after another.
    held = {writer: read_rank_bytes(url, writer, manifest) for writer in range(mine, writers, ranks)}
    parts = {}
    for writer in range(writers):
        file = held.pop(writer, None)
        if file is None:
            file = np.empty(file_info(url, writer, manifest)["bytes"], np.uint8)
        communicator.broadcast(file, writer % ranks)
        parts[writer] = tensors_in(file, join(url, file_name(writer)))
    return parts


def whole_tensors(url: str, manifest: Mapping[str, Any], parts: Mapping[int, Tensors], kinds: Sequence[str]) -> Tensors:
    """What all ranks hold alike, of these kinds, put together from the files. Raises CorruptionError naming a file."""
    if manifest["format_version"] == 1:
        return {name: value for name, value in parts[0].items() if name.split("/")[0] in kinds}
    return checkpoint_parts.assemble(manifest, parts, url, kinds)


def read_whole(url: str, manifest: Mapping[str, Any], kinds: Sequence[str]) -> Tensors:
    """The same, read by this process alone."""
    writers = 1 if manifest["format_version"] == 1 else manifest["num_ranks"]
    return whole_tensors(url, manifest, {w: read_rank_file(url, w, manifest) for w in range(writers)}, kinds)
