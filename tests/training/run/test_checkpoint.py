"""A rank's file: what is written comes back, and anything else is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.documents import seal, sha256_hex
from lockstep.storage.errors import ConfigError, CorruptionError, DataError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join
from lockstep.training.rank import callback_state
from lockstep.training.run.checkpoint import (
    STATE_KEYS,
    HostBuffer,
    Tensors,
    TensorSpec,
    read_manifest,
    read_rank_file,
    read_resumable,
    sha256_of,
    take,
    upload,
)

TENSORS: Tensors = {
    "weights/0001/b": np.arange(6, dtype=np.float64).reshape(2, 3),
    "weights/0000/a": np.float32(1.5) * np.ones((), np.float32),
    "seeds/0000/s": np.array([1, 2], np.uint32),
    "metrics/0000/empty": np.zeros((0, 4), np.float32),
}


def committed(directory: Path, tensors: Tensors, **changes: Any) -> str:
    fs, name, file = filesystem(str(directory)), "rank-00000.safetensors", HostBuffer().fill(tensors)
    upload(fs, join(str(directory), name), file)
    files = {name: {"bytes": int(file.size), "sha256": sha256_of(file)}}
    document = {"kind": "checkpoint", "format_version": 1, "files": files} | changes
    write_file(fs, join(str(directory), "_manifest.json"), seal(document))
    return str(directory)


def test_round_trip_and_equal_bytes(tmp_path: Path) -> None:
    url = committed(tmp_path / "one", TENSORS)
    again = committed(tmp_path / "two", dict(reversed(TENSORS.items())))
    name = "rank-00000.safetensors"
    assert (Path(url) / name).read_bytes() == (Path(again) / name).read_bytes()
    back = read_rank_file(url, 0, read_manifest(url))
    assert back.keys() == TENSORS.keys()
    for key, value in TENSORS.items():
        assert (back[key].dtype, back[key].shape, back[key].tobytes()) == (value.dtype, value.shape, value.tobytes())


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    url = committed(tmp_path, {"weights/0000/a": np.ones(3, np.float32)})
    manifest = read_manifest(url)
    file = tmp_path / "rank-00000.safetensors"
    whole = file.read_bytes()
    for position in range(0, len(whole), 7):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(CorruptionError, match="rank-00000"):
            read_rank_file(url, 0, manifest)
    file.write_bytes(whole[:-1])
    with pytest.raises(CorruptionError, match="rank-00000"):
        read_rank_file(url, 0, manifest)


@pytest.mark.parametrize("changes", [{"kind": "dataset"}, {"format_version": 2}])
def test_another_kind_of_manifest_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no checkpoint"):
        read_manifest(committed(tmp_path, TENSORS, **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"plan": {"seed": 2}}, "another plan"),  # copied from another run
        ({"state": 5}, "state"),
        ({"state": {}}, "state"),
        ({"state": dict.fromkeys(STATE_KEYS)}, "callbacks"),
        ({"num_ranks": 0}, "num_ranks"),
        ({"files": []}, "files"),
    ],
)
def test_a_run_goes_on_from_a_checkpoint_of_its_own_alone(
    tmp_path: Path, changes: dict[str, Any], named: str | None
) -> None:
    state = dict.fromkeys(STATE_KEYS) | {"callbacks": [{}]}
    right = {"plan": {"seed": 1}, "step": 5, "num_ranks": 2, "state": state}
    url = committed(tmp_path, TENSORS, **right | changes)
    if named is None:
        assert read_resumable(url, {"seed": 1})["step"] == 5
        return
    with pytest.raises(DataError, match=named) as caught:
        read_resumable(url, {"seed": 1})
    assert named != "another plan" or caught.value.got == "seed = 2 (not 1)"


def _header(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        _header(b"[]"),
        _header(b"{}", bytes(4)),  # bytes of no tensor
        _header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(8)),
        _header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(3)),
        _header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', bytes(4)),
        _header(b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', bytes(4)),
        _header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}', bytes(4)),
        _header(2 * b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        _header(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            bytes(4),
        ),
        _header(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}\xff'),
        _header(b"{}", length=2**63),
        _header(b"{}", length=2**64 - 1),
        _header(b"[" * 10_000),
        _header(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
        _header(b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}', bytes(4)),
        _header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,400]}}', bytes(4)),
        _header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', bytes(4)),
        _header(b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', b"1"),
        _header(b'{"a":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}}', b"1"),
        _header(b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}', b"12"),
        _header(b'{"a":{"dtype":"O","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        _header(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            bytes(4),
        ),
    ],
)
def test_hostile_safetensors_under_a_right_digest_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rank-00000.safetensors").write_bytes(data)
    manifest = {"files": {"rank-00000.safetensors": {"bytes": len(data), "sha256": sha256_hex(data)}}}
    with pytest.raises(CorruptionError, match="rank-00000"):
        read_rank_file(str(tmp_path), 0, manifest)


def test_a_file_that_the_manifest_lacks(tmp_path: Path) -> None:
    url = committed(tmp_path, TENSORS)
    with pytest.raises(CorruptionError, match="rank-00003"):
        read_rank_file(url, 3, read_manifest(url))


GOOD = {"weights/0000/a": TensorSpec((), "float32"), "weights/0001/b": TensorSpec((2, 3), "float64")}


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (GOOD | {"weights/0002/c": TensorSpec((), "float32")}, "no tensor weights/0002/c"),
        ({"weights/0000/a": GOOD["weights/0000/a"]}, "a tensor weights/0001/b"),  # too many of the kind
        (GOOD | {"weights/0001/b": TensorSpec((3, 2), "float64")}, r"\(2, 3\)"),  # same size, other shape
        (GOOD | {"weights/0000/a": TensorSpec((), "float64")}, "float32"),  # no silent cast
    ],
)
def test_strict_load(expected: dict[str, TensorSpec], words: str) -> None:
    with pytest.raises(DataError, match=words):
        take(TENSORS, expected, "here")


def test_strict_load_takes_the_kinds_asked_for() -> None:
    assert [value.shape for value in take(TENSORS, GOOD, "here")] == [(), (2, 3)]


class Seen:
    """Like a Keras callback: attributes are its state."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def test_callbacks_come_back_as_they_were() -> None:
    state = {
        "best": float("inf"),
        "wait": 3,
        "rate": np.float32(0.1),
        "best_weights": [np.ones((2, 2), np.float32), np.zeros(3)],
        "history": {"loss": [0.5, float("nan")], 3: ("a", None)},
        "flag": True,
    }
    documents, tensors = callback_state.save([Seen(**state, monitor_op=np.less, model=object())])
    assert "monitor_op" not in documents[0]["state"], "functions are set by the callback itself"
    seal({"state": documents})  # is canonical JSON
    fresh = Seen(monitor_op="own")
    callback_state.load([fresh], documents, tensors, "here")
    assert fresh.monitor_op == "own"  # type: ignore[attr-defined] # of its own
    for name, value in state.items():
        np.testing.assert_equal(getattr(fresh, name), value)
        assert type(getattr(fresh, name)) is type(value)


def test_callback_with_too_much_state_is_named_before_it_fails_on_the_way() -> None:
    callback_state.save([Seen(seen=np.zeros(1_000_000))])  # an array is a tensor of the checkpoint
    with pytest.raises(ConfigError, match="the callback Seen has too much state") as caught:
        callback_state.save([Seen(few=1, many=[0.125] * 100_000)])
    assert "`many`" in caught.value.got


def test_other_callbacks_are_refused() -> None:
    documents, tensors = callback_state.save([Seen(a=1)])
    with pytest.raises(DataError, match="other callbacks"):
        callback_state.load([], documents, tensors, "here")
