"""A checkpoint's manifest and its ranks' files (safetensors), read strictly. No TensorFlow and no pickle."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.storage import documents
from lockstep.storage.documents import sha256_hex, unseal_as
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, differences
from lockstep.storage.files.interface import FileSystem, Writer
from lockstep.storage.files.local import whole_pages
from lockstep.storage.formats.safetensors import DTYPES, LENGTH_BYTES, head_bytes, parse_header
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import MANIFEST_NAME, lost_write, read_back, write_file, write_stream
from lockstep.storage.urls import join, parent
from lockstep.training.run.paths import checkpoint_name, rank_name

ALIGN_BYTES = 64
CHUNK_BYTES = 1 << 20
# Written and read back in one call: the size that a remote writer sends. Each piece takes the interpreter's lock once.
PIECE_BYTES = 1 << 22
_memcmp = ctypes.CDLL(None).memcmp  # twice as fast as NumPy, which makes an array of booleans
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
# Where the manifest has a `base`, the files hold of tables only what has changed since that one, which is a whole
# checkpoint in the same folder.
FORMAT_VERSION = 1
# Keys of the manifest's `state`, from rank 0; `early_stop` is training.rank.early_stop's, None without the rule.
STATE_KEYS = ("in_epoch", "stopped", "epochs", "metrics", "callbacks", "early_stop")
EARLY_STOP_KEYS = ("metric", "way", "patience", "best", "best_epoch", "waited", "reason")


class HostBuffer:
    """Memory that is reused for one file after another; it grows as needed and is never freed.

    The first touch of fresh memory takes twenty times as long as a later copy into it, so `reserve` touches it early.
    """

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def reserve(self, size: int, *, touch: bool = True) -> None:
        """Make `size` bytes ready, touched if `touch`. The buffer's content is lost."""
        if size > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # free the old one before the new one is allocated
            self._memory = whole_pages(size)
            if touch:
                np.copyto(self._memory, 0)

    def fill(self, tensors: Mapping[str, NDArray[Any]], later: Collection[str] = ()) -> NDArray[np.uint8]:
        """The file (bytes,) of these tensors, a view that is valid until the next call. Equal tensors give equal bytes.
        The values of those named by `later` are left out, for the caller to fill in.

        Raises ConfigError naming a tensor whose dtype the file cannot hold.
        """
        head, offsets, size = _lay_out(tensors)
        self.reserve(size)
        file = self._memory[:size]
        file[: len(head)] = np.frombuffer(head, np.uint8)
        for name, value in tensors.items():
            if name in later:
                continue
            begin = len(head) + offsets[name]
            target = file[begin : begin + value.nbytes].view(value.dtype)
            np.copyto(target.reshape(value.shape), value)
        return file


def file_bytes(tensors: Mapping[str, NDArray[Any]]) -> int:
    """The size of the file of these tensors. Raises ConfigError as `HostBuffer.fill` does."""
    return _lay_out(tensors)[2]


def tensors_in(file: NDArray[np.uint8], where: str) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file (bytes,), as views of it.

    Raises CorruptionError naming `where` for anything else: gaps, overlaps, bytes after the end, other types.
    """
    head = head_bytes(file[:LENGTH_BYTES].tobytes(), file.size, where)
    stored = parse_header(file[LENGTH_BYTES:head].tobytes(), file.size, where)
    return {
        name: file[tensor.begin : tensor.begin + tensor.bytes].view(tensor.dtype).reshape(tensor.shape)
        for name, tensor in stored.items()
    }


def upload(fs: FileSystem, url: str, file: NDArray[np.uint8]) -> None:
    """Publish the file durably and compare it with what reads back, without a second copy in memory.

    Raises what lockstep.storage.publish.write_stream does, and LostWriteError if other bytes read back.
    """

    def produce(writer: Writer) -> None:
        for start in range(0, file.size, PIECE_BYTES):
            writer.write_uncached(file[start : start + PIECE_BYTES].data)

    write_stream(fs, url, produce)
    done, same, piece = 0, True, whole_pages(PIECE_BYTES)
    with read_back(url), fs.open_uncached(url) as back:
        while same and (count := back.readinto(piece.data)):  # type: ignore[attr-defined] # all have it
            same = count <= file.size - done and not _memcmp(piece.ctypes.data, file[done:].ctypes.data, count)
            done += count if same else 0
    if not same or done != file.size:
        raise lost_write(url, f"other bytes from {done} on", f"{file.size} bytes as written")


def sha256_of(file: NDArray[np.uint8]) -> str:
    """Compute SHA-256 in hex; releases the interpreter's lock."""
    return hashlib.sha256(file.data).hexdigest()


def _lay_out(tensors: Mapping[str, NDArray[Any]]) -> tuple[bytes, dict[str, int], int]:
    """The file's head (length and header), each tensor's offset in the data, and the file's size."""
    header: dict[str, Any] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        value = tensors[name]
        if value.dtype.name not in DTYPES or not value.dtype.isnative:
            raise ConfigError(
                f"a checkpoint cannot hold {name}",
                got=f"dtype {value.dtype}",
                allowed=", ".join(DTYPES),
                next_step="Keep this state in one of these dtypes.",
            )
        offsets[name], end = end, end + value.nbytes
        header[name] = {
            "dtype": DTYPES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = math.ceil((8 + len(text)) / ALIGN_BYTES) * ALIGN_BYTES - 8
    return padded.to_bytes(8, "little") + text.ljust(padded), offsets, 8 + padded + end


Tensors = dict[str, NDArray[Any]]


class TensorSpec(NamedTuple):
    """The expected shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def file_name(rank: int) -> str:
    """Name the file of a rank: `rank-00000.safetensors`."""
    return f"{rank_name(rank)}.safetensors"


def write_bytes(directory: str, name: str, data: bytes) -> dict[str, Any]:
    """Write a file durably; returns the report for the driver: {name, bytes, sha256}."""
    fs = filesystem(directory)
    fs.mkdirs(directory)
    write_file(fs, join(directory, name), data)
    return {"name": name, "bytes": len(data), "sha256": sha256_hex(data)}


def read_manifest(url: str) -> dict[str, Any]:
    """The manifest of the checkpoint at `url`. Raises CorruptionError for a changed one, DataError for another kind."""
    where = join(url, MANIFEST_NAME)
    return unseal_as("checkpoint", filesystem(url).read_bytes(where), where, version=FORMAT_VERSION)


def base_of(manifest: Mapping[str, Any], where: str) -> str | None:
    """The name of the checkpoint of which this one holds the difference; None if it is whole. Raises DataError."""
    if manifest.get("base") is None:
        return None
    base = documents.obj(manifest["base"], ("step", "generation"), where=f"{where}: base")
    step, generation = (documents.count(base[part], where=f"{where}: base") for part in ("step", "generation"))
    return checkpoint_name(step, generation)


def base_url(url: str, manifest: Mapping[str, Any]) -> str | None:
    """The URL of the checkpoint of which the one at `url` holds the difference; None if it is whole."""
    name = base_of(manifest, url)
    return None if name is None else join(parent(url), name)


def read_resumable(url: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Read the manifest, as `read_manifest` does, of a checkpoint that a run of this plan may resume from; raises
    DataError for any other.
    """
    manifest = read_manifest(url)
    if manifest.get("plan") != plan:
        raise DataError(
            f"the checkpoint {url} belongs to another plan",
            got=", ".join(differences(documents.mapping(manifest.get("plan"), where=f"{url}: plan"), plan))[:500],
            allowed="the plan of its run",
            next_step="Remove what was copied there from another run, or begin a new run.",
        )
    documents.mapping(manifest.get("files"), where=f"{url}: files")
    documents.count(manifest.get("step"), where=f"{url}: step")
    documents.count(manifest.get("num_ranks"), where=f"{url}: num_ranks", least=1)
    state = dict(documents.mapping(manifest.get("state"), where=f"{url}: state"))
    grid = state.pop("grid", [manifest["num_ranks"], 1, 1])  # absent where each rank has rows of its own
    numbers = [
        documents.count(one, where=f"{url}: grid", least=1) for one in documents.items(grid, where=f"{url}: grid")
    ]
    if len(numbers) != 3 or math.prod(numbers) != manifest["num_ranks"]:
        raise CorruptionError("a checkpoint of another grid than its ranks", file=url, got=f"{numbers}")
    documents.obj(state, STATE_KEYS, where=f"{url}: state")
    if state["early_stop"] is not None:
        documents.obj(state["early_stop"], EARLY_STOP_KEYS, where=f"{url}: early_stop")
    for document in documents.items(state["callbacks"], where=f"{url}: callbacks"):
        documents.mapping(document, where=f"{url}: callbacks")
    return manifest


def read_rank_file(url: str, rank: int, manifest: Mapping[str, Any]) -> Tensors:
    """A rank's tensors of the checkpoint at `url`, checked by digest. Raises CorruptionError naming the file."""
    return tensors_in(read_rank_bytes(url, rank, manifest), join(url, file_name(rank)))


def file_info(url: str, rank: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return {bytes, sha256} of a rank's file. Raises CorruptionError where the manifest has no such file."""
    info = manifest["files"].get(file_name(rank))
    where = join(url, file_name(rank))
    if info is None:
        raise CorruptionError("a checkpoint without a rank's file", file=where, got="no entry in the manifest")
    documents.count(documents.obj(info, ("bytes", "sha256"), where=where)["bytes"], where=where)
    return dict(info)


def read_rank_bytes(url: str, rank: int, manifest: Mapping[str, Any]) -> NDArray[np.uint8]:
    """A rank's file (bytes,). Raises CorruptionError naming it unless length and digest match the manifest."""
    where, info, fs = join(url, file_name(rank)), file_info(url, rank, manifest), filesystem(url)
    size, got = fs.stat(where).size_bytes, ""
    if size == info["bytes"]:  # a file of another length is not read
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

    Tensors of other kinds (by the first part of the name) are ignored; of these kinds no other may be present.
    """
    kinds = {name.split("/")[0] for name in expected}
    present = {name for name in tensors if name.split("/")[0] in kinds}
    if missing := [name for name in expected if name not in present]:
        raise _unlike(where, f"no tensor {missing[0]} ({len(missing)} missing)", "the model's own tensors")
    if extra := sorted(present - set(expected)):
        raise _unlike(where, f"a tensor {extra[0]} ({len(extra)} too many)", "only the model's own tensors")
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
