"""A checkpoint's manifest and its ranks' files, read strictly. No TensorFlow and no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.storage import strict
from lockstep.storage.dataset.layout import MANIFEST_NAME
from lockstep.storage.documents import sha256_hex
from lockstep.storage.errors import CorruptionError, DataError, differences
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.sealed import unseal_as
from lockstep.storage.urls import join
from training.run.paths import rank_name
from training.run.rank_file import CHUNK_BYTES, sha256_of, tensors_in

Tensors = dict[str, NDArray[Any]]
FORMAT_VERSIONS = (
    1,
    2,
)  # 1: all that ranks hold alike is in rank 0's file; 2: divided, as the manifest's `tensors` say
STATE_KEYS = ("in_epoch", "stopped", "epochs", "metrics", "callbacks")  # of the manifest's `state`, from rank 0


class TensorSpec(NamedTuple):
    """What a tensor must be."""

    shape: tuple[int, ...]
    dtype: str


def file_name(rank: int) -> str:
    """`rank-00000.safetensors`."""
    return f"{rank_name(rank)}.safetensors"


def write_bytes(directory: str, name: str, data: bytes) -> dict[str, Any]:
    """Write a file durably; returns what is reported to the driver: {name, bytes, sha256}."""
    fs = filesystem(directory)
    fs.mkdirs(directory)
    write_file(fs, join(directory, name), data)
    return {"name": name, "bytes": len(data), "sha256": sha256_hex(data)}


def read_manifest(url: str) -> dict[str, Any]:
    """The manifest of the checkpoint at `url`. Raises CorruptionError for a changed one, DataError for another kind."""
    where = join(url, MANIFEST_NAME)
    return unseal_as("checkpoint", filesystem(url).read_bytes(where), where, version=FORMAT_VERSIONS)


def read_resumable(url: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """`read_manifest` of a checkpoint that a run of this plan may go on from; raises DataError for any other."""
    manifest = read_manifest(url)
    if manifest.get("plan") != plan:
        raise DataError(
            f"the checkpoint {url} belongs to another plan",
            got=", ".join(differences(strict.mapping(manifest.get("plan"), where=f"{url}: plan"), plan))[:500],
            allowed="the plan of its run",
            next_step="Take out what was copied there from another run, or begin a new run.",
        )
    strict.mapping(manifest.get("files"), where=f"{url}: files")
    strict.count(manifest.get("step"), where=f"{url}: step")
    strict.count(manifest.get("num_ranks"), where=f"{url}: num_ranks", least=1)
    state = strict.obj(manifest.get("state"), STATE_KEYS, where=f"{url}: state")
    for document in strict.items(state["callbacks"], where=f"{url}: callbacks"):
        strict.mapping(document, where=f"{url}: callbacks")
    return manifest


def read_rank_file(url: str, rank: int, manifest: Mapping[str, Any]) -> Tensors:
    """A rank's tensors of the checkpoint at `url`, checked by digest. Raises CorruptionError naming the file."""
    return tensors_in(read_rank_bytes(url, rank, manifest), join(url, file_name(rank)))


def file_info(url: str, rank: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """{bytes, sha256} of a rank's file. Raises CorruptionError where the manifest has no such file."""
    info = manifest["files"].get(file_name(rank))
    where = join(url, file_name(rank))
    if info is None:
        raise CorruptionError("a checkpoint without a rank's file", file=where, got="no entry in the manifest")
    strict.count(strict.obj(info, ("bytes", "sha256"), where=where)["bytes"], where=where)
    return dict(info)


def read_rank_bytes(url: str, rank: int, manifest: Mapping[str, Any]) -> NDArray[np.uint8]:
    """A rank's file (bytes,). Raises CorruptionError naming it where length or digest are not the manifest's."""
    where, info, fs = join(url, file_name(rank)), file_info(url, rank, manifest), filesystem(url)
    size, got = fs.stat(where).size_bytes, ""
    if size == info["bytes"]:  # what grew without end is not read
        data, done = np.empty(size, np.uint8), 0
        with fs.open_read(where) as file:
            while chunk := file.read(CHUNK_BYTES):
                data[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)[: size - done]
                done += len(chunk)
                if done > size:
                    break
        size, got = done, sha256_of(data)
        if (size, got) == (info["bytes"], info["sha256"]):
            return data
    raise CorruptionError(
        "a file of a checkpoint was changed",
        file=where,
        got=f"{size} bytes" + (f", sha256 {got}" if got else ""),
        allowed=f"{info['bytes']} bytes, sha256 {info['sha256']}",
    )


def take(tensors: Tensors, expected: Mapping[str, TensorSpec], where: str) -> list[NDArray[Any]]:
    """The tensors named in `expected`, in its order. Raises DataError for a name, shape or dtype that differs.

    Tensors of another kind (another first part of the name) may be there; of these kinds every one must be expected.
    """
    kinds = {name.split("/")[0] for name in expected}
    present = {name for name in tensors if name.split("/")[0] in kinds}
    if missing := [name for name in expected if name not in present]:
        raise _unlike(where, f"no tensor {missing[0]} ({len(missing)} missing)", "the model's own tensors")
    if extra := sorted(present - set(expected)):
        raise _unlike(where, f"a tensor {extra[0]} ({len(extra)} too many)", "the model's own tensors alone")
    for name, spec in expected.items():
        got = TensorSpec(tensors[name].shape, tensors[name].dtype.name)
        if got != spec:
            raise _unlike(where, f"{name}: {got.dtype} {got.shape}", f"{name}: {spec.dtype} {spec.shape}")
    return [tensors[name] for name in expected]


def _unlike(where: str, got: str, allowed: str) -> DataError:
    return DataError(
        f"the checkpoint {where} does not fit the model",
        got=got,
        allowed=allowed,
        next_step="Resume with the model, options and versions that the run began with, or begin a new run.",
    )
