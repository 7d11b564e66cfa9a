"""A checkpoint of any number of ranks, read by any number of ranks; every changed bit is refused with its place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.documents import SEAL, parse_canonical, seal
from lockstep.storage.errors import CorruptionError, DataError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join
from lockstep.storage.verify import verify
from lockstep.training.comm import Communicator
from lockstep.training.run import checkpoint_division
from lockstep.training.run.checkpoint import (
    STATE_KEYS,
    HostBuffer,
    Tensors,
    TensorSpec,
    file_name,
    read_manifest,
    sha256_of,
    upload,
)
from lockstep.training.run.checkpoint_division import assemble, read_parts, read_whole
from lockstep.training.run.lineage import CheckpointRef, read_checkpoint
from tests.training._ring import run_ring, run_solo

ALIKE = ("weights", "optimizer")
RNG = np.random.default_rng(5)
STATE: Tensors = {
    "weights/0000/kernel": RNG.normal(size=(40, 7)).astype(np.float32),
    "weights/0001/bias": RNG.normal(size=7),
    "optimizer/0000/step": np.array(12, np.int64),
    "optimizer/0001/momentum": RNG.normal(size=(40, 7)).astype(np.float32),
}


def commit(folder: Path, num_ranks: int, state: Tensors = STATE) -> str:
    """What `num_ranks` ranks and the driver write."""
    url = str(folder / "checkpoints" / "step-0000000012.g0001")
    fs, specs = filesystem(url), {name: TensorSpec(value.shape, value.dtype.name) for name, value in state.items()}
    divided = checkpoint_division.divide(specs, num_ranks)
    files, reports = {}, []
    for rank, pieces in enumerate(divided):
        tensors: Tensors = {f"seeds/{rank}": np.array([rank, 7], np.uint32)}
        for piece in pieces:
            key, flat = checkpoint_division.key_of(piece, specs[piece.name]), state[piece.name].reshape(-1)
            tensors[key] = flat[piece.start : piece.stop].reshape(
                specs[piece.name].shape if key == piece.name else (-1,)
            )
        file = HostBuffer().fill(tensors)
        upload(fs, join(url, file_name(rank)), file)
        files[file_name(rank)] = {"bytes": int(file.size), "sha256": sha256_of(file)}
        reports.append(checkpoint_division.report(pieces, specs))
    document: dict[str, Any] = {"kind": "checkpoint", "format_version": 1, "step": 12, "generation": 1}
    document |= {"num_ranks": num_ranks, "files": files, "audit": {}, "state": dict.fromkeys(STATE_KEYS)}
    document["tensors"] = checkpoint_division.merge(reports, url)
    write_file(fs, join(url, "_manifest.json"), seal(document))
    return url


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (3, 1), (1, 3), (2, 2), (3, 2), (2, 3)])
def test_any_number_of_ranks_reads_what_any_number_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: int, readers: int
) -> None:
    monkeypatch.setattr(checkpoint_division, "WHOLE_BYTES", 100)
    url = commit(tmp_path, writers)
    manifest = read_manifest(url)

    def one(communicator: Communicator) -> tuple[Tensors, dict[int, Tensors]]:
        parts = read_parts(url, manifest, communicator)
        return assemble(manifest, parts, url, ALIKE), parts

    for whole, parts in run_solo(1, one) if readers == 1 else run_ring(readers, one):
        assert sorted(whole) == sorted(STATE)
        assert all(whole[name].tobytes() == value.tobytes() for name, value in STATE.items())
        assert [parts[rank][f"seeds/{rank}"][0] for rank in range(writers)] == list(range(writers))
    assert read_whole(url, manifest, ("weights",)).keys() == {"weights/0000/kernel", "weights/0001/bias"}


def test_a_file_that_one_rank_finds_changed_ends_them_all(tmp_path: Path) -> None:
    url = commit(tmp_path, 3)
    manifest, file = read_manifest(url), Path(url, file_name(1))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def one(communicator: Communicator) -> LockstepError | None:
        try:
            read_parts(url, manifest, communicator)
        except LockstepError as error:
            communicator.abort(str(error))
            return error
        return None

    errors = run_ring(2, one)
    assert isinstance(errors[1], CorruptionError) and errors[1].file.endswith("rank-00001.safetensors")
    assert errors[0] is not None


def test_every_flipped_bit_and_every_truncation_is_refused_with_its_place(tmp_path: Path) -> None:
    """Of the manifest and of both files, by who resumes, by who reads the chain and by `lockstep verify`."""
    small: Tensors = {"weights/0000/w": np.ones(3, np.float32), "optimizer/0000/m": np.zeros(3, np.float32)}
    url = commit(tmp_path, 2, small)
    fs, ref = filesystem(url), CheckpointRef(12, 1)
    assert verify(url) == []
    for name in ("_manifest.json", file_name(0), file_name(1)):
        path = Path(url, name)
        whole = path.read_bytes()
        flips = [(at, 1 << bit) for at in range(len(whole)) for bit in range(8)]
        for number, (at, mask) in enumerate([*flips, *((length, 0) for length in range(len(whole)))]):
            changed = bytearray(whole)
            if mask:
                changed[at] ^= mask
            path.write_bytes(bytes(changed) if mask else whole[:at])
            with pytest.raises(DataError) as caught:
                read_parts(url, read_manifest(url), _SOLO)
            assert name in str(caught.value), (name, at, mask)
            if number % 64 == 0:  # these take longer
                with pytest.raises(DataError) as caught:
                    read_checkpoint(fs, url, ref)
                assert name in str(caught.value), (name, at, mask)
                try:
                    places = [finding.path for finding in verify(url)]
                except DataError as error:
                    places = [str(error)]
                assert places and all(name in place for place in places), (name, at, mask, places)
        path.write_bytes(whole)
    assert verify(url) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda doc: doc["tensors"].pop("weights/0000/kernel"), None),  # the model misses it, see test_checkpoint
        (lambda doc: doc.pop("tensors"), "tensors"),
        (lambda doc: doc["tensors"].update(weights=5), "an object"),
        (lambda doc: doc["tensors"]["weights/0001/bias"]["parts"].clear(), "do not make up the whole"),
        (lambda doc: doc["tensors"]["weights/0001/bias"].update(shape=[7, 1 << 40]), "do not make up the whole"),
        (lambda doc: doc["tensors"]["weights/0001/bias"].update(dtype="float32"), "differs from the manifest"),
        (lambda doc: doc["tensors"]["weights/0001/bias"]["parts"][0].__setitem__(0, 9), "not in its file"),
        (lambda doc: doc["files"].pop(file_name(1)), "without a rank's file"),
        (lambda doc: doc["files"][file_name(1)].update(bytes=-1), "an integer"),
        (lambda doc: doc["files"][file_name(1)].update(bytes=1 << 50), "was changed"),
    ],
)
def test_a_manifest_under_a_right_seal_that_says_what_cannot_be(tmp_path: Path, change: Any, words: str | None) -> None:
    url = commit(tmp_path, 2)
    where = Path(url, "_manifest.json")
    document: Any = parse_canonical(where.read_bytes(), file="m")
    document.pop(SEAL)
    change(document)
    where.write_bytes(seal(document))
    if words is None:
        assert "weights/0000/kernel" not in read_whole(url, read_manifest(url), ALIKE)
        return
    with pytest.raises(DataError, match=words):
        read_whole(url, read_manifest(url), ALIKE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    url = commit(tmp_path, 2)
    Path(url, file_name(1)).unlink()
    with pytest.raises(LockstepError, match="rank-00001"):
        read_whole(url, read_manifest(url), ALIKE)
    shutil.rmtree(url)
    with pytest.raises(LockstepError, match=r"_manifest\.json"):
        read_manifest(url)


(_SOLO,) = run_solo(1, lambda communicator: communicator)
