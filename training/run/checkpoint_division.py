"""Division of the state that all ranks share over the ranks' files, and its reassembly (decision 077).

Tensors are laid end to end in the order of their names and cut into num_ranks parts of equal bytes. A cut within a
tensor of up to a MiB moves to its nearer end, so that small tensors stay whole; only large ones are in two files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.storage import documents
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.formats.safetensors import Divided, check_whole, part_name, read_divided
from lockstep.storage.urls import join
from lockstep.training.comm.base import Communicator
from lockstep.training.run.checkpoint import (
    HostBuffer,
    Tensors,
    TensorSpec,
    file_info,
    file_name,
    read_rank_bytes,
    read_rank_file,
    tensors_in,
)

WHOLE_BYTES = 1 << 20  # tensors up to here are never cut


class Piece(NamedTuple):
    """Elements `start` to `stop` of a flattened tensor, in C order."""

    name: str
    start: int
    stop: int


def divide(specs: Mapping[str, TensorSpec], num_ranks: int) -> list[list[Piece]]:
    """The pieces of each rank, determined only by names, sizes and `num_ranks`.

    Each element is in one piece; no rank has more than 1 / num_ranks of the bytes plus a MiB. A rank has at most one
    piece of a tensor. Tensors without elements belong to rank 0.
    """
    shares: list[list[Piece]] = [[] for _ in range(num_ranks)]
    total = sum(_elements(spec) * _itemsize(spec) for spec in specs.values())
    begin, rank = 0, 0
    for name in sorted(specs):
        elements, itemsize = _elements(specs[name]), _itemsize(specs[name])
        end, start = begin + elements * itemsize, 0
        if not elements:
            shares[0].append(Piece(name, 0, 0))
        while start < elements:
            stop = elements
            if rank + 1 < num_ranks:
                stop = min(elements, max(start, _cut(total * (rank + 1) // num_ranks - begin, elements, itemsize)))
            if stop > start:
                shares[rank].append(Piece(name, start, stop))
            start = stop
            if start < elements:
                rank += 1
        begin = end
    return shares


def key_of(piece: Piece, spec: TensorSpec) -> str:
    """The piece's name in a rank's file: the tensor's name, followed by the range of elements if it is not whole."""
    return part_name(piece.name, piece.start, piece.stop, _elements(spec))


def report(pieces: Sequence[Piece], specs: Mapping[str, TensorSpec]) -> dict[str, list[Any]]:
    """A rank's report of its pieces to the driver: name -> [dtype, shape, start, stop]."""
    return {p.name: [specs[p.name].dtype, list(specs[p.name].shape), p.start, p.stop] for p in pieces}


def merge(reports: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """The manifest's `tensors` from all reports: name -> {dtype, shape, parts: [[rank, start, stop], ...]}.

    Raises CorruptionError if an element is in no piece or in two, or ranks differ in a dtype or shape.
    """
    tensors: dict[str, Any] = {}
    for rank, report in enumerate(reports):
        for name, (dtype, shape, start, stop) in report.items():
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "parts": []})
            if (entry["dtype"], entry["shape"]) != (dtype, shape):
                raise CorruptionError(
                    f"rank {rank} has another {name} than the ranks before it",
                    file=where,
                    got=f"{dtype} {shape}",
                    allowed=f"{entry['dtype']} {entry['shape']}",
                )
            entry["parts"].append([rank, start, stop])
    for name, entry in tensors.items():
        entry["parts"].sort(key=lambda part: (part[1], part[0]))
        check_whole(name, entry["shape"], entry["parts"], where)
    return tensors


def assemble(manifest: Mapping[str, Any], parts: Mapping[int, Tensors], where: str, kinds: Sequence[str]) -> Tensors:
    """The whole tensors of these kinds (first parts of names) from `parts`: rank -> tensors of its file.

    Raises CorruptionError naming file and tensor if a part is missing or differs from the manifest.
    """
    found: Tensors = {}
    for name, entry in _stored(where, manifest).items():
        if name.split("/")[0] not in kinds:
            continue
        dtype, shape, places = read_divided(name, entry, where)
        spec = TensorSpec(tuple(shape), dtype)
        values = [_part(parts, rank, Piece(name, start, stop), spec, where) for rank, start, stop in places]
        whole = values[0] if len(values) == 1 else np.concatenate([value.reshape(-1) for value in values])
        found[name] = whole.reshape(spec.shape)
    return found


def _part(parts: Mapping[int, Tensors], rank: int, piece: Piece, spec: TensorSpec, where: str) -> Any:
    key, file = key_of(piece, spec), f"{where}/{file_name(rank)}"
    value = parts.get(rank, {}).get(key)
    if value is None:
        raise CorruptionError("a tensor that the manifest lists is not in its file", file=file, got=f"no {key}")
    shape = spec.shape if key == piece.name else (piece.stop - piece.start,)  # a part is stored flat
    if (value.shape, value.dtype.name) != (shape, spec.dtype):
        raise CorruptionError(
            "a tensor differs from the manifest",
            file=file,
            got=f"{key}: {value.dtype.name} {value.shape}",
            allowed=f"{spec.dtype} {shape}",
        )
    return value


def _cut(offset: int, elements: int, itemsize: int) -> int:
    """The element before which a cut at byte `offset` of a tensor is made; for a small tensor, one of its ends."""
    size = elements * itemsize
    if size <= WHOLE_BYTES:
        return elements if 2 * offset >= size else 0
    return max(0, min(elements, offset // itemsize))


def _elements(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


def _itemsize(spec: TensorSpec) -> int:
    return np.dtype(spec.dtype).itemsize


def read_parts(url: str, manifest: Mapping[str, Any], communicator: Communicator) -> dict[int, Tensors]:
    """Rank -> the tensors of its file, for all ranks that wrote the checkpoint. A collective, on any number of ranks.

    Raises CorruptionError on the rank that reads a changed file, which ends the others too.
    """
    writers, mine, ranks = manifest["num_ranks"], communicator.rank, communicator.num_ranks
    if ranks == 1:
        return {writer: read_rank_file(url, writer, manifest) for writer in range(writers)}
    # First each rank reads its files, all at the same time; then they broadcast one after another.
    held = {writer: read_rank_bytes(url, writer, manifest) for writer in range(mine, writers, ranks)}
    parts = {}
    for writer in range(writers):
        file = held.pop(writer, None)
        if file is None:
            file = np.empty(file_info(url, writer, manifest)["bytes"], np.uint8)
        communicator.broadcast(file, writer % ranks)
        parts[writer] = tensors_in(file, join(url, file_name(writer)))
    return parts


def read_parts_and_own(
    url: str, manifest: Mapping[str, Any], communicator: Communicator, *kinds: str
) -> tuple[dict[int, Tensors], dict[int, Tensors]]:
    """Return what `read_parts` does without the tensors of `kinds`, and the tensors of `kinds` in the files that this
    rank has read.

    No rank holds more of the latter than its share of the files. A collective, with the errors of `read_parts`.
    """
    writers, ranks = manifest["num_ranks"], communicator.num_ranks
    parts: dict[int, Tensors] = {}
    own: dict[int, Tensors] = {}
    common: dict[int, NDArray[np.uint8]] = {}
    for writer in range(communicator.rank, writers, ranks):
        found = read_rank_file(url, writer, manifest)
        own[writer] = {name: value for name, value in found.items() if name.split("/")[0] in kinds}
        common[writer] = HostBuffer().fill({name: value for name, value in found.items() if name not in own[writer]})
    for writer in range(writers):
        file = common.pop(writer, np.empty(0, np.uint8))
        size = np.array([file.size])
        communicator.broadcast(size, writer % ranks)
        if writer not in own:
            file = np.empty(int(size[0]), np.uint8)
        communicator.broadcast(file, writer % ranks)
        parts[writer] = tensors_in(file, join(url, file_name(writer)))
    return parts, own


def deal(
    url: str,
    manifest: Mapping[str, Any],
    own: Mapping[int, Tensors],
    communicator: Communicator,
    wanted: Mapping[Piece, NDArray[Any]],
    specs: Mapping[str, TensorSpec],
) -> None:
    """Fill the arrays of `wanted`, this rank's pieces of tensors of `specs`, from what `read_parts_and_own` has read.

    Parts go from the rank that has read them to the ranks that own their elements now, at any number of ranks. A
    collective: `wanted` has the same tensors in the same order on every rank. Raises DataError for tensors that the
    checkpoint does not have, or of another shape or dtype, CorruptionError as `assemble` does.
    """
    stored = _stored(url, manifest)
    for piece, target in wanted.items():
        spec, entry = specs[piece.name], stored.get(piece.name)
        divided = None if entry is None else read_divided(piece.name, entry, url)
        if divided is None or TensorSpec(tuple(divided.shape), divided.dtype) != spec:
            raise _unfit(url, piece.name, divided, f"{spec.dtype} {spec.shape}")
        bounds = communicator.all_gather(np.array([piece.start, piece.stop])).tolist()
        for writer, start, stop in divided.parts:
            flat = np.empty(0, spec.dtype)
            if writer in own:
                flat = _part(own, writer, Piece(piece.name, start, stop), spec, url).reshape(-1)
            cuts = [[min(max(edge, start), stop) - start for edge in pair] for pair in bounds]
            received = communicator.all_to_all_ragged([flat[first:last] for first, last in cuts])
            first = max(piece.start, start) - piece.start
            part = received[writer % communicator.num_ranks]
            if part.size:
                target[first : first + part.size] = part


def held(url: str, manifest: Mapping[str, Any], own: Mapping[int, Tensors], name: str, spec: TensorSpec) -> Any:
    """The parts of a tensor in the files that this rank has read, in their order: (n, *spec.shape[1:]).

    Errors as of `deal`; the length of the whole tensor is not compared.
    """
    entry = _stored(url, manifest).get(name)
    divided = None if entry is None else read_divided(name, entry, url)
    if divided is None or (tuple(divided.shape[1:]), divided.dtype) != (spec.shape[1:], spec.dtype):
        raise _unfit(url, name, divided, f"{spec.dtype}, {spec.shape[1:]} each")
    whole = TensorSpec(tuple(divided.shape), divided.dtype)
    parts = [_part(own, w, Piece(name, start, stop), whole, url) for w, start, stop in divided.parts if w in own]
    flat = [part.reshape(-1) for part in parts]
    return np.concatenate([np.empty(0, spec.dtype), *flat]).reshape(-1, *spec.shape[1:])


def _stored(url: str, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return documents.mapping(manifest.get("tensors"), where=f"{url}: tensors")


def _unfit(url: str, name: str, found: Divided | None, allowed: str) -> DataError:
    return DataError(
        f"the checkpoint {url} does not fit the model",
        got=f"no tensor {name}" if found is None else f"{name}: {found.dtype} {found.shape}",
        allowed=f"{name}: {allowed}",
        next_step="Resume with the model and options that the run began with, or begin a new run.",
    )


def read_whole(url: str, manifest: Mapping[str, Any], kinds: Sequence[str]) -> Tensors:
    """Return what `assemble` does, with all files read by this process."""
    parts = {writer: read_rank_file(url, writer, manifest) for writer in range(manifest["num_ranks"])}
    return assemble(manifest, parts, url, kinds)
