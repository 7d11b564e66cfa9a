"""The division of the state over ranks: all of it, once, in equal parts; and what is put together from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError, CorruptionError, DataError, LostWriteError
from lockstep.storage.fs import filesystem
from lockstep.training.run import checkpoint_division as division
from lockstep.training.run.checkpoint import (
    HostBuffer,
    Tensors,
    TensorSpec,
    file_bytes,
    file_name,
    read_rank_bytes,
    sha256_of,
    upload,
)

SHAPES = st.dictionaries(
    st.text("abc/", min_size=1, max_size=4).map(lambda name: f"weights/{name}"),
    st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(["float32", "float64", "uint8", "int64"])),
    max_size=12,
)


def specs_of(drawn: dict[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in drawn.items()}


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 9), st.sampled_from([1, 64, 1 << 20]))
def test_every_element_once_and_back_again(drawn: dict[str, Any], num_ranks: int, whole_bytes: int) -> None:
    specs = specs_of(drawn)
    rng = np.random.default_rng(0)
    tensors: Tensors = {n: rng.integers(0, 200, s.shape).astype(s.dtype) for n, s in specs.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(division, "WHOLE_BYTES", whole_bytes)
        divided = division.divide(specs, num_ranks)
    assert len(divided) == num_ranks
    parts = {
        rank: {division.key_of(p, specs[p.name]): tensors[p.name].reshape(-1)[p.start : p.stop] for p in pieces}
        for rank, pieces in enumerate(divided)
    }
    parts = {r: {n: v.reshape(specs[n].shape) if n in specs else v for n, v in p.items()} for r, p in parts.items()}
    merged = division.merge([division.report(pieces, specs) for pieces in divided], "here")
    back = division.assemble({"tensors": merged}, parts, "here", ("weights",))
    assert sorted(back) == sorted(tensors)
    for name, value in tensors.items():
        assert (back[name].dtype, back[name].shape, back[name].tobytes()) == (value.dtype, value.shape, value.tobytes())
    held = [sum((p.stop - p.start) * np.dtype(specs[p.name].dtype).itemsize for p in pieces) for pieces in divided]
    total = sum(value.nbytes for value in tensors.values())
    # A cut moves by half a small tensor at most, and by one element of a large one.
    assert max(held) <= total / num_ranks + max(whole_bytes, 8)


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "expected"),
    [
        ({"a": 100}, 1, [["a"]]),
        ({"a": 100, "b": 100}, 2, [["a"], ["b"]]),
        ({"a": 100}, 3, [[], ["a"], []]),  # too small to be cut: who has its middle has it all
        ({"a": 1 << 20, "b": 3 << 20}, 2, [["a", "b[0:262144]"], ["b[262144:786432]"]]),
        ({}, 2, [[], []]),
        ({"a": 0, "b": 4}, 2, [["a", "b"], []]),  # the half of b falls to the first
    ],
)
def test_small_tensors_stay_whole(sizes: dict[str, int], num_ranks: int, expected: list[list[str]]) -> None:
    specs = {name: TensorSpec((size // 4,), "float32") for name, size in sizes.items()}
    named = [[division.key_of(p, specs[p.name]) for p in pieces] for pieces in division.divide(specs, num_ranks)]
    assert named == expected


RIGHT = {"weights/a": ["float32", [4], 0, 2]}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({}, "do not make up the whole"),  # a rank that forgot its share
        ({"weights/a": ["float32", [4], 1, 4]}, "do not make up the whole"),  # an element twice
        ({"weights/a": ["float32", [4], 3, 4]}, "do not make up the whole"),  # a gap
        ({"weights/a": ["float64", [4], 2, 4]}, "another weights/a"),
        ({"weights/a": ["float32", [2, 2], 2, 4]}, "another weights/a"),
    ],
)
def test_reports_that_do_not_fit_together_are_refused(second: dict[str, Any], words: str) -> None:
    with pytest.raises(CorruptionError, match=words):
        division.merge([RIGHT, second], "here")


ENTRY = {"dtype": "float32", "shape": [4], "parts": [[0, 0, 2], [1, 2, 4]]}
GOOD_PARTS = {0: {"weights/a[0:2]": np.zeros(2, np.float32)}, 1: {"weights/a[2:4]": np.ones(2, np.float32)}}


@pytest.mark.parametrize(
    ("entry", "parts", "words"),
    [
        ({}, {1: {}}, "rank-00001.*no weights"),
        ({}, {1: {"weights/a[2:4]": np.ones(2, np.float64)}}, "rank-00001.*float64"),  # no silent cast
        ({}, {1: {"weights/a[2:4]": np.ones(3, np.float32)}}, r"rank-00001.*float32 \(3,\)"),
        ({"shape": [2, 2], "parts": [[0, 0, 4]]}, {0: {"weights/a": np.zeros((4, 1), np.float32)}}, "differs from the"),
        ({"shape": [5]}, {}, "do not make up the whole"),
        ({"shape": [-1]}, {}, "an integer"),
        ({"parts": [[0, 0, 2], [1, 2]]}, {}, "do not make up the whole"),
        ({"parts": []}, {}, "do not make up the whole"),
        ({"dtype": 5}, {}, "a string"),
        ({"more": 1}, {}, "unknown keys"),
    ],
)
def test_a_manifest_or_file_that_does_not_fit_is_refused(
    entry: dict[str, Any], parts: dict[int, Tensors], words: str
) -> None:
    assert (
        division.assemble({"tensors": {"weights/a": ENTRY}}, GOOD_PARTS, "here", ("weights",))["weights/a"].sum() == 2
    )
    with pytest.raises(DataError, match=f"(?s){words}"):
        division.assemble({"tensors": {"weights/a": ENTRY | entry}}, GOOD_PARTS | parts, "here", ("weights",))


TENSORS: Tensors = {
    "b": np.arange(6, dtype=np.float64).reshape(2, 3),
    "a": np.float32(1.5) * np.ones((), np.float32),
    'ünicode "quote"': np.array([True, False, True]),
    "strided": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.mark.parametrize("tensors", [TENSORS, {}], ids=["some", "none"])
def test_the_file_is_safetensors_in_memory_that_is_used_again(tmp_path: Path, tensors: Tensors) -> None:
    buffer = HostBuffer()
    buffer.fill({"larger": np.full(10_000, 7, np.uint8)})
    file = buffer.fill(tensors)
    assert file.size == file_bytes(tensors)
    back = safetensors.numpy.load(file.tobytes())
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (back[name].dtype, back[name].shape, back[name].tobytes()) == (value.dtype, value.shape, value.tobytes())
    upload(filesystem(str(tmp_path)), str(tmp_path / "file"), file)
    assert (tmp_path / "file").read_bytes() == file.tobytes()
    again = HostBuffer().fill(dict(reversed(tensors.items())))
    assert sha256_of(again) == sha256_of(file)


def test_a_dtype_that_no_file_holds_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot hold a"):
        file_bytes({"a": np.zeros(2, np.complex64)})


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: data[:-1] + bytes([data[-1] ^ 128]),
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data + b"x",  # each piece is as it was written, and one more follows
    ],
)
def test_a_file_that_reads_back_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]
) -> None:
    file = HostBuffer().fill(TENSORS)
    fs = filesystem(str(tmp_path))
    monkeypatch.setattr("lockstep.training.run.checkpoint.PIECE_BYTES", file.size)

    def changes(_fs: object, url: str, _produce: object) -> None:
        Path(url).write_bytes(change(file.tobytes()))

    monkeypatch.setattr("lockstep.training.run.checkpoint.write_stream", changes)
    with pytest.raises(LostWriteError, match="does not read back"):
        upload(fs, str(tmp_path / "file"), file)


def test_damage_in_the_copy_is_found_by_the_digest_if_it_comes_after_it(tmp_path: Path) -> None:
    """The cause: a bit flips in the memory from which a rank writes its part, while training continues. After the
    digest was made, whoever loads the file finds it; before it, the digest is that of the damaged bytes, and nothing
    does (docs/guarantees.md says so).
    """
    whole = HostBuffer().fill(TENSORS).tobytes()
    for before in (True, False):
        url = str(tmp_path / str(before))
        fs, file = filesystem(url), HostBuffer().fill(TENSORS)
        file[-1] ^= before
        manifest = {"files": {file_name(0): {"bytes": int(file.size), "sha256": sha256_of(file)}}}
        file[-1] ^= not before
        fs.mkdirs(url)
        upload(fs, f"{url}/{file_name(0)}", file)
        if before:
            assert read_rank_bytes(url, 0, manifest).tobytes() != whole, "it is not found"
        else:
            with pytest.raises(CorruptionError, match="a file of a checkpoint was changed"):
                read_rank_bytes(url, 0, manifest)
