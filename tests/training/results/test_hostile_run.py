"""What a run, an exported model or a Keras file of a stranger may do to those who load or show it: nothing."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped] # has no types
import keras
import numpy as np
import pytest

from lockstep.storage.documents import canonical_bytes, seal, sha256_hex
from lockstep.storage.errors import CorruptionError, DataError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.training.driver.retention import empty_trash
from lockstep.training.models.on_disk import load_initial, load_model
from lockstep.training.results.predictor import ExportedModel
from lockstep.training.results.report import write_report
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.weights_source import checked_file
from tests.training._tiny import TABLE_SCHEMA
from tests.training.results.test_report import run as run  # the run of a report's tests

DEEP = b"[" * 100_000 + b"]" * 100_000
ROOM = 64 << 20  # more than a test's file
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def good() -> Files:
    """The members of an archive that Keras wrote."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    return _members(model)


def _members(model: keras.Model) -> Files:
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"lockstep-test-{os.getpid()}.keras")
    try:
        model.save(path)
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    finally:
        path.unlink()


def packed(files: Files, how: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def export(folder: Path, data: bytes, **files: bytes) -> str:
    """An exported model whose manifest, sealed and with right digests, lists these bytes as its model.keras."""
    folder.mkdir()
    found = {"model.keras": data, **{f"{name}.json": content for name, content in files.items()}}
    for name, content in found.items():
        (folder / name).write_bytes(content)
    listed = {name: {"bytes": len(content), "sha256": sha256_hex(content)} for name, content in found.items()}
    (folder / "_manifest.json").write_bytes(seal({"format_version": 1, "kind": "model", "files": listed}))
    return str(folder)


def with_layer(files: Files, change: Callable[[dict[str, Any]], object]) -> Files:
    """The archive with a change to its dense layer's entry."""
    config = json.loads(files["config.json"])
    change(config["config"]["layers"][1])
    return {**files, "config.json": json.dumps(config).encode()}


def entry(module: str, name: str, **config: Any) -> dict[str, Any]:
    return {"module": module, "class_name": name, "config": config, "registered_name": None}


def from_elsewhere(files: Files, secret: Path) -> Files:
    """The weights of the dense layer are another file's bytes, which HDF5 would read."""
    out = io.BytesIO(files["model.weights.h5"])
    with h5py.File(out, "a") as file:
        variables = file["layers/dense/vars"]
        del variables["0"]
        variables.create_dataset("0", shape=(2, 2), dtype="f4", external=[(str(secret), 0, 16)])
    return {**files, "model.weights.h5": out.getvalue()}


def calling(files: Files, marker: Path) -> Files:
    """A layer that holds Python code."""
    harm = keras.layers.Lambda(lambda x: (Path(__import__("os").environ["LOCKSTEP_HARMED"]).write_text("x"), x)[1])
    model = keras.Sequential([keras.Input((2,)), harm])
    found = _members(model)
    marker.unlink()  # made while Keras built the layer
    return found


HARMFUL: dict[str, Callable[[Files, Path], Files]] = {
    "code in a layer": calling,
    "a function of Python for a layer": lambda files, marker: with_layer(
        files, lambda layer: layer.update(entry("os", "system", command=f"touch {marker}"))
    ),
    "a function of Python for an activation": lambda files, marker: with_layer(
        files,
        lambda layer: layer["config"].update(activation=entry("os", "function") | {"config": "system"}),
    ),
    "a model of TensorFlow elsewhere": lambda files, marker: with_layer(
        files, lambda layer: layer.update(entry("keras.layers", "TFSMLayer", filepath=str(marker.parent)))
    ),
    "a vocabulary that is a file of ours": lambda files, marker: with_layer(
        files, lambda layer: layer.update(entry("keras.layers", "StringLookup", vocabulary="/etc/passwd"))
    ),
    "weights that are a file of ours": lambda files, marker: from_elsewhere(files, marker.parent / "secret"),
    "lists in lists": lambda files, marker: {**files, "config.json": DEEP},
    "no configuration": lambda files, marker: {"metadata.json": files["metadata.json"]},
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_model_that_would_run_code_or_read_files_is_refused(
    good: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    (tmp_path / "secret").write_bytes(np.ones(4, np.float32).tobytes())
    marker = tmp_path / "harmed"
    monkeypatch.setenv("LOCKSTEP_HARMED", str(marker))
    url = export(tmp_path / "model", packed(HARMFUL[case](good, marker)))
    with pytest.raises(LockstepError, match="cannot be loaded") as caught:
        load_model(url, "")
    assert caught.value.got and "which hold code" in caught.value.allowed
    assert not marker.exists()


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="cannot be loaded"):
        load_model(export(tmp_path / "model", b"no archive"), "")


@pytest.mark.filterwarnings("ignore:Skipping invalid path")
def test_names_in_an_archive_lead_nowhere(good: Files, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    files = {**good, f"../../{outside.name}": b"x", str(outside): b"x", f"assets/../..{outside}": b"x"}
    load_model(export(tmp_path / "model", packed(files)), "")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_first_weights_that_unpack_to_very_much_are_refused(good: Files, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    file = tmp_path / "bomb.keras"
    file.write_bytes(packed({**good, "model.weights.h5": bytes(ROOM)}, zipfile.ZIP_DEFLATED))
    with pytest.raises(CorruptionError, match="unpacks to too much"):
        load_initial(model, str(file))


@pytest.mark.parametrize("files", [None, [], {"model.keras": []}])
def test_a_manifest_of_other_types_is_refused(tmp_path: Path, files: Any) -> None:
    (tmp_path / "model.keras").write_bytes(b"x")
    (tmp_path / "_manifest.json").write_bytes(seal({"format_version": 1, "kind": "model", "files": files}))
    with pytest.raises(DataError):
        checked_file(str(tmp_path), "model.keras")


def test_documents_of_a_model_that_are_too_deep_are_refused(good: Files, tmp_path: Path) -> None:
    url = export(tmp_path / "model", packed(good), schema=canonical_bytes(TABLE_SCHEMA.to_json()), signature=DEEP)
    with pytest.raises(CorruptionError, match=r"signature\.json"):
        ExportedModel.at(url)


def test_metrics_that_are_too_deep_are_named(run: str) -> None:
    part = Path(RunPaths(run).metrics(2)) / "part-00000.jsonl"
    part.write_bytes(b'{"kind":"step","step":' + DEEP + b"}\n")
    with pytest.raises(CorruptionError, match="no measurement"):
        read_history(run)


@pytest.mark.parametrize(
    "name", [r"$\frac{$", "$x^$", "\x1b]0;owned\x07", "--><script>alert(1)", "<img src=x onerror=y>"]
)
def test_names_are_shown_in_a_report_and_not_carried_out(run: str, name: str) -> None:
    folder = Path(RunPaths(run).evaluations("test-0"))
    folder.mkdir(parents=True)
    result = {"split": name, "dataset": "/data", "metrics": {"loss": 0.5, name: 0.25}}
    document = {"format_version": 1, "kind": "evaluation", "step": 3, "generation": 1, "result": result}
    (folder / "step-0000000003.g0001.json").write_bytes(seal(document))
    page = Path(write_report(run)).read_text()
    assert "<script" not in page and "<img" not in page
    assert "of data" in page


def test_a_link_in_the_trash_of_a_run_is_removed_and_not_followed(run: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_bytes(b"x")
    fs, paths = filesystem(run), RunPaths(run)
    trash = Path(run, ".trash", "g0001")
    trash.mkdir(parents=True)
    (trash / "step-0000000003.g0001").symlink_to(tmp_path / "mine")
    empty_trash(fs, paths, 1, lambda: None)
    assert not list(trash.iterdir()) and (tmp_path / "mine" / "file").exists()
